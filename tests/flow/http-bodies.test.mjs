// http-bodies.test.mjs - which model a call is for: rows H061 to H086 of HTTP-CASES.md. The scope of the lease is what tells.
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { after, before } from 'node:test';
import zlib from 'node:zlib';

import { assertGrowth, assertOwnAnswer, CHAT, chatBody, get, post, rowsOn, rssBytes, Stage } from './http-tools.mjs';

let stage;
const row = rowsOn(() => stage);
const SCAN_MAX = 32 << 20;

before(async () => {
    stage = await Stage.start({ client: { body_scan_max: SCAN_MAX }, bedrock: { pass_host: true } });
});
after(() => stage.stop());

// How a model stands in a key.
const inKey = (model) => `models/${/^(?!h-)[A-Za-z0-9._-]{1,64}$/.test(model) ? model : `h-${createHash('sha256').update(model, 'latin1').digest('hex').slice(0, 32)}`}`;
const utf8 = (text) => Buffer.from(text).toString('latin1');

function request(target, body, { type = 'application/json', fields = [], method = 'POST' } = {}) {
    const bytes = Buffer.isBuffer(body) ? body : Buffer.from(body, 'latin1');
    const lines = [`${method} ${target} HTTP/1.1`, 'Host: gate', ...(type === null ? [] : [`Content-Type: ${type}`]), ...fields, `Content-Length: ${bytes.length}`];
    return Buffer.concat([Buffer.from(`${lines.join('\r\n')}\r\n\r\n`, 'latin1'), bytes]);
}

// The call goes through under the scope of `model` (null: of none), and what was sent is what arrives, byte for byte.
async function takes(bytes, model) {
    await stage.mark();
    const { wire, exchange } = await stage.send(bytes);
    const message = await exchange.whole;
    const sent = bytes.toString('latin1'), end = sent.indexOf('\r\n\r\n') + 4;
    assert.equal(exchange.start, sent.slice(0, sent.indexOf('\r\n')));
    if (message !== undefined)
        assert.ok(Buffer.from(sent.slice(end), 'latin1').equals(message.body), 'the body arrives as it was sent');
    assert.deepEqual(await stage.scopes(), [model === null ? ['all'] : ['all', inKey(model)]]);
    exchange.reply();
    assert.equal((await wire.response()).status, 200);
    wire.close();
    await stage.released();
    return exchange;
}

async function refuses(bytes, status, expected) {
    await stage.mark();
    const wire = await stage.open();
    wire.write(bytes);
    const response = await wire.response();
    assertOwnAnswer(response, status, expected);
    await stage.neverTaken();
    wire.close();
    return response;
}

// Either verdict is the same when the body comes in two parts, for every cut.
async function atEveryCut(body, verdict) {
    const bytes = request(CHAT, body), start = bytes.length - Buffer.from(body, 'latin1').length;
    for (let cut = start; cut < bytes.length; cut++) {
        const wire = await stage.open();
        await stage.mark();
        wire.write(bytes.subarray(0, cut));
        await stage.turn();
        wire.write(bytes.subarray(cut));
        await verdict(wire, cut - start);
        wire.close();
    }
}

// Of what reached the upstream since then, no request was completed.
async function neverWhole() {
    for (let i = 0; i < 4; i++) // what was sent there before the answer has been received here
        await stage.turn();
    for (const exchange of stage.up.waiting())
        assert.equal(await exchange.whole, null);
    stage.up.forget();
}

const filler = (n) => `"messages":[{"role":"user","content":"${'x'.repeat(n)}"}]`;

row('H061', 'a model behind 8 MiB of messages is found, in bounded memory', async () => {
    await takes(request(CHAT, `{${filler(8 << 20)},"model":"x1"}`), 'x1');
    const before_ = rssBytes(stage.gate.pid);
    await takes(request(CHAT, `{${filler(8 << 20)},"model":"x1"}`), 'x1');
    assertGrowth(stage.gate.pid, before_, 16 << 20);
});
row('H061', 'no model within the cap: 413 that names the cap', async () => {
    const response = await refuses(request(CHAT, `{${filler(SCAN_MAX + 1000)},"model":"x1"}`), 413, { reason: 'body_too_large' });
    assert.match(response.json().error.message, /body_scan_max/);
});

