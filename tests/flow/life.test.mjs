// life.test.mjs - an instance's own life: check, reload, drain, and the policies that outlast a client.
import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import path from 'node:path';
import { before, beforeEach } from 'node:test';

import { chat, closeWires, config, directory, request, root, runGate, sleep, startGate, startMock, startRedis, startUpstream, test, waitUntil, within, Wire } from './harness.mjs';

let mock, redis;

before(async () => {
    redis = await startRedis();
    mock = await startMock();
});
beforeEach(() => mock.reset());

const of = (n, more = {}) => config({ redis, upstream: mock, limit: { all: { concurrency: n } }, ...more });
const stays = { 'x-mock-events': 1e6, 'x-mock-delay-ms': 20 };

async function hold(g, headers = {}) {
    const wire = await Wire.connect(g.port);
    wire.send(chat({ ...stays, ...headers }, 'm', { stream: true }));
    await wire.until(/^HTTP\/1\.1 \d\d\d[^]*\r\n\r\n/);
    wire.status = Number(wire.text.slice(9, 12));
    return wire;
}

async function ask(g, bytes = chat()) {
    const wire = await Wire.connect(g.port);
    wire.send(bytes);
    const m = await wire.message(10000);
    wire.stop();
    return m;
}

// --- leasegate check -------------------------------------------------------------------------------------------------

function file(text) {
    const name = path.join(directory, `check-${Math.random().toString(36).slice(2)}.conf`);
    writeFileSync(name, text);
    return name;
}

test('check: a good file is ok', async () => {
    const { code, out, err } = await runGate('check', '-c', file(of(5)));
    assert.deepEqual([code, err], [0, '']);
    assert.match(out, /: ok\n$/);
});

test('check: proxy.conf.example is ok', async () => {
    const { code, err } = await runGate('check', '-c', path.join(root, 'proxy.conf.example'));
    assert.equal(code, 0, err);
});

test('check: every fault is named with its line, in one run', async () => {
    const name = file('upstream "a" {\n    url = "http://127.0.0.1:1"\n    colour = "red"\n}\nroute "/" { upstream = "b" }\nlimit "l" { concurrency = many }\n' +
        'listen "127.0.0.1:0" {}\nlease { heartbeat = 2s ttl = 3s }\n');
    const { code, err } = await runGate('check', '-c', name);
    assert.equal(code, 78);
    for (const line of [3, 5, 6, 8])
        assert.ok(err.includes(`${name}:${line}: `), `line ${line}: ${err}`);
});

