// ends.test.mjs - the table state x way to end: each phase of a call against each way in which it can end there.
//
// Every cell checks what the client sees, the log line (reason, by, phase, status), that the counter of exactly this end
// went up by one, that each lease was released exactly once (seen by MONITOR), that nothing is left in
// Redis, and what became of the upstream's connection. tests/README.md shows the table.
import assert from 'node:assert/strict';
import { once } from 'node:events';
import net from 'node:net';
import { before } from 'node:test';
import { TLSSocket } from 'node:tls';

import { chat, config, request, sleep, startDeafPort, startGate, startRedis, startUpstream, test, waitUntil, within, Wire } from './harness.mjs';
import { Certificates } from './http-tools.mjs';

let gate, redis, upstream, tls, monitor, count = 0;
const SHORT = 300; // ms: the timeout that a cell lets pass
const short = `${within(SHORT)}ms`;

const settings = (more = {}) => config({
    redis: { url: redis.url, timeout: `${within(more.patient ? 1200 : 250)}ms` },
    // 127.0.0.1 aborts at a FIN, .2 serves on, .3 probes
    listen: { '127.0.0.1:0': {}, '127.0.0.2:0': { half_close: 'serve' }, '127.0.0.3:0': { half_close: 'probe' } },
    client: { header_timeout: short, body_timeout: short, write_timeout: short },
    url: upstream.url,
    upstream: {
        calm: {},
        scan: {},
        quick: { send_timeout: short, first_byte_timeout: short, idle_timeout: short },
        total: { total_timeout: short },
        drain: { on_client_gone: 'drain' },
        slow: { send_timeout: `${within(600)}ms` },
        'drain-quick': { on_client_gone: 'drain', idle_timeout: short },
        'drain-max': { on_client_gone: 'drain', drain_max: short },
        grace: { done_grace: short },
        'no-grace': { done_grace: '0s' },
        'drain-grace': { on_client_gone: 'drain', done_grace: short },
        tls: { url: tls.url.replace('http:', 'https:') },
        'tls-quick': { url: tls.url.replace('http:', 'https:'), connect_timeout: short },
        'tls-total': { url: tls.url.replace('http:', 'https:'), total_timeout: short },
        nobody: { url: 'http://127.0.0.1:1' },
        ...more.upstream,
    },
    route: Object.fromEntries(['calm', 'scan', 'quick', 'total', 'drain', 'drain-quick', 'drain-max', 'grace', 'no-grace', 'slow', 'drain-grace', 'tls', 'tls-quick', 'tls-total', 'nobody',
        ...Object.keys(more.upstream ?? {})].map((name) => [`/${name}/`, { upstream: name }])),
    limit: { all: { concurrency: 4 }, none: { concurrency: 0, tenant: ['nobody'] }, models: { concurrency: 4, model: '*', upstream: ['scan'] } },
    tenant: { from: 'header:x-tenant-id' },
    ...more.top,
});

before(async () => {
    redis = await startRedis();
    upstream = await startUpstream(() => {});
    tls = await startUpstream(() => {});
    gate = await startGate(settings());
    monitor = await redis.monitor();
});

const series = (reason, by, phase) => `leasegate_calls_total{reason="${reason}",by="${by}",phase="${phase}"}`;

// Whatever was sent to leasegate before this has been read by it when it returns.
async function settle(g) {
    const wire = await Wire.connect(g.port);
    wire.send(request('GET', '/nowhere'));
    assert.equal((await wire.message()).status, 404);
    wire.stop();
}

/*
 * One cell. play(c) drives it: c.client, c.id, c.gate, c.up() the upstream's connection of this call. `expect` is the
 * log line's [reason, by, phase, status]; `up` what the upstream's connection comes to: closed, open, or none.
 */
function cell(phase, way, { expect, up = 'closed', on = 0, own, repeated = false }, play) {
    test(`end: ${phase} × ${way}`, async () => {
        const g = own === undefined ? gate : await startGate(settings(own));
        const c = { gate: g, id: `cell-${++count}`, first: upstream.wires.length, tlsFirst: tls.wires.length };
        const [reason, by, endPhase, status] = expect;
        const counted = own === undefined ? await g.metric(series(reason, by, endPhase)) : 0;

        c.up = () => upstream.connection(c.first);
        upstream.script = tls.script = () => {};
        c.client = await Wire.connect(g.ports[on], { host: `127.0.0.${on + 1}` });
        await play(c);
        const line = await g.callLine(c.id);
        assert.deepEqual([line.reason, line.by, line.phase, line.status], expect, JSON.stringify(line));
        if (up === 'none')
            assert.equal(upstream.wires.length, c.first, 'no connection to the upstream');
        else if (up === 'open')
            assert.equal((await c.up()).end, null, 'the upstream connection stays open');
        else
            await (await c.up()).ended();
        if (own === undefined)
            assert.equal(await g.metric(series(reason, by, endPhase)), counted + 1);
        await redis.holds(0);
        if (line.lease !== undefined) {
            const removals = monitor.lines.filter((l) => l.lua && /^zrem$/i.test(l.words[0]) && l.words.includes(line.lease));
            const perKey = new Map();
            removals.forEach((l) => perKey.set(l.words[1], (perKey.get(l.words[1]) ?? 0) + 1));
            assert.ok(perKey.size > 0, 'the lease was released');
            if (!repeated)
                assert.deepEqual([...new Set(perKey.values())], [1], `released once: ${JSON.stringify([...perKey])}`);
        }
        for (const wire of [...upstream.wires.slice(c.first), ...tls.wires.slice(c.tlsFirst)])
            wire.stop();
    });
}

