// http-requests.test.mjs - request lines and headers: rows H001 to H035 of HTTP-CASES.md.
import assert from 'node:assert/strict';
import path from 'node:path';
import { writeFileSync } from 'node:fs';
import { after, before } from 'node:test';

import { directory, runGate } from './harness.mjs';
import { assertGrowth, assertOwnAnswer, CHAT, chat, chatBody, get, post, rowsOn, rssBytes, Stage } from './http-tools.mjs';

let stage;
const row = rowsOn(() => stage);

before(async () => {
    stage = await Stage.start({
        tenant: { from: 'header:x-tenant-id' },
        limit: {
            all: { concurrency: 1000 },
            models: { model: ['*'], upstream: ['llm'], per: ['model'], concurrency: 500 },
            tenants: { per: ['tenant'], upstream: ['plain'], concurrency: 500 },
        },
    });
});
after(() => stage.stop());

const head = (...lines) => `${lines.join('\r\n')}\r\n\r\n`;
const withFields = (...lines) => head('GET /v1/models HTTP/1.1', 'Host: gate', ...lines);

// Each input of its own is refused with one of these statuses.
function refused(id, name, statuses, inputs, expected = {}) {
    row(id, name, async () => {
        for (const input of inputs)
            await stage.refuses(input, statuses, expected);
    });
}

// What reaches the upstream of one request, which is then answered.
async function passed(bytes, options) {
    const { wire, exchange } = await stage.send(bytes, options);
    const message = await exchange.whole;
    exchange.reply();
    const response = await wire.response();
    assert.equal(response.status, 200);
    return { wire, exchange, message, response };
}

// --- the request line -------------------------------------------------------------------------------------------

refused('H001', 'a line ended by LF alone is refused, whichever line it is', 400, [
    'GET / HTTP/1.1\nHost: a\r\n\r\n',
    'GET / HTTP/1.1\r\nHost: a\n\r\n',
    'GET / HTTP/1.1\r\nHost: a\r\n\n',
    'POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\nabc',
], { reason: 'bad_request' });

refused('H002', 'versions other than 1.0 and 1.1 are refused', 505,
    ['HTTP/2.0', 'HTTP/0.9', 'HTTP/1.2', 'HTTP/3.0'].map((version) => head(`GET / ${version}`, 'Host: a')), { reason: 'version' });

refused('H002', 'what is not HTTP is refused', [400, 505], [
    'GET /\r\n',
    head('OPTIONS rtsp://a/ RTSP/1.0', 'Host: a'),
    head('SOURCE / ICE/1.0', 'Host: a'),
    head('GET / HTTP/11', 'Host: a'),
    head('GET / http/1.1', 'Host: a'),
]);

refused('H003', 'an HTTP/2 preface is refused', [400, 505], ['PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n']);

row('H004', 'a target over the cap, one byte a write, is refused in bounded memory', async () => {
    const before_ = rssBytes(stage.gate.pid);
    const wire = await stage.open();
    wire.write('GET /');
    for (let i = 0; i < 66000 && wire.received === 0; i++) {
        wire.write('a');
        if (i % 64 === 0)
            await new Promise(setImmediate);
    }
    assertOwnAnswer(await wire.response(), 414, { reason: 'target_too_long', close: true });
    await wire.closesCleanly();
    assertGrowth(stage.gate.pid, before_, 4 << 20);
    await stage.neverTaken();
});

refused('H005', 'absolute form: an authority that is not the Host, or has userinfo, is refused', 400, [
    head('GET http://b/v1/models HTTP/1.1', 'Host: a'),
    head('GET https://user:pw@b:8/x HTTP/1.1', 'Host: b:8'),
    head('GET http://user:pw@b/v1/models HTTP/1.1', 'Host: b'),
    head('GET ftp://a/v1/models HTTP/1.1', 'Host: a'),
]);

