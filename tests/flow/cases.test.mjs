// cases.test.mjs - what went wrong in other limiters, tried here; each test begins with the id of its case.
//
// Groups: A slots that never come back, B more let in than the limit, G client gone, H streams, K refusals, L cost.
// The cases that are one cell of the table state x way to end stand in ends.test.mjs; tests/README.md says where each is.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { before, beforeEach } from 'node:test';

import { chat, closeWires, config, request, sleep, slow, startGate, startMock, startRedis, startUpstream, test, waitUntil, within, Wire } from './harness.mjs';

let gate, mock, noTls, redis;
const HEARTBEAT = within(300), TTL = within(1500);

before(async () => {
    redis = await startRedis();
    mock = await startMock();
    noTls = await startUpstream(async (wire) => {
        await wire.until(/./s);
        wire.send('HTTP/1.1 400 Bad Request\r\n\r\n');
    });
    gate = await startGate(settings());
});
beforeEach(() => mock.reset());

function settings(more = {}) {
    return config({
        redis,
        upstream: {
            llm: { url: mock.url, done_grace: `${within(200)}ms` },
            gone: { url: 'http://127.0.0.1:1' },
            nameless: { url: 'http://does-not-exist.invalid' },
            plain: { url: noTls.url.replace('http:', 'https:') },
            silent: { url: mock.url, first_byte_timeout: `${within(50)}ms` },
        },
        route: Object.fromEntries(['llm', 'gone', 'nameless', 'plain', 'silent'].map((name) =>
            [name === 'llm' ? '/' : `/${name}/`, { upstream: name }])),
        limit: Object.fromEntries([1, 2, 5, 10].map((n) => [`of-${n}`, { model: [`of-${n}`, `also-${n}`], concurrency: n }])),
        ...more,
    });
}

async function send(bytes, g = gate, ms = 10000) {
    const wire = await Wire.connect(g.port);
    wire.send(bytes);
    const m = await wire.message(ms);
    wire.stop();
    return m;
}

const stays = { 'x-mock-events': 1e6, 'x-mock-delay-ms': 20 };

async function hold(model, g = gate, headers = {}) {
    const wire = await Wire.connect(g.port);
    wire.send(chat({ ...stays, ...headers }, model, { stream: true }));
    await wire.until(/^HTTP\/1\.1 \d\d\d[^]*\r\n\r\n/);
    assert.equal(wire.text.slice(9, 12), '200', wire.text.slice(0, 400));
    return wire;
}

async function isServed(model, g) {
    const m = await send(chat({}, model), g);
    assert.equal(m.status, 200, m.head + m.body);
}

async function isFull(model, g) {
    const m = await send(chat({}, model), g);
    assert.equal(m.status, 429, m.head);
    assert.equal(m.headers.get('x-leasegate-reason'), 'limit_full');
    return m;
}

// --- A: slots that never come back -----------------------------------------------------------------------------------

const apis = {
    chat: (m, h, s) => request('POST', '/v1/chat/completions', h, JSON.stringify({ model: m, messages: [], stream: s })),
    messages: (m, h, s) => request('POST', '/v1/messages', h, JSON.stringify({ model: m, messages: [], stream: s })),
    responses: (m, h, s) => request('POST', '/v1/responses', h, JSON.stringify({ model: m, input: '', stream: s })),
    gemini: (m, h, s) => request('POST', `/v1beta/models/${m}:${s ? 'streamGenerateContent?alt=sse' : 'generateContent'}`, h, '{}'),
    embeddings: (m, h) => request('POST', '/v1/embeddings', h, JSON.stringify({ model: m, input: '' })),
};

for (const [api, make] of Object.entries(apis)) {
    test(`A01: ${api}: after every kind of end the only slot is free at once`, async () => {
        for (const stream of api === 'embeddings' ? [false] : [false, true]) {
            for (const headers of [{}, { 'x-mock-status': 500 }, { 'x-mock-status': 429 }, { 'x-mock-fault': 'reset-before-head' },
                { 'x-mock-fault': 'reset-mid-body' }, { 'x-mock-fault': 'close-mid-body' }]) {
                await send(make('of-1', headers, stream));
                assert.equal((await send(make('of-1', {}, stream))).status, 200, `after ${JSON.stringify(headers)}`);
            }
            const wire = await Wire.connect(gate.port);
            wire.send(make('of-1', { 'x-mock-ttft-ms': 60000 }, stream));
            await redis.holds(1);
            wire.stop();
            await redis.holds(0, '', 300);
            assert.equal((await send(make('of-1', {}, stream))).status, 200, 'after an abort');
        }
    });
}

