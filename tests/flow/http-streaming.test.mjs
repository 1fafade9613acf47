// http-streaming.test.mjs - responses that go on: rows H122 to H139 of HTTP-CASES.md.
import assert from 'node:assert/strict';
import { after, before } from 'node:test';

import { sleep, waitUntil, within } from './harness.mjs';
import { assertGrowth, assertOwnAnswer, chat, chatBody, CHAT, get, rowsOn, rssBytes, Stage } from './http-tools.mjs';

let stage, probe, serve, drain;
const row = rowsOn(() => stage);

before(async () => {
    const listen = (half_close) => ({ listen: { '127.0.0.1:0': { half_close } } });
    stage = await Stage.start({ client: { body_max: 1 << 20 }, llm: { done_grace: `${within(500)}ms` } });
    probe = await Stage.start(listen('probe'));
    serve = await Stage.start(listen('serve'));
    drain = await Stage.start({ llm: { on_client_gone: 'drain' } });
});
after(() => Promise.all([stage, probe, serve, drain].map((s) => s.stop())));

const EVENT = 'data: {"a":1}\n\n';

// A stream whose first event has reached the client.
async function streaming(own = stage, bytes = chat()) {
    const { wire, exchange } = await own.send(bytes);
    await exchange.whole;
    exchange.stream().chunk(EVENT);
    await wire.until('the first event', () => wire.rest.includes(EVENT));
    return { wire, exchange };
}

const aborted = (exchange) => exchange.wire.until('the upstream connection is closed', () => exchange.wire.ended || exchange.wire.closed);

row('H122', 'a head alone and a small event are forwarded at once', async () => {
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    exchange.stream();
    assert.match((await wire.head()).start, / 200 /);
    for (let i = 0; i < 20; i++) {
        const from = Date.now();
        exchange.chunk(`data: ${i} ${'x'.repeat(30)}\n\n`);
        await wire.until('the event', () => wire.rest.includes(`data: ${i} `));
        assert.ok(Date.now() - from < within(1000));
    }
    await stage.held(1);
    exchange.last();
    await wire.response();
});

row('H123', 'comments, pings and empty data pass byte for byte', async () => {
    const events = ': ping\n\n' + 'event: ping\ndata: {"type": "ping"}\n\n' + 'data:\n\n' + ':\r\n\r\n' + 'data: \r\rid: 7\ndata: x\n\n';
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    exchange.stream();
    for (const c of events)
        exchange.chunk(c);
    exchange.last();
    assert.equal((await wire.response()).body.toString(), events);
});

row('H124', 'nothing is added to a quiet stream', async () => {
    const { wire, exchange } = await streaming(stage);
    const before_ = wire.received;
    await sleep(within(700)); // several heartbeats: that time passes is the case
    assert.equal(wire.received, before_);
    exchange.last();
    assert.equal((await wire.response()).body.toString(), EVENT);
});

row('H125', 'a compressed stream is opaque, and a cut one is broken off without a word', async () => {
    const bytes = Buffer.from([0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3]).toString('latin1');
    for (const cut of [false, true]) {
        const { wire, exchange } = await stage.send(chat('Accept-Encoding: gzip, br;q=0.5'));
        await exchange.whole;
        assert.equal(exchange.value('accept-encoding'), 'gzip, br;q=0.5');
        exchange.stream('Content-Encoding: gzip').chunk(bytes);
        await wire.until('the bytes', () => wire.rest.includes(bytes));
        if (cut) {
            exchange.wire.reset();
            assert.equal(await wire.ending(), 'reset');
            assert.ok(wire.rest.endsWith(`${bytes}\r\n`), 'nothing was added');
        } else {
            exchange.last();
            const response = await wire.response();
            assert.equal(response.value('content-encoding'), 'gzip');
            assert.equal(response.body.toString('latin1'), bytes);
        }
    }
});