row('H005', 'absolute form that agrees with Host: its path goes to the configured upstream alone', async () => {
    const { exchange } = await passed(`POST http://gate/v1/chat/completions HTTP/1.1\r\nHost: gate\r\nContent-Length: ${chatBody.length}\r\n\r\n${chatBody}`);
    assert.equal(exchange.start, 'POST /v1/chat/completions HTTP/1.1');
    assert.deepEqual(exchange.all('host'), [`127.0.0.1:${stage.up.port}`]);
});

refused('H007', 'CONNECT never becomes a tunnel', [405, 501], [head('CONNECT api:443 HTTP/1.1', 'Host: api:443')]);
refused('H007', 'authority form is for CONNECT alone', 400, [head('GET api:443 HTTP/1.1', 'Host: api:443')]);

row('H008', '`OPTIONS *` is answered here', async () => {
    const wire = await stage.open();
    wire.write(head('OPTIONS * HTTP/1.1', 'Host: gate'));
    const response = await wire.response();
    assert.ok([204, 404].includes(response.status));
    await stage.neverTaken();
});
refused('H008', '`*` is for OPTIONS alone', 400, [head('GET * HTTP/1.1', 'Host: gate')], { reason: 'bad_target' });

refused('H009', 'Host: none, two, or one that is no authority', 400, [
    'GET / HTTP/1.1\r\n\r\n',
    ...[['Host: a', 'Host: a'], ['Host: a', 'Host: b'], ['Host:'], ['Host: a b'], ['Host: a/../b'], ['Host: u@a'], ['Host: u:p@a'],
        ['Host: a:'], ['Host: a:99999'], ['Host: a:8x'], ['Host: a,b'], ['Host: [::1'], ['Host: a b/../@c']]
        .map((lines) => head('GET / HTTP/1.1', ...lines)),
], { reason: 'bad_host' });

refused('H010', 'unknown and lower-case methods', [501, 400], [head('FOO / HTTP/1.1', 'Host: a'), head('get / HTTP/1.1', 'Host: a')]);

refused('H011', 'TRACE would echo credentials', 405, [head('TRACE /v1/models HTTP/1.1', 'Host: a', 'Authorization: Bearer SECRET')]);

row('H013', 'a few CRLFs before a request line are skipped', async () => {
    for (const crlfs of ['\r\n', '\r\n\r\n'])
        await passed(crlfs + get('/v1/models'));
});
refused('H013', 'endless CRLFs are not', 400, ['\r\n'.repeat(40)], { splits: false });
row('H013', 'nor between two requests of a connection', async () => {
    const { wire } = await passed(get('/v1/models'));
    await stage.mark();
    for (let i = 0; i < 40 && wire.received > 0; i++)
        wire.write('\r\n');
    assertOwnAnswer(await wire.response(), 400, { close: true });
    await wire.closesCleanly();
    await stage.neverTaken();
});

row('H014', 'the target goes on byte for byte, and is routed by the same bytes', async () => {
    for (const target of ['/v1/../admin', '/v1/%2e%2e/plain', '/v1/models%2Fa', '/v1/x;y', '/v1//x', '/v1/./x?a=%20&b=/../', '/v1/../plain/x', '/v1/"<>|^`{}\\']) {
        const { exchange } = await passed(get(target));
        assert.equal(exchange.start, `GET ${target} HTTP/1.1`);
        assert.equal(exchange.value('x-upstream'), 'llm');
    }
    await stage.mark();
    for (const target of ['//evil/v1/x', '/nowhere', '/V1/models', '/%761/models', '/./v1/models']) {
        const wire = await stage.open();
        wire.write(get(target));
        assertOwnAnswer(await wire.response(), 404, { reason: 'no_route', close: false });
    }
    await stage.neverTaken();
});

refused('H015', 'one space between method, target and version, and no TAB', 400, [
    'GET  / HTTP/1.1', 'GET /  HTTP/1.1', 'GET\t/ HTTP/1.1', 'GET /\tHTTP/1.1', 'GET / HTTP/1.1 ', ' GET / HTTP/1.1', 'GET / a HTTP/1.1',
    'GET  HTTP/1.1', 'GET HTTP/1.1',
].map((line) => head(line, 'Host: a')));

