// limits.test.mjs - which limits count a call: models and where they stand, tenants, several limits together; that what is
// refused never held a slot; and that bodies go on byte for byte.
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { before, beforeEach } from 'node:test';
import zlib from 'node:zlib';

import { chat, closeWires, config, request, startGate, startMock, startRedis, test, waitUntil, Wire } from './harness.mjs';

let gate, mock, redis;

before(async () => {
    redis = await startRedis();
    mock = await startMock();
    gate = await startGate(config({
        redis,
        upstream: mock,
        tenant: { from: 'header:x-tenant-id', map: { 'acme-eu': { to: 'acme' } } },
        client: { model_header: 'x-model' },
        limit: {
            'gpt-4o': { model: ['gpt-4o', 'gpt-4o-*'], concurrency: 2 },
            closed: { model: ['closed*'], concurrency: 0 },
            tenants: { per: 'tenant', tenant: ['acme', 'team-*'], concurrency: 2, override: { acme: { concurrency: 3 } } },
            each: { per: ['tenant', 'model'], tenant: ['pair-*'], concurrency: 1 },
            narrow: { model: ['narrow'], concurrency: 1 },
        },
    }));
});
beforeEach(() => mock.reset());

async function send(bytes) {
    const wire = await Wire.connect(gate.port);
    wire.send(bytes);
    const m = await wire.message(10000);
    wire.stop();
    return m;
}

// A call that stays: it holds its slots until stop().
async function hold(headers = {}, model = 'gpt-4o') {
    const wire = await Wire.connect(gate.port);
    wire.send(chat({ 'x-mock-events': 100000, 'x-mock-delay-ms': 50, ...headers }, model, { stream: true }));
    const m = await wire.until(/^HTTP\/1\.1 \d\d\d[^]*\r\n\r\n/);
    assert.ok(m);
    wire.status = Number(wire.text.slice(9, 12));
    return wire;
}

async function isRefused(bytes, limit) {
    const m = await send(bytes);
    assert.equal(m.status, 429, m.head + m.body);
    assert.equal(m.headers.get('x-leasegate-limit'), limit);
    assert.match(JSON.parse(m.body).error.message, new RegExp(`\\(limit ${limit}\\)`));
    return m;
}

async function isServed(bytes) {
    const m = await send(bytes);
    assert.equal(m.status, 200, m.head + m.body);
    return m;
}

// --- models ------------------------------------------------------------------------------------------------------

test('a glob counts what it matches and nothing else', async () => {
    const held = [await hold({}, 'gpt-4o'), await hold({}, 'gpt-4o-mini')];
    await isRefused(chat({}, 'gpt-4o-2024-08-06'), 'gpt-4o');
    await isRefused(chat({}, 'GPT-4o-Mini'), 'gpt-4o'); // some APIs heed no case
    for (const other of ['gpt-4', 'gpt-4o1', 'my-gpt-4o'])
        await isServed(chat({}, other));
    held[0].stop();
    await redis.holds(1);
    await isServed(chat({}, 'gpt-4o'));
});

const json = (model, more = '') => `{"messages": [{"role": "user", "content": "the \\"model\\": \\"other\\""}], ${more}"model": ${JSON.stringify(model)}, "n": 1}`;
const type = { 'Content-Type': 'application/json' };
const multipart = (...fields) => fields.map(([name, value]) =>
    `--XX\r\nContent-Disposition: form-data; name="${name}"${name === 'file' ? '; filename="a.mp3"\r\nContent-Type: audio/mpeg' : ''}\r\n\r\n${value}\r\n`).join('') + '--XX--\r\n';
const form = { 'Content-Type': 'multipart/form-data; boundary=XX' };
const latin1 = (buffer) => buffer.toString('latin1');
const websocket = { Connection: 'Upgrade', Upgrade: 'websocket', 'Sec-WebSocket-Version': 13, 'Sec-WebSocket-Key': 'dGhlIHNhbXBsZSBub25jZQ==' };
const post = '/v1/chat/completions';

// A zstd frame (RFC 8878 section 3.1.1) of one raw block: Node.js 18 has no zstd.
function zstd(text) {
    const bytes = Buffer.from(text), head = Buffer.alloc(12);
    head.writeUInt32LE(0xfd2fb528, 0);
    head[4] = 0xa0; // one segment, its size in four bytes
    head.writeUInt32LE(bytes.length, 5);
    head.writeUIntLE(bytes.length << 3 | 1, 9, 3); // the last block, raw
    return Buffer.concat([head, bytes]);
}