row('H062', 'only the top level counts', async () => {
    const inner = '{"model":"inner","a":[{"model":"deep"}]}';
    await takes(request(CHAT, `{"messages":[${inner}],"tools":[${inner}],"metadata":${inner},"response_format":${inner},"model":"x1","x":${inner}}`), 'x1');
    await refuses(request(CHAT, `{"messages":[${inner}],"metadata":${inner}}`), 400, { reason: 'model_missing' });
    await refuses(request(CHAT, `[${inner}]`), 400, { reason: 'model_missing' });
    await refuses(request(CHAT, '"model"'), 400, { reason: 'model_missing' });
});

row('H063', 'an escaped key is the key', async () => {
    for (const key of ['\\u006dodel', 'm\\u006Fdel', '\\u006d\\u006f\\u0064\\u0065\\u006c'])
        await takes(request(CHAT, `{"${key}":"x1"}`), 'x1');
    await refuses(request(CHAT, '{"\\\\u006dodel":"x1","mode\\u006c2":"x"}'), 400, { reason: 'model_missing' });
});

row('H064', 'a model twice', async () => {
    for (const body of ['{"model":"a","model":"b"}', '{"model":"a","\\u006dodel":"b"}', '{"model":"a","model":"a"}'])
        await refuses(request(CHAT, body), 400, { reason: 'model_duplicate' });
    // the first one may have been enough to begin: then the lease is released, and the request is never completed
    const wire = await stage.open();
    wire.write(request(CHAT, `{"model":"a",${filler(1000000)},"model":"b"}`));
    assertOwnAnswer(await wire.response(), 400, { reason: 'model_duplicate' });
    await stage.released();
    await neverWhole();
});

row('H065', 'another letter case', async () => {
    for (const body of ['{"Model":"a","model":"b"}', '{"model":"b","MODEL":"a"}'])
        await refuses(request(CHAT, body), 400, { reason: 'model_ambiguous' });
    await refuses(request(CHAT, '{"Model":"a"}'), 400, { reason: ['model_missing', 'model_ambiguous'] });
});

row('H067', 'no value leaves its key', async () => {
    await takes(request(CHAT, '{"model":"gpt\\u002d4o"}'), 'gpt-4o');
    for (const [json, value] of [['{x}', '{x}'], ['a:b/c', 'a:b/c'], ['all', 'all'], ['a b', 'a b'], ['h-x', 'h-x'], ['\\ud83d\\ude00', utf8('😀')], [utf8('é'), utf8('é')], ['..', '..'],
        ['*', '*'], ['x'.repeat(65), 'x'.repeat(65)]])
        await takes(request(CHAT, `{"model":"${json}"}`), value);
    for (const [json, reason] of [['\\u0000', 'model_invalid'], ['\\ud800', 'model_invalid'], ['\\udc00x', 'model_invalid'], ['a\\nb', 'model_invalid'], ['', 'model_empty'],
        ['x'.repeat(1 << 20), 'model_too_long'], ['\\x', 'model_invalid'], ['a\nb', 'model_invalid']])
        await refuses(request(CHAT, `{"model":"${json}"}`), 400, { reason });
    for (const json of ['null', '7', '["a"]', '{"a":1}', 'true'])
        await refuses(request(CHAT, `{"model":${json}}`), 400, { reason: 'model_not_string' });
});

row('H068', 'a UTF-8 BOM is skipped and forwarded', () => takes(request(CHAT, `\xef\xbb\xbf${chatBody}`), 'm1'));

row('H069', 'UTF-16 and UTF-32', async () => {
    const utf16 = Buffer.from(chatBody, 'utf16le');
    await refuses(request(CHAT, utf16), 400);
    await refuses(request(CHAT, Buffer.concat([Buffer.from([0xff, 0xfe]), utf16])), 400);
    await refuses(request(CHAT, Buffer.from(utf16).swap16()), 400);
    await refuses(request(CHAT, Buffer.concat([Buffer.from([0xfe, 0xff]), Buffer.from(utf16).swap16()])), 400);
    await refuses(request(CHAT, Buffer.from([...chatBody].map((c) => `\0\0\0${c}`).join(''), 'latin1')), 400);
    await refuses(request(CHAT, chatBody, { type: 'application/json; charset=utf-16' }), 400, { reason: 'body_encoding' });
    await takes(request(CHAT, chatBody, { type: 'application/json; charset=UTF-8' }), 'm1');
});

row('H070', 'bad bytes outside of the model are the upstream`s business', async () => {
    await takes(request(CHAT, '{"messages":"\xff\x80 \x01\x1f\t","model":"m1"}'), 'm1');
    for (const value of ['a\xffb', 'a\xc3', 'a\x01b', '\xed\xa0\x80'])
        await refuses(request(CHAT, `{"model":"${value}"}`), 400, { reason: 'model_invalid' });
});

