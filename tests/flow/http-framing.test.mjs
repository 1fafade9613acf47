// http-framing.test.mjs - where a request's body ends, Expect, slow clients: rows H037 to H058 of HTTP-CASES.md.
import assert from 'node:assert/strict';
import { after, before } from 'node:test';

import { sleep, within } from './harness.mjs';
import { assertOwnAnswer, CHAT, chat, chatBody, get, post, rowsOn, Stage } from './http-tools.mjs';

let stage, slow;
const row = rowsOn(() => stage);
const slowRow = rowsOn(() => slow);

const BODY_MAX = 1 << 20;

before(async () => {
    stage = await Stage.start({
        client: { body_max: BODY_MAX },
        tenant: { from: 'header:x-tenant-id' },
        limit: {
            all: { concurrency: 1000 },
            models: { model: ['*'], upstream: ['llm'], per: ['model'], concurrency: 500 },
            shut: { tenant: ['shut'], concurrency: 0 },
        },
    });
    slow = await Stage.start({
        client: { header_timeout: `${within(400)}ms`, body_timeout: `${within(400)}ms`, keepalive_timeout: `${within(400)}ms` },
    });
});
after(async () => {
    await stage.stop();
    await slow.stop();
});

const head = (...lines) => `${lines.join('\r\n')}\r\n\r\n`;
const posts = (target, ...lines) => head(`POST ${target} HTTP/1.1`, 'Host: gate', 'Content-Type: application/json', ...lines);
const CHUNKED = 'Transfer-Encoding: chunked';

function refused(id, name, statuses, inputs, expected = {}) {
    row(id, name, async () => {
        for (const input of inputs)
            await stage.refuses(input, statuses, expected);
    });
}

/*
 * Chunked bodies that go wrong behind `good`: where the body is searched for a model, no lease is taken and nothing is dialed;
 * where the call is at the upstream already, the lease is released and the request never looks complete.
 */
function badBodies(id, name, bad, expected = {}, status = 400) {
    row(id, name, async () => {
        for (const bytes of bad) {
            await stage.refuses(posts(CHAT, CHUNKED) + bytes, status, { splits: bytes.length < 100, ...expected });
            const { wire, exchange } = await stage.send(posts('/plain/x', CHUNKED));
            await stage.held();
            wire.write(bytes);
            assertOwnAnswer(await wire.response(), status, { close: true, ...expected });
            await wire.closesCleanly();
            assert.equal(await exchange.whole, null, 'the upstream saw a request without an end');
            await stage.released();
            await stage.mark();
        }
    });
}

// A request goes through whole; gives what the upstream saw.
async function passes(bytes, { method, wire, interim = false } = {}) {
    const sent = await stage.send(bytes, { wire });
    const message = await sent.exchange.whole;
    sent.exchange.reply();
    let response = await sent.wire.response({ method });
    if (interim && response.status === 100)
        response = await sent.wire.response({ method });
    assert.equal(response.status, 200);
    return { ...sent, message, response };
}

// --- framing ----------------------------------------------------------------------------------------------------

refused('H037', 'Content-Length and Transfer-Encoding together', 400, [
    posts(CHAT, 'Content-Length: 3', CHUNKED) + '0\r\n\r\n',
    posts(CHAT, CHUNKED, 'Content-Length: 3') + '0\r\n\r\n',
    posts('/plain/x', CHUNKED, 'Content-Length: 3') + '0\r\n\r\n',
    posts('/plain/x', 'Content-Length: 0', CHUNKED) + '0\r\n\r\n',
], { reason: 'bad_framing' });

refused('H038', 'a Content-Length that is not one plain number', 400, [
    ...['3, 3', '+3', '-3', '0x3', '3 3', '', '18446744073709551619', '3.0', '3;', '٣'.replace(/./u, '\xd9\xa3')].map((v) => posts(CHAT, `Content-Length: ${v}`) + 'abc'),
    posts(CHAT, 'Content-Length: 3', 'Content-Length: 3') + 'abc',
    posts('/plain/x', 'Content-Length: 3', 'Content-Length: 4') + 'abc',
], { reason: 'bad_framing' });