test('check: --dump prints what is understood, secrets masked', async () => {
    const { code, out } = await runGate('check', '--dump', '-c', file(config({
        upstream: { llm: { url: 'http://127.0.0.1:1', header: { authorization: { value: 'Bearer sk-secret' } } } }, limit: { l: { concurrency: 7 } } })));
    assert.equal(code, 0);
    assert.match(out, /concurrency = "?7/);
    assert.ok(!out.includes('sk-secret'));
});

test('a bad file at start, a bad argument: named, with the status of sysexits', async () => {
    assert.equal((await runGate('-c', file('limit "l" {}\n'))).code, 78);
    assert.equal((await runGate('-c', '/does/not/exist')).code, 78);
    assert.equal((await runGate('dance')).code, 64);
});

// --- reload ----------------------------------------------------------------------------------------------------------

test('L02: 10 to 5 with 10 held: nobody is cut, nobody enters until fewer than 5 run; 5 to 10 at once', async () => {
    const gate = await startGate(of(10));
    const wires = [];
    for (let i = 0; i < 10; i++)
        wires.push(await hold(gate));
    assert.ok(wires.every((w) => w.status === 200));
    await gate.reload(of(5));
    for (let running = 10; running > 5; running--) {
        assert.equal((await ask(gate)).status, 429);
        wires.pop().stop();
        await redis.holds(running - 1);
    }
    assert.equal((await ask(gate)).status, 429);
    wires.pop().stop();
    await redis.holds(4);
    assert.equal((await ask(gate)).status, 200);
    assert.ok(wires.every((w) => w.end === null));
    await gate.reload(of(10));
    for (let i = 4; i < 10; i++)
        assert.equal((await hold(gate)).status, 200);
    assert.equal((await hold(gate)).status, 429);
});

test('L06: a limit of 0 closes, running calls go on, back to 1 opens', async () => {
    const gate = await startGate(of(2));
    const wire = await hold(gate);
    await gate.reload(of(0));
    assert.equal((await ask(gate)).status, 429);
    const seen = wire.text.length;
    await waitUntil('the stream goes on', () => wire.text.length > seen);
    assert.equal(wire.end, null);
    await gate.reload(of(2));
    assert.equal((await ask(gate)).status, 200);
});

test('L07: a bad file changes nothing, and the log names its line', async () => {
    const gate = await startGate(of(1));
    const wire = await hold(gate);
    const { lines } = await gate.reload(`${of(5)}\nlimit "x" {\n    concurrency = "lots"\n}\n`);
    const n = of(5).split('\n').length + 2;
    assert.ok(lines.some((l) => l.level === 'error' && l.message.includes(`${gate.file}:${n}: `)), JSON.stringify(lines));
    assert.match(lines.at(-1).message, /the old configuration stays in force/);
    assert.equal((await ask(gate)).status, 429);
    assert.equal(wire.end, null);
    await waitUntil('it is counted', async () => await gate.metric('leasegate_config_reload_failures_total') === 1);
});

test('a file with a warning is taken, and the log names its line', async () => {
    const gate = await startGate(of(1));
    const { lines } = await gate.reload(of(1, { lease: { heartbeat: '2s', ttl: '5s' } }));
    assert.match(lines.at(-1).message, /is in force$/);
    assert.ok(lines.some((l) => l.level === 'warn' && /:\d+: warning: lease: `ttl`/.test(l.message)), JSON.stringify(lines));
});

test('a reload changes upstreams for new calls; old ones end where they began', async () => {
    const other = await startMock();
    const gate = await startGate(of(5));
    const wire = await hold(gate);
    await gate.reload(of(5, { upstream: other }));
    assert.equal((await ask(gate)).status, 200);
    assert.equal((await other.stats()).total, 1);
    const seen = wire.text.length;
    await waitUntil('the old stream goes on', () => wire.text.length > seen);
    assert.equal((await mock.stats()).in_flight, 1);
});

test('what needs a restart is refused by name', async () => {
    const gate = await startGate(of(5));
    const { lines } = await gate.reload(of(5, { workers: 2 }));
    assert.ok(lines.some((l) => l.message.includes('`workers` needs a restart')), JSON.stringify(lines));
});

test('B09: a limit that goes and comes back under load counts right', async () => {
    const gate = await startGate(of(3));
    const wires = [await hold(gate), await hold(gate)];
    await gate.reload(config({ redis, upstream: mock }));
    const uncounted = await hold(gate);
    assert.equal(uncounted.status, 200);
    await gate.reload(of(3));
    await redis.holds(2);
    wires.push(await hold(gate));
    assert.equal((await ask(gate)).status, 429);
    wires[0].stop();
    await redis.holds(2);
    await waitUntil('the gauge agrees', async () => await gate.metric('leasegate_limit_held{limit="all"}') === 2);
});

// --- drain -----------------------------------------------------------------------------------------------------------

test('J04, J06, J09: SIGTERM waits for a live stream, is not ready meanwhile, takes no new call', async () => {
    const gate = await startGate(of(5));
    const wire = await hold(gate, { 'x-mock-events': 30, 'x-mock-delay-ms': 20 });
    const idle = await Wire.connect(gate.port);
    idle.send(chat());
    assert.equal((await idle.message()).status, 200);
    gate.terminate();
    await waitUntil('not ready', async () => (await gate.admin('/readyz')).status === 503);
    assert.equal((await gate.admin('/healthz')).status, 200);
    await idle.ended(); // an idle connection is closed
    await assert.rejects(Wire.connect(gate.port), /ECONNREFUSED/);
    await redis.holds(1);
    const m = await wire.message(5000);
    assert.ok(m.complete && m.body.includes('[DONE]'));
    wire.stop();
    await gate.ended();
    assert.equal(await redis.held(), 0);
});

test('J10: min_drain: not ready at once, but serving until it is over, each response closing its connection', async () => {
    const gate = await startGate(of(5, { min_drain: '800ms' }));
    const idle = await Wire.connect(gate.port);
    idle.send(chat());
    assert.equal((await idle.message()).headers.has('connection'), false);
    gate.terminate();
    await waitUntil('not ready', async () => (await gate.admin('/readyz')).status === 503, 600);
    idle.send(chat()); // on the connection that was kept
    const kept = await idle.message();
    assert.deepEqual([kept.status, kept.headers.get('connection')], [200, 'close']);
    const fresh = await Wire.connect(gate.port); // and on a new one
    fresh.send(chat());
    const m = await fresh.message();
    assert.deepEqual([m.status, m.headers.get('connection')], [200, 'close']);
    idle.stop();
    fresh.stop();
    await gate.ended();
    await assert.rejects(Wire.connect(gate.port), /ECONNREFUSED/);
});

test('J09: a call on a connection that was open is refused while draining, with a delay', async () => {
    const gate = await startGate(of(5));
    const wire = await Wire.connect(gate.port);
    wire.send('POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n'); // a head that is on its way
    const other = await hold(gate);
    gate.terminate();
    await gate.waitForLog((l) => l.event === 'drain');
    await waitUntil('not ready', async () => (await gate.admin('/readyz')).status === 503);
    wire.send('\r\n{}');
    const m = await wire.message();
    assert.deepEqual([m.status, m.headers.get('x-leasegate-reason'), m.headers.get('connection')], [429, 'draining', 'close']);
    assert.ok(Number(m.headers.get('retry-after')) >= 1);
    other.stop();
    wire.stop();
    await gate.ended();
});

test('a second SIGTERM hurries: streams end with an error event', async () => {
    const gate = await startGate(of(5, { drain_timeout: '600s' }));
    const wire = await hold(gate);
    gate.terminate();
    await gate.waitForLog((l) => l.event === 'drain');
    assert.equal(wire.end, null);
    gate.terminate();
    const m = await wire.message();
    assert.ok(!m.complete && m.body.includes('"code":"drain_timeout"'));
    wire.stop();
    await gate.ended();
});

test('a slow client still gets its whole answer after SIGTERM', async () => {
    const gate = await startGate(of(5));
    const wire = await Wire.connect(gate.port, { readable: false });
    wire.send(chat({ 'x-mock-bytes': 8e6 }));
    wire.socket.pause();
    await mock.shows({ total: 1 });
    gate.terminate();
    await gate.waitForLog((l) => l.event === 'drain');
    wire.socket.resume();
    const m = await wire.message(10000);
    assert.ok(m.complete);
    wire.stop();
    await gate.ended();
});

test('SIGTERM: a client that never closes its side delays the end by its lingering time, no longer', async () => {
    const gate = await startGate(of(5, { drain_timeout: '0s' }));
    const wire = await Wire.connect(gate.port);
    wire.send(chat({ 'x-mock-ttft-ms': 60000 }));
    await mock.shows({ in_flight: 1 });
    gate.terminate();
    const m = await wire.message();
    assert.deepEqual([m.status, m.headers.get('x-leasegate-reason'), m.headers.get('connection')], [503, 'drain_timeout', 'close']);
    await gate.ended(8000); // while `wire` stays half open
});

// --- the lease outlasts the client, or the response ------------------------------------------------------------------------

test('B24, G08: on_client_gone = drain: the slot stays taken until the upstream has ended', async () => {
    const gate = await startGate(of(1, { upstream: { llm: { url: mock.url, on_client_gone: 'drain' } } }));
    const wire = await hold(gate, { 'x-mock-events': 30, 'x-mock-delay-ms': 20 });
    wire.stop();
    for (let i = 0; i < 5; i++)
        assert.equal((await ask(gate)).status, 429);
    await mock.shows({ in_flight: 0, aborted: 0, completed: 1 });
    await redis.holds(0, '', 300);
    assert.equal((await ask(gate)).status, 200);
});

test('release_delay and abort_delay keep the slot that much longer', async () => {
    const gate = await startGate(of(1, { upstream: { llm: { url: mock.url, release_delay: `${within(300)}ms`, abort_delay: `${within(600)}ms` } } }));
    for (const [end, delay] of [['done', 300], ['aborted', 600]]) {
        let began;
        if (end === 'done') {
            assert.equal((await ask(gate)).status, 200);
            began = Date.now();
        } else {
            const wire = await hold(gate);
            began = Date.now();
            wire.stop();
        }
        await mock.shows({ in_flight: 0 });
        assert.equal((await ask(gate)).status, 429, end);
        await redis.holds(0);
        assert.ok(Date.now() - began >= within(delay - 60), `${end}: ${Date.now() - began}`);
        assert.equal((await ask(gate)).status, 200);
        await redis.holds(0);
    }
});

test('the slot is given back when the upstream has ended, though the client still reads', async () => {
    const gate = await startGate(of(1));
    const wire = await Wire.connect(gate.port);
    wire.socket.pause();
    wire.send(chat({ 'x-mock-bytes': 100000 })); // fits what we may hold for it
    await mock.shows({ completed: 1 });
    await redis.holds(0, '', 300);
    assert.equal((await ask(gate)).status, 200);
    wire.socket.resume();
    assert.ok((await wire.message()).complete);
});

test('G04: a FIN that comes before the tunnel begins ends it, where half_close lets the call go on', async () => {
    for (const half_close of ['probe', 'serve']) {
        const upstream = await startUpstream(async (wire) => {
            await wire.until('\r\n\r\n');
            await waitUntil('the word to go on', () => wire.go);
            wire.send('HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n');
        });
        const gate = await startGate(of(1, {
            listen: { '127.0.0.1:0': { half_close } }, upstream: { llm: { url: upstream.url, idle_timeout: `${within(300)}ms` } } }));
        const wire = await Wire.connect(gate.port);
        wire.send(request('GET', '/v1/realtime?model=m', { Connection: 'upgrade', Upgrade: 'websocket' }) + 'ahead');
        const up = await upstream.connection();
        await up.until('\r\n\r\n');
        wire.finish();
        if (half_close === 'probe')
            await wire.until('102'); // so the FIN was seen
        else
            await sleep(within(100));
        up.go = true;
        await waitUntil('the upgrade', () => /HTTP\/1.1 101/.test(wire.text));
        await up.until(/\r\n\r\nahead$/);
        assert.equal(await up.ended(), 'fin');
        await gate.waitForLog((l) => l.event === 'call' && l.phase === 'tunnel');
        await redis.holds(0);
    }
});

test('G04: a client that resets while it is probed is drained like any other that has gone', async () => {
    const gate = await startGate(of(20, {
        listen: { '127.0.0.1:0': { half_close: 'probe' } }, upstream: { llm: { url: mock.url, on_client_gone: 'drain' } } }));
    const wires = await Promise.all(Array.from({ length: 20 }, () => Wire.connect(gate.port)));
    for (const wire of wires)
        wire.send(chat({ 'x-mock-ttft-ms': within(600) }));
    await mock.shows({ in_flight: 20 });
    for (const wire of wires) { // over a while: the reset is seen by the watch first, or by the probe
        wire.finish();
        wire.until('102').then(() => wire.reset(), () => {});
        await sleep(10);
    }
    await mock.shows({ in_flight: 0, completed: 20, aborted: 0 });
});

test('A stale pooled connection: a GET is sent again, a POST only with replay_stale', async () => {
    for (const replay of [false, true]) {
        const upstream = await startUpstream(async (wire, n) => {
            const first = await wire.message(10000);
            if (first.first?.startsWith('GET /warm') || n > 0)
                wire.send('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok');
            await wire.message(10000);
            wire.reset(); // the second request on a connection finds it dead
        });
        const gate = await startGate(of(5, { upstream: { llm: { url: upstream.url, replay_stale: replay } } }));
        assert.equal((await ask(gate, request('GET', '/warm'))).status, 200);
        const m = await ask(gate, chat({ 'x-request-id': 'stale' }));
        assert.equal(m.status, replay ? 200 : 502, m.head);
        const line = await gate.callLine('stale');
        assert.equal(line.replayed ?? false, replay);
        assert.equal(await gate.metric('leasegate_upstream_replays_total'), replay ? 1 : 0);
    }
});

test('the endpoints of the admin listener, and its token', async () => {
    const gate = await startGate(of(5, { admin: { '127.0.0.1:0': { token: 'hush' } } }));
    const ask = (target, token) => gate.admin(target, token === undefined ? {} : { headers: { authorization: `Bearer ${token}` } });
    assert.equal((await ask('/healthz')).status, 200);
    assert.equal((await ask('/readyz')).status, 200);
    assert.equal((await ask('/metrics')).status, 401);
    assert.equal((await ask('/metrics', 'wrong')).status, 401);
    assert.match((await ask('/metrics', 'hush')).text, /leasegate_limit_cap\{limit="all"\} 5/);
    assert.match((await ask('/metrics', 'hush')).text, /^leasegate_log_lines_dropped_total 0$/m);
    assert.equal((await ask('/nothing', 'hush')).status, 404);
    await sleep(0);
    closeWires();
});