row('H127', 'a slow reader of 200 MB: the upstream waits, memory stays bounded', async () => {
    const total = 200 << 20, part = Buffer.alloc(1 << 20, 0x61);
    const wire = await stage.open({ keep: false });
    wire.write(get('/v1/big'));
    const exchange = await stage.up.next();
    const before_ = rssBytes(stage.gate.pid), upstream = exchange.wire.socket;
    wire.socket.pause();
    exchange.write(`HTTP/1.1 200 OK\r\nContent-Length: ${total}\r\n\r\n`);
    let given = 0;
    const give = () => {
        while (given < total && upstream.write(part))
            given += part.length;
        if (given < total)
            given += part.length; // the one that was queued
    };
    upstream.on('drain', () => given < total && give());
    give();
    let last = -1;
    await waitUntil('the upstream stands still', async () => {
        const was = last;
        last = upstream.bytesWritten - upstream.writableLength;
        await stage.turn();
        await sleep(20);
        return last === was && upstream.writableLength > 0;
    }, 8000);
    assert.ok(given < total / 2, `${given} bytes were taken`);
    assertGrowth(stage.gate.pid, before_, 8 << 20);
    await stage.held(1);
    wire.socket.resume();
    await wire.until('all of it', () => wire.received >= total, within(20000));
    assertGrowth(stage.gate.pid, before_, 8 << 20);
    await stage.released();
});

row('H128', 'a reset in a silent stream is seen at once', async () => {
    const { wire, exchange } = await streaming();
    const from = Date.now();
    wire.reset();
    await aborted(exchange);
    await stage.released();
    assert.ok(Date.now() - from < within(1000));
});

row('H129', 'a reset while nothing is read from the client', async () => {
    // pipelined bytes beyond the bound stop the reading
    const ahead = await streaming();
    ahead.wire.write(get('/v1/models/ahead', `X: ${'y'.repeat(8000)}`).repeat(40));
    await stage.turn();
    await stage.turn();
    const from = Date.now();
    ahead.wire.reset();
    await aborted(ahead.exchange);
    await stage.released();
    assert.ok(Date.now() - from < within(1000));
    assert.equal(stage.up.waiting().length, 0);
    // back-pressure: the upstream does not take the body
    const { wire, exchange } = await stage.send(`POST /plain/x HTTP/1.1\r\nHost: gate\r\nContent-Length: 1000000\r\n\r\n`);
    exchange.wire.socket.pause();
    for (let i = 0; i < 9; i++)
        wire.write('x'.repeat(100000));
    await stage.turn();
    await stage.held(1);
    wire.reset();
    await stage.released();
    exchange.wire.socket.resume();
    await aborted(exchange);
});
row('H129', 'a FIN behind unread bytes', async () => {
    const { wire, exchange } = await streaming();
    wire.write(get('/v1/models/ahead', `X: ${'y'.repeat(8000)}`).repeat(12)).end();
    await aborted(exchange);
    await stage.released();
});

row('H130', 'abort: a FIN in a stream ends the call', async () => {
    const { wire, exchange } = await streaming();
    wire.end();
    await aborted(exchange);
    await stage.released();
    wire.close();
});
for (const [name, own] of [['serve', () => serve], ['probe', () => probe]])
    rowsOn(own)('H130', `${name}: a FIN in a stream is a half-close until an RST says otherwise`, async () => {
        const { wire, exchange } = await streaming(own());
        wire.end();
        await own().turn();
        await own().held(1);
        exchange.chunk(EVENT).last();
        assert.equal((await wire.response()).body.toString(), EVENT + EVENT);
        await wire.until('the close', () => wire.closed);
        await own().released();
        const second = await streaming(own());
        second.wire.close(); // FIN; the next write draws an RST
        await own().turn();
        await waitUntil('it is noticed', () => {
            second.exchange.chunk(EVENT);
            return second.exchange.wire.ended || second.exchange.wire.closed;
        }, 8000);
        await own().released();
    });

row('H131', 'abort: a FIN while no byte is due ends the call', async () => {
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    const from = Date.now();
    wire.end();
    await aborted(exchange);
    await stage.released();
    assert.ok(Date.now() - from < within(1000));
    wire.close();
});
rowsOn(() => probe)('H131', 'probe: a closed client is told from a half-closed one', async () => {
    const gone = await probe.send(chat());
    await gone.exchange.whole;
    const from = Date.now();
    gone.wire.close();
    await aborted(gone.exchange);
    await probe.released();
    assert.ok(Date.now() - from < within(1000));
    const half = await probe.send(chat());
    await half.exchange.whole;
    half.wire.end();
    const interim = await half.wire.response();
    assert.equal(interim.status, 102);
    await sleep(within(150)); // the verdict has fallen by then
    await probe.held(1);
    half.exchange.reply('{"n":1}');
    assert.deepEqual((await half.wire.response()).json(), { n: 1 });
    await half.wire.until('the close', () => half.wire.closed);
});
rowsOn(() => probe)('H131', 'probe: an HTTP/1.0 client gets no 1xx', async () => {
    const { wire, exchange } = await probe.send(`POST ${CHAT} HTTP/1.0\r\nContent-Length: ${chatBody.length}\r\n\r\n${chatBody}`);
    await exchange.whole;
    wire.end();
    await probe.turn();
    await probe.held(1);
    exchange.reply('{"n":1}');
    assert.deepEqual((await wire.response()).json(), { n: 1 });
});