test('A02: an RST in mid stream frees the only slot', async () => {
    const wire = await hold('of-1');
    await wire.until(/(data: [^]*){3}/);
    wire.reset();
    await mock.shows({ in_flight: 0, aborted: 1 }, 300);
    await redis.holds(0, '', 300);
    await isServed('of-1');
});

test('A03, A10: upstreams that refuse, reset, stay silent, have no name, speak no TLS: the slot comes back each time', async () => {
    const ways = [
        ['gone', {}, 502], ['nameless', {}, 502], ['plain', {}, 502], ['silent', { 'x-mock-ttft-ms': 60000 }, 504],
        ['silent', { 'x-mock-fault': 'reset-before-head' }, 502], ['silent', { 'x-mock-status': 502 }, 502],
    ];
    for (const [where, headers, status] of ways) {
        for (let round = 0; round < (where === 'nameless' ? 3 : 20); round++) {
            const m = await send(chat(headers, 'of-1').replace('/v1/', `/${where}/v1/`));
            assert.equal(m.status, status, `${where} round ${round}: ${m.head}`);
        }
        await redis.holds(0);
    }
    await isServed('of-1');
});

test('A05: a limit of 5 is no total: 50 one after the other', async () => {
    for (let i = 0; i < 50; i++)
        await isServed('of-5');
});

test('A07, A23: the slots of a killed instance are free after a ttl, not before', async () => {
    const gates = [await startGate(settings()), await startGate(settings())];
    for (let i = 0; i < 10; i++)
        await hold('of-10', gates[0]);
    await redis.holds(10);
    await isFull('of-10', gates[1]);
    await gates[0].kill();
    const killed = Date.now();
    for (let taken = 0, refused = 0; taken < 10;) { // they were renewed at different moments: one after the other comes free
        const wire = await Wire.connect(gates[1].port);
        wire.send(chat(stays, 'of-10', { stream: true }));
        await wire.until(/^HTTP\/1\.1 \d\d\d[^]*\r\n\r\n/);
        if (wire.text.startsWith('HTTP/1.1 200')) {
            assert.ok(refused > 0 && Date.now() - killed > TTL - HEARTBEAT * 2, 'not while they may be alive');
            taken++;
            continue;
        }
        refused++;
        wire.stop();
        assert.ok(Date.now() - killed < TTL + 1000, 'usable within ttl + 1 s');
        await sleep(10);
    }
    await isFull('of-10', gates[1]);
});

test('A11: a mix with aborts at random over three instances leaves nothing behind', async () => {
    const gates = [gate, await startGate(settings()), await startGate(settings({ workers: 2 }))];
    let seed = 42;
    const random = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
    const one = async (i) => {
        const wire = await Wire.connect(gates[i % 3].port);
        wire.send(chat({ 'x-mock-events': 1 + random(5), 'x-mock-delay-ms': random(4) }, ['of-2', 'of-5', 'of-10', 'free'][random(4)],
            { stream: random(2) === 0 }));
        if (random(5) === 0) {
            await sleep(random(8));
            wire[['finish', 'reset', 'stop'][random(3)]]();
            wire.stop();
            return 'aborted';
        }
        const m = await wire.message(10000);
        wire.stop();
        assert.ok(m.complete && (m.status === 200 || m.status === 429), m.head);
        return m.status;
    };
    const seen = {};
    for (let i = 0; i < 900; i += 30)
        for (const what of await Promise.all(Array.from({ length: 30 }, (_, k) => one(i + k))))
            seen[what] = (seen[what] ?? 0) + 1;
    assert.ok(seen[200] > 100 && seen.aborted > 50, JSON.stringify(seen));
    await redis.holds(0);
    for (const g of gates)
        await waitUntil('nothing is held', async () => await g.metric('leasegate_leases_held') + await g.metric('leasegate_calls_in_flight') === 0);
});