row('H071', 'a hundred thousand levels', async () => {
    await refuses(request(CHAT, `{"a":${'['.repeat(100000)}`), 400, { reason: 'body_too_deep' });
    await refuses(request(CHAT, '{"a":'.repeat(100000)), 400, { reason: 'body_too_deep' });
    await refuses(request(CHAT, '['.repeat(100000)), 400);
});

row('H073', 'the same answer at every cut', async () => {
    const body = `{"a":{"model":"no"},"s":"\\\\\\"${utf8('é😀')}","m\\u006fdel" : "x\\u002d\\u00e9${utf8('é')}"}`;
    await atEveryCut(body, async (wire, cut) => {
        const exchange = await stage.up.next();
        assert.ok((await exchange.whole).body.equals(Buffer.from(body, 'latin1')));
        assert.deepEqual(await stage.scopes(), [['all', inKey(utf8('x-éé'))]], `cut ${cut}`);
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
    });
    await atEveryCut(`{"model":"a","x":"\\"","\\u006dodel":"b"}`, async (wire) => {
        assertOwnAnswer(await wire.response(), 400, { reason: 'model_duplicate' });
        await stage.released();
    });
    await neverWhole();
});

// --- compressed --------------------------------------------------------------------------------------------------

// One zstd frame with one raw block.
function zstdFrame(text, declared) {
    const block = Buffer.alloc(3);
    block.writeUIntLE(1 | text.length << 3, 0, 3);
    const size = declared === undefined ? Buffer.from([text.length]) : Buffer.alloc(8);
    if (declared !== undefined)
        size.writeBigUInt64LE(declared);
    return Buffer.concat([Buffer.from([0x28, 0xb5, 0x2f, 0xfd, declared === undefined ? 0x20 : 0xe0]), size, block, Buffer.from(text)]);
}
const coded = (coding, body) => request(CHAT, body, { fields: [`Content-Encoding: ${coding}`] });

row('H074', 'gzip, deflate and zstd are decoded for the scan and forwarded as they came', async () => {
    for (const [coding, body] of [['gzip', zlib.gzipSync(chatBody)], ['x-gzip', zlib.gzipSync(chatBody)], ['deflate', zlib.deflateSync(chatBody)], ['deflate', zlib.deflateRawSync(chatBody)],
        ['zstd', zstdFrame(chatBody)], ['identity', Buffer.from(chatBody)], ['GZIP', zlib.gzipSync(`{${filler(1 << 20)},"model":"m1"}`)]]) {
        const exchange = await takes(coded(coding, body), 'm1');
        assert.equal(exchange.value('content-encoding'), coding);
    }
});
row('H074', 'an unknown coding where the model is needed: 415 that names the known ones', async () => {
    for (const coding of ['br', 'compress', 'gzip, gzip', 'gzip, br']) {
        const response = await refuses(coded(coding, 'x'), 415, { reason: 'content_encoding_unsupported' });
        assert.match(response.value('accept-encoding'), /gzip.*zstd/);
    }
    const { wire, exchange } = await stage.send(request('/plain/x', 'abc', { fields: ['Content-Encoding: br'] }));
    await exchange.whole;
    exchange.reply();
    assert.equal((await wire.response()).status, 200);
});

row('H075', 'bombs and corrupt bodies', async () => {
    const bomb = zlib.gzipSync(`{"a":"${' '.repeat(SCAN_MAX + 1000)}","model":"m1"}`);
    assert.ok(bomb.length < 64 << 10);
    const before_ = rssBytes(stage.gate.pid);
    await refuses(coded('gzip', bomb), 413, { reason: 'decoded_body_too_large' });
    await refuses(coded('zstd', zstdFrame(chatBody, 4n << 30n)), 413, { reason: 'decoded_body_too_large' });
    assertGrowth(stage.gate.pid, before_, 8 << 20);
    const gzip = zlib.gzipSync(chatBody), wrongCrc = Buffer.from(gzip);
    wrongCrc[gzip.length - 8] ^= 1;
    for (const body of [wrongCrc, gzip.subarray(0, -3), Buffer.concat([gzip, Buffer.from('x')]), Buffer.from(chatBody)])
        await refuses(coded('gzip', body), 400, { reason: 'content_encoding_corrupt' });
    const halves = [chatBody.slice(0, 5), chatBody.slice(5)].map((text) => zlib.gzipSync(text));
    await takes(coded('gzip', Buffer.concat(halves)), 'm1');
    await refuses(coded('gzip', Buffer.concat([gzip, zlib.gzipSync(',"model":"m2"}')])), 400);
});