refused('H039', 'an unknown transfer coding', [501], [
    posts(CHAT, 'Transfer-Encoding: gzip, chunked'), posts(CHAT, 'Transfer-Encoding: xchunked'), posts('/plain/x', 'Transfer-Encoding: identity', CHUNKED),
], { reason: 'coding_unknown' });
refused('H039', 'chunked that is not the last and only', 400, [
    posts(CHAT, 'Transfer-Encoding: , chunked'), posts(CHAT, 'Transfer-Encoding: chunked, identity'), posts(CHAT, CHUNKED, CHUNKED),
    posts('/plain/x', 'Transfer-Encoding: chunked, chunked'), posts(CHAT, 'Transfer-Encoding: chunked;a=b'), posts(CHAT, 'Transfer-Encoding: "chunked"'),
], { reason: 'bad_framing' });

refused('H040', 'an empty Transfer-Encoding', 400, [
    posts(CHAT, 'Transfer-Encoding:'), posts(CHAT, 'Transfer-Encoding:', 'Content-Length: 3') + 'abc', posts('/plain/x', 'Transfer-Encoding: '),
], { reason: 'bad_framing' });

refused('H041', 'chunked on HTTP/1.0', 400, [
    head(`POST ${CHAT} HTTP/1.0`, 'Host: gate', CHUNKED) + '0\r\n\r\n', head('POST /plain/x HTTP/1.0', 'Host: gate', CHUNKED) + '0\r\n\r\n',
], { reason: 'bad_framing' });

badBodies('H043', 'chunk data without CRLF behind it', ['3\r\n{"aXX0\r\n\r\n', '3\r\n{"a\n0\r\n\r\n', '3\r\n{"a\rX0\r\n\r\n', '3\r\n{"ab\r\n0\r\n\r\n'], { reason: 'bad_chunk' });

badBodies('H044', 'chunk extensions with control bytes, or too much of them',
    ['3;a=\nb\r\n{"a\r\n0\r\n\r\n', '3;a=\rb\r\n{"a\r\n0\r\n\r\n', '3;a=\0\r\n{"a\r\n0\r\n\r\n', `3;${'a'.repeat(65536)}\r\n{"a\r\n0\r\n\r\n`,
        `${'1;a=bcdefghijklmnopqrstuvwxyz\r\n \r\n'.repeat(2000)}0\r\n\r\n`], { reason: 'bad_chunk' });
row('H044', 'valid extensions are ignored and go no further', async () => {
    const body = `5;a=b\r\n{"mod\r\n${(chatBody.length - 5).toString(16)};x="y"\r\n${chatBody.slice(5)}\r\n0;last\r\n\r\n`;
    const { exchange, message } = await passes(posts(CHAT, CHUNKED) + body);
    assert.equal(message.by, 'chunked');
    assert.equal(message.body.toString(), chatBody);
    assert.ok(!exchange.wire.bytes.includes('a=b'));
});

badBodies('H045', 'chunk sizes that are no plain hex number', ['0x3\r\n{"a\r\n0\r\n\r\n', '+3\r\n{"a\r\n0\r\n\r\n', '3 \r\n{"a\r\n0\r\n\r\n', '\r\n{"a\r\n0\r\n\r\n',
    '10000000000000003\r\n{"a\r\n0\r\n\r\n', '-1\r\n{"a\r\n', 'ffffffffffffffffff\r\n{"a', `${'0'.repeat(1000000)}3\r\n{"a\r\n0\r\n\r\n`], { reason: 'bad_chunk' });