// Wherever the model stands, `closed-x` is found there and refused, and `open-x` is not.
const places = {
    'body': (m) => request('POST', post, type, json(m)),
    'body, first key': (m) => request('POST', post, type, `{"model":"${m}","messages":[]}`),
    'body, chunked by 7': (m) => request('POST', post, type, json(m), { chunked: 7 }),
    'body, escaped key': (m) => request('POST', post, type, `{"\\u006dodel": "${m}"}`),
    'body, escaped value': (m) => request('POST', post, type, `{"model": "\\u0063${m.slice(1)}"}`.replace('\\u0063pen', 'open')),
    'body, behind 10 MB of messages': (m) => request('POST', post, type, `{"messages": ["${'x'.repeat(10e6)}"], "model": "${m}"}`),
    'body, a nested model before it': (m) => request('POST', post, type, `{"tool": {"model": "other"}, "list": [{"model": "other"}], "model": "${m}"}`),
    'body, no content type': (m) => request('POST', post, {}, json(m)),
    'body, gzip': (m) => request('POST', post, { ...type, 'Content-Encoding': 'gzip' }, latin1(zlib.gzipSync(json(m)))),
    'body, deflate': (m) => request('POST', post, { ...type, 'Content-Encoding': 'deflate' }, latin1(zlib.deflateSync(json(m)))),
    'body, zstd': (m) => request('POST', post, { ...type, 'Content-Encoding': 'zstd' }, latin1(zstd(json(m)))),
    'body of messages': (m) => request('POST', '/v1/messages', type, json(m)),
    'body of responses': (m) => request('POST', '/v1/responses', type, json(m)),
    'multipart': (m) => request('POST', '/v1/audio/transcriptions', form, multipart(['file', 'x'.repeat(100000)], ['model', m])),
    'multipart, model first': (m) => request('POST', '/v1/audio/transcriptions', form, multipart(['model', m], ['file', 'x'.repeat(100000)])),
    'path of Gemini': (m) => request('POST', `/v1beta/models/${m}:generateContent`, type, '{"contents": []}'),
    'path of Vertex': (m) => request('POST', `/v1/projects/p/locations/l/publishers/google/models/${m}:streamGenerateContent?alt=sse`, type, '{}'),
    'path of Azure': (m) => request('POST', `/openai/deployments/${m}/chat/completions?api-version=2024-10-21`, type, '{"messages": []}'),
    'path of Bedrock': (m) => request('POST', `/model/${m}/converse`, type, '{}'),
    'path of Bedrock, escaped': (m) => request('POST', `/model/${m.replace('-', '%2D')}/invoke`, type, '{}'),
    'query of a websocket': (m) => request('GET', `/v1/realtime?x=1&model=${m}`, websocket),
    'header of a trusted worker': (m) => request('POST', post, { ...type, 'x-model': m }, '{"messages": []}'),
};
for (const [name, make] of Object.entries(places)) {
    test(`the model stands in: ${name}`, async () => {
        await isRefused(make('closed-x'), 'closed');
        const m = await send(make('open-x'));
        assert.ok(m.status === 200 || m.status === 101, m.head);
        assert.equal((await mock.stats()).total, 1, 'what is refused never reaches the upstream');
    });
}

// --- what has no one model is told so, and never gets a slot ---------------------------------------------------------

const bad = {
    'two models': ['{"model": "gpt-4o", "model": "open"}', 400],
    'two models, the second escaped': ['{"model": "gpt-4o", "mo\\u0064el": "open"}', 400],
    'no model': ['{"messages": []}', 400],
    'an empty model': ['{"model": ""}', 400],
    'a model that is no string': ['{"model": 4}', 400],
    'no JSON': ['model=gpt-4o', 400],
    'no object': ['["model", "gpt-4o"]', 400],
    'JSON that ends early': ['{"model": "gpt-4o", "messages": [', 400],
    'nothing': ['', 400],
};
for (const [name, [body, status]] of Object.entries(bad)) {
    test(`A04: refused and never leased: ${name}`, async () => {
        const monitor = await redis.monitor();
        const m = await send(request('POST', post, type, body));
        assert.equal(m.status, status, m.head);
        assert.match(m.headers.get('x-leasegate-reason'), /^(model|json|body)/);
        assert.equal(JSON.parse(m.body).error.type, 'invalid_request_error');
        assert.equal((await mock.stats()).total, 0);
        await redis.command('ECHO', 'mark');
        await waitUntil('the mark is seen', () => monitor.lines.some((l) => l.words[0] === 'ECHO'));
        assert.ok(!monitor.lines.some((l) => /^zadd$/i.test(l.words[0])), 'no lease was taken');
        monitor.stop();
    });
}