test('A15: not streamed, the client gives up: upstream left and slot free within a second', async () => {
    const wire = await Wire.connect(gate.port);
    wire.send(chat({ 'x-mock-ttft-ms': 60000 }, 'of-1'));
    await mock.shows({ in_flight: 1 });
    wire.stop();
    await mock.shows({ in_flight: 0 }, 1000);
    await redis.holds(0, '', 300);
});

test('A20: no heartbeat is sent for what has ended', async () => {
    for (let i = 0; i < 100; i++)
        await send(chat(i % 2 === 0 ? {} : { 'x-mock-fault': 'reset-mid-body' }, 'of-10'));
    await redis.holds(0);
    const monitor = await redis.monitor();
    await hold('of-10'); // beats meanwhile: so that we know that we would see it
    await waitUntil('three heartbeats', () => monitor.lines.filter((l) => l.lua && /^pexpire$/i.test(l.words[0])).length >= 3, 5000);
    const ids = new Set(monitor.lines.filter((l) => l.lua && /^zadd$/i.test(l.words[0])).flatMap((l) => l.words.filter((w) => /^[0-9a-f]+\.\d+\/[0-9a-f]+$/.test(w))));
    assert.equal(ids.size, 1, JSON.stringify(monitor.lines.slice(0, 12)));
    monitor.stop();
});

// --- B: more let in than the limit -------------------------------------------------------------------------------------

test('B02, B15: over two instances of two threads each, 200 at once: never more than 10', async () => {
    const gates = [await startGate(settings({ workers: 2 })), await startGate(settings({ workers: 2 }))];
    const answers = await Promise.all(Array.from({ length: 200 }, (_, i) =>
        send(chat({ 'x-mock-ttft-ms': within(400) }, 'of-10'), gates[i % 2])));
    const served = answers.filter((m) => m.status === 200).length;
    assert.ok(answers.every((m) => m.status === 200 || m.status === 429));
    assert.ok(served >= 10, `${served}`);
    assert.ok((await mock.stats()).max_in_flight <= 10, 'the upstream saw no more');
});

test('B03: Redis is lost: nothing enters, what runs goes on, and is counted afterwards', async () => {
    const wire = await hold('of-10');
    await redis.pause();
    const first = await send(chat({}, 'of-10'));
    assert.deepEqual([first.status, first.headers.get('x-leasegate-reason')], [429, 'redis_unavailable']);
    const began = performance.now();
    for (let i = 0; i < 20; i++)
        assert.equal((await send(chat({}, 'of-10'))).status, 429);
    assert.ok(performance.now() - began < within(250), 'the short circuit asks nobody');
    await waitUntil('it says so', async () => (await gate.admin('/readyz')).status === 503);
    await isServed('without-a-limit');
    const length = wire.text.length;
    await waitUntil('the stream goes on', () => wire.text.length > length);
    await redis.resume();
    await waitUntil('leasegate admits again', async () => (await send(chat({}, 'of-10'))).status === 200);
    await redis.holds(1);
});

test('B05, B01, B04: a silent call is counted far beyond its ttl', async () => {
    const wire = await Wire.connect(gate.port);
    wire.send(chat({ 'x-mock-ttft-ms': 3600000 }, 'of-1'));
    await redis.holds(1);
    for (const until = Date.now() + 2 * TTL; Date.now() < until; await sleep(50))
        await isFull('of-1');
    await redis.holds(1);
});

test('B10: the key outlives its leases while calls run', async () => {
    await hold('of-1');
    const key = Object.keys(await redis.leases()).find((k) => k.includes(':of-1'));
    for (const until = Date.now() + 2 * TTL; Date.now() < until; await sleep(50)) {
        await isFull('of-1');
        assert.ok(await redis.command('PTTL', key) > TTL, 'expires after the youngest lease');
    }
});

