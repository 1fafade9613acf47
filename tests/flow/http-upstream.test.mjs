// http-upstream.test.mjs - what an upstream may do to us: rows H101 to H121 of HTTP-CASES.md.
import assert from 'node:assert/strict';
import { once } from 'node:events';
import net from 'node:net';
import { after, before } from 'node:test';

import { startDeafPort, within } from './harness.mjs';
import { assertOwnAnswer, CHAT, chat, chatBody, get, post, rowsOn, Stage } from './http-tools.mjs';

let stage, quick;
const row = rowsOn(() => stage);
const quickRow = rowsOn(() => quick);

before(async () => {
    stage = await Stage.start();
    quick = await Stage.start({ llm: { first_byte_timeout: `${within(400)}ms`, idle_timeout: `${within(400)}ms`, connect_timeout: `${within(400)}ms` } });
});
after(async () => {
    await stage.stop();
    await quick.stop();
});

async function withOwn(options, body) {
    const own = await Stage.start(options);
    try {
        await own.mark();
        await body(own);
    } finally {
        await own.stop();
    }
}

// One call that ends well and leaves its connection with the pool; gives that connection.
async function pooled(own = stage) {
    const { wire, exchange } = await own.send(chat());
    await exchange.whole;
    exchange.reply();
    assert.equal((await wire.response()).status, 200);
    wire.close();
    await own.turn();
    return exchange.wire;
}

// The raw answer to a request gets a 502 and its connection is closed; nothing of it reaches the client.
async function disbelieved(raw, { request = chat(), reason = 'upstream_invalid' } = {}) {
    const { wire, exchange } = await stage.send(request);
    await exchange.whole;
    exchange.write(raw);
    const response = await wire.response();
    assertOwnAnswer(response, 502, { reason });
    assert.ok(!response.text.includes('X-Evil'));
    await stage.turn();
    assert.ok(wire.isQuiet(), wire.rest);
    await exchange.wire.until('the upstream connection is closed', () => exchange.wire.ended || exchange.wire.closed);
    await stage.released();
    wire.close();
}

for (const [what, spoil] of [
    ['FIN', (wire) => wire.end()],
    ['RST', (wire) => wire.reset()],
    ['a 408', (wire) => wire.write('HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n')],
    ['a whole response', (wire) => wire.write('HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil')],
])
    row('H101', `an idle connection gets ${what}: it is retired`, async () => {
        const idle = await pooled();
        spoil(idle);
        await idle.until('it is closed', () => idle.ended || idle.closed);
        const { wire, exchange } = await stage.send(chat());
        assert.notEqual(exchange.wire, idle);
        exchange.reply('good');
        assert.equal((await wire.response()).body.toString(), 'good');
    });
row('H101', 'a connection that is in order is used again', async () => {
    const first = await pooled();
    const { wire, exchange } = await stage.send(chat());
    assert.equal(exchange.wire, first);
    exchange.reply();
    await wire.response();
});

row('H103', 'refused, unknown name, silent: 502 or 504 without details for the client', async () => {
    const closed = net.createServer().listen(0, '127.0.0.1');
    await once(closed, 'listening');
    const port = closed.address().port;
    closed.close();
    await once(closed, 'close');
    const deaf = await startDeafPort();
    for (const [url, status, reason] of [[`http://127.0.0.1:${port}`, 502, 'upstream_unreachable'], ['http://no-such-host.invalid', 502, 'upstream_unreachable'], [deaf.url, 504, 'upstream_timeout']])
        await withOwn({ url: () => url, llm: { connect_timeout: `${within(500)}ms` } }, async (own) => {
            const wire = await own.open();
            wire.write(chat());
            const response = await wire.response();
            assertOwnAnswer(response, url.includes('invalid') ? [502, 504] : status, { reason: [reason, 'upstream_timeout'], close: false });
            assert.ok(!response.body.includes('invalid') && !response.body.includes('127.0.0.1'));
            const line = await own.gate.waitForLog((l) => l.event === 'call');
            assert.ok(line.detail.length > 0);
            await own.released();
        });
});