// --- to each phase -----------------------------------------------------------------------------------------------

const target = (route) => `/${route}/v1/chat/completions`;
const post = (c, route, headers = {}, more = {}) =>
    c.client.send(chat({ 'x-request-id': c.id, ...headers }, 'gpt-4o', more).replace('/v1/chat/completions', target(route)));

// Body in parts: the head asks for 100-continue, so its answer shows that the body is awaited.
async function toScan(c) {
    c.client.send(request('POST', target('scan'), { 'x-request-id': c.id, 'Content-Length': 100, Expect: '100-continue' }));
    await c.client.until('100 Continue');
    c.client.send('{"model": "gp');
    await settle(c.gate);
}

async function toAdmit(c, headers = {}) {
    await redis.pause();
    post(c, 'calm', headers);
    await settle(c.gate);
}

async function toTls(c, route = 'tls') {
    post(c, route);
    c.tls = await tls.connection(c.tlsFirst);
    await c.tls.until(/./s); // its hello
}

// The upstream reads nothing, and the body is larger than all buffers between.
async function toSend(c, route = 'calm') {
    upstream.script = (wire) => wire.socket.pause();
    c.client.send(request('POST', target(route), { 'x-request-id': c.id, 'Content-Length': 40e6 }));
    c.upstream = await c.up();
    c.client.send(Buffer.alloc(30e6, 'x'));
    await waitUntil('the body is held back', () => new Promise((done) => {
        const sent = c.client.socket.bytesWritten - c.client.socket.writableLength;
        setTimeout(() => done(c.client.socket.bytesWritten - c.client.socket.writableLength === sent && sent > 0), within(30));
    }));
}

// The head and a part of the body have gone on; the client is to send more.
async function toSendStopped(c, route = 'calm') {
    c.client.send(request('POST', target(route), { 'x-request-id': c.id, 'Content-Length': 100 }) + 'x'.repeat(50));
    c.upstream = await c.up();
    await c.upstream.until('x'.repeat(50));
}

// The next call will go out on the connection of this one.
async function reused(c, route) {
    c.client.send(request('GET', target(route)));
    c.upstream = await c.up();
    await c.upstream.message();
    c.upstream.send('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok');
    assert.equal((await c.client.message()).status, 200);
}

async function toWait(c, route = 'calm', more = {}) {
    post(c, route, {}, more);
    c.upstream = await c.up();
    assert.ok((await c.upstream.message()).complete);
}

const chunk = (text) => `${Buffer.byteLength(text, 'latin1').toString(16)}\r\n${text}\r\n`;
const event = (n) => `data: {"n":${n}}\n\n`;
const sseHead = 'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n';

async function toRelay(c, route = 'calm') {
    await toWait(c, route, { stream: true });
    c.upstream.send(sseHead + chunk(event(1)));
    await c.client.until(event(1));
}

const jsonHead = 'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n';

async function toRelayJson(c, route = 'calm') {
    await toWait(c, route);
    c.upstream.send(jsonHead + '{"half":');
    await c.client.until('{"half":');
}

async function toTunnel(c, route = 'calm') {
    c.client.send(request('GET', `/${route}/v1/realtime?model=gpt-4o`, {
        'x-request-id': c.id, Connection: 'Upgrade', Upgrade: 'websocket', 'Sec-WebSocket-Version': 13, 'Sec-WebSocket-Key': 'dGhlIHNhbXBsZSBub25jZQ==' }));
    c.upstream = await c.up();
    assert.match((await c.upstream.message()).headers.get('upgrade'), /websocket/i);
    c.upstream.send('HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n');
    assert.equal((await c.client.message()).status, 101);
    c.client.send('ping');
    await c.upstream.until('ping');
}

// The client has gone, the upstream is read on, the lease stays.
async function toDrain(c, route = 'drain') {
    await toRelay(c, route);
    c.client.finish();
    await c.client.ended();
    await settle(c.gate);
    await redis.holds(1);
    assert.equal(c.upstream.end, null, 'the upstream connection stays open');
}

// --- what the client sees ----------------------------------------------------------------------------------------

// An answer of ours, whole, in OpenAI's shape.
async function answered(c, status, reason) {
    const m = await c.client.message();
    assert.equal(m.status, status, m.head);
    assert.ok(m.complete);
    assert.equal(m.headers.get('x-leasegate-reason'), reason);
    assert.equal(m.headers.get('x-request-id'), c.id);
    assert.equal(JSON.parse(m.body).error.code, reason);
    if (status === 429 || status >= 500) {
        assert.ok(Number(m.headers.get('retry-after')) >= 1 && Number(m.headers.get('retry-after')) <= 60);
        assert.equal(m.headers.get('x-should-retry'), 'true');
    }
    return m;
}

// A stream cut in the middle: one error event of its API, no last chunk, the connection ended.
async function cutWithEvent(c, reason) {
    const m = await c.client.message();
    assert.equal(m.complete, false, 'a cut stream must not look complete');
    const body = m.body.replace(/\r\n[0-9a-f]+\r\n/g, '');
    assert.ok(body.includes(`"code":"${reason}"`), m.body);
    assert.ok(/\n\ndata: \{"error":[^\n]*\}\n\n/.test(body), JSON.stringify(m.body));
    return m;
}

async function cutByReset(c) {
    assert.equal(await c.client.ended(), 'reset', 'a cut answer is reset');
}

// The rest of a stream arrives whole.
async function wholeStream(c) {
    c.upstream.send(chunk('data: [DONE]\n\n') + '0\r\n\r\n');
    const m = await c.client.message();
    assert.ok(m.complete && m.body.endsWith('data: [DONE]\n\n'), JSON.stringify(m.body));
}

