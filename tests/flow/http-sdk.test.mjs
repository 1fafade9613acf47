// http-sdk.test.mjs - what SDKs are told: rows H167 to H172 of HTTP-CASES.md. The SDKs themselves run in the other flow tests.
import assert from 'node:assert/strict';
import { after, before } from 'node:test';

import { within } from './harness.mjs';
import { assertOwnAnswer, chat, chatBody, CHAT, get, post, rowsOn, Stage } from './http-tools.mjs';

let stage;
const row = rowsOn(() => stage);

before(async () => {
    stage = await Stage.start({
        client: { body_max: 100000 },
        tenant: { from: 'header:x-tenant-id' },
        limit: { all: { concurrency: 1000 }, shut: { tenant: ['shut'], concurrency: 0 } },
    });
});
after(() => stage.stop());

const APIS = [['openai', CHAT], ['openai', '/v1/responses'], ['anthropic', '/v1/messages'], ['gemini', '/v1beta/models/m1:generateContent']];

row('H167', 'every error has the shape of the route`s API', async () => {
    for (const [api, target] of APIS) {
        const cases = [
            [post(target, chatBody, 'x-tenant-id: shut'), 429, 'limit_full'],
            [post(target, 'x'.repeat(100001)), 413, 'body_too_large'],
        ];
        for (const [bytes, status, reason] of cases) {
            const wire = await stage.open();
            wire.write(bytes);
            assertOwnAnswer(await wire.response(), status, { api, reason });
        }
        const { wire, exchange } = await stage.send(post(target, chatBody));
        await exchange.whole;
        exchange.wire.reset();
        assertOwnAnswer(await wire.response(), 502, { api, reason: 'upstream_closed', close: false });
        await stage.released();
    }
});
row('H167', 'a HEAD gets the head alone', async () => {
    const wire = await stage.open();
    wire.write('HEAD /nowhere HTTP/1.1\r\nHost: gate\r\n\r\n' + get('/nowhere'));
    assertOwnAnswer(await wire.response({ method: 'HEAD' }), 404, { bodyless: true });
    assertOwnAnswer(await wire.response(), 404);
});

row('H169', '400, 404, 413 and 415 are not worth another try', async () => {
    for (const [bytes, status] of [
        ['GET / HTTP/1.1\r\n\r\n', 400], [get('/nowhere'), 404], [post('/plain/x', 'x'.repeat(100001)), 413], [post('/plain/x', 'abc', 'Expect: x'), 417],
        ['FOO / HTTP/1.1\r\nHost: a\r\n\r\n', 501], ['GET / HTTP/1.2\r\nHost: a\r\n\r\n', 505],
    ]) {
        const wire = await stage.open();
        wire.write(bytes);
        const response = await wire.response();
        assertOwnAnswer(response, status);
        if (status > 500)
            assert.equal(response.value('x-should-retry'), 'false', 'SDKs would repeat it like every 5xx');
    }
    await stage.neverTaken();
});

row('H170', 'a stream cut in the middle: the one event that each SDK raises, and no end of stream', async () => {
    for (const [api, target] of APIS) {
        const { wire, exchange } = await stage.send(post(target, chatBody));
        await exchange.whole;
        exchange.stream().chunk('data: {"a":1}\n\n');
        await wire.until('the event', () => wire.rest.includes('{"a":1}'));
        exchange.wire.end();
        assert.equal(await wire.ending(), 'fin');
        const text = wire.rest;
        const event = JSON.parse(/data: (\{.*"error":.*\})\n\n/.exec(text)[1]);
        if (api === 'openai')
            assert.equal(event.error.code, 'upstream_closed');
        if (api === 'anthropic')
            assert.ok(text.includes('event: error\ndata: ') && event.type === 'error' && typeof event.error.message === 'string');
        if (api === 'gemini')
            assert.deepEqual([typeof event.error.code, typeof event.error.status], ['number', 'string']);
        assert.ok(!text.includes('[DONE]') && !text.includes('message_stop') && !text.includes('\r\n0\r\n'));
        await stage.released();
    }
});

row('H171', 'both ids are set, and are the log`s', async () => {
    for (const field of ['X: y', 'X-Request-Id: mine-1']) {
        const wire = await stage.open();
        wire.write(post('/plain/x', 'abc', 'x-tenant-id: shut', field));
        const response = await wire.response();
        assertOwnAnswer(response, 429);
        if (field !== 'X: y')
            assert.equal(response.value('x-request-id'), 'mine-1');
        const line = await stage.gate.callLine(response.value('x-request-id'), 8000);
        assert.deepEqual([line.status, line.reason], [429, 'limit_full']);
    }
});

row('H172', 'connecting stays fast under load and while Redis hangs', async () => {
    const calls = await Promise.all(Array.from({ length: 200 }, () => stage.open()));
    for (const wire of calls)
        wire.write(chat());
    const exchanges = [];
    while (exchanges.length < calls.length)
        exchanges.push(await stage.up.next());
    await stage.redis.pause();
    const waiting = await stage.open();
    waiting.write(chat());
    for (let i = 0; i < 20; i++) {
        const from = Date.now();
        const wire = await stage.open();
        wire.write(get('/nowhere'));
        assert.equal((await wire.response()).status, 404);
        assert.ok(Date.now() - from < within(500), `${Date.now() - from} ms`);
        wire.close();
    }
    await stage.redis.resume();
    const answered = await Promise.race([waiting.head().then(() => null), stage.up.next().catch(() => null)]);
    answered?.reply();
    assert.ok([200, 429].includes((await waiting.response()).status));
    for (const exchange of exchanges)
        exchange.reply();
    for (const wire of calls)
        assert.equal((await wire.response()).status, 200);
    await stage.ready();
});
