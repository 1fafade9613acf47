// http-tls.test.mjs - TLS on both sides: rows H059, H133 and H157 to H166 of HTTP-CASES.md.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { copyFileSync, writeFileSync, readFileSync } from 'node:fs';
import net from 'node:net';
import path from 'node:path';
import { after, before } from 'node:test';
import tls from 'node:tls';

import { directory, waitUntil, within } from './harness.mjs';
import { assertOwnAnswer, Certificates, chat, connect, get, rowsOn, Stage } from './http-tools.mjs';

const EVENT = 'data: {"a":1}\n\n';
const WS = get('/v1/realtime?model=m1', 'Connection: Upgrade', 'Upgrade: websocket', 'Sec-WebSocket-Version: 13', 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==');
let certificates, server, stage, files;
const row = rowsOn(() => stage);

// One stage with a plain listener (its first), a TLS listener, and an upstream that is called by name over TLS.
before(async () => {
    certificates = new Certificates();
    server = certificates.issue('server', 'DNS:localhost,IP:127.0.0.1');
    files = { tls_cert: path.join(directory, 'live.pem'), tls_key: path.join(directory, 'live.key') };
    copyFileSync(server.cert, files.tls_cert);
    copyFileSync(server.key, files.tls_key);
    stage = await Stage.start({
        url: (up) => `https://localhost:${up.port}`,
        upstream: { tls: { ...server.pem(), ALPNProtocols: ['http/1.1'] } },
        llm: { tls_ca: certificates.ca.cert },
        listen: { '127.0.0.1:0': {}, '127.0.0.2:0': files },
        client: { handshake_timeout: `${within(400)}ms` },
    });
});
after(() => stage.stop());

const tlsPort = () => stage.gate.ports[1];
const secure = (more = {}) => ({ port: tlsPort(), host: '127.0.0.2', tls: { ca: readFileSync(certificates.ca.cert), servername: 'localhost', ...more } });
const rawTls = () => connect(tlsPort(), { host: '127.0.0.2' });

// A gate towards an upstream that speaks TLS in some other way; calls end as `expected` says.
async function towards({ upstream = {}, url, llm = {} }, body) {
    const own = await Stage.start({ url: url ?? ((up) => `https://localhost:${up.port}`), upstream, llm: { tls_ca: certificates.ca.cert, ...llm } });
    try {
        await own.mark();
        await body(own);
        await own.released();
    } finally {
        await own.stop();
    }
}

async function unreachable(own) {
    const wire = await own.open();
    wire.write(chat());
    assertOwnAnswer(await wire.response(), 502, { reason: 'upstream_unreachable', close: false });
    assert.equal(own.up.requests, 0, 'nothing was sent in the clear');
    await own.released();
    return own.gate.waitForLog((l) => l.event === 'call');
}

row('H059', 'a ClientHello in half, or nothing of it: closed at the handshake`s deadline', async () => {
    const lines = stage.gate.log.length;
    const silent = await rawTls(), half = await rawTls();
    half.write(Buffer.from([0x16, 3, 1, 2, 0, 1, 0, 1]));
    for (const wire of [silent, half])
        await wire.until('the close', () => wire.ended || wire.closed);
    await stage.neverTaken();
    assert.deepEqual(stage.gate.log.slice(lines).filter((l) => l.level === 'error'), []);
});

row('H133', 'FIN without close_notify: the client is gone', async () => {
    const socket = net.connect(tlsPort(), '127.0.0.2');
    const inner = tls.connect({ socket, ca: readFileSync(certificates.ca.cert), servername: 'localhost' });
    inner.on('error', () => {});
    await new Promise((done) => inner.once('secureConnect', done));
    inner.write(chat());
    const exchange = await stage.up.next();
    await exchange.whole;
    exchange.stream().chunk(EVENT);
    await new Promise((done) => inner.once('data', done));
    socket._handle.shutdown(new (process.binding('stream_wrap').ShutdownWrap)());
    await exchange.wire.until('aborted', () => exchange.wire.ended || exchange.wire.closed);
    await stage.released();
    socket.destroy();
});

row('H157', 'an upstream TLS port that speaks plain HTTP', () => towards({
    upstream: { onSocket: (socket) => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok') } }, unreachable));

row('H158', 'SNI is the configured name, ALPN offers http/1.1 alone', async () => {
    const { wire, exchange } = await stage.send(chat());
    assert.equal(exchange.wire.socket.servername, 'localhost');
    assert.equal(exchange.wire.socket.alpnProtocol, 'http/1.1');
    exchange.reply();
    assert.equal((await wire.response()).status, 200);
});
row('H158', 'an address: no SNI, verified by the IP in the certificate', () => towards({
    url: (up) => `https://127.0.0.1:${up.port}`, upstream: { tls: server.pem() } }, async (own) => {
    const { wire, exchange } = await own.send(chat());
    assert.equal(exchange.wire.socket.servername, false);
    exchange.reply();
    assert.equal((await wire.response()).status, 200);
}));
for (const [what, options] of [
    ['another name', () => ({ upstream: { tls: certificates.issue('other', 'DNS:other.example').pem() } })],
    ['a name where an address is called', () => ({ url: (up) => `https://127.0.0.1:${up.port}`, upstream: { tls: certificates.issue('name', 'DNS:localhost').pem() } })],
    ['the right name by an unknown CA', () => ({ upstream: { tls: new Certificates().issue('x', 'DNS:localhost').pem() } })],
])
    row('H158', `a certificate for ${what}: 502`, () => towards(options(), unreachable));

row('H159', 'a bad client does not fail its neighbours', async () => {
    const { wire, exchange } = await stage.send(chat(), secure());
    await exchange.whole;
    exchange.stream();
    for (let i = 0; i < 10; i++) {
        const bad = await rawTls();
        bad.write(Buffer.from(i % 2 === 0 ? 'no TLS at all, certainly' : [0x16, 3, 1, 0, 4, 1, 0, 0, 0]));
        await bad.until('it is closed', () => bad.ended || bad.closed);
        exchange.chunk(EVENT);
        await wire.until('the event', () => wire.rest.split(EVENT).length === i + 2);
    }
    exchange.last();
    assert.equal((await wire.response()).body.toString(), EVENT.repeat(10));
});

row('H160', 'tickets and key updates on an idle connection are consumed, and sessions are resumed', async () => {
    const first = await stage.send(chat());
    first.exchange.reply();
    await first.wire.response();
    await stage.turn();
    const second = await stage.send(chat());
    assert.equal(second.exchange.wire, first.exchange.wire, 'the pooled connection with its tickets is used again');
    second.exchange.write('HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n');
    await second.wire.response();
    const third = await stage.send(chat());
    assert.notEqual(third.exchange.wire, first.exchange.wire);
    assert.equal(third.exchange.wire.socket.isSessionReused(), true);
    third.exchange.reply();
    await third.wire.response();
});

row('H161', 'TLS 1.2 renegotiation by the client is refused', async () => {
    const wire = await stage.open(secure({ maxVersion: 'TLSv1.2' }));
    assert.equal(wire.socket.getProtocol(), 'TLSv1.2');
    const refused = new Promise((done) => {
        wire.socket.on('error', () => done(true));
        wire.socket.renegotiate({ rejectUnauthorized: false }, (error) => done(error !== null));
        wire.socket.on('close', () => done(true));
    });
    assert.equal(await refused, true);
    await stage.neverTaken();
});

row('H163', 'certificates are replaced: new handshakes use the new ones, running calls go on', async () => {
    const { wire, exchange } = await stage.send(chat(), secure());
    await exchange.whole;
    exchange.stream().chunk(EVENT);
    await wire.until('the event', () => wire.rest.includes(EVENT));
    const old = wire.socket.getPeerCertificate().fingerprint256;
    const fresh = certificates.issue('fresh', 'DNS:localhost');
    copyFileSync(fresh.cert, files.tls_cert);
    copyFileSync(fresh.key, files.tls_key);
    assert.match((await stage.gate.reload()).line.message, /is in force/);
    const next = await waitUntil('a handshake with the new one', async () => {
        const candidate = await stage.open(secure());
        if (candidate.socket.getPeerCertificate().fingerprint256 !== old)
            return candidate;
        candidate.close();
        return null;
    }, 8000);
    const second = await stage.send(chat(), { wire: next });
    assert.notEqual(second.exchange.wire, exchange.wire);
    second.exchange.reply();
    assert.equal((await next.response()).status, 200);
    exchange.chunk(EVENT).last();
    assert.equal((await wire.response()).body.toString(), EVENT + EVENT);
});
row('H154', 'a key that does not fit, a file that cannot be read: the old ones stay', async () => {
    const before_ = [readFileSync(files.tls_cert), readFileSync(files.tls_key)];
    for (const spoil of [() => writeFileSync(files.tls_key, readFileSync(certificates.ca.key)), () => writeFileSync(files.tls_cert, 'no certificate')]) {
        spoil();
        const { line, lines } = await stage.gate.reload();
        assert.match(line.message, /old configuration stays/);
        assert.ok(lines.some((l) => l.level === 'error' && /live\./.test(l.message)), JSON.stringify(lines));
        const { wire, exchange } = await stage.send(chat(), secure());
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
        writeFileSync(files.tls_cert, before_[0]);
        writeFileSync(files.tls_key, before_[1]);
    }
});

row('H164', 'plain HTTP to the TLS port is closed, a ClientHello to the plain port is a 400', async () => {
    const plain = await rawTls();
    plain.write(get('/v1/models'));
    await plain.until('the close', () => plain.ended || plain.closed);
    assert.ok(!plain.rest.includes('HTTP/1.1 200'));
    const hello = await stage.open();
    hello.write(Buffer.from([0x16, 3, 1, 0, 0xf0, 1, 0, 0, 0xec, 3, 3, ...Array(240).fill(7), 0x0d, 0x0a]));
    assertOwnAnswer(await hello.response(), 400, { close: true });
    await hello.closesCleanly();
    await stage.neverTaken();
});
row('H164', 'early data is not offered', async () => {
    const out = execFileSync('openssl', ['s_client', '-connect', `127.0.0.2:${tlsPort()}`, '-servername', 'localhost', '-CAfile', certificates.ca.cert], { input: 'GET /nowhere HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n', stdio: ['pipe', 'pipe', 'pipe'] }).toString();
    assert.doesNotMatch(out, /Max Early Data: [1-9]/);
});
row('H003', 'an HTTP/2 preface on the TLS port; ALPN never says h2', async () => {
    const wire = await stage.open(secure({ ALPNProtocols: ['h2', 'http/1.1'] }));
    assert.equal(wire.socket.alpnProtocol, 'http/1.1');
    wire.write('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n');
    assertOwnAnswer(await wire.response(), [400, 505], { close: true });
    await wire.closesCleanly();
    await stage.neverTaken();
});

row('H165', 'records of a byte, records of all sizes, both ways: nothing lost or doubled', async () => {
    const { wire, exchange } = await stage.send(WS, secure());
    exchange.write('HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n');
    assert.equal((await wire.response()).status, 101);
    let sent = '';
    for (let i = 0; i < 600; i++) {
        const piece = String.fromCharCode(33 + i % 90).repeat(i < 300 ? 1 : i * 37);
        sent += piece;
        wire.write(piece);
        exchange.wire.write(piece);
    }
    await exchange.wire.until('all of it', () => exchange.wire.bytes.length - exchange.wire.at >= sent.length);
    await wire.until('all of it', () => wire.bytes.length - wire.at >= sent.length);
    assert.ok(exchange.wire.rest === sent && wire.rest === sent);
    await stage.held(1);
    wire.end();
    exchange.wire.end();
    await stage.released();
});

row('H166', 'the gateway`s close is close_notify, then FIN', async () => {
    const { wire, exchange } = await stage.send(chat('Connection: close'), secure());
    exchange.reply();
    assert.equal((await wire.response()).value('connection'), 'close');
    await wire.closesCleanly();
    const idle = await stage.send(chat(), secure());
    idle.exchange.write('HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nabc');
    idle.exchange.wire.end();
    assert.equal((await idle.wire.response()).body.toString(), 'abc', 'a body ended by close_notify is whole');
});
row('H112', 'a body without length ended by a TLS connection that just goes is cut', async () => {
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    exchange.write('HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nabc');
    await wire.until('the bytes', () => wire.rest.includes('abc'));
    exchange.wire.socket._parent?.destroy();
    for (const socket of stage.up.sockets)
        socket.destroy();
    assert.equal(await wire.ending(), 'reset');
    assert.ok(!wire.rest.includes('\r\n0\r\n'));
    await stage.released();
});