async function wholeJson(c) {
    c.upstream.send('HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}');
    const m = await c.client.message();
    assert.equal(m.status, 200, m.head);
    assert.ok(m.complete && m.body === '{}');
    return m;
}

const gone = (phase, status = 0) => ['client_gone', 'client', phase, status];

// --- head --------------------------------------------------------------------------------------------------------

cell('head', 'own answer', { expect: ['no_route', 'client', 'head', 404], up: 'none' }, async (c) => {
    c.client.send(request('GET', '/nowhere', { 'x-request-id': c.id }));
    await answered(c, 404, 'no_route');
});

cell('head', 'own answer, body too large', { expect: ['body_too_large', 'client', 'head', 413], up: 'none' }, async (c) => {
    c.client.send(request('POST', target('calm'), { 'x-request-id': c.id, 'Content-Length': 1e12 }));
    await answered(c, 413, 'body_too_large');
});

// Before its head is whole a request is no call: there is nothing to log, and nobody to answer.
for (const [way, end] of [['client FIN', 'finish'], ['client RST', 'reset']]) {
    test(`end: head × ${way}`, async () => {
        const lines = gate.log.length, connections = upstream.wires.length;
        const client = await Wire.connect(gate.port);
        client.send('POST /calm/v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-');
        await settle(gate);
        client[end]();
        await client.ended();
        const other = await Wire.connect(gate.port);
        other.send(request('GET', '/nowhere', { 'x-request-id': `after-${way}` }));
        await gate.callLine(`after-${way}`);
        assert.equal(gate.log.slice(lines).filter((l) => l.event === 'call' && l.path !== '/nowhere').length, 0);
        assert.equal(upstream.wires.length, connections);
    });
}

test('end: head × header timeout', async () => {
    const counted = await gate.metric(series('request_timeout', 'client', 'head'));
    const client = await Wire.connect(gate.port);
    const from = gate.log.length;
    client.send('POST /calm/v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-');
    const m = await client.message();
    assert.equal(m.status, 408);
    assert.ok(m.complete && JSON.parse(m.body).error.code === 'request_timeout');
    const line = await gate.waitForLog((l) => l.event === 'call' && l.reason === 'request_timeout', 3000, from);
    assert.deepEqual([line.by, line.phase, line.status], ['client', 'head', 408]);
    assert.equal(await gate.metric(series('request_timeout', 'client', 'head')), counted + 1);
    assert.equal(await client.ended(), 'fin');
});

test('end: head × SIGTERM', async () => {
    const g = await startGate(settings());
    const client = await Wire.connect(g.port);
    client.send('POST /calm/v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-');
    await settle(g);
    g.terminate();
    await client.ended();
    await g.ended();
});

// --- scan --------------------------------------------------------------------------------------------------------

cell('scan', 'own answer', { expect: ['model_missing', 'client', 'scan', 400], up: 'none' }, async (c) => {
    c.client.send(request('POST', target('scan'), { 'x-request-id': c.id }, '{"messages": []}'));
    await answered(c, 400, 'model_missing');
});

cell('scan', 'client FIN', { expect: gone('scan'), up: 'none' }, async (c) => {
    await toScan(c);
    c.client.finish();
    await c.client.ended();
});

cell('scan', 'client RST', { expect: gone('scan'), up: 'none' }, async (c) => {
    await toScan(c);
    c.client.reset();
});

// A FIN before the body is whole can be no half-close: the request will never be complete.
for (const [on, mode] of [[1, 'serve'], [2, 'probe']]) {
    cell('scan', `client half-close, ${mode}`, { on, expect: gone('scan'), up: 'none' }, async (c) => {
        await toScan(c);
        c.client.finish();
        await c.client.ended();
    });
}

cell('scan', 'body timeout', { expect: ['request_timeout', 'client', 'scan', 408], up: 'none' }, async (c) => {
    await toScan(c);
    await answered(c, 408, 'request_timeout');
});

const draining = { top: { drain_timeout: short, client: {} } };

cell('scan', 'SIGTERM', { own: draining, expect: ['drain_timeout', 'gate', 'scan', 503], up: 'none' }, async (c) => {
    await toScan(c);
    c.gate.terminate();
    await answered(c, 503, 'drain_timeout');
    c.client.stop();
    await c.gate.ended();
});

// Nothing is held yet: an outage that is over when the body has come changes nothing.
cell('scan', 'Redis loss', { own: { top: { client: {} } }, expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
    await toScan(c);
    await redis.pause();
    await recoveredFrom(c.gate, () => redis.resume());
    c.client.send('t-4o"'.padEnd(86, ' ') + '}');
    c.upstream = await c.up();
    await c.upstream.message();
    await wholeJson(c);
});

async function recoveredFrom(g, resume) {
    const post = await Wire.connect(g.port);
    post.send(chat().replace('/v1/', '/calm/v1/'));
    assert.equal((await post.message()).status, 429); // the outage is noticed
    await resume();
    await recovered(g);
    await recovered();
}

// --- admit -------------------------------------------------------------------------------------------------------

cell('admit', 'own answer', { expect: ['limit_full', 'gate', 'admit', 429], up: 'none' }, async (c) => {
    post(c, 'calm', { 'x-tenant-id': 'nobody' });
    const m = await answered(c, 429, 'limit_full');
    assert.equal(m.headers.get('x-leasegate-limit'), 'none');
});