// --- headers ----------------------------------------------------------------------------------------------------

refused('H016', 'white space before the colon', 400, [
    head('POST /v1/x HTTP/1.1', 'Host: a', 'Content-Length : 3') + 'abc',
    head('POST /v1/x HTTP/1.1', 'Host: a', 'Transfer-Encoding\t: chunked') + '0\r\n\r\n',
]);
row('H016', 'nor in a response', async () => {
    const { wire, exchange } = await stage.send(get('/v1/models'));
    exchange.write('HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\nabc');
    assertOwnAnswer(await wire.response(), 502, { reason: 'upstream_invalid' });
});

refused('H017', 'a bare CR in or behind a value', 400, [
    withFields('Dummy: x\rContent-Length: 3'), withFields('X:\rContent-Length: 3'), withFields('X: \rTransfer-Encoding: chunked'), withFields('X: y\r'),
    'GET / HTTP/1.1\rHost: a\r\n\r\n',
]);

refused('H019', 'obs-fold', 400, [
    withFields('X: y', ' z'), head('GET / HTTP/1.1', 'Host: a', ' Content-Length: 3'), withFields('Connection:', ' close'),
    withFields('X: y', '\tz'), withFields('X: y', ' '),
]);

refused('H020', 'a head that ends with CR CR', 400, ['GET / HTTP/1.1\r\nHost: a\r\n\rX', 'GET / HTTP/1.1\r\nHost: a\r\n\r\r\n']);

refused('H021', 'an empty name', 400, [withFields(': y'), withFields(':')]);

refused('H022', 'a name that is no token, a line without a colon', 400, [
    'foo bar: y', 'foo(: y', 'foo', 'f\u00e9: y', 'foo\0: y', 'foo@: y', '"foo": y', 'foo/: y',
].map((line) => withFields(line)));

refused('H023', 'white space between the request line and the first header', 400, [
    'GET / HTTP/1.1\r\n \r\nHost: a\r\n\r\n', 'GET / HTTP/1.1\r\n Host: a\r\n\r\n', 'GET / HTTP/1.1\r\n\tHost: a\r\n\r\n',
]);

refused('H025', 'too many bytes or too many lines', 431, [
    withFields(`X: ${'a'.repeat(66000)}`), withFields(...Array(9000).fill('a: b')), withFields(...Array(300).fill('a: b')), withFields(`${'a'.repeat(66000)}: b`),
], { reason: 'head_too_large', splits: false });
row('H025', 'a head without an end', async () => {
    const wire = await stage.open();
    wire.write('GET / HTTP/1.1\r\nHost: a\r\n');
    for (let i = 0; i < 4096 && wire.received === 0; i++) {
        wire.write(`X: ${'a'.repeat(1000)}\r\n`);
        await new Promise(setImmediate);
    }
    assertOwnAnswer(await wire.response(), 431, { close: true });
    await wire.closesCleanly();
    await stage.neverTaken();
});

refused('H026', 'Connection may not nominate what the request means or who sent it', 400,
    ['authorization', 'content-length', 'host', 'transfer-encoding', 'x-api-key', 'api-key', 'x-goog-api-key', 'cookie', 'content-type', 'x-forwarded-for']
        .map((name) => withFields(`Connection: close, ${name}`, 'Authorization: x')), { reason: 'bad_connection', splits: false });
row('H026', 'the gateway`s own fields are added behind the removal', async () => {
    const { exchange, wire } = await passed(withFields('Connection: close, x-upstream, x-leasegate-task', 'X-Upstream: mine', 'X-Leasegate-Task: t1'));
    assert.deepEqual(exchange.all('x-upstream'), ['llm']);
    assert.equal(exchange.value('x-leasegate-task'), undefined);
    await wire.closesCleanly();
});