badBodies('H046', 'trailers that would change framing, routing or credentials',
    ['Host: b', 'Authorization: x', 'Content-Length: 3', 'Transfer-Encoding: chunked', 'content-length: 0'].map((t) => `3\r\n{"a\r\n0\r\n${t}\r\n\r\n`), { reason: 'bad_trailer' });
row('H046', 'other trailers are dropped', async () => {
    const { exchange, message } = await passes(posts(CHAT, CHUNKED, 'Trailer: X-Anything') + `${chatBody.length.toString(16)}\r\n${chatBody}\r\n0\r\nX-Anything: 1\r\n\r\n`);
    assert.equal(message.body.toString(), chatBody);
    assert.ok(!exchange.wire.bytes.includes('X-Anything'));
});

badBodies('H047', 'the end of a chunked body without CRLF', ['0\r\n\n', '0\r\n\rX', '0\n\r\n', '0\r\nX: y\n\r\n'], { reason: ['bad_chunk', 'bad_trailer'] });

// --- what follows a body -----------------------------------------------------------------------------------------

row('H049', 'what is left of a refused body is never a request; a small rest keeps the connection', async () => {
    const hidden = get('/v1/hidden'), wire = await stage.open();
    wire.write(head('POST /nowhere HTTP/1.1', 'Host: gate', `Content-Length: ${hidden.length + 5}`) + 'abcde');
    assertOwnAnswer(await wire.response(), 404, { close: false });
    wire.write(hidden);
    await stage.turn();
    assert.ok(wire.isQuiet());
    await stage.neverTaken();
    const { exchange } = await passes(get('/v1/models'), { wire });
    assert.equal(exchange.start, 'GET /v1/models HTTP/1.1');
});
row('H049', 'a large rest ends the connection', async () => {
    const hidden = get('/v1/hidden'), wire = await stage.open();
    wire.write(head('POST /nowhere HTTP/1.1', 'Host: gate', `Content-Length: ${BODY_MAX - 5}`) + 'abcde');
    assertOwnAnswer(await wire.response(), 404, { close: true });
    wire.write(hidden.repeat(100));
    await wire.closesCleanly();
    await stage.neverTaken();
});
row('H049', 'a refused chunked body ends the connection', async () => {
    const wire = await stage.open();
    wire.write(posts('/nowhere', CHUNKED));
    assertOwnAnswer(await wire.response(), 404, { close: true });
    wire.write(`0\r\n\r\n${get('/v1/hidden')}`);
    await wire.closesCleanly();
    await stage.neverTaken();
});
row('H049', 'a refusal for want of a slot keeps the connection when the body is small', async () => {
    const wire = await stage.open();
    wire.write(chat('x-tenant-id: shut'));
    assertOwnAnswer(await wire.response(), 429, { reason: 'limit_full', close: false });
    await passes(chat(), { wire });
});

row('H050', 'bytes behind a body are the next request', async () => {
    const { wire, exchange } = await stage.send(chat() + get('/v1/models/next'));
    await exchange.whole;
    exchange.reply('{"n":1}');
    assert.deepEqual((await wire.response()).json(), { n: 1 });
    const next = await stage.up.next();
    assert.equal(next.start, 'GET /v1/models/next HTTP/1.1');
    next.reply('{"n":2}');
    assert.deepEqual((await wire.response()).json(), { n: 2 });
    assert.ok(wire.isQuiet());
});
row('H050', 'garbage behind a body: the call ends well, then 400', async () => {
    const { wire, exchange } = await stage.send(`${chat()}garbage\r\n\r\n`);
    await exchange.whole;
    exchange.reply('{"n":1}');
    assert.deepEqual((await wire.response()).json(), { n: 1 });
    assertOwnAnswer(await wire.response(), 400, { close: true });
    await wire.closesCleanly();
});