for (const [way, end] of [['client FIN', 'finish'], ['client RST', 'reset']]) {
    cell('admit', way, { expect: gone('admit'), up: 'none', repeated: true }, async (c) => {
        await toAdmit(c);
        c.client[end]();
        await c.gate.callLine(c.id);
        await redis.resume();
        await recovered();
    });
}

for (const [on, mode] of [[1, 'serve'], [2, 'probe']]) {
    cell('admit', `client half-close, ${mode}`, { on, expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
        await toAdmit(c);
        c.client.finish();
        await settle(c.gate);
        await redis.resume();
        c.upstream = await c.up();
        await c.upstream.message();
        const m = await wholeJson(c);
        assert.deepEqual(m.interim, mode === 'probe' ? [102] : []);
    });
}

cell('admit', 'Redis loss', { expect: ['redis_unavailable', 'redis', 'admit', 429], up: 'none' }, async (c) => {
    await toAdmit(c);
    await answered(c, 429, 'redis_unavailable');
    const from = c.gate.log.length;
    await redis.resume();
    await c.gate.waitForLog((l) => l.event === 'redis' && /usable$/.test(l.message), 5000, from); // recovered() would be counted here
});

cell('admit', 'SIGTERM', { own: { patient: true, ...draining }, expect: ['drain_timeout', 'gate', 'admit', 503], up: 'none', repeated: true },
    async (c) => {
        await toAdmit(c);
        c.gate.terminate();
        await answered(c, 503, 'drain_timeout');
        c.client.stop();
        await redis.resume();
        await c.gate.ended();
        await recovered();
    });

// After an outage: admitting again. (502: it was let in, and there is nobody at that upstream. /readyz may be 200 ms old.)
const recovered = (g = gate) => waitUntil('leasegate admits again', async () => {
    const wire = await Wire.connect(g.port);
    wire.send(chat().replace('/v1/', '/nobody/v1/'));
    const { status } = await wire.message();
    wire.stop();
    return status === 502;
}, 5000);

// --- dial --------------------------------------------------------------------------------------------------------

cell('dial', 'upstream refuses', { expect: ['upstream_unreachable', 'upstream', 'dial', 502], up: 'none' }, async (c) => {
    post(c, 'nobody');
    await answered(c, 502, 'upstream_unreachable');
});

for (const [way, end] of [['upstream FIN', 'finish'], ['upstream RST', 'reset']]) {
    cell('dial', way, { expect: ['upstream_unreachable', 'upstream', 'dial', 502], up: 'none' }, async (c) => {
        await toTls(c);
        c.tls[end]();
        await answered(c, 502, 'upstream_unreachable');
    });
}

cell('dial', 'upstream silence in TLS', { expect: ['upstream_timeout', 'upstream', 'dial', 504], up: 'none' }, async (c) => {
    await toTls(c, 'tls-quick');
    await answered(c, 504, 'upstream_timeout');
    await c.tls.ended();
});

test('end: dial × upstream silence in TCP', async () => {
    const deaf = await startDeafPort();
    const g = await startGate(settings({ upstream: { deaf: { url: deaf.url, connect_timeout: short } } }));
    const client = await Wire.connect(g.port);
    client.send(chat({ 'x-request-id': 'deaf' }).replace('/v1/', '/deaf/v1/'));
    assert.equal((await client.message()).status, 504);
    const line = await g.callLine('deaf');
    assert.deepEqual([line.reason, line.by, line.phase], ['upstream_timeout', 'upstream', 'dial']);
    assert.equal(await g.metric(series('upstream_timeout', 'upstream', 'dial')), 1);
});

for (const [way, end] of [['client FIN', 'finish'], ['client RST', 'reset']]) {
    // the connection in the making is kept for the pool: only the lease goes at once
    cell('dial', way, { expect: gone('dial'), up: 'none' }, async (c) => {
        await toTls(c);
        c.client[end]();
        await redis.holds(0, '', 300);
        assert.equal(c.tls.end, null);
    });
}

// The connection comes about later: SIGCONT wakes the deaf port, which then answers 200.
function lateCell(way, on, play) {
    test(`end: dial × ${way}`, async () => {
        const deaf = await startDeafPort();
        const g = await startGate(settings({ upstream: { deaf: { url: deaf.url, connect_timeout: `${within(10000)}ms` } } }));
        const client = await Wire.connect(g.ports[on], { host: `127.0.0.${on + 1}` });
        client.send(chat({ 'x-request-id': 'late' }).replace('/v1/', '/deaf/v1/'));
        await settle(g);
        await redis.holds(1);
        await play(client, g);
        deaf.wake();
        const m = await client.message(10000);
        assert.equal(m.status, 200);
        assert.equal(m.body, 'awake');
        const line = await g.callLine('late');
        assert.deepEqual([line.reason, line.by, line.phase, line.status], ['done', 'upstream', 'relay', 200]);
    });
}

lateCell('true end', 0, () => {});
lateCell('client half-close, serve', 1, (client) => client.finish());
lateCell('client half-close, probe', 2, (client) => client.finish());
lateCell('Redis loss', 0, async (client, g) => {
    await redis.pause();
    await g.waitForLog((l) => l.event === 'redis' && l.level !== 'info', 5000);
    await redis.resume();
    await recovered();
});

cell('dial', 'total timeout', { expect: ['total_timeout', 'gate', 'dial', 504], up: 'none' }, async (c) => {
    await toTls(c, 'tls-total');
    await answered(c, 504, 'total_timeout');
});

cell('dial', 'SIGTERM', { own: draining, expect: ['drain_timeout', 'gate', 'dial', 503], up: 'none' }, async (c) => {
    await toTls(c);
    c.gate.terminate();
    await answered(c, 503, 'drain_timeout');
    c.client.stop();
    await c.gate.ended();
});