row('H134', 'a client that closes behind [DONE]: complete, and the upstream is read to its end for the pool', async () => {
    for (const leave of ['end', 'reset']) {
        const { wire, exchange } = await streaming();
        exchange.chunk('data: [DONE]\n\n');
        await wire.until('[DONE]', () => wire.rest.includes('[DONE]'));
        const address = `127.0.0.1:${wire.socket.localPort}`;
        wire[leave]();
        await stage.turn();
        await stage.held(1);
        exchange.last();
        const line = await stage.gate.waitForLog((l) => l.event === 'call' && l.client === address);
        assert.equal(line.reason, 'done');
        await stage.released();
        const next = await stage.send(chat());
        assert.equal(next.exchange.wire, exchange.wire, 'the connection is used again');
        next.exchange.reply();
        await next.wire.response();
        wire.close();
    }
});
row('H134', 'an upstream that leaves the connection open behind [DONE] has done_grace', async () => {
    const { wire, exchange } = await streaming();
    exchange.chunk('data: [DONE]\n\n');
    await wire.until('an end', () => wire.ended || wire.closed);
    assert.ok(!wire.bytes.includes('\r\n0\r\n\r\n') && !wire.bytes.includes('error'));
    await stage.released();
    await aborted(exchange);
});

row('H135', 'an HTTP/1.0 client gets a stream without chunks, ended by the close', async () => {
    for (const field of ['', 'Connection: keep-alive\r\n']) {
        const { wire, exchange } = await stage.send(`POST ${CHAT} HTTP/1.0\r\n${field}Content-Length: ${chatBody.length}\r\n\r\n${chatBody}`);
        await exchange.whole;
        exchange.write('HTTP/1.1 103 Early Hints\r\n\r\n').stream().chunk(EVENT);
        await wire.until('the event', () => wire.rest.includes(EVENT));
        await stage.held(1);
        exchange.chunk(EVENT).last();
        const response = await wire.response();
        assert.equal(response.by, 'eof');
        assert.equal(response.body.toString(), EVENT + EVENT);
        assert.equal(response.value('transfer-encoding'), undefined);
        assert.equal(response.value('connection'), 'close');
        await wire.closesCleanly();
    }
});
row('H135', 'an HTTP/1.0 client that keeps its connection, where the length is known', async () => {
    const { wire, exchange } = await stage.send('GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n');
    exchange.reply();
    assert.equal((await wire.response()).value('connection'), 'keep-alive');
    const next = await stage.send('GET /v1/models HTTP/1.0\r\n\r\n', { wire });
    next.exchange.reply();
    assert.equal((await wire.response()).value('connection'), 'close');
    await wire.closesCleanly();
});

row('H136', 'a pipelined request waits for its turn, with a lease of its own', async () => {
    const { wire, exchange } = await streaming();
    const { sent } = { sent: stage.up.requests };
    wire.write(chat());
    await stage.turn();
    await stage.held(1);
    assert.equal(stage.up.requests, sent);
    exchange.last();
    await wire.response();
    const next = await stage.up.next();
    await stage.held(1);
    next.reply('{"n":2}');
    assert.deepEqual((await wire.response()).json(), { n: 2 });
});
row('H136', '64 KiB of them, in order', async () => {
    const { wire, exchange } = await streaming();
    const many = 70;
    wire.write(Array.from({ length: many }, (_, i) => get(`/v1/models/${i}`, `X: ${'y'.repeat(1000)}`)).join(''));
    await stage.turn();
    exchange.last();
    await wire.response();
    for (let i = 0; i < many; i++) {
        const next = await stage.up.next();
        assert.equal(next.start, `GET /v1/models/${i} HTTP/1.1`);
        next.reply(`{"n":${i}}`);
        assert.deepEqual((await wire.response()).json(), { n: i });
    }
    assert.ok(wire.isQuiet());
});
row('H136', 'behind Connection: close they are dropped', async () => {
    const { wire, exchange } = await stage.send(chat('Connection: close') + get('/v1/models/dropped'));
    await exchange.whole;
    const sent = stage.up.requests;
    exchange.reply();
    assert.equal((await wire.response()).value('connection'), 'close');
    await wire.closesCleanly();
    assert.equal(stage.up.requests, sent);
});