row('H051', 'GET, HEAD, DELETE and OPTIONS with a body: framed and forwarded', async () => {
    for (const method of ['GET', 'HEAD', 'DELETE', 'OPTIONS']) {
        for (const target of ['/v1/x', '/plain/x']) {
            const wire = await stage.open();
            const byLength = await passes(`${method} ${target} HTTP/1.1\r\nHost: gate\r\nContent-Length: ${chatBody.length}\r\n\r\n${chatBody}`, { wire, method });
            assert.deepEqual([byLength.message.by, byLength.message.body.toString()], ['length', chatBody]);
            const chunked = await passes(`${method} ${target} HTTP/1.1\r\nHost: gate\r\n${CHUNKED}\r\n\r\n${chatBody.length.toString(16)}\r\n${chatBody}\r\n0\r\n\r\n`, { wire, method });
            assert.deepEqual([chunked.message.by, chunked.message.body.toString()], ['chunked', chatBody]);
            await stage.turn();
            assert.ok(wire.isQuiet());
        }
    }
});

row('H052', 'an empty POST says so upstream', async () => {
    for (const bytes of [head('POST /plain/x HTTP/1.1', 'Host: gate', 'Content-Length: 0'), head('POST /plain/x HTTP/1.1', 'Host: gate')]) {
        const { exchange } = await passes(bytes);
        assert.deepEqual(exchange.all('content-length'), ['0']);
    }
});
row('H052', 'an empty POST where a model is needed', async () => {
    for (const bytes of [posts(CHAT, 'Content-Length: 0'), posts(CHAT), posts(CHAT, CHUNKED) + '0\r\n\r\n', posts('/v1/responses'), post(CHAT, '{"messages":[]}')]) {
        const wire = await stage.open();
        wire.write(bytes);
        assertOwnAnswer(await wire.response(), 400, { reason: 'model_missing', close: false });
    }
    await stage.neverTaken();
});

// --- Expect ------------------------------------------------------------------------------------------------------

row('H053', 'Expect: 100 before the body is waited for, and not a word of it upstream', async () => {
    for (const target of [CHAT, '/plain/x']) {
        const wire = await stage.open();
        wire.write(posts(target, `Content-Length: ${chatBody.length}`, 'Expect: 100-continue'));
        const interim = await wire.response();
        assert.equal(interim.text, 'HTTP/1.1 100 Continue\r\n\r\n');
        const { exchange, response } = await passes(chatBody, { wire });
        assert.equal(exchange.value('expect'), undefined);
        assert.equal(response.status, 200);
    }
});
row('H053', 'a refusal at the head is the final status, without a 100', async () => {
    for (const [target, length, status, field = 'X: y'] of [['/nowhere', 9, 404], [CHAT, BODY_MAX + 1, 413], ['/plain/x', BODY_MAX + 1, 413], ['/plain/x', 9, 429, 'x-tenant-id: shut']]) {
        const wire = await stage.open();
        wire.write(posts(target, `Content-Length: ${length}`, 'Expect: 100-continue', field));
        assertOwnAnswer(await wire.response(), status, { close: true });
        await wire.closesCleanly();
        assert.equal(wire.rest, '');
    }
});
row('H053', 'a client that does not wait gets no 100 that would come too late', async () => {
    const { response } = await passes(chat('Expect: 100-continue'), { interim: true });
    assert.equal(response.status, 200);
});

row('H055', 'Expect of HTTP/1.0 is ignored', async () => {
    const { exchange, message } = await passes(`POST ${CHAT} HTTP/1.0\r\nHost: gate\r\nExpect: 100-continue\r\nContent-Length: ${chatBody.length}\r\n\r\n${chatBody}`);
    assert.equal(exchange.value('expect'), undefined);
    assert.equal(message.body.toString(), chatBody);
});
refused('H055', 'any other expectation', 417, [
    ['Expect: x'], ['Expect: y 100-continue'], ['Expect: 100-continue', 'Expect: 100-continue'], ['Expect: 100-continue, x'], ['Expect:'],
].map((lines) => posts(CHAT, 'Content-Length: 3', ...lines) + 'abc'), { reason: 'expectation' });