// --- send --------------------------------------------------------------------------------------------------------

cell('send', 'true end', { expect: ['done', 'upstream', 'relay', 413] }, async (c) => { // answered before it was asked
    await toSend(c);
    c.upstream.send('HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\n{}');
    const m = await c.client.message();
    assert.equal(m.status, 413);
    assert.ok(m.complete);
    c.upstream.socket.resume();
});

for (const [way, end] of [['client FIN', 'finish'], ['client RST', 'reset']]) {
    cell('send', way, { expect: gone('send') }, async (c) => {
        await toSendStopped(c);
        c.client[end]();
        await c.upstream.ended();
    });
}

cell('send', 'client RST, held back', { expect: gone('send') }, async (c) => {
    await toSend(c);
    c.client.reset();
    c.upstream.socket.resume();
});

for (const [on, mode] of [[1, 'serve'], [2, 'probe']]) {
    // The whole request and the FIN are on their way while the upstream does not read: a half-close, however late it is read.
    cell('send', `client half-close, ${mode}`, { on, expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
        upstream.script = (wire) => wire.socket.pause();
        c.client.send(request('POST', target('calm'), { 'x-request-id': c.id }, 'x'.repeat(20e6)));
        c.client.finish();
        c.upstream = await c.up();
        await settle(c.gate);
        c.upstream.socket.resume();
        assert.ok((await c.upstream.message(10000)).complete);
        await wholeJson(c);
    });
}

for (const [way, end] of [['upstream FIN', 'finish'], ['upstream RST', 'reset']]) {
    cell('send', way, { expect: ['upstream_closed', 'upstream', 'send', 502] }, async (c) => {
        await toSendStopped(c);
        c.upstream[end]();
        await answered(c, 502, 'upstream_closed');
    });
}

cell('send', 'upstream silence', { expect: ['upstream_timeout', 'upstream', 'send', 504] }, async (c) => {
    await toSend(c, 'quick');
    await answered(c, 504, 'upstream_timeout');
    c.upstream.socket.resume();
});

cell('send', 'body timeout', { expect: ['request_timeout', 'client', 'send', 408] }, async (c) => {
    await toSendStopped(c);
    await answered(c, 408, 'request_timeout');
});

/*
 * A connection that served before dies while the body is under way: what has gone out is not kept, so it cannot be said
 * again. That the wait for the slow side had begun anew meanwhile changes nothing.
 */
cell('send', 'body timeout, reused connection', { expect: ['request_timeout', 'client', 'send', 408] }, async (c) => {
    await reused(c, 'calm');
    c.client.send(request('POST', target('calm'), { 'x-request-id': c.id, 'Content-Length': 100 }) + 'x'.repeat(50));
    await c.upstream.until('x'.repeat(50));
    await sleep(within(1.5 * SHORT));
    c.upstream.finish();
    await answered(c, 408, 'request_timeout');
    assert.equal(upstream.wires.length, c.first + 1, 'no second connection');
});

cell('send', 'upstream RST, held back, reused connection', { expect: ['upstream_closed', 'upstream', 'send', 502] }, async (c) => {
    await reused(c, 'slow');
    c.upstream.socket.pause();
    c.client.send(request('POST', target('slow'), { 'x-request-id': c.id, 'Content-Length': 40e6 }));
    c.client.send(Buffer.alloc(30e6, 'x'));
    await sleep(within(900));
    c.upstream.reset();
    await answered(c, 502, 'upstream_closed');
    assert.equal(upstream.wires.length, c.first + 1, 'no second connection');
});

cell('send', 'total timeout', { expect: ['total_timeout', 'gate', 'send', 504] }, async (c) => {
    await toSend(c, 'total');
    await answered(c, 504, 'total_timeout');
    c.upstream.socket.resume();
});

cell('send', 'SIGTERM', { own: draining, expect: ['drain_timeout', 'gate', 'send', 503] }, async (c) => {
    await toSendStopped(c);
    c.gate.terminate();
    await answered(c, 503, 'drain_timeout');
    c.client.stop();
    await c.gate.ended();
});

cell('send', 'Redis loss', { own: { top: { client: {} } }, expect: ['done', 'upstream', 'relay', 200], up: 'open', repeated: true }, async (c) => {
    await toSendStopped(c);
    await outage(c);
    c.client.send('x'.repeat(50));
    await c.upstream.message();
    await wholeJson(c);
    await over(c);
});

// Redis is lost while a call runs, and comes back when it has ended.
async function outage(c) {
    const from = c.gate.log.length;
    await redis.pause();
    await c.gate.waitForLog((l) => l.event === 'redis' && l.level !== 'info', 5000, from);
}

async function over(c) {
    await c.gate.callLine(c.id);
    await redis.resume();
    await recovered(c.gate);
    await recovered();
}

// --- wait --------------------------------------------------------------------------------------------------------

cell('wait', 'true end', { expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
    await toWait(c);
    await wholeJson(c);
});

for (const [way, end] of [['client FIN', 'finish'], ['client RST', 'reset']]) {
    cell('wait', way, { expect: gone('wait') }, async (c) => {
        await toWait(c);
        c.client[end]();
        await c.upstream.ended(300);
        await redis.holds(0, '', 300);
    });
}

for (const [on, mode] of [[1, 'serve'], [2, 'probe']]) {
    cell('wait', `client half-close, ${mode}`, { on, expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
        await toWait(c);
        c.client.finish();
        if (mode === 'probe')
            await c.client.until('102 Processing');
        const m = await wholeJson(c);
        assert.deepEqual(m.interim, mode === 'probe' ? [102] : []);
        assert.equal(await c.client.ended(), 'fin');
    });
}

