// mock.test.mjs - checks mock-llm itself: its answers against the real SDKs, its faults on the wire, and
// above all its count of calls in flight, which the other tests hold against the configured limit.
// Also that loadgen's figures agree with it.
import assert from 'node:assert/strict';
import { File } from 'node:buffer'; // a global only from Node.js 20 on
import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import net from 'node:net';
import path from 'node:path';
import { after, before, beforeEach, test } from 'node:test';
import { fileURLToPath } from 'node:url';

import Anthropic from '@anthropic-ai/sdk';
import { GoogleGenAI } from '@google/genai';
import OpenAI from 'openai';
import WebSocket from 'ws';

const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '../..');
const build = path.resolve(root, process.env.LEASEGATE_BUILD ?? 'build');
let mock;

async function startMock(...args) {
    const child = spawn(path.join(build, 'mock-llm'), ['--port', '0', ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
    let text = '';
    for await (const piece of child.stdout) {
        text += piece;
        if (text.includes('\n'))
            break;
    }
    const port = Number(/listening on 127\.0\.0\.1:(\d+)/.exec(text)[1]);
    const url = `http://127.0.0.1:${port}`;
    return {
        port, url, child,
        stats: async () => (await fetch(`${url}/stats`)).json(),
        reset: async () => (await fetch(`${url}/reset`, { method: 'POST' })).json(),
        stop: async () => {
            const gone = once(child, 'exit');
            child.kill('SIGTERM');
            const [code] = await gone;
            assert.equal(code, 0, 'mock-llm ends cleanly on SIGTERM');
        },
    };
}

async function waitUntil(what, probe, ms = 5000) {
    const deadline = Date.now() + ms;
    for (;;) {
        const seen = await probe();
        if (seen.ok)
            return;
        if (Date.now() > deadline)
            assert.fail(`${what}: ${JSON.stringify(seen)}`);
        await new Promise((done) => setTimeout(done, 5));
    }
}

const statsBecome = (wanted, on = mock) => waitUntil(`stats become ${JSON.stringify(wanted)}`, async () => {
    const seen = await on.stats();
    return { ok: Object.entries(wanted).every(([k, v]) => seen[k] === v), seen };
});

// Sends bytes as they are; gives all that comes back until the other side closes, or `until` is seen.
function raw(request, { until, ms = 5000, port = mock.port } = {}) {
    return new Promise((resolve, reject) => {
        const socket = net.connect(port, '127.0.0.1', () => socket.write(request));
        let text = '';
        const end = (how) => {
            clearTimeout(timer);
            socket.destroy();
            resolve({ text, how });
        };
        const timer = setTimeout(() => reject(new Error(`nothing more after ${JSON.stringify(text)}`)), ms);
        socket.on('data', (piece) => {
            text += piece.toString('latin1');
            if (until !== undefined && text.includes(until))
                end('until');
        });
        socket.on('end', () => end('fin'));
        socket.on('error', (error) => end(error.code));
    });
}

const post = (fields = {}, body = '{"model":"m"}', target = '/v1/chat/completions') =>
    `POST ${target} HTTP/1.1\r\nHost: mock\r\nContent-Length: ${body.length}\r\n` +
    Object.entries(fields).map(([k, v]) => `${k}: ${v}\r\n`).join('') + `\r\n${body}`;

before(async () => {
    mock = await startMock();
});
after(() => mock.stop());
beforeEach(async () => {
    await statsBecome({ in_flight: 0 });
    await mock.reset();
});

test('openai SDK: chat, completions, responses, embeddings, models, transcriptions', async () => {
    const client = new OpenAI({ apiKey: 'k', baseURL: `${mock.url}/v1`, maxRetries: 0 });
    const messages = [{ role: 'user', content: 'hi' }];

    const chat = await client.chat.completions.create({ model: 'gpt-4o', messages });
    assert.equal(chat.model, 'gpt-4o');
    assert.ok(chat.choices[0].message.content.startsWith('the quick brown fox'));
    assert.equal(chat.usage.total_tokens, chat.usage.prompt_tokens + chat.usage.completion_tokens);

    const stream = await client.chat.completions.create(
        { model: 'gpt-4o', messages, stream: true, stream_options: { include_usage: true } },
        { headers: { 'x-mock-events': '5', 'x-mock-bytes': '9' } });
    let text = '', usage, finish;
    for await (const chunk of stream) {
        text += chunk.choices[0]?.delta.content ?? '';
        finish = chunk.choices[0]?.finish_reason ?? finish;
        usage = chunk.usage ?? usage;
    }
    assert.equal(text, 'the quick'.repeat(5));
    assert.equal(finish, 'stop');
    assert.equal(usage.completion_tokens, 5);

    const old = await client.completions.create({ model: 'm', prompt: 'p', stream: true });
    let pieces = 0;
    for await (const chunk of old)
        pieces += chunk.choices[0].text === '' ? 0 : 1;
    assert.equal(pieces, 16);

    const response = await client.responses.create({ model: 'm', input: 'x' });
    assert.ok(response.output_text.startsWith('the quick'));
    const running = client.responses.stream({ model: 'm', input: 'x' });
    const types = [];
    for await (const event of running)
        types.push(event.type);
    assert.equal(types[0], 'response.created');
    assert.equal(types.at(-1), 'response.completed');
    assert.equal((await running.finalResponse()).output_text, 'the quick brown '.repeat(16));

    const embedding = await client.embeddings.create({ model: 'm', input: 'x' });
    assert.deepEqual(Array.from(embedding.data[0].embedding), [0.5, -0.5, 0.25, -0.25, 1, -1, 0, 2]);
    const models = await client.models.list();
    assert.ok(models.data.some((m) => m.id === 'gpt-4o'));
    assert.equal((await client.models.retrieve('abc')).id, 'abc');
    const file = new File([Buffer.alloc(100000)], 'a.wav');
    assert.equal((await client.audio.transcriptions.create({ model: 'whisper-1', file })).text, 'the quick brown fox');
    await statsBecome({ in_flight: 0, total: 9, completed: 9, aborted: 0, bad_requests: 0 });
});

test('@anthropic-ai/sdk: messages, stream, count_tokens, 529', async () => {
    const client = new Anthropic({ apiKey: 'k', baseURL: mock.url, maxRetries: 0 });
    const body = { model: 'claude-mock', max_tokens: 10, messages: [{ role: 'user', content: 'hi' }] };

    const message = await client.messages.create(body);
    assert.equal(message.model, 'claude-mock');
    assert.equal(message.stop_reason, 'end_turn');
    const final = await client.messages.stream(body, { headers: { 'x-mock-events': '3' } }).finalMessage();
    assert.equal(final.content[0].text, 'the quick brown '.repeat(3));
    assert.equal(final.usage.output_tokens, 3);
    assert.ok((await client.messages.countTokens({ model: 'm', messages: body.messages })).input_tokens > 0);
    await assert.rejects(client.messages.create(body, { headers: { 'x-mock-status': '529' } }),
        (error) => error.status === 529 && error.error.error.type === 'overloaded_error');
});

test('@google/genai: generateContent and its stream', async () => {
    const client = new GoogleGenAI({ apiKey: 'k', httpOptions: { baseUrl: mock.url } });

    const answer = await client.models.generateContent({ model: 'gemini-2.5-flash', contents: 'hi' });
    assert.ok(answer.text.startsWith('the quick brown fox'));
    assert.equal(answer.modelVersion, 'gemini-2.5-flash');
    let text = '';
    for await (const chunk of await client.models.generateContentStream({ model: 'gemini-2.5-flash', contents: 'hi' }))
        text += chunk.text ?? '';
    assert.equal(text, 'the quick brown '.repeat(16));
    const array = await (await fetch(`${mock.url}/v1beta/models/g:streamGenerateContent`, { method: 'POST', body: '{}' })).json();
    assert.equal(array.length, 17);
});

test('a stream as gzip is the same stream', async () => {
    for (const bytes of ['16', '100000']) {
        const stream = await fetch(`${mock.url}/v1/chat/completions`, {
            method: 'POST', body: '{"stream":true}', headers: { 'x-mock-gzip': '1', 'x-mock-events': '4', 'x-mock-bytes': bytes },
        });
        assert.equal(stream.headers.get('content-encoding'), 'gzip');
        const text = await stream.text(); // undici checks the CRC
        assert.equal(text.match(/"mock_sent_ns"/g).length, 4);
        assert.ok(text.length > 4 * Number(bytes) && text.endsWith('data: [DONE]\n\n'));
    }
});

test('Azure path, and an echo that is exact', async () => {
    const azure = await (await fetch(`${mock.url}/openai/deployments/dep-1/chat/completions?api-version=1`,
        { method: 'POST', body: '{}' })).json();
    assert.equal(azure.model, 'dep-1');

    const body = Buffer.alloc(3_000_001, 'aé"\\');
    const seen = await (await fetch(`${mock.url}/v1/some%2Fthing?q="`, { method: 'PUT', body, headers: { 'X-A': 'b"c' } })).json();
    assert.equal(seen.method, 'PUT');
    assert.equal(seen.path, '/v1/some%2Fthing?q=%22');
    assert.equal(seen.body_bytes, body.length);
    assert.equal(seen.body_sha256, createHash('sha256').update(body).digest('hex'));
    assert.deepEqual(seen.headers.find(([k]) => k === 'X-A'), ['X-A', 'b"c'], 'names keep their case');
    const chunked = await raw('POST /v1/echo HTTP/1.1\r\nHost: m\r\nTransfer-Encoding: chunked\r\n\r\n' +
        '3;x=y\r\nabc\r\n00A\r\n0123456789\r\n0\r\nt: 1\r\n\r\n', { until: '"chunked":true}' });
    assert.match(chunked.text, /"body_bytes":13/);
});

test('in flight: from the head to the last byte, and to the close of an abort', async () => {
    const socket = net.connect(mock.port, '127.0.0.1');
    socket.write('POST /v1/chat/completions HTTP/1.1\r\nHost: m\r\nContent-Length: 2\r\n');
    await once(socket, 'connect');
    assert.equal((await mock.stats()).in_flight, 0, 'half a head is no call');
    socket.write('\r\n');
    await statsBecome({ in_flight: 1 });
    socket.write('{}');
    await once(socket, 'data');
    assert.equal((await mock.stats()).in_flight, 0, 'down before the end can be seen');
    socket.write(post({ 'x-mock-fault': 'silent' }));
    await statsBecome({ in_flight: 1, aborted: 0 });
    socket.destroy();
    await statsBecome({ in_flight: 0, aborted: 1, total: 2, max_in_flight: 1 });
});

test('the maximum never counts a call that had ended beside one that began after it', async () => {
    // Each socket sends a call, leaves it by FIN or RST at once, and the next one begins right behind it.
    for (let i = 0; i < 300; i++) {
        const socket = net.connect(mock.port, '127.0.0.1');
        await once(socket, 'connect');
        await new Promise((done) => socket.write(post({ 'x-mock-fault': 'silent' }), done));
        if (i % 2 === 0)
            socket.destroy();
        else
            socket.resetAndDestroy();
        await once(socket, 'close');
    }
    await statsBecome({ in_flight: 0 });
    assert.equal((await mock.stats()).max_in_flight, 1);
});

test('groups count apart, and reset keeps what runs', async () => {
    const socket = net.connect(mock.port, '127.0.0.1');
    socket.write(post({ 'x-mock-fault': 'silent', 'x-mock-group': 'acme' }));
    await statsBecome({ in_flight: 1 });
    await fetch(`${mock.url}/v1/models`, { headers: { 'x-mock-group': 'other' } });
    const { groups } = await mock.stats();
    assert.deepEqual(groups.acme, { in_flight: 1, max_in_flight: 1, total: 1 });
    assert.deepEqual(groups.other, { in_flight: 0, max_in_flight: 1, total: 1 });
    const reset = await mock.reset();
    assert.equal(reset.total, 0);
    assert.equal(reset.max_in_flight, 1);
    socket.destroy();
    await statsBecome({ in_flight: 0 });
});

test('--cap answers the provider\'s 429', async () => {
    const capped = await startMock('--cap', '2');
    try {
        const held = [1, 2].map(() => net.connect(capped.port, '127.0.0.1'));
        held.forEach((socket) => socket.write(post({ 'x-mock-fault': 'silent' })));
        await statsBecome({ in_flight: 2 }, capped);
        const third = await fetch(`${capped.url}/v1/messages`, { method: 'POST', body: '{}' });
        assert.equal(third.status, 429);
        assert.equal(third.headers.get('retry-after'), '1');
        assert.equal((await third.json()).error.type, 'rate_limit_error');
        held.forEach((socket) => socket.destroy());
        await statsBecome({ in_flight: 0, over_cap: 1, max_in_flight: 3 }, capped);
        assert.equal((await fetch(`${capped.url}/v1/messages`, { method: 'POST', body: '{}' })).status, 200);
    } finally {
        await capped.stop();
    }
});

test('a call that works on without its caller keeps its place', async () => {
    const socket = net.connect(mock.port, '127.0.0.1');
    socket.write(post({ 'x-mock-keep-working': '1', 'x-mock-events': '20', 'x-mock-delay-ms': '20' }, '{"stream":true}'));
    await once(socket, 'data');
    socket.destroy();
    await statsBecome({ aborted: 1 });
    assert.equal((await mock.stats()).in_flight, 1);
    await statsBecome({ in_flight: 0 });
    assert.ok((await mock.stats()).events_after_abort > 0);
});

test('time: head, events', async () => {
    const begun = performance.now();
    const response = await fetch(`${mock.url}/v1/chat/completions`, {
        method: 'POST', body: '{"stream" : true}',
        headers: { 'x-mock-ttft-ms': '60', 'x-mock-first-event-ms': '40', 'x-mock-delay-ms': '20', 'x-mock-events': '6' },
    });
    const head = performance.now() - begun;
    const text = await response.text();
    const total = performance.now() - begun;
    assert.ok(head >= 59, `head after ${head} ms`);
    assert.ok(total >= 199, `end after ${total} ms`);
    assert.equal(text.match(/"mock_sent_ns":\d+/g).length, 6);
});

const faults = {
    'reset-before-head': { how: 'ECONNRESET', text: /^$/ },
    'close-before-head': { how: 'fin', text: /^$/ },
    'close-mid-head': { how: 'fin', text: /content-le$/ },
    'close-mid-body': { how: 'fin', text: /content-length: 1024\r\n\r\n[^]{512}$/ },
    'close-mid-event': { how: 'fin', stream: true, text: /(mock_sent_ns[^]+){8}"choi[^}]*$/ },
    'no-length': { how: 'fin', text: /^(?![^]*content-length)[^]*connection: close[^]*\}$/ },
    'http10': { how: 'fin', text: /^HTTP\/1\.0 200/ },
    'hold-after-done': { until: 'data: [DONE]\n\n\r\n', stream: true, text: /\[DONE\]\n\n\r\n$/, held: true },
    'early-response': { until: '"}', partial: true, text: /^HTTP\/1\.1 200/ },
    'early-close': { how: 'fin', partial: true, text: /connection: close/ },
    '100-continue': { until: '}}', text: /^HTTP\/1\.1 100 Continue\r\n\r\nHTTP\/1\.1 200/ },
    '103': { until: '}}', text: /^(HTTP\/1\.1 103[^]+?\r\n\r\n){2}HTTP\/1\.1 200/ },
    'trailers': { until: 'x-mock-second: 2\r\n\r\n', text: /\r\n0\r\nx-mock-trailer: yes\r\n/ },
    'bad-chunk': { until: 'zz\r\n', stream: true, text: /zz\r\n/, held: true },
    'extra-bytes': { until: 'extra', text: /\}HTTP\/1\.1 200 OK\r\ncontent-length: 5/ },
    'obs-fold': { until: '}}', text: /\r\nx-mock-folded: one\r\n two\r\n/ },
    'cl-te': { until: '0\r\n\r\n', text: /content-length: 5\r\ntransfer-encoding: chunked/, held: true },
    'two-cl': { until: '{}', text: /content-length: 2\r\ncontent-length: 5/, held: true },
    'bad-status': { until: '{}', text: /^HTTP\/1\.1 2x0/, held: true },
    '204-with-cl': { until: '\r\n\r\n', text: /^HTTP\/1\.1 204[^]+content-length: 5/ },
};

for (const [name, want] of Object.entries(faults)) {
    test(`fault ${name}`, async () => {
        const body = want.stream ? '{"stream":true}' : '{}';
        const request = post({ 'x-mock-fault': name, 'x-mock-events': '16' }, want.partial ? body.padEnd(100) : body);
        const seen = await raw(want.partial ? request.slice(0, -50) : request, { until: want.until });
        assert.match(seen.text, want.text);
        assert.equal(seen.how, want.how ?? 'until');
        await statsBecome({ in_flight: 0, total: 1, aborted: want.held ? 1 : 0 });
    });
}

test('an unknown fault is said, not ignored', async () => {
    const response = await fetch(`${mock.url}/v1/chat/completions`,
        { method: 'POST', body: '{}', headers: { 'x-mock-fault': 'typo' } });
    assert.equal(response.status, 400);
});

test('malformed requests are refused and counted', async () => {
    const bad = [
        'POST /v1/x HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n',
        'POST /v1/x HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n',
        'POST /v1/x HTTP/1.1\r\nContent-Length : 3\r\n\r\n',
        'POST /v1/x HTTP/1.1\r\nX: a\r\n folded\r\n\r\n',
        'POST /v1/x HTTP/1.1\r\nX: a\nY: b\r\n\r\n',
        'GET /v1/x HTTP/2.0\r\n\r\n',
        'POST /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n',
    ];
    for (const request of bad)
        assert.match((await raw(request)).text, /^HTTP\/1\.1 400 /, JSON.stringify(request));
    await statsBecome({ in_flight: 0, bad_requests: bad.length });
});

test('pipelined requests are answered in order', async () => {
    const seen = await raw(post({ 'x-mock-ttft-ms': '30' }, '{}', '/v1/a') + post({}, '{}', '/v1/b') + post({}, '{}', '/v1/c'),
        { until: '/v1/c' });
    assert.deepEqual(seen.text.match(/\/v1\/[abc]/g), ['/v1/a', '/v1/b', '/v1/c']);
    assert.equal((await mock.stats()).max_in_flight, 1);
});

test('an idle connection is closed on request', async () => {
    const seen = await raw(post({ 'x-mock-idle-close-ms': '20', 'x-mock-fault': '408-idle' }));
    assert.match(seen.text, /\}HTTP\/1\.1 408 /);
    assert.equal(seen.how, 'fin');
});