row('H104', 'a reused connection that dies behind a POST: 502, no replay', async () => {
    for (const die of [(wire) => wire.end(), (wire) => wire.reset()]) {
        const idle = await pooled(), requests = stage.up.requests;
        const { wire, exchange } = await stage.send(chat());
        assert.equal(exchange.wire, idle);
        await exchange.whole;
        die(exchange.wire);
        assertOwnAnswer(await wire.response(), 502, { reason: 'upstream_closed', close: false });
        await stage.released();
        assert.equal(stage.up.requests, requests + 1);
    }
});
row('H104', 'a GET without a body is sent once more, under the same lease', async () => {
    const idle = await pooled();
    const { wire, exchange } = await stage.send(get('/v1/models'));
    assert.equal(exchange.wire, idle);
    exchange.wire.reset();
    const again = await stage.up.next();
    assert.notEqual(again.wire, idle);
    await stage.held(1);
    again.wire.end(); // not twice
    assertOwnAnswer(await wire.response(), 502, { reason: 'upstream_closed' });
    await stage.witness.sync();
});
row('H104', 'replay_stale allows it for a POST', async () => {
    await withOwn({ llm: { replay_stale: true } }, async (own) => {
        const idle = await pooled(own);
        const { wire, exchange } = await own.send(chat());
        assert.equal(exchange.wire, idle);
        await exchange.whole;
        exchange.wire.reset();
        const again = await own.up.next();
        assert.equal((await again.whole).body.toString(), chatBody);
        again.reply();
        assert.equal((await wire.response()).status, 200);
        const line = await own.gate.waitForLog((l) => l.event === 'call' && l.replayed === true);
        assert.equal(line.status, 200);
        const third = await own.send(chat());
        await third.exchange.whole;
        third.exchange.write('HTTP/1.1 2').wire.end(); // a response had begun
        assertOwnAnswer(await third.wire.response(), 502);
        await own.released();
    });
});

const large = (n) => `POST /plain/x HTTP/1.1\r\nHost: gate\r\nContent-Length: ${n}\r\n\r\n`;

row('H106', 'an early answer while the body is being sent: forwarded at once, the rest is not sent', async () => {
    for (const status of ['413 Too Large', '401 Unauthorized', '429 Slow Down']) {
        const { wire, exchange } = await stage.send(large(1000000) + 'x'.repeat(1000));
        exchange.reply('{"error":1}', { status });
        const response = await wire.response();
        assert.equal(response.status, Number(status.slice(0, 3)));
        assert.equal(response.body.toString(), '{"error":1}');
        await stage.released();
        await exchange.wire.until('that connection is not used again', () => exchange.wire.ended || exchange.wire.closed);
        wire.write('x'.repeat(900000));
        assert.equal(await exchange.whole, null);
        wire.close();
    }
});

row('H107', 'an early answer and a close: the answer wins', async () => {
    for (const leave of [(wire) => wire.end(), (wire) => wire.reset()]) {
        const { wire, exchange } = await stage.send(large(4000000) + 'x'.repeat(1000));
        exchange.write('HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlarge');
        setImmediate(() => leave(exchange.wire));
        for (let i = 0; i < 30; i++)
            wire.write('x'.repeat(100000));
        const response = await wire.response();
        assert.deepEqual([response.status, response.body.toString()], [413, 'large']);
        await stage.released();
        wire.close();
    }
});

row('H109', 'interim responses are no response', async () => {
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    exchange.write('HTTP/1.1 100 Continue\r\n\r\n').write('HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n');
    for (let i = 0; i < 5; i++)
        exchange.write('HTTP/1.1 102 Processing\r\n\r\n');
    await stage.turn();
    await stage.held(1);
    assert.ok(!wire.rest.includes(' 100 '));
    exchange.reply('{"n":1}');
    let response = await wire.response();
    while (response.status === 103 || response.status === 102)
        response = await wire.response();
    assert.deepEqual(response.json(), { n: 1 });
});
row('H109', 'without end they are', () => disbelieved('HTTP/1.1 102 Processing\r\n\r\n'.repeat(100)));

row('H110', 'responses that no two parsers read alike', async () => {
    for (const raw of [
        'HTTP/1.1 200 OK\r\nX-Evil: 1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n', 'HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd',
        'HTTP/1.1 200 OK\r\nContent-Length: 3, 3\r\n\r\nabc', 'HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n', 'HTTP/1.1 099 X\r\nContent-Length: 0\r\n\r\n', 'HTTP/1.1 600 X\r\nContent-Length: 0\r\n\r\n',
        'HTTP/1.1 1000 X\r\n\r\n', 'HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n', 'HTTP/1.1 200 OK\rContent-Length: 0\r\n\r\n', 'HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n', 'ICY 200 OK\r\n\r\n',
        'HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n', `HTTP/1.1 200 OK\r\nX: ${'a'.repeat(70000)}\r\n\r\n`, '\r\nHTTP/1.1 200 OK\r\n\r\n', 'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n',
    ])
        await disbelieved(raw);
});
row('H110', 'a bad chunk size: 502 before the first byte, a broken connection behind it', async () => {
    for (const size of ['0x3', 'zz', '-1', '11111111111111111', '3 ']) {
        const { wire, exchange } = await stage.send(chat());
        await exchange.whole;
        exchange.write(`HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n${size}\r\nabc\r\n0\r\n\r\n`);
        const head = await wire.head();
        if (head.start.includes(' 502 ')) {
            assertOwnAnswer(await wire.response(), 502);
        } else {
            assert.equal(await wire.ending(), 'reset');
            assert.ok(!wire.rest.includes('\r\n0\r\n\r\n'));
        }
        await stage.released();
        wire.close();
    }
});