cell('wait', 'client close, probe', { on: 2, expect: gone('wait') }, async (c) => {
    await toWait(c);
    c.client.stop(); // no reader any more: the probe is answered by an RST
    await c.upstream.ended(500);
});

cell('wait', 'client RST, serve', { on: 1, expect: gone('wait') }, async (c) => {
    await toWait(c);
    c.client.finish();
    await settle(c.gate);
    c.client.reset();
    await c.upstream.ended(500);
});

for (const [way, end] of [['upstream FIN', 'finish'], ['upstream RST', 'reset']]) {
    cell('wait', way, { expect: ['upstream_closed', 'upstream', 'wait', 502] }, async (c) => {
        await toWait(c);
        c.upstream[end]();
        await answered(c, 502, 'upstream_closed');
    });
}

cell('wait', 'upstream silence', { expect: ['upstream_timeout', 'upstream', 'wait', 504] }, async (c) => {
    await toWait(c, 'quick');
    await answered(c, 504, 'upstream_timeout');
});

cell('wait', 'upstream nonsense', { expect: ['upstream_invalid', 'upstream', 'wait', 502] }, async (c) => {
    await toWait(c);
    c.upstream.send('SSH-2.0-OpenSSH_9.2\r\n\r\n');
    await answered(c, 502, 'upstream_invalid');
});

cell('wait', 'total timeout', { expect: ['total_timeout', 'gate', 'wait', 504] }, async (c) => {
    await toWait(c, 'total');
    await answered(c, 504, 'total_timeout');
});

cell('wait', 'SIGTERM', { own: draining, expect: ['drain_timeout', 'gate', 'wait', 503] }, async (c) => {
    await toWait(c);
    c.gate.terminate();
    await answered(c, 503, 'drain_timeout');
    c.client.stop();
    await c.gate.ended();
});

cell('wait', 'Redis loss', { expect: ['done', 'upstream', 'relay', 200], up: 'open', repeated: true }, async (c) => {
    await toWait(c);
    await outage(c);
    await wholeJson(c);
    await over(c);
});

// A GET is sent once more, on a connection that is owed its whole connect_timeout, however long the first was waited for.
test('end: wait × upstream FIN on a reused connection, then silence in TLS', async () => {
    const pem = new Certificates().issue('server', 'DNS:localhost').pem();
    let first, asked = 0;
    const server = net.createServer((socket) => {
        socket.on('error', () => {});
        if (first !== undefined)
            return; // no hello
        first = new TLSSocket(socket, { isServer: true, ...pem });
        first.on('error', () => {});
        first.on('data', () => {
            if (++asked === 1)
                first.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok');
        });
    }).listen(0, '127.0.0.1');
    await once(server, 'listening');
    const g = await startGate(settings({ upstream: {
        stale: { url: `https://localhost:${server.address().port}`, tls_verify: false, first_byte_timeout: `${within(400)}ms`, connect_timeout: `${within(800)}ms` } } }));
    const client = await Wire.connect(g.port);
    client.send(request('GET', target('stale')));
    assert.equal((await client.message()).status, 200);
    client.send(request('GET', target('stale'), { 'x-request-id': 'twice' }));
    await waitUntil('the second request', () => asked === 2);
    first.destroy();
    const line = await g.callLine('twice');
    assert.deepEqual([line.reason, line.by, line.phase, line.status], ['upstream_timeout', 'upstream', 'dial', 504], JSON.stringify(line));
    client.stop();
    server.close();
});

// --- relay -------------------------------------------------------------------------------------------------------

cell('relay', 'true end, last chunk', { expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
    await toRelay(c);
    await wholeStream(c);
});

cell('relay', 'true end, length', { expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
    await toRelayJson(c);
    c.upstream.send('x'.repeat(92));
    const m = await c.client.message();
    assert.ok(m.complete && m.body.length === 100);
});

cell('relay', 'true end, close', { expect: ['done', 'upstream', 'relay', 200] }, async (c) => {
    await toWait(c);
    c.upstream.send('HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end');
    await c.client.until('until the end');
    c.upstream.finish();
    const m = await c.client.message();
    assert.ok(m.complete && m.body === 'until the end');
});

for (const [way, end] of [['client FIN', 'finish'], ['client RST', 'reset']]) {
    cell('relay', way, { expect: gone('relay', 200) }, async (c) => {
        await toRelay(c);
        c.client[end]();
        await c.upstream.ended(300);
        await redis.holds(0, '', 300);
    });
}

for (const [on, mode] of [[1, 'serve'], [2, 'probe']]) {
    cell('relay', `client half-close, ${mode}`, { on, expect: ['done', 'upstream', 'relay', 200], up: 'open' }, async (c) => {
        await toRelay(c);
        c.client.finish();
        await settle(c.gate);
        await wholeStream(c);
    });
    cell('relay', `client RST, ${mode}`, { on, expect: gone('relay', 200) }, async (c) => {
        await toRelay(c);
        c.client.finish();
        await settle(c.gate);
        c.client.reset();
        await c.upstream.ended(500);
    });
}

for (const [way, end] of [['upstream FIN', 'finish'], ['upstream RST', 'reset']]) {
    cell('relay', way, { expect: ['upstream_closed', 'upstream', 'relay', 200] }, async (c) => {
        await toRelay(c);
        c.upstream[end]();
        await cutWithEvent(c, 'upstream_closed');
    });
    cell('relay', `${way}, JSON`, { expect: ['upstream_closed', 'upstream', 'relay', 200] }, async (c) => {
        await toRelayJson(c);
        c.upstream[end]();
        await cutByReset(c);
    });
}