test('a large answer costs no memory, a slow reader stops a stream', async () => {
    const big = await fetch(`${mock.url}/v1/messages`, { method: 'POST', body: '{}', headers: { 'x-mock-bytes': '50000000' } });
    assert.equal(big.headers.get('content-length'), '50000000');
    assert.equal((await big.text()).length, 50_000_000);
    const socket = net.connect(mock.port, '127.0.0.1');
    socket.pause();
    socket.write(post({ 'x-mock-events': '10000000', 'x-mock-bytes': '1000' }, '{"stream":true}'));
    await statsBecome({ in_flight: 1 });
    assert.equal((await fetch(`${mock.url}/v1/models`)).status, 200, 'others are served meanwhile');
    socket.destroy();
    await statsBecome({ in_flight: 0 });
});

test('WebSocket: frames come back, the call lasts as long as the connection', async () => {
    const socket = new WebSocket(`${mock.url.replace('http', 'ws')}/v1/realtime?model=m`, ['realtime', 'other'],
        { headers: { 'x-mock-ws-hello': '1' } });
    const got = [];
    socket.on('message', (piece) => got.push(piece.toString()));
    await once(socket, 'open');
    assert.equal(socket.protocol, 'realtime');
    assert.equal((await mock.stats()).in_flight, 1);
    const long = 'x'.repeat(200_000);
    socket.send('hello');
    socket.send(long);
    await waitUntil('echo', () => ({ ok: got.length === 3 }));
    assert.equal(JSON.parse(got[0]).type, 'session.created');
    assert.deepEqual(got.slice(1), ['hello', long]);
    socket.ping('p');
    assert.equal((await once(socket, 'pong'))[0].toString(), 'p');
    socket.close(1000);
    assert.equal((await once(socket, 'close'))[0], 1000);
    await statsBecome({ in_flight: 0, aborted: 0 });
});