// --- size --------------------------------------------------------------------------------------------------------

row('H056', 'a Content-Length over the cap: 413 at once', async () => {
    for (const target of [CHAT, '/plain/x']) {
        const wire = await stage.open();
        wire.write(posts(target, `Content-Length: ${5 * 2 ** 30}`));
        assertOwnAnswer(await wire.response(), 413, { reason: 'body_too_large', close: true });
        await wire.closesCleanly();
    }
    await stage.neverTaken();
});
row('H056', 'a chunked body over the cap: 413 when the count passes it', async () => {
    const part = Buffer.alloc(60000, 0x20), chunk = Buffer.concat([Buffer.from(`${part.length.toString(16)}\r\n`), part, Buffer.from('\r\n')]);
    for (const target of [CHAT, '/plain/x']) {
        const wire = await stage.open();
        wire.write(posts(target, CHUNKED));
        for (let sent = 0; sent <= BODY_MAX; sent += part.length)
            wire.write(chunk);
        assertOwnAnswer(await wire.response(), 413, { reason: 'body_too_large', close: true });
        await wire.closesCleanly();
        if (target === CHAT)
            await stage.neverTaken();
        else
            assert.equal(await (await stage.up.next()).whole, null);
    }
});

// --- slow clients ------------------------------------------------------------------------------------------------

// Sends one piece every 20 ms until an answer or an end comes.
async function dribble(wire, pieces) {
    for (const piece of pieces) {
        if (wire.received > 0 || wire.ended || wire.closed)
            return;
        wire.write(piece);
        await sleep(20);
    }
}

slowRow('H057', 'a head in single bytes: 408 by a total deadline', async () => {
    const wire = await slow.open();
    const dripping = dribble(wire, withX());
    assertOwnAnswer(await wire.response(), 408, { reason: 'request_timeout', close: true });
    await dripping;
    await wire.closesCleanly();
    await slow.neverTaken();
});
function* withX() {
    yield* 'GET / HTTP/1.1\r\n';
    for (let i = 0; ; i++)
        yield 'X: y\r\n'[i % 6];
}
slowRow('H057', 'the same behind a first request, and with CRLFs alone', async () => {
    const { wire, exchange } = await slow.send(get('/v1/models'));
    exchange.reply();
    await wire.response();
    wire.write('\r');
    await wire.until('an end', () => wire.ended || wire.closed);
    assert.ok(wire.rest === '' || / 408 /.test(wire.rest), wire.rest);
    await wire.closesCleanly();
});
slowRow('H057', 'a body that stops: 408, before and after admission', async () => {
    const before_ = await slow.open();
    before_.write(posts(CHAT, 'Content-Length: 100') + '{"messages":');
    assertOwnAnswer(await before_.response(), 408, { reason: 'request_timeout', close: true });
    await before_.closesCleanly();
    await slow.neverTaken();
    const { wire, exchange } = await slow.send(posts('/plain/x', 'Content-Length: 100') + '{"messages":');
    await slow.held();
    assertOwnAnswer(await wire.response(), 408, { reason: 'request_timeout', close: true });
    await wire.closesCleanly();
    assert.equal(await exchange.whole, null);
    await slow.released();
});

slowRow('H058', 'a connection on which nothing comes is closed quietly', async () => {
    const lines = slow.gate.log.length;
    const fresh = await slow.open(), address = `127.0.0.1:${fresh.socket.localPort}`;
    const { wire: used, exchange } = await slow.send(get('/v1/models'));
    exchange.reply();
    await used.response();
    for (const wire of [fresh, used]) {
        await wire.closesCleanly();
        assert.equal(wire.rest, '');
    }
    assert.equal(fresh.received, 0);
    assert.deepEqual(slow.gate.log.slice(lines).filter((l) => l.level !== 'info'), []);
    assert.deepEqual(slow.gate.log.slice(lines).filter((l) => l.event === 'call' && l.client === address), []);
});