cell('relay', 'upstream FIN in an event', { expect: ['upstream_closed', 'upstream', 'relay', 200] }, async (c) => {
    await toRelay(c);
    c.upstream.send(chunk('data: {"n":'));
    await c.client.until('{"n":');
    c.upstream.finish();
    await cutWithEvent(c, 'upstream_closed');
});

cell('relay', 'upstream nonsense', { expect: ['upstream_invalid', 'upstream', 'relay', 200] }, async (c) => {
    await toRelay(c);
    c.upstream.send('no chunk\r\n');
    await cutWithEvent(c, 'upstream_invalid');
});

cell('relay', 'upstream silence', { expect: ['upstream_timeout', 'upstream', 'relay', 200] }, async (c) => {
    await toRelay(c, 'quick');
    await cutWithEvent(c, 'upstream_timeout');
});

cell('relay', 'upstream silence, JSON', { expect: ['upstream_timeout', 'upstream', 'relay', 200] }, async (c) => {
    await toRelayJson(c, 'quick');
    await cutByReset(c);
});

cell('relay', 'upstream silence after the terminator', { expect: ['done_unclosed', 'upstream', 'relay', 200] }, async (c) => {
    await toRelay(c, 'grace');
    c.upstream.send(chunk('data: [DONE]\n\n'));
    const m = await c.client.message();
    assert.equal(m.complete, false, 'no last chunk is invented');
    assert.ok(!m.body.includes('error'), m.body);
});

// No grace at all: what is not ended together with its terminator is ended here.
cell('relay', 'upstream silence after the terminator, done_grace = 0', { expect: ['done_unclosed', 'upstream', 'relay', 200] }, async (c) => {
    await toRelay(c, 'no-grace');
    c.upstream.send(chunk('data: [DONE]\n\n'));
    assert.equal((await c.client.message()).complete, false, 'no last chunk is invented');
});

cell('relay', 'client FIN after the terminator', { expect: ['done', 'upstream', 'drain', 200], up: 'open' }, async (c) => {
    await toRelay(c);
    c.upstream.send(chunk('data: [DONE]\n\n'));
    await c.client.until('[DONE]');
    c.client.finish();
    await c.client.ended();
    await settle(c.gate);
    c.upstream.send('0\r\n\r\n');
});

cell('relay', 'client stall', { expect: ['client_stalled', 'client', 'relay', 200] }, async (c) => {
    await toRelay(c);
    c.client.socket.pause();
    const flood = chunk(`data: ${'x'.repeat(65000)}\n\n`);
    const more = () => {
        while (c.upstream.end === null && c.upstream.socket.write(flood));
    };
    c.upstream.socket.on('drain', more);
    more();
    await c.upstream.ended();
    c.client.socket.resume();
    assert.equal((await c.client.message()).complete, false, 'a cut stream must not look complete');
});

cell('relay', 'total timeout', { expect: ['total_timeout', 'gate', 'relay', 200] }, async (c) => {
    await toRelay(c, 'total');
    await cutWithEvent(c, 'total_timeout');
});

cell('relay', 'SIGTERM', { own: draining, expect: ['drain_timeout', 'gate', 'relay', 200] }, async (c) => {
    await toRelay(c);
    c.gate.terminate();
    await cutWithEvent(c, 'drain_timeout');
    c.client.stop();
    await c.gate.ended();
});

cell('relay', 'Redis loss', { expect: ['done', 'upstream', 'relay', 200], up: 'open', repeated: true }, async (c) => {
    await toRelay(c);
    await outage(c);
    c.upstream.send(chunk(event(2)));
    await c.client.until(event(2));
    await wholeStream(c);
    await over(c);
});

// With `strict`, a call whose slot went to others is ended: by an answer while there was none, else by a cut.
const strict = { top: { lease: { heartbeat: short, ttl: `${within(1500)}ms`, strict: 'true' } } };

async function loseTheSlot() {
    const [key] = Object.keys(await redis.leases()).filter((k) => k.includes(':all:'));
    const [s, us] = await redis.command('TIME');
    await redis.command('DEL', key);
    await redis.command('ZADD', key, ...[1, 2, 3, 4].flatMap((n) => [Number(s) * 1000 + Math.floor(us / 1000) + 60000, `others/${n}`]));
    return () => redis.command('ZREM', key, ...[1, 2, 3, 4].map((n) => `others/${n}`));
}

cell('wait', 'lease lost', { own: strict, expect: ['lease_lost', 'redis', 'wait', 503], repeated: true }, async (c) => {
    await toWait(c);
    const giveBack = await loseTheSlot();
    await answered(c, 503, 'lease_lost');
    await giveBack();
});

cell('relay', 'lease lost', { own: strict, expect: ['lease_lost', 'redis', 'relay', 200], repeated: true }, async (c) => {
    await toRelay(c);
    const giveBack = await loseTheSlot();
    await cutWithEvent(c, 'lease_lost');
    await giveBack();
});

// --- tunnel ------------------------------------------------------------------------------------------------------

cell('tunnel', 'client FIN', { expect: ['done', 'upstream', 'tunnel', 101] }, async (c) => {
    await toTunnel(c);
    c.client.finish();
    await c.upstream.ended();
    await redis.holds(1); // until the tunnel closes
    c.upstream.send('last words');
    await c.client.until('last words');
    c.upstream.finish();
    assert.equal(await c.client.ended(), 'fin');
});