row('H027', 'several Connection lines are one list', async () => {
    const { exchange } = await passed(withFields('Connection:', 'X-Secret: 1', 'Connection: x-secret', 'X-Open: 2'));
    assert.equal(exchange.value('x-secret'), undefined);
    assert.equal(exchange.value('x-open'), '2');
    assert.equal(exchange.value('connection'), undefined);
});

row('H028', 'close is seen behind and before white space and in any case', async () => {
    for (const value of ['close\t', 'TE , CLOSE', ' ,close,', 'keep-alive, close']) {
        const { wire, response } = await passed(withFields(`Connection: ${value}`));
        assert.equal(response.value('connection').toLowerCase(), 'close', value);
        await wire.closesCleanly();
    }
    const { wire, response } = await passed(withFields('Connection: closed'));
    assert.equal(response.value('connection'), undefined);
    assert.ok(wire.isQuiet());
});

row('H029', 'hop-by-hop fields that nobody nominated go no further, in either direction', async () => {
    const { wire, exchange } = await stage.send(post(CHAT, chatBody, 'Keep-Alive: timeout=5', 'TE: trailers', 'Trailer: x', 'Upgrade: foo',
        'HTTP2-Settings: AAMAAABk', 'Proxy-Connection: keep-alive', 'Proxy-Authorization: Basic SECRET', 'X-End: to-end'));
    const names = exchange.fields.map(([name]) => name.toLowerCase());
    assert.deepEqual(names.sort(), ['content-length', 'content-type', 'host', 'x-end', 'x-upstream']);
    await exchange.whole;
    exchange.reply('{}', { fields: ['Keep-Alive: timeout=5', 'Proxy-Connection: close', 'Trailer: x', 'Upgrade: h2c', 'Proxy-Authenticate: Basic', 'TE: x', 'X-End: to-end'] });
    const response = await wire.response();
    const seen = response.fields.map(([name]) => name.toLowerCase());
    for (const name of ['keep-alive', 'proxy-connection', 'trailer', 'upgrade', 'proxy-authenticate', 'te', 'connection', 'transfer-encoding'])
        assert.ok(!seen.includes(name), name);
    assert.equal(response.value('x-end'), 'to-end');
});
row('H029', 'Expect goes no further', async () => {
    const { exchange, wire } = await stage.send(post('/plain/x', 'abc', 'Expect: 100-continue'));
    assert.equal(exchange.value('expect'), undefined);
    assert.equal((await exchange.whole).body.toString(), 'abc');
    exchange.reply();
    let response = await wire.response();
    if (response.status === 100)
        response = await wire.response();
    assert.equal(response.status, 200);
});

row('H031', 'alias names are plain unknown fields', async () => {
    const { exchange, message } = await passed(post('/plain/x', 'abc', 'Transfer_Encoding: chunked', 'Content_Length: 99', 'X_Tenant_Id: evil', 'x.tenant.id: evil'));
    assert.equal(message.body.toString(), 'abc');
    assert.equal(exchange.value('transfer_encoding'), 'chunked');
    assert.equal(exchange.value('x_tenant_id'), 'evil');
    assert.deepEqual(await stage.scopes(), [['all', 'tenants/h-e3b0c44298fc1c149afbf4c8996fb924']]);
});

row('H032', 'forwarding fields pass as they are; the log stays one line of JSON', async () => {
    const id = 'a"b\\c\u00e9';
    const fields = ['X-Forwarded-For: 1.2.3.4, "x"', 'Forwarded: for="[::1]"', 'Via: 1.1 other', `X-Request-Id: ${id}`, `X-Long: ${'q"'.repeat(8000)}`];
    const { exchange, response } = await passed(get('/v1/models', ...fields));
    for (const field of fields)
        assert.ok(exchange.text.includes(`${field}\r\n`), field.slice(0, 40));
    assert.equal(response.status, 200);
    const line = await stage.gate.waitForLog((l) => l.event === 'call' && l.id?.startsWith('a"b\\c'));
    assert.equal(line.status, 200);
    assert.deepEqual(stage.gate.noise, [], 'every line of the log is JSON');
});
refused('H032', 'X-Request-Id of 64 KiB, or with a control character', [400, 431],
    [withFields(`X-Request-Id: ${'a'.repeat(65536)}`), withFields('X-Request-Id: a\x01b'), withFields('Via: a\0b')], { splits: false });