// A model that is found early lets the call begin before its body is whole; what follows is still watched.
test('H064: a second model far behind the first: 400, the upstream never gets a whole request', async () => {
    const m = await send(request('POST', post, type, `{"model": "gpt-4o", "messages": ["${'x'.repeat(4e6)}"], "model": "open"}`));
    assert.equal(m.status, 400);
    assert.equal(m.headers.get('x-leasegate-reason'), 'model_duplicate');
    await redis.holds(0);
    assert.equal((await mock.shows({ in_flight: 0 })).completed, 0);
});

test('two models in a multipart body and in a query are refused', async () => {
    assert.equal((await send(request('POST', '/v1/audio/transcriptions', form, multipart(['model', 'a'], ['model', 'b'])))).status, 400);
    assert.equal((await send(request('GET', '/v1/realtime?model=a&mod%65l=b', websocket))).status, 400);
});

test('calls that name no model and need none are counted by limits that ask for none only', async () => {
    await isServed(request('GET', '/v1/models'));
    await isServed(request('POST', '/v1/other', type, '{}'));
});

// --- tenants -----------------------------------------------------------------------------------------------------

test('per tenant: each has its own slots; an override is for one; a map names the tenant', async () => {
    for (let i = 0; i < 2; i++)
        await hold({ 'x-tenant-id': 'team-a' }, 'm');
    await isRefused(chat({ 'x-tenant-id': 'team-a' }, 'm'), 'tenants');
    await isServed(chat({ 'x-tenant-id': 'team-b' }, 'm'));
    await isServed(chat({ 'x-tenant-id': 'stranger' }, 'm'));
    await isServed(chat({}, 'm'));
    for (let i = 0; i < 3; i++)
        assert.equal((await hold({ 'x-tenant-id': i === 1 ? 'acme-eu' : 'acme' }, 'm')).status, 200);
    await isRefused(chat({ 'x-tenant-id': 'acme' }, 'm'), 'tenants');
    await isRefused(chat({ 'x-tenant-id': 'acme-eu' }, 'm'), 'tenants');
    await redis.holds(3, 'tenants/acme');
});

test('per tenant and model: each pair has its own slot', async () => {
    await hold({ 'x-tenant-id': 'pair-a' }, 'm1');
    await isRefused(chat({ 'x-tenant-id': 'pair-a' }, 'm1'), 'each');
    await isServed(chat({ 'x-tenant-id': 'pair-a' }, 'm2'));
    await isServed(chat({ 'x-tenant-id': 'pair-b' }, 'm1'));
});

test('L10: an override of one tenant changes no other count', async () => {
    for (let i = 0; i < 3; i++)
        await hold({ 'x-tenant-id': 'acme' }, 'm');
    const other = [await hold({ 'x-tenant-id': 'team-z' }, 'm'), await hold({ 'x-tenant-id': 'team-z' }, 'm')];
    assert.deepEqual(other.map((w) => w.status), [200, 200]);
    await isRefused(chat({ 'x-tenant-id': 'team-z' }, 'm'), 'tenants');
});

test('tenants by key: the hash of the key is the tenant, wherever each SDK puts it; a map renames it', async () => {
    const own = await startGate(config({
        redis, upstream: mock, tenant: { from: 'key', map: { 'sk-vip': { to: 'vip' } } },
        limit: { keys: { per: 'tenant', concurrency: 1, override: { vip: { concurrency: 2 } } } },
    }));
    const ask = async (headers) => {
        const wire = await Wire.connect(own.port);
        wire.send(chat({ 'x-mock-ttft-ms': 60000, ...headers }));
        return wire;
    };
    const first = await ask({ Authorization: 'Bearer sk-one' });
    await redis.holds(1);
    for (const headers of [{ Authorization: 'bearer sk-one' }, { 'x-api-key': 'sk-one' }, { 'api-key': 'sk-one' }, { 'x-goog-api-key': 'sk-one' }])
        assert.equal((await (await ask(headers)).message()).status, 429, JSON.stringify(headers));
    await ask({ Authorization: 'Bearer sk-two' });
    await ask({ 'x-api-key': 'sk-vip' });
    await ask({ 'x-api-key': 'sk-vip' });
    await redis.holds(4);
    assert.equal((await (await ask({ 'x-api-key': 'sk-vip' })).message()).status, 429);
    const keys = Object.keys(await redis.leases());
    assert.ok(!keys.some((key) => key.includes('sk-')), 'no key stands in Redis');
    assert.ok(!JSON.stringify(own.log).includes('sk-'), 'nor in the log');
    first.stop();
    await redis.holds(3);
});