cell('tunnel', 'upstream FIN', { expect: ['done', 'upstream', 'tunnel', 101] }, async (c) => {
    await toTunnel(c);
    c.upstream.finish();
    assert.equal(await c.client.ended(), 'fin');
    await redis.holds(1);
    c.client.send('last words');
    await c.upstream.until('last words');
    c.client.finish();
});

cell('tunnel', 'upstream silence, half closed', { expect: ['upstream_timeout', 'upstream', 'tunnel', 101] }, async (c) => {
    await toTunnel(c, 'quick');
    await redis.holds(1);
    c.client.finish(); // from now on the other direction must make progress
    await cutByReset(c);
});

cell('tunnel', 'client RST', { expect: gone('tunnel', 101) }, async (c) => {
    await toTunnel(c);
    c.client.reset();
    await c.upstream.ended(500);
});

cell('tunnel', 'upstream RST', { expect: ['upstream_closed', 'upstream', 'tunnel', 101] }, async (c) => {
    await toTunnel(c);
    c.upstream.reset();
    await cutByReset(c);
});

cell('tunnel', 'client stall', { expect: ['client_stalled', 'client', 'tunnel', 101] }, async (c) => {
    await toTunnel(c);
    c.client.socket.pause();
    const flood = Buffer.alloc(65536);
    const more = () => {
        while (c.upstream.end === null && c.upstream.socket.write(flood));
    };
    c.upstream.socket.on('drain', more);
    more();
    await c.upstream.ended();
});

cell('tunnel', 'SIGTERM', { own: draining, expect: ['drain_timeout', 'gate', 'tunnel', 101] }, async (c) => {
    await toTunnel(c);
    c.gate.terminate();
    await cutByReset(c);
    await c.gate.ended();
});

cell('tunnel', 'Redis loss', { expect: ['done', 'upstream', 'tunnel', 101], repeated: true }, async (c) => {
    await toTunnel(c);
    await outage(c);
    c.upstream.send('pong');
    await c.client.until('pong');
    c.client.finish();
    await c.upstream.ended();
    c.upstream.finish();
    await over(c);
});

// --- drain -------------------------------------------------------------------------------------------------------

cell('drain', 'true end', { expect: ['client_gone', 'client', 'drain', 200], up: 'open' }, async (c) => {
    await toDrain(c);
    c.upstream.send('0\r\n\r\n');
});

cell('drain', 'true end, terminator', { expect: ['client_gone', 'client', 'drain', 200], up: 'open' }, async (c) => {
    await toDrain(c);
    c.upstream.send(chunk('data: [DONE]\n\n') + '0\r\n\r\n');
});

cell('drain', 'upstream silence after the terminator', { expect: ['done_unclosed', 'upstream', 'drain', 200] }, async (c) => {
    await toDrain(c, 'drain-grace');
    c.upstream.send(chunk('data: [DONE]\n\n'));
});

cell('drain', 'true end, from wait', { expect: ['client_gone', 'client', 'drain', 0], up: 'open' }, async (c) => {
    await toWait(c, 'drain');
    c.client.finish();
    await c.client.ended();
    await redis.holds(1);
    c.upstream.send('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}');
});

// The client was asked whether it is still there, and its RST was the answer: nobody asks it again.
cell('drain', 'true end, from wait, after a probe', { on: 2, expect: ['client_gone', 'client', 'drain', 0], up: 'open' }, async (c) => {
    await toWait(c, 'drain');
    c.client.stop();
    await redis.holds(1);
    await waitUntil('the probe is over', () => sleep(within(100)).then(() => true));
    await settle(c.gate);
    assert.equal(c.upstream.end, null, 'the upstream connection stays open');
    c.upstream.send('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}');
});

// Before the upstream has begun to answer, first_byte_timeout rules, whether or not the client is still there.
cell('drain', 'true end, from wait, later than idle_timeout', { expect: ['client_gone', 'client', 'drain', 0], up: 'open' }, async (c) => {
    await toWait(c, 'drain-quick');
    c.client.finish();
    await c.client.ended();
    await sleep(2 * parseInt(short, 10));
    await redis.holds(1);
    c.upstream.send('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}');
});

cell('drain', 'upstream silence after the terminator, from wait', { expect: ['done_unclosed', 'upstream', 'drain', 0] }, async (c) => {
    await toWait(c, 'drain-grace', { stream: true });
    c.client.finish();
    await c.client.ended();
    await settle(c.gate);
    c.upstream.send(sseHead + chunk(event(1)) + chunk('data: [DONE]\n\n'));
});

for (const [way, end] of [['upstream FIN', 'finish'], ['upstream RST', 'reset']]) {
    cell('drain', way, { expect: ['upstream_closed', 'upstream', 'drain', 200] }, async (c) => {
        await toDrain(c);
        c.upstream[end]();
    });
}

cell('drain', 'upstream silence', { expect: ['upstream_timeout', 'upstream', 'drain', 200] }, async (c) => {
    await toDrain(c, 'drain-quick');
});

cell('drain', 'drain_max', { expect: gone('drain', 200) }, async (c) => {
    await toDrain(c, 'drain-max');
});

cell('drain', 'SIGTERM', { own: draining, expect: ['drain_timeout', 'gate', 'drain', 200] }, async (c) => {
    await toDrain(c);
    c.gate.terminate();
    await c.gate.ended();
});

cell('drain', 'Redis loss', { expect: ['client_gone', 'client', 'drain', 200], up: 'open', repeated: true }, async (c) => {
    await toDrain(c);
    await outage(c);
    c.upstream.send('0\r\n\r\n');
    await over(c);
});