// --- forms -------------------------------------------------------------------------------------------------------

const part = (disposition, content, end = '\r\n') => `--BOUND${end}Content-Disposition: form-data; ${disposition}${end}${end}${content}${end}`;
const form = (...parts) => `${parts.join('')}--BOUND--\r\n`;
const audio = (n) => part('name="file"; filename="a.mp3"', '\x00\xff\r\n-'.repeat(n / 5));
const FORM = 'multipart/form-data; boundary=BOUND';
const transcription = (body, type = FORM) => request('/v1/audio/transcriptions', body, { type });

row('H076', 'a form field model, wherever it stands', async () => {
    const model = part('name="model"', 'whisper-1');
    await takes(transcription(form(model, audio(100))), 'whisper-1');
    await takes(transcription(form(audio(25 << 20), model)), 'whisper-1');
    await takes(transcription(form(audio(100), model), 'multipart/form-data; boundary="BOUND"'), 'whisper-1');
    await refuses(transcription(form(audio(100), model, part('name="model"', 'other'))), 400, { reason: 'model_duplicate' });
    await refuses(transcription(form(part('name="model"', 'whisper-1', '\n'))), 400, { reason: 'multipart_malformed' });
    const over = await refuses(transcription(form(audio(SCAN_MAX + 5000), model)), 413, { reason: 'body_too_large' });
    assert.match(over.json().error.message, /model/);
});
row('H076', 'its boundary cut anywhere', async () => {
    const bytes = transcription(form(audio(20), part('name="model"', 'whisper-1'))), start = bytes.indexOf('\r\n\r\n') + 4;
    for (let cut = start; cut < bytes.length; cut++) {
        const wire = await stage.open();
        await stage.mark();
        wire.write(bytes.subarray(0, cut));
        await stage.turn();
        const { exchange } = await stage.send(bytes.subarray(cut), { wire });
        assert.ok((await exchange.whole).body.equals(bytes.subarray(start)));
        assert.deepEqual(await stage.scopes(), [['all', inKey('whisper-1')]], `cut ${cut - start}`);
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
        wire.close();
    }
});

row('H077', 'not fooled by contents, names and boundaries', async () => {
    const model = part('name="model"', 'whisper-1');
    const inside = part('name="file"; filename="model"', 'x\r\n--BOUNE\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n--BOUN\r\n -- BOUND');
    await takes(transcription(form(inside, model)), 'whisper-1');
    await takes(transcription(form(part('name=model', 'whisper-1'))), 'whisper-1');
    await takes(transcription(form(part('NAME="model"', 'whisper-1'))), 'whisper-1');
    await refuses(transcription(form(inside)), 400, { reason: 'model_missing' });
    for (const disposition of ["name*=UTF-8''model", 'name="model"; filename="x"'])
        await refuses(transcription(form(part(disposition, 'whisper-1'))), 400, { reason: ['model_ambiguous', 'multipart_malformed'] });
    for (const type of ['multipart/form-data', 'multipart/form-data; boundary=', 'multipart/form-data; boundary=a; boundary=b'])
        await refuses(transcription(form(model), type), 400, { reason: 'multipart_boundary' });
});

// --- targets -----------------------------------------------------------------------------------------------------

row('H079', 'what needs no model is never refused for want of one', async () => {
    for (const target of ['/v1/models', '/v1/models/m1', '/v1/responses/resp_1', '/v1/files', '/v1/files/f/content', '/v1/batches', '/v1/messages/batches'])
        await takes(Buffer.from(get(target)), null);
    await takes(request('/v1/responses/resp_1', '', { method: 'DELETE', type: null }), null);
    await takes(request('/v1/responses/resp_1/cancel', ''), null);
    await takes(request('/v1/files', form(part('name="purpose"', 'batch'), audio(1000)), { type: FORM }), null);
    await takes(request('/v1/batches', '{"input_file_id":"f"}'), null);
    await takes(request('/v1/messages/batches', '{"requests":[{"params":{"model":"m1"}}]}'), null);
    await takes(request('/v1/messages/count_tokens', chatBody), 'm1');
    await takes(request('/v1/anything', '{"a":1}'), null);
    await takes(request('/v1/anything', 'no json', { type: 'text/plain' }), null);
});