row('H111', 'obs-fold in a response', async () => {
    await disbelieved('HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n');
    await disbelieved('HTTP/1.1 200 OK\r\n Content-Length: 0\r\n\r\n');
});

row('H112', 'a response without a length: chunked for the client, complete at the FIN', async () => {
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    exchange.write('HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nabc').write('def');
    await wire.until('the bytes', () => wire.rest.includes('def'));
    await stage.held(1);
    assert.ok(!wire.rest.includes('0\r\n\r\n'));
    exchange.wire.end();
    const response = await wire.response();
    assert.deepEqual([response.by, response.body.toString()], ['chunked', 'abcdef']);
    await stage.released();
    assert.ok(wire.isQuiet());
});

row('H113', 'cut before a body byte: 502', async () => {
    for (const [raw, leave] of [['', 'end'], ['', 'reset'], ['HTTP/1.1 200', 'end'], ['HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n', 'end'], ['HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n', 'reset']]) {
        const { wire, exchange } = await stage.send(chat());
        await exchange.whole;
        exchange.write(raw).wire[leave]();
        const head = await wire.head();
        if (head.start.includes(' 502 ')) {
            assertOwnAnswer(await wire.response(), 502, { reason: 'upstream_closed' });
        } else { // the head had gone out alone
            assert.match(raw, /\r\n\r\n$/);
            await wire.ending(); // FIN or RST: what a kernel says of an RST behind unread bytes differs
            assert.equal(wire.bytes.length, head.end);
        }
        await stage.released();
        wire.close();
    }
});
row('H113', 'cut behind it: never a last chunk, never a whole length', async () => {
    for (const raw of ['HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc', 'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n', 'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc']) {
        const { wire, exchange } = await stage.send(chat());
        await exchange.whole;
        exchange.write(raw);
        await wire.until('the bytes', () => wire.rest.includes('abc'));
        exchange.wire.end();
        assert.equal(await wire.ending(), 'reset');
        assert.ok(!wire.rest.includes('\r\n0\r\n'));
        await stage.released();
    }
});
row('H113', 'a cut event stream gets one error event, at a boundary, and no last chunk', async () => {
    for (const [sent, between] of [['data: 1\n\n', ''], ['data: 1\n', '\n'], ['data: 1', '\n\n'], ['data: 1\r\n\r\n', '']]) {
        const { wire, exchange } = await stage.send(chat());
        await exchange.whole;
        exchange.stream().chunk(sent);
        await wire.until('the event', () => wire.rest.includes('data: 1'));
        exchange.wire.reset();
        assert.equal(await wire.ending(), 'fin');
        const head = await wire.head(), body = wire.bytes.toString('latin1', head.end).replace(/[0-9a-f]+\r\n/, '');
        const text = body.replace(/\r\n[0-9a-f]+\r\n/g, '').replace(/\r\n$/, '');
        assert.ok(text.startsWith(`${sent}${between}data: {"error":`), JSON.stringify(text));
        assert.ok(text.endsWith('}\n\n'));
        assert.equal(JSON.parse(text.slice((sent + between).length + 6)).error.code, 'upstream_closed');
        assert.ok(!wire.bytes.includes('\r\n0\r\n') && !text.includes('[DONE]'));
        await stage.released();
    }
});

row('H115', 'no body where none may be: the next response is not eaten', async () => {
    const { wire, exchange } = await stage.send('HEAD /v1/models HTTP/1.1\r\nHost: gate\r\n\r\n');
    exchange.write('HTTP/1.1 200 OK\r\nContent-Length: 123\r\n\r\n');
    const response = await wire.response({ method: 'HEAD' });
    assert.equal(response.value('content-length'), '123');
    for (const [status, lines] of [['204 No Content', 'Content-Length: 5'], ['304 Not Modified', 'Content-Length: 5'], ['204 No Content', 'Transfer-Encoding: chunked'], ['304 Not Modified', 'ETag: "x"']]) {
        const next = await stage.send(get('/v1/models'), { wire });
        assert.equal(next.exchange.wire, exchange.wire, 'the same upstream connection');
        next.exchange.write(`HTTP/1.1 ${status}\r\n${lines}\r\n\r\n`);
        assert.equal((await wire.response()).status, Number(status.slice(0, 3)));
    }
    const last = await stage.send(get('/v1/models'), { wire });
    assert.equal(last.exchange.wire, exchange.wire);
    last.exchange.reply('{"n":1}');
    assert.deepEqual((await wire.response()).json(), { n: 1 });
});