test('B11: a key that was deleted is whole again after a heartbeat; late releases change nothing', async () => {
    const restored = await gate.metric('leasegate_leases_restored_total');
    const wires = await Promise.all(Array.from({ length: 5 }, () => hold('of-5')));
    const key = Object.keys(await redis.leases()).find((k) => k.includes(':of-5'));
    await redis.command('DEL', key);
    await redis.holds(5, ':of-5');
    await isFull('of-5');
    await waitUntil('all five are counted as restored', async () => await gate.metric('leasegate_leases_restored_total') - restored === 5);
    await redis.command('DEL', key);
    wires.forEach((wire) => wire.stop());
    await redis.holds(0);
    await isServed('of-5');
});

test('B16: two names under one limit share its slots', async () => {
    await hold('of-2');
    await hold('also-2');
    await isFull('of-2');
    await isFull('also-2');
});

test('B18: a key of another type fails closed, and the log names it', async () => {
    await isServed('of-1');
    const m = /lg1:\{[^}]*\}:of-1:leases/.exec((await keysSeen('of-1')).join(' '));
    const key = m[0];
    await redis.command('DEL', key);
    await redis.command('SET', key, 'nonsense');
    const from = gate.log.length;
    const answer = await send(chat({}, 'of-1'));
    assert.equal(answer.status, 429);
    assert.match(answer.headers.get('x-leasegate-reason'), /^redis_/);
    await gate.waitForLog((l) => l.level !== 'info' && /WRONGTYPE/.test(JSON.stringify(l)) && JSON.stringify(l).includes('of-1'), 3000, from);
    await redis.command('DEL', key);
    await waitUntil('leasegate admits again', async () => (await send(chat({}, 'of-1'))).status === 200);
});

async function keysSeen(model) {
    const monitor = await redis.monitor();
    await isServed(model);
    await waitUntil('the command is seen', () => monitor.lines.some((l) => l.words.some((w) => w.endsWith(':leases'))));
    monitor.stop();
    return monitor.lines.flatMap((l) => l.words.filter((w) => w.endsWith(':leases')));
}

test('B22: the upstream never has more calls than Redis has leases', async () => {
    let running = true;
    const load = Promise.all(Array.from({ length: 12 }, async () => {
        while (running)
            await send(chat({ 'x-mock-events': 3, 'x-mock-delay-ms': 2 }, 'of-10', { stream: true }));
    }));
    for (let i = 0; i < 100; i++) {
        const upstream = (await mock.stats()).in_flight; // seen before: a lease taken since cannot hide one that is missing
        assert.ok(upstream <= 10 && (await mock.stats()).max_in_flight <= 10);
    }
    running = false;
    await load;
    assert.ok((await mock.stats()).max_in_flight <= 10);
});

test('B23: count_tokens is counted too', async () => {
    await hold('of-1');
    const m = await send(request('POST', '/v1/messages/count_tokens', {}, '{"model": "of-1", "messages": []}'));
    assert.equal(m.status, 429);
});

test('M07: two at once for the last slot: exactly one gets it, each time', async () => {
    const other = await startGate(settings());
    for (let round = 0; round < 100; round++) {
        const wires = await Promise.all([gate, other].map(async (g) => {
            const wire = await Wire.connect(g.port);
            wire.send(chat({ 'x-mock-ttft-ms': 60000 }, 'of-1'));
            return wire;
        }));
        const refused = await Promise.race(wires.map(async (wire) => {
            assert.equal((await wire.message(5000)).status, 429);
            return wire;
        }));
        await redis.holds(1);
        assert.equal(wires.find((wire) => wire !== refused).text, '', 'the other one has its slot');
        wires.forEach((wire) => wire.stop());
        await redis.holds(0);
    }
});

// --- G: client gone ----------------------------------------------------------------------------------------------------

test('G06: bytes sent ahead are kept, and no end', async () => {
    const wire = await Wire.connect(gate.port);
    wire.send(chat({ 'x-mock-ttft-ms': within(100) }, 'of-1', { first: true }) + chat({}, 'of-1') + chat({}, 'of-1'));
    for (let i = 0; i < 3; i++)
        assert.equal((await wire.message()).status, 200);
    assert.equal((await mock.stats()).max_in_flight, 1);
});