row('H080', 'a background response ends its lease with the exchange; reading it is a call of its own', async () => {
    await takes(request('/v1/responses', '{"background":true,"model":"m1"}'), 'm1');
    await takes(Buffer.from(get('/v1/responses/resp_1?stream=true')), null);
});

row('H081', 'Azure: the path names the model, the body does not', async () => {
    await takes(request('/openai/deployments/dep-1/chat/completions?api-version=2024-10-21', '{"model":"other"}'), 'dep-1');
    await takes(request('/openai/deployments/my%20dep%2Dx/embeddings?api-version=1', '{"model":"other"}'), 'my dep-x');
    await takes(request('/openai/v1/responses', '{"model":"m1"}'), 'm1');
});

row('H082', 'Gemini: the name in the path; the key in no log and no metric', async () => {
    await takes(request('/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse&key=SECRETKEY', '{"contents":[]}'), 'gemini-2.5-pro');
    await takes(request('/v1beta/models/gemini-2.5-pro:generateContent?key=SECRETKEY', '{"contents":[],"model":"other"}'), 'gemini-2.5-pro');
    await takes(request('/v1beta/models/tuned/a:b:generateContent', '{"contents":[]}'), 'tuned/a:b');
    const line = await stage.gate.waitForLog((l) => l.path?.includes('streamGenerateContent'));
    assert.match(line.path, /alt=sse&key=\*\*\*/);
    assert.ok(!JSON.stringify(stage.gate.log).includes('SECRETKEY'));
    assert.ok(!(await stage.gate.admin('/metrics')).text.includes('SECRETKEY'));
});
row('H082', 'both stream forms pass untouched', async () => {
    for (const [type, body] of [['text/event-stream', 'data: {"a":1}\r\n\r\n'], ['application/json', '[{"a":1}\n,\r\n{"a":2}]']]) {
        const { wire, exchange } = await stage.send(request('/v1beta/models/m:streamGenerateContent', '{"contents":[]}'));
        await exchange.whole;
        exchange.write(`HTTP/1.1 200 OK\r\nContent-Type: ${type}\r\nTransfer-Encoding: chunked\r\n\r\n`).chunk(body.slice(0, 9)).chunk(body.slice(9)).last();
        assert.equal((await wire.response()).body.toString(), body);
    }
});

row('H083', 'Bedrock: decoded once for the scope, forwarded raw', async () => {
    const arn = 'arn:aws:bedrock:us-east-1:123:inference-profile/us.a-v1:0';
    const exchange = await takes(request(`/model/${encodeURIComponent(arn)}/invoke-with-response-stream`, '{"max_tokens":1}', { fields: ['X-Amz-Date: 1', 'Authorization: AWS4-HMAC-SHA256 x'] }), arn);
    assert.deepEqual(exchange.all('host'), ['gate'], 'the signed Host');
    await takes(request('/model/a.b-v1:0/converse', '{}'), 'a.b-v1:0');
    await takes(request('/model/a%2520b/converse', '{}'), 'a%20b');
    const { wire, exchange: binary } = await stage.send(request('/model/m/invoke-with-response-stream', '{}'));
    const body = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
    binary.write('HTTP/1.1 200 OK\r\nContent-Type: application/vnd.amazon.eventstream\r\nTransfer-Encoding: chunked\r\n\r\n').chunk(body.toString('latin1')).last();
    assert.ok((await wire.response()).body.equals(body));
});

const realtime = (query) => Buffer.from(get(`/v1/realtime${query}`, 'Connection: Upgrade', 'Upgrade: websocket', 'Sec-WebSocket-Version: 13', 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=='));

row('H085', 'the model in a query: keys are decoded, all of them are looked at', async () => {
    await takes(realtime('?model=a'), 'a');
    await takes(realtime('?x=1&mod%65l=a%2Db'), 'a-b');
    await takes(realtime('?model=a;b'), 'a;b');
    await takes(realtime(`?${'x=1&'.repeat(6000)}model=a`), 'a');
    for (const query of ['?model=a&model=b', '?model=a&mod%65l=b', `?model=a${'&x=1'.repeat(6000)}&model=b`])
        await refuses(realtime(query), 400, { reason: 'model_duplicate' });
});

row('H086', 'a WebSocket without a model is counted by limits that ask for none', async () => {
    await takes(realtime('?call_id=rtc_1'), null);
    await takes(Buffer.from(realtime('').toString().replace('/v1/realtime', '/v1/responses')), null);
});