row('H032', 'Max-Forwards 0 of OPTIONS ends here', async () => {
    const wire = await stage.open();
    wire.write(head('OPTIONS /v1/models HTTP/1.1', 'Host: gate', 'Max-Forwards: 0'));
    const response = await wire.response();
    assert.ok(response.status < 500, `${response.status}`);
    await stage.neverTaken();
});

row('H033', 'a configured header value with a line end is an error with its line, at start and at reload', async () => {
    for (const value of ['a\\r\\nX: b', 'a\\n', 'key\\r']) {
        const text = stage.text().replace('value = "llm"', `value = "${value}"`);
        assert.notEqual(text, stage.text());
        const file = path.join(directory, 'bad-header.conf');
        writeFileSync(file, text);
        const line = text.split('\n').findIndex((l) => l.includes(value)) + 1;
        const { code, err } = await runGate('check', '-c', file);
        assert.equal(code, 78);
        assert.match(err, new RegExp(`bad-header.conf:${line}: `));
        stage.gate.write(text);
        const { lines, line: last } = await stage.gate.reload();
        assert.match(last.message, /old configuration stays/);
        assert.ok(lines.some((l) => l.message.includes(`:${line}:`)), JSON.stringify(lines));
        const { exchange } = await passed(chat());
        assert.equal(exchange.value('x-upstream'), 'llm');
    }
    stage.gate.write(stage.text());
});

row('H034', 'obs-text in values passes byte for byte, both ways', async () => {
    const value = 'caf\u00e9 \xff\xfe\x80\xc3(';
    const { wire, exchange } = await stage.send(get('/v1/models', `X-Name: ${value}`));
    assert.ok(exchange.text.includes(`X-Name: ${value}\r\n`));
    exchange.reply('{}', { fields: [] });
    await wire.response();
    const second = await stage.send(get('/v1/models', `X-Request-Id: ${value}`));
    second.exchange.write(Buffer.from(`HTTP/1.1 200 caf\u00e9\r\nX-Name: ${value}\r\nContent-Length: 0\r\n\r\n`, 'latin1'));
    const response = await second.wire.response();
    assert.ok(response.text.includes(`X-Name: ${value}\r\n`));
    assert.deepEqual(stage.gate.noise, []);
});

row('H035', 'a head cut at every byte is the same head', async () => {
    const bytes = post(CHAT, chatBody, 'X-A: 1', 'Connection: x-b', 'X-B: 2');
    for (let cut = 1; cut < bytes.length; cut++) {
        const wire = await stage.open();
        wire.write(bytes.slice(0, cut));
        await stage.turn();
        const { exchange } = await stage.send(bytes.slice(cut), { wire });
        assert.equal(exchange.start, `POST ${CHAT} HTTP/1.1`);
        assert.equal((await exchange.whole).body.toString(), chatBody);
        assert.equal(exchange.value('x-a'), '1');
        assert.equal(exchange.value('x-b'), undefined);
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
        wire.close();
    }
});
row('H035', 'many heads in one read are answered in their order', async () => {
    const wire = await stage.open();
    wire.write(Array.from({ length: 20 }, (_, i) => get(`/v1/models/${i}`)).join(''));
    for (let i = 0; i < 20; i++) {
        const exchange = await stage.up.next();
        assert.equal(exchange.start, `GET /v1/models/${i} HTTP/1.1`);
        exchange.reply(`{"n":${i}}`);
        assert.deepEqual((await wire.response()).json(), { n: i });
    }
    await stage.turn();
    assert.ok(wire.isQuiet());
});