row('H137', 'a 413 during an upload of 30 MB is seen by fetch, and no second upload is made', async () => {
    for (const target of [CHAT, '/plain/x']) {
        const from = stage.gate.log.length;
        const body = new ReadableStream({
            start() { this.left = 30; },
            pull(controller) {
                controller.enqueue(new Uint8Array(1 << 20).fill(0x20));
                if (--this.left === 0)
                    controller.close();
            },
        });
        const response = await fetch(`${stage.gate.url}${target}`, { method: 'POST', body, duplex: 'half', headers: { 'content-type': 'application/json' } });
        assert.equal(response.status, 413);
        assert.equal((await response.json()).error.code, 'body_too_large');
        const large = await fetch(`${stage.gate.url}${target}`, { method: 'POST', body: new Uint8Array(30 << 20), headers: { 'content-type': 'application/json' } });
        assert.equal(large.status, 413);
        await large.text();
        const uploads = () => stage.gate.log.slice(from).filter((l) => l.event === 'call' && l.path === target && l.status === 413).length;
        await waitUntil('both are in the log', () => uploads() >= 2, 8000);
        assert.equal(uploads(), 2);
    }
    await stage.released();
    await stage.turn();
    stage.up.forget();
});
row('H137', 'what comes behind an error is read within bounds of bytes', async () => {
    const wire = await stage.open();
    wire.write(`POST ${CHAT} HTTP/1.1\r\nHost: gate\r\nContent-Length: 9999999999\r\n\r\n`);
    assertOwnAnswer(await wire.response(), 413, { close: true });
    const part = Buffer.alloc(1 << 20);
    let sent = 0;
    const push = () => {
        while (!wire.closed && wire.error === null && sent < 200 << 20 && wire.socket.write(part))
            sent += part.length;
    };
    wire.socket.on('drain', push);
    push();
    await wire.until('the connection is broken off', () => wire.closed || wire.error !== null);
    assert.ok(sent < 100 << 20, `${sent}`);
});

row('H139', 'an empty chunk of our own never ends a body', async () => {
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    exchange.stream();
    for (const piece of ['1', '\r\n', 'a', '\r', '\n2;x=', 'y\r\n', 'b', 'c', '\r\n', '0', '\r\n', '\r', '\n']) {
        exchange.write(piece);
        await stage.turn();
    }
    const response = await wire.response();
    assert.equal(response.body.toString(), 'abc');
    assert.ok(response.chunks.every((chunk) => chunk.length > 0));
    assert.ok(wire.isQuiet());
});

rowsOn(() => drain)('H128', 'on_client_gone = drain: the lease is held until the upstream is done', async () => {
    const { wire, exchange } = await streaming(drain);
    wire.reset();
    await drain.turn();
    exchange.chunk(EVENT);
    await drain.held(1);
    exchange.last();
    await drain.released();
    const next = await drain.send(chat());
    assert.equal(next.exchange.wire, exchange.wire);
    next.exchange.reply();
    await next.wire.response();
});

rowsOn(() => drain)('H128', 'on_client_gone = drain: a tunnel that comes when nobody is there any more is none', async () => {
    const { wire, exchange } = await drain.send(get('/v1/realtime?model=m1', 'Connection: Upgrade', 'Upgrade: websocket', 'Sec-WebSocket-Version: 13', 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=='));
    wire.reset();
    await drain.turn();
    await drain.held(1);
    exchange.write('HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n');
    exchange.wire.end();
    await drain.released();
    const next = await drain.send(chat());
    next.exchange.reply();
    assert.equal((await next.wire.response()).status, 200);
});