function loadgen(...args) {
    return new Promise((resolve, reject) => {
        const child = spawn(path.join(build, 'loadgen'), ['--json', '--quiet', ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
        let text = '';
        child.stdout.on('data', (piece) => { text += piece; });
        child.on('error', reject);
        child.on('exit', (code) => (code === 0 ? resolve(JSON.parse(text)) : reject(new Error(`loadgen: ${code}`))));
    });
}

test('loadgen: its figures agree with the mock', async () => {
    const url = `${mock.url}/v1/chat/completions`;
    const plain = await loadgen('--url', url, '--concurrency', '8', '--requests', '2000', '--model', 'a,b', '--tenants', '3');
    assert.equal(plain.statuses['200'], 2000);
    assert.equal(plain.connections, 8);
    const first = await mock.stats();
    assert.equal(first.total, 2000);
    assert.ok(first.max_in_flight <= 8, `max ${first.max_in_flight}`);

    await mock.reset();
    const stream = await loadgen('--url', url, '--concurrency', '5', '--requests', '50', '--stream', '--events', '7', '--delay-ms', '2');
    assert.equal(stream.completed, 50);
    assert.equal(stream.event_lag_ms.n, 350, 'each stamp once');
    assert.equal(stream.events, 50 * (7 + 3), 'role, 7 events, finish, [DONE]');

    await mock.reset();
    const aborts = await loadgen('--url', url, '--concurrency', '10', '--requests', '300', '--stream', '--events', '10',
        '--delay-ms', '3', '--ttft-ms', '5', '--abort-rate', '0.4');
    const given = aborts.aborted.before_first_byte + aborts.aborted.after_first_byte;
    assert.equal(aborts.completed + given, 300);
    assert.ok(aborts.aborted.before_first_byte > 0 && aborts.aborted.after_first_byte > 0);
    await statsBecome({ in_flight: 0 });
    assert.ok((await mock.stats()).max_in_flight <= 10);
});

test('loadgen: judges refusals', async () => {
    const seen = await loadgen('--url', `${mock.url}/v1/chat/completions`, '--concurrency', '2', '--requests', '10',
        '--header', 'x-mock-status: 429');
    assert.equal(seen.statuses['429'], 10);
    assert.equal(seen.malformed_refusals, 10);
    assert.deepEqual(seen.malformed, { content_length: 0, content_type: 0, json_error_body: 0, retry_after: 0,
        retry_after_ms: 10, x_should_retry: 10, reason: 10, request_id: 0 });
    assert.deepEqual(seen.refusals, { none: 10 });
});

test('loadgen: names errors by kind', async () => {
    const url = `${mock.url}/v1/chat/completions`;
    const run = (fault, ...more) => loadgen('--url', url, '--concurrency', '1', '--requests', '3', '--header', `x-mock-fault: ${fault}`, ...more);
    assert.equal((await run('close-mid-body')).errors.cut, 3);
    assert.equal((await run('close-before-head')).errors.no_response, 3);
    assert.equal((await run('reset-before-head')).errors.reset, 3);
    assert.equal((await run('bad-status')).errors.bad_response, 3);
    assert.equal((await run('silent', '--timeout-ms', '30')).errors.timeout, 3);
    assert.equal((await run('no-length')).completed, 3);
});