row('H116', 'bytes behind a response are nobody`s, and their connection is retired', async () => {
    for (const raw of ['HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcEVIL', 'HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL', 'HTTP/1.1 204 No Content\r\n\r\nEVIL',
        'HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nEVIL', 'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nEVIL']) {
        const { wire, exchange } = await stage.send(chat());
        await exchange.whole;
        exchange.write(raw);
        assert.ok((await wire.response()).status < 300);
        const next = await stage.send(chat(), { wire });
        assert.notEqual(next.exchange.wire, exchange.wire);
        next.exchange.reply('good');
        assert.equal((await wire.response()).body.toString(), 'good');
        assert.ok(!wire.bytes.includes('EVIL'));
        wire.close();
    }
});

row('H117', 'a response complete before the request is out: that connection is retired', async () => {
    const { wire, exchange } = await stage.send(large(100000) + 'x'.repeat(10));
    exchange.reply('done');
    assert.equal((await wire.response()).body.toString(), 'done');
    await stage.released();
    await exchange.wire.until('it is closed', () => exchange.wire.ended || exchange.wire.closed);
    wire.write('x'.repeat(99990)); // the rest has no reader, the connection lives on
    const next = await stage.send(chat(), { wire });
    assert.notEqual(next.exchange.wire, exchange.wire);
    next.exchange.reply('good');
    assert.equal((await wire.response()).body.toString(), 'good');
});

row('H118', 'an upstream that will close: the call ends at its length, the connection is not pooled', async () => {
    for (const raw of ['HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc', 'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc', 'HTTP/1.1 205 Reset\r\nConnection: close\r\nContent-Length: 0\r\n\r\n',
        'HTTP/1.1 413 Large\r\nConnection: Close\r\nContent-Length: 3\r\n\r\nabc']) {
        const { wire, exchange } = await stage.send(chat());
        await exchange.whole;
        exchange.write(raw);
        const response = await wire.response();
        assert.equal(response.value('connection'), undefined);
        await stage.released(); // no FIN has come
        const next = await stage.send(chat(), { wire });
        assert.notEqual(next.exchange.wire, exchange.wire);
        next.exchange.reply();
        await wire.response();
        wire.close();
    }
});

quickRow('H119', 'no byte within first_byte_timeout: 504', async () => {
    const { wire, exchange } = await quick.send(chat());
    await exchange.whole;
    assertOwnAnswer(await wire.response(), 504, { reason: 'upstream_timeout', close: false });
    await quick.released();
    await exchange.wire.until('it is closed', () => exchange.wire.ended || exchange.wire.closed);
});
quickRow('H119', 'silence within a stream: ended as a cut one', async () => {
    const { wire, exchange } = await quick.send(chat());
    await exchange.whole;
    exchange.stream().chunk('data: 1\n\n');
    assert.equal(await wire.ending(), 'fin');
    assert.match(wire.rest, /data: \{"error":.*upstream_timeout/);
    assert.ok(!wire.rest.includes('\r\n0\r\n'));
    await quick.released();
});
quickRow('H119', 'a connection that is not accepted: 504', async () => {
    const deaf = await startDeafPort();
    await withOwn({ url: () => deaf.url, llm: { connect_timeout: `${within(300)}ms` } }, async (own) => {
        const wire = await own.open();
        wire.write(chat());
        assertOwnAnswer(await wire.response(), 504, { reason: 'upstream_timeout' });
        await own.released();
    });
});

row('H121', 'the upstream`s own errors pass untouched', async () => {
    const fields = ['Retry-After: 7', 'retry-after-ms: 6500', 'X-Should-Retry: false', 'x-ratelimit-remaining-requests: 0', 'anthropic-ratelimit-tokens-limit: 1', 'X-Request-ID: req_1', 'request-id: req_2', 'X-Leasegate-Reason: forged'];
    for (const status of ['429 Slow Down', '529 Overloaded', '500 Oops', '503 Service Unavailable', '400 Bad Request']) {
        const { wire, exchange } = await stage.send(chat());
        await exchange.whole;
        exchange.reply('{"error":{"message":"theirs"}}', { status, fields });
        const response = await wire.response();
        assert.equal(response.start, `HTTP/1.1 ${status}`);
        assert.equal(response.body.toString(), '{"error":{"message":"theirs"}}');
        for (const field of fields.slice(0, -1))
            assert.ok(response.text.includes(`${field}\r\n`), field);
        assert.equal(response.value('x-leasegate-reason'), undefined);
        assert.match(response.value('x-leasegate-lease'), /\/[0-9a-f]+$/);
        wire.close();
        await stage.released();
    }
});