test('B19: odd tenants are counted each for itself, none escapes', async () => {
    const odd = ['team-' + 'x'.repeat(5000), 'team-{a}', 'team-a b', 'team-a/b', 'team-\u00e9', 'team-a:leases'];
    for (const name of odd) {
        const wires = [await hold({ 'x-tenant-id': name }, 'm'), await hold({ 'x-tenant-id': name }, 'm')];
        assert.deepEqual(wires.map((w) => w.status), [200, 200], name.slice(0, 40));
        await isRefused(chat({ 'x-tenant-id': name }, 'm'), 'tenants');
        assert.equal((await hold({ 'x-tenant-id': 'team-a' }, 'm')).status, 200);
        await redis.holds(3);
        await waitUntil('one key each', async () => Object.values(await redis.leases()).filter((n) => n > 0).length === 2);
        closeWires();
        await redis.holds(0);
    }
});

// --- several limits ------------------------------------------------------------------------------------------------

test('A09: several limits are taken all together or not at all', async () => {
    for (const [full, name, free] of [
        [{ headers: {}, model: 'narrow' }, 'narrow', 'tenants/team-a'], // tenant free, model full
        [{ headers: { 'x-tenant-id': 'team-a' }, model: 'm' }, 'tenants', 'narrow'], // and mirrored
    ]) {
        const held = [await hold(full.headers, full.model)];
        if (name === 'tenants')
            held.push(await hold(full.headers, full.model));
        const before = await redis.held(free);
        const answers = await Promise.all(Array.from({ length: 50 }, () => send(chat({ 'x-tenant-id': 'team-a' }, 'narrow'))));
        assert.ok(answers.every((m) => m.status === 429 && m.headers.get('x-leasegate-limit') === name));
        assert.equal(await redis.held(free), before);
        for (const wire of held)
            wire.stop();
        await redis.holds(0);
    }
    await isServed(chat({ 'x-tenant-id': 'team-a' }, 'narrow'));
});

// --- bytes ---------------------------------------------------------------------------------------------------------

const sizes = [0, 1, 100, 65535, 65536, 65537, 1 << 20, 20 << 20];
for (const chunked of [undefined, 1000, 70000]) {
    test(`bodies go on byte for byte, ${chunked === undefined ? 'with a length' : `in chunks of ${chunked}`}`, async () => {
        for (const n of sizes) {
            let body = Buffer.alloc(n);
            for (let i = 0; i < n; i += 997)
                body[i] = i % 251;
            body = latin1(body);
            const m = await isServed(request('POST', '/v1/files', { 'x-mock-echo': 1 }, body, { chunked }));
            const echo = JSON.parse(m.body);
            assert.equal(echo.body_bytes, n);
            assert.equal(echo.body_sha256, createHash('sha256').update(body, 'latin1').digest('hex'));
            assert.equal(echo.chunked, chunked !== undefined);
        }
    });
}

test('a scanned body goes on byte for byte, compressed or not', async () => {
    const text = `{ "messages": ["${'\\u00e9\\n x'.repeat(200000)}"],\t"model" : "m" }`;
    for (const [headers, body] of [[{}, text], [{ 'Content-Encoding': 'gzip' }, latin1(zlib.gzipSync(text))]]) {
        for (const chunked of [undefined, 50000]) {
            const m = await isServed(request('POST', post, { ...type, ...headers, 'x-mock-echo': 1 }, body, { chunked }));
            const echo = JSON.parse(m.body);
            assert.equal(echo.body_sha256, createHash('sha256').update(body, 'latin1').digest('hex'));
        }
    }
});

// --- without limits ------------------------------------------------------------------------------------------------

test('L01: without a limit there is no Redis command and no limit header', async () => {
    const quiet = await startRedis(); // of this instance alone
    const own = await startGate(config({ redis: quiet, upstream: mock }));
    await own.waitForLog((l) => l.event === 'redis' && /usable$/.test(l.message)); // what it asks at start is over
    const mark = async () => {
        const stats = await quiet.command('INFO', 'commandstats');
        return ['evalsha', 'eval', 'zadd'].map((c) => new RegExp(`cmdstat_${c}:calls=(\\d+)`).exec(stats)?.[1] ?? '0').join();
    };
    const before = await mark();
    for (let i = 0; i < 20; i++) {
        const wire = await Wire.connect(own.port);
        wire.send(chat());
        const m = await wire.message();
        assert.equal(m.status, 200);
        assert.ok(![...m.headers.keys()].some((k) => k.includes('ratelimit') || k === 'x-leasegate-lease'));
        wire.stop();
    }
    assert.equal(await mark(), before);
    assert.equal(await own.metric('leasegate_leases_granted_total'), 0);
});