test('G07: through two instances in a row an abort reaches the upstream within 500 ms', async () => {
    const outer = await startGate(settings({ upstream: { inner: { url: gate.url } }, route: { '/': { upstream: 'inner' } }, limit: {} }));
    const wire = await hold('of-1', outer);
    await mock.shows({ in_flight: 1 });
    wire.stop();
    await mock.shows({ in_flight: 0 }, 500);
    await redis.holds(0, '', 500);
});

test('G09, G10: an abort is logged as what it was, with what was sent', async () => {
    const wire = await hold('of-1', gate, { 'x-request-id': 'left-early' });
    await wire.until(/(data: [^]*){3}/);
    wire.stop();
    const line = await gate.callLine('left-early');
    assert.deepEqual([line.reason, line.by, line.phase, line.model], ['client_gone', 'client', 'relay', 'of-1']);
    assert.ok(line.bytes_out > 0 && line.bytes_in > 0 && line.duration_ms > 0);
});

// --- H: streams ----------------------------------------------------------------------------------------------------------

for (const api of ['chat', 'messages', 'responses']) {
    test(`H01: ${api}: all was said, the connection stays open: ended after done_grace, slot free, not used again`, async () => {
        const before = (await mock.stats()).connections_total;
        const m = await send(apis[api]('of-1', { 'x-mock-fault': 'hold-after-done', 'x-request-id': `held-${api}` }, true));
        assert.equal(m.complete, false, 'no last chunk is invented');
        const line = await gate.callLine(`held-${api}`);
        assert.deepEqual([line.reason, line.phase], ['done_unclosed', 'relay']);
        assert.ok(line.duration_ms >= within(200) - 5 && line.duration_ms < within(1000), `${line.duration_ms}`);
        await redis.holds(0, '', 300);
        await isServed('of-1');
        assert.ok((await mock.stats()).connections_total > before);
    });
}

for (const api of ['messages', 'responses', 'gemini']) {
    test(`H02: ${api}: a stream without [DONE] is a clean end`, async () => {
        const m = await send(apis[api]('of-1', { 'x-request-id': `clean-${api}` }, true));
        assert.ok(m.complete && !m.body.includes('[DONE]'));
        assert.equal((await gate.callLine(`clean-${api}`)).reason, 'done');
    });
}

test('H06: nothing is sent again once a byte has reached the client', async () => {
    await isServed('of-1'); // a pooled connection
    await mock.reset();
    const m = await send(chat({ 'x-mock-fault': 'reset-mid-body', 'x-mock-fault-after': 5 }, 'of-1', { stream: true }));
    assert.equal(m.complete, false);
    assert.equal((await mock.stats()).total, 1);
});

