// http-upgrade.test.mjs - WebSockets and other upgrades: rows H141 to H149 of HTTP-CASES.md.
import assert from 'node:assert/strict';
import { after, before } from 'node:test';

import { assertOwnAnswer, chat, get, rowsOn, Stage } from './http-tools.mjs';

let stage;
const row = rowsOn(() => stage);

before(async () => {
    stage = await Stage.start();
});
after(() => stage.stop());

const WS = ['Connection: Upgrade', 'Upgrade: websocket', 'Sec-WebSocket-Version: 13', 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=='];
const SWITCH = 'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n';
const realtime = (...fields) => get('/v1/realtime?model=m1', ...WS, ...fields);

async function tunnel(bytes = realtime(), first = '') {
    const { wire, exchange } = await stage.send(bytes);
    exchange.write(SWITCH + first);
    const response = await wire.response();
    assert.equal(response.status, 101);
    return { wire, exchange, response, up: exchange.wire };
}

async function finish({ wire, up }) {
    up.end();
    await wire.until('the FIN', () => wire.ended);
    wire.end();
    await stage.released();
}

row('H141', 'a WebSocket: its fields are made anew, then bytes pass, under one lease', async () => {
    const t = await tunnel(realtime('Sec-WebSocket-Extensions: permessage-deflate', 'Keep-Alive: x'));
    assert.equal(t.exchange.start, 'GET /v1/realtime?model=m1 HTTP/1.1');
    assert.deepEqual(t.exchange.all('connection').map((v) => v.toLowerCase()), ['upgrade']);
    assert.deepEqual(t.exchange.all('upgrade'), ['websocket']);
    for (const field of WS.slice(2))
        assert.ok(t.exchange.text.includes(`${field}\r\n`));
    assert.equal(t.exchange.value('sec-websocket-extensions'), 'permessage-deflate');
    assert.equal(t.exchange.value('keep-alive'), undefined);
    assert.equal(t.response.value('upgrade'), 'websocket');
    assert.equal(t.response.value('connection').toLowerCase(), 'upgrade');
    assert.equal(t.response.value('sec-websocket-accept'), 's3pPLMBiTxaQ9kYGzzhZRbK+xOo=');
    const bytes = Buffer.from(Array.from({ length: 256 }, (_, i) => i)).toString('latin1');
    for (let i = 0; i < 5; i++) {
        t.wire.write(bytes);
        t.up.write(bytes);
    }
    await t.up.until('all of it', () => t.up.rest === bytes.repeat(5));
    await t.wire.until('all of it', () => t.wire.rest === bytes.repeat(5));
    await stage.held(1);
    t.wire.end();
    await t.up.until('the FIN', () => t.up.ended);
    await stage.held(1);
    t.up.end();
    await t.wire.until('the FIN', () => t.wire.ended);
    await stage.released();
});
row('H141', 'much in both directions at once', async () => {
    const t = await tunnel(), n = 8 << 20;
    t.wire.write(Buffer.alloc(n, 0x61));
    t.up.write(Buffer.alloc(n, 0x62));
    await t.up.until('all of it', () => t.up.bytes.length - t.up.at === n);
    await t.wire.until('all of it', () => t.wire.bytes.length - t.wire.at === n);
    await finish(t);
});

row('H142', 'any other upgrade is a plain call', async () => {
    for (const fields of [['Connection: Upgrade, HTTP2-Settings', 'Upgrade: h2c', 'HTTP2-Settings: AAMAAABkAAQAAP__'], ['Connection: Upgrade', 'Upgrade: foo'], ['Connection: Upgrade', 'Upgrade: websocket, h2c'],
        ['Connection: Upgrade', 'Upgrade: websocket', 'Upgrade: h2c']]) {
        const { wire, exchange } = await stage.send(get('/v1/models', ...fields));
        for (const name of ['upgrade', 'http2-settings', 'connection'])
            assert.equal(exchange.value(name), undefined);
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
        wire.close();
    }
});
row('H142', 'a 101 that nobody asked for, or to something else, is no answer', async () => {
    for (const [request, raw] of [[get('/v1/models'), SWITCH], [realtime(), SWITCH.replace('Upgrade: websocket', 'Upgrade: h2c')], [realtime(), 'HTTP/1.1 101 X\r\n\r\n']]) {
        const { wire, exchange } = await stage.send(request);
        exchange.write(raw);
        assertOwnAnswer(await wire.response(), 502, { reason: 'upstream_invalid' });
        await stage.released();
        wire.close();
    }
});

row('H143', 'bytes behind the request wait for the 101', async () => {
    const { wire, exchange } = await stage.send(realtime() + 'frame');
    await stage.turn();
    assert.equal(exchange.wire.rest, '');
    exchange.write(SWITCH);
    assert.equal((await wire.response()).status, 101);
    await exchange.wire.until('the frame', () => exchange.wire.rest === 'frame');
    await finish({ wire, up: exchange.wire });
});
row('H143', 'on any other status they are no request', async () => {
    for (const status of ['200 OK', '403 Forbidden', '426 Upgrade Required']) {
        const { wire, exchange } = await stage.send(realtime() + get('/v1/smuggled'));
        const sent = stage.up.requests;
        exchange.reply('{}', { status });
        const response = await wire.response();
        assert.equal(response.status, Number(status.slice(0, 3)));
        assert.equal(response.value('connection'), 'close');
        await wire.closesCleanly();
        assert.equal(stage.up.requests, sent);
        await stage.released();
    }
});

row('H145', 'first frames in the segment of the 101, and of the request', async () => {
    const t = await tunnel(realtime() + 'c1', 'u1');
    t.up.write('u2');
    t.wire.write('c2');
    await t.wire.until('both', () => t.wire.rest === 'u1u2');
    await t.up.until('both', () => t.up.rest === 'c1c2');
    await finish(t);
});

row('H146', 'an upgrade with a body or by POST is refused', async () => {
    for (const bytes of [realtime('Content-Length: 3') + 'abc', realtime('Transfer-Encoding: chunked') + '0\r\n\r\n', realtime('Content-Length: 0').replace('GET', 'POST'), realtime().replace('GET', 'POST')])
        await stage.refuses(bytes, 400, { reason: 'bad_upgrade', splits: false });
});
row('H146', 'without the Connection token, or on HTTP/1.0, it is a plain request', async () => {
    for (const bytes of [realtime().replace('Connection: Upgrade\r\n', ''), realtime().replace('HTTP/1.1', 'HTTP/1.0')]) {
        const { wire, exchange } = await stage.send(bytes);
        assert.equal(exchange.value('upgrade'), undefined);
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
        wire.close();
    }
});

row('H147', 'one side half-closes: the other goes on', async () => {
    const first = await tunnel();
    first.up.write('last words').end();
    await first.wire.until('words and FIN', () => first.wire.rest === 'last words' && first.wire.ended);
    first.wire.write('still here');
    await first.up.until('still here', () => first.up.rest === 'still here');
    await stage.held(1);
    first.wire.end();
    await first.up.until('the FIN', () => first.up.ended);
    await stage.released();
    const second = await tunnel();
    second.wire.write('last words').end();
    await second.up.until('words and FIN', () => second.up.rest === 'last words' && second.up.ended);
    second.up.write('still here');
    await second.wire.until('still here', () => second.wire.rest === 'still here');
    await stage.held(1);
    await finish(second);
});
row('H147', 'an RST of one side ends both', async () => {
    for (const side of ['wire', 'up']) {
        const t = await tunnel(), other = side === 'wire' ? t.up : t.wire;
        t[side].reset();
        await other.until('an end', () => other.ended || other.closed);
        await stage.released();
    }
});

row('H149', 'subprotocols pass, and no secret of them is in a log or metric', async () => {
    const { wire, exchange } = await stage.send(get('/openai/realtime?deployment=d&api-key=SECRET1', ...WS, 'Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.SECRET2', 'api-key: SECRET3'));
    assert.equal(exchange.value('sec-websocket-protocol'), 'realtime, openai-insecure-api-key.SECRET2');
    assert.match(exchange.start, /api-key=SECRET1/);
    exchange.write(SWITCH.replace('\r\n\r\n', '\r\nSec-WebSocket-Protocol: realtime\r\n\r\n'));
    assert.equal((await wire.response()).value('sec-websocket-protocol'), 'realtime');
    await stage.held(1);
    const seen = await Promise.all(['/metrics', '/api/calls', '/api/limits', '/'].map((target) => stage.gate.admin(target)));
    const address = `127.0.0.1:${wire.socket.localPort}`;
    await finish({ wire, up: exchange.wire });
    await stage.gate.waitForLog((l) => l.event === 'call' && l.client === address);
    for (const text of [...seen.map((s) => s.text), JSON.stringify(stage.gate.log)])
        assert.ok(!/SECRET/.test(text), /.{60}SECRET./.exec(text)?.[0]);
});