const rssBytes = (g) => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${g.pid}/status`, 'utf8'))[1]) * 1024;

test('H08: a slow reader of 200 MB costs no memory, and its lease beats', async () => {
    const wire = await Wire.connect(gate.port);
    wire.send(chat({ 'x-mock-bytes': 200e6 }, 'of-1'));
    await wire.until('HTTP/1.1 200');
    wire.socket.pause();
    const before = rssBytes(gate);
    for (const until = Date.now() + TTL + HEARTBEAT; Date.now() < until; await sleep(50)) {
        wire.socket.read(1024);
        await redis.holds(1);
    }
    assert.ok(rssBytes(gate) - before < 8e6 * slow, `grew by ${rssBytes(gate) - before} bytes`);
    await isFull('of-1');
});

test('H10: 60 bodies of 2 MB for one slot: refused without being gathered', async () => {
    const body = JSON.stringify({ model: 'of-1', messages: ['x'.repeat(2e6)] });
    await hold('of-1');
    const before = rssBytes(gate);
    const answers = await Promise.all(Array.from({ length: 60 }, () => send(request('POST', '/v1/chat/completions', {}, body))));
    assert.ok(answers.every((m) => m.status === 429 && m.complete));
    assert.ok(rssBytes(gate) - before < 32e6 * slow, `grew by ${rssBytes(gate) - before} bytes`);
});

test('H14: 200 and an empty stream passes as it is', async () => {
    const empty = await startUpstream(async (wire) => {
        await wire.message();
        wire.send('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n');
    });
    const own = await startGate(config({ redis, upstream: empty, limit: { all: { concurrency: 1 } } }));
    const m = await send(chat({ 'x-request-id': 'empty' }), own);
    assert.ok(m.status === 200 && m.complete && m.body === '');
    assert.deepEqual([(await own.callLine('empty')).reason, (await own.callLine('empty')).bytes_out], ['done', 0]);
});

// --- K: refusals -----------------------------------------------------------------------------------------------------------

const shapes = {
    chat: (e) => [e.error.type, e.error.code],
    messages: (e) => [e.type, e.error.type],
    gemini: (e) => [e.error.code, e.error.status],
};
const words = { chat: ['rate_limit_error', 'limit_full'], messages: ['error', 'rate_limit_error'], gemini: [429, 'RESOURCE_EXHAUSTED'] };
for (const api of Object.keys(shapes)) {
    test(`K01, K10: ${api}: a refusal says all: which limit, when to come back, in the words of the API`, async () => {
        await hold('of-1');
        const m = await send(apis[api]('of-1', { 'x-request-id': 'mine' }, false));
        assert.equal(m.status, 429);
        assert.deepEqual(shapes[api](JSON.parse(m.body)), words[api]);
        const after = Number(m.headers.get('retry-after')), afterMs = Number(m.headers.get('retry-after-ms'));
        assert.ok(Number.isInteger(after) && after >= 1 && after <= 60 && afterMs > 0 && afterMs <= 60000);
        assert.equal(after, Math.ceil(afterMs / 1000));
        assert.deepEqual(['x-should-retry', 'x-leasegate-reason', 'x-leasegate-limit', 'x-request-id', 'content-type'].map((k) => m.headers.get(k)),
            ['true', 'limit_full', 'of-1', 'mine', 'application/json']);
        assert.ok(m.body.includes('of-1') && !m.body.includes('of-2'));
    });
}

test('K04: the delay grows with those who were refused before, and differs', async () => {
    const own = await startGate(settings());
    await hold('of-1');
    const delays = [];
    for (let i = 0; i < 60; i++)
        delays.push(Number((await send(chat({}, 'of-1'), own)).headers.get('retry-after-ms')));
    const mean = (part) => part.reduce((a, b) => a + b, 0) / part.length;
    assert.ok(mean(delays.slice(-10)) > 3 * mean(delays.slice(0, 3)), delays.join());
    assert.ok(new Set(delays).size > 30, 'with jitter');
    assert.ok(Math.max(...delays) <= 60000);
});

// --- L: cost ---------------------------------------------------------------------------------------------------------------

async function evals() {
    const m = /cmdstat_evalsha:calls=(\d+)/.exec(await redis.command('INFO', 'commandstats'));
    return Number(m?.[1] ?? 0);
}

test('L08: two commands a call', async () => {
    await isServed('of-10');
    await redis.holds(0);
    await sleep(2 * HEARTBEAT); // what the calls before still owed
    const before = await evals();
    for (let i = 0; i < 50; i++)
        await isServed('of-10');
    await redis.holds(0);
    const n = await evals() - before;
    assert.ok(n >= 100 && n <= 100 + 10, `${n} for 50 calls`);
});

test('L09: an idle instance sends at most a command a second', async () => {
    await redis.holds(0);
    const monitor = await redis.monitor();
    await sleep(2000);
    const n = monitor.lines.filter((l) => !l.lua && !['KEYS', 'ZCARD', 'PING', 'INFO'].includes(l.words[0])).length;
    assert.ok(n <= 2, `${n} in 2 s: ${JSON.stringify(monitor.lines.map((l) => l.words[0]))}`);
    monitor.stop();
});

test('M05: a reload of something else forgets no call', async () => {
    const own = await startGate(settings());
    for (let i = 0; i < 10; i++)
        await hold('of-10', own);
    await own.reload(settings({ client: { keepalive_timeout: '10s' } }));
    await isFull('of-10', own);
    await redis.holds(10);
    closeWires();
});
