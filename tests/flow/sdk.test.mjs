// sdk.test.mjs - the official SDKs through leasegate: what they get, what they raise, how they retry, and that an abort
// of theirs ends the call upstream and frees its slot.
import assert from 'node:assert/strict';
import { File } from 'node:buffer';
import { once } from 'node:events';
import { before, beforeEach } from 'node:test';

import Anthropic from '@anthropic-ai/sdk';
import { ApiError, GoogleGenAI } from '@google/genai';
import OpenAI from 'openai';
import WebSocket from 'ws';

import { config, startGate, startMock, startRedis, startUpstream, test, waitUntil, within } from './harness.mjs';

globalThis.File ??= File; // Node.js 18 has none, and the SDKs ask for it

let gate, mock, redis, scripted;
const messages = [{ role: 'user', content: 'hi' }];

before(async () => {
    redis = await startRedis();
    mock = await startMock();
    scripted = await startUpstream(() => {});
    gate = await startGate(config({
        redis,
        upstream: {
            llm: { url: mock.url },
            gone: { url: 'http://127.0.0.1:1' },
            silent: { url: mock.url, first_byte_timeout: `${within(200)}ms` },
            scripted: { url: scripted.url },
            small: { url: mock.url },
        },
        route: {
            '/': { upstream: 'llm' }, '/gone/': { upstream: 'gone' }, '/silent/': { upstream: 'silent' }, '/scripted/': { upstream: 'scripted' },
        },
        client: { body_max: '1m' },
        limit: { all: { concurrency: 20 }, full: { concurrency: 0, model: ['full*'] }, one: { concurrency: 1, model: ['one'] } },
    }));
});
beforeEach(() => mock.reset());

const openai = (where = '', more = {}) => new OpenAI({ apiKey: 'k', baseURL: `${gate.url}${where}/v1`, maxRetries: 0, ...more });
const anthropic = (where = '', more = {}) => new Anthropic({ apiKey: 'k', baseURL: `${gate.url}${where}`, maxRetries: 0, ...more });
const gemini = (where = '', headers = {}) => new GoogleGenAI({ apiKey: 'k', httpOptions: { baseUrl: `${gate.url}${where}`, headers } });

async function raised(promise) {
    try {
        await promise;
    } catch (error) {
        return error;
    }
    return assert.fail('nothing was raised');
}

// --- calls -------------------------------------------------------------------------------------------------------

test('openai: chat, not streamed', async () => {
    const { data, response } = await openai().chat.completions.create({ model: 'gpt-4o', messages }).withResponse();
    assert.ok(data.choices[0].message.content.startsWith('the quick brown fox'));
    assert.match(response.headers.get('x-leasegate-lease'), /^[0-9a-f]+\.\d+\/[0-9a-f]+$/);
    assert.match(response.headers.get('x-leasegate-wait-ms'), /^\d+$/);
});

test('openai: chat, streamed', async () => {
    const stream = await openai().chat.completions.create({ model: 'gpt-4o', messages, stream: true }, { headers: { 'x-mock-events': '7' } });
    let text = '';
    for await (const piece of stream)
        text += piece.choices[0]?.delta.content ?? '';
    assert.equal(text.length, 7 * 16);
});

test('openai: responses, embeddings, models', async () => {
    const answer = await openai().responses.create({ model: 'gpt-4o', input: 'hi' });
    assert.ok(answer.output_text.length > 0);
    const types = [];
    for await (const event of await openai().responses.create({ model: 'gpt-4o', input: 'hi', stream: true }))
        types.push(event.type);
    assert.equal(types.at(-1), 'response.completed');
    assert.ok((await openai().embeddings.create({ model: 'e', input: 'hi' })).data[0].embedding.length > 0);
    assert.ok((await openai().models.list()).data.length > 0);
});

test('openai: audio upload, multipart, its model counted', async () => {
    const file = new globalThis.File([Buffer.alloc(300000, 'a')], 'speech.mp3');
    const { response } = await openai().audio.transcriptions.create({ model: 'whisper-1', file }).withResponse();
    assert.equal(response.status, 200);
    const error = await raised(openai().audio.transcriptions.create({ model: 'full-whisper', file }));
    assert.ok(error instanceof OpenAI.RateLimitError);
});

test('anthropic: messages, not streamed and streamed', async () => {
    const body = { model: 'claude-sonnet-4', max_tokens: 100, messages };
    const answer = await anthropic().messages.create(body);
    assert.ok(answer.content[0].text.startsWith('the quick brown fox'));
    const stream = anthropic().messages.stream(body, { headers: { 'x-mock-events': '5' } });
    const final = await stream.finalMessage();
    assert.equal(final.content[0].text.length, 5 * 16);
    assert.equal(final.stop_reason, 'end_turn');
});

test('gemini: generateContent and its stream', async () => {
    const answer = await gemini().models.generateContent({ model: 'gemini-2.5-flash', contents: 'hi' });
    assert.ok(answer.text.startsWith('the quick brown fox'));
    let text = '';
    for await (const piece of await gemini('', { 'x-mock-events': '5' }).models.generateContentStream({ model: 'gemini-2.5-flash', contents: 'hi' }))
        text += piece.text ?? '';
    assert.equal(text.length, 5 * 16);
});

// --- aborts ------------------------------------------------------------------------------------------------------

const slowly = { headers: { 'x-mock-events': '1000', 'x-mock-delay-ms': '20' } };
const late = { headers: { 'x-mock-ttft-ms': '60000' } };

// Each begins a call of model `one` (limit 1) and gives the way to abort it.
const aborts = {
    'openai chat, mid-stream': async () => {
        const stream = await openai().chat.completions.create({ model: 'one', messages, stream: true }, slowly);
        const pieces = stream[Symbol.asyncIterator]();
        await pieces.next();
        return () => stream.controller.abort();
    },
    'openai responses, mid-stream': async () => {
        const stream = await openai().responses.create({ model: 'one', input: 'x', stream: true }, slowly);
        const pieces = stream[Symbol.asyncIterator]();
        await pieces.next();
        return () => stream.controller.abort();
    },
    'anthropic messages, mid-stream': async () => {
        const stream = await anthropic().messages.create({ model: 'one', max_tokens: 9, messages, stream: true }, slowly);
        const pieces = stream[Symbol.asyncIterator]();
        await pieces.next();
        return () => stream.controller.abort();
    },
    'gemini, mid-stream': async () => {
        const control = new AbortController();
        const stream = await gemini('', slowly.headers).models.generateContentStream({
            model: 'one', contents: 'x', config: { abortSignal: control.signal } });
        await stream.next();
        stream.next().catch(() => {});
        return () => control.abort();
    },
    'openai chat, before the first byte': async () => {
        const control = new AbortController();
        openai().chat.completions.create({ model: 'one', messages }, { ...late, signal: control.signal }).catch(() => {});
        return () => control.abort();
    },
    'openai embeddings, before the first byte': async () => {
        const control = new AbortController();
        openai().embeddings.create({ model: 'one', input: 'x' }, { ...late, signal: control.signal }).catch(() => {});
        return () => control.abort();
    },
    'anthropic messages, before the first byte': async () => {
        const control = new AbortController();
        anthropic().messages.create({ model: 'one', max_tokens: 9, messages }, { ...late, signal: control.signal }).catch(() => {});
        return () => control.abort();
    },
    'gemini, before the first byte': async () => {
        const control = new AbortController();
        gemini('', late.headers).models.generateContent({ model: 'one', contents: 'x', config: { abortSignal: control.signal } }).catch(() => {});
        return () => control.abort();
    },
};

for (const [name, begin] of Object.entries(aborts)) {
    test(`abort: ${name}: the slot is free and the upstream left within 300 ms`, async () => {
        const abort = await begin();
        await mock.shows({ in_flight: 1 });
        await redis.holds(1, ':one');
        abort();
        await mock.shows({ in_flight: 0, aborted: 1 }, 300);
        await redis.holds(0, '', 300);
        assert.equal((await openai().chat.completions.create({ model: 'one', messages })).model, 'one');
    });
}

// --- refusals and retries ------------------------------------------------------------------------------------------

test('K03: maxRetries + 1 attempts on our 429, each after the delay we named', async () => {
    const times = [], named = [];
    const client = openai('', {
        maxRetries: 2,
        fetch: async (...args) => {
            times.push(performance.now());
            const answer = await fetch(...args);
            named.push(Number(answer.headers.get('retry-after-ms')));
            return answer;
        },
    });
    const busy = await openai().chat.completions.create({ model: 'one', messages, stream: true }, slowly);
    const error = await raised(client.chat.completions.create({ model: 'one', messages }));
    busy.controller.abort();
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.equal(times.length, 3);
    for (let i = 0; i < 2; i++) {
        assert.ok(named[i] >= 250 && named[i] <= 60000, `${named[i]}`);
        const gap = times[i + 1] - times[i];
        assert.ok(gap >= named[i] - 5 && gap < named[i] + within(400), `waited ${gap} ms, was told ${named[i]}`);
    }
});

test('a retry that finds a slot succeeds', async () => {
    const busy = await openai().chat.completions.create({ model: 'one', messages, stream: true }, slowly);
    setTimeout(() => busy.controller.abort(), 100);
    const answer = await openai('', { maxRetries: 5 }).chat.completions.create({ model: 'one', messages });
    assert.equal(answer.model, 'one');
    const again = await anthropic('', { maxRetries: 5 }).messages.create({ model: 'one', max_tokens: 9, messages });
    assert.equal(again.model, 'one');
});

// What each SDK raises for what leasegate answers by itself.
const big = 'x'.repeat(2 << 20);
const faults = [
    ['429', 'full', '', messages, 429, 'limit_full', OpenAI.RateLimitError, Anthropic.RateLimitError, 'rate_limit_error', 'RESOURCE_EXHAUSTED'],
    ['400', '', '', messages, 400, 'model', OpenAI.BadRequestError, Anthropic.BadRequestError, 'invalid_request_error', 'INVALID_ARGUMENT'],
    ['413', 'm', '', [{ role: 'user', content: big }], 413, 'body_too_large', OpenAI.APIError, Anthropic.APIError, 'request_too_large', 'INVALID_ARGUMENT'],
    ['502', 'm', '/gone', messages, 502, 'upstream_unreachable', OpenAI.InternalServerError, Anthropic.InternalServerError, 'api_error', 'UNAVAILABLE'],
    ['504', 'm', '/silent', messages, 504, 'upstream_timeout', OpenAI.InternalServerError, Anthropic.InternalServerError, 'timeout_error', 'DEADLINE_EXCEEDED'],
];
for (const [name, model, where, said, status, reason, inOpenai, inAnthropic, type, googleStatus] of faults) {
    test(`openai raises ${name} of ours`, async () => {
        const error = await raised(openai(where).chat.completions.create({ model, messages: said }, late));
        assert.ok(error instanceof inOpenai, error.constructor.name);
        assert.equal(error.status, status);
        assert.ok(error.code.startsWith(reason), error.code);
        assert.ok(error.headers.get('x-leasegate-reason').startsWith(reason));
        assert.match(error.requestID, /./);
    });
    test(`anthropic raises ${name} of ours`, async () => {
        const error = await raised(anthropic(where).messages.create({ model, max_tokens: 9, messages: said }, late));
        assert.ok(error instanceof inAnthropic, error.constructor.name);
        assert.equal(error.status, status);
        assert.equal(error.error.error.type, type);
        assert.ok(error.headers.get('x-leasegate-reason').startsWith(reason));
        assert.equal(error.requestID, error.error.request_id);
    });
    if (model !== '') {
        test(`gemini raises ${name} of ours`, async () => {
            const error = await raised(gemini(where, late.headers).models.generateContent({ model, contents: said[0].content }));
            assert.ok(error instanceof ApiError, error.constructor.name);
            assert.equal(error.status, status);
            const parsed = JSON.parse(error.message).error;
            assert.deepEqual([parsed.code, parsed.status], [status, googleStatus]);
        });
    }
}

// --- streams that are cut ------------------------------------------------------------------------------------------

const dies = { 'x-mock-fault': 'reset-mid-body', 'x-mock-fault-after': '3', 'x-mock-events': '10' };

test('openai raises our error event when a stream is cut', async () => {
    const stream = await openai().chat.completions.create({ model: 'm', messages, stream: true }, { headers: dies });
    const error = await raised((async () => {
        for await (const piece of stream)
            assert.ok(piece.choices);
    })());
    assert.ok(error instanceof OpenAI.APIError, error.constructor.name);
    assert.equal(error.code, 'upstream_closed');
});

test('anthropic raises our error event when a stream is cut', async () => {
    const stream = anthropic().messages.stream({ model: 'm', max_tokens: 9, messages }, { headers: dies });
    const error = await raised(stream.finalMessage());
    assert.ok(error instanceof Anthropic.APIError, error.constructor.name);
    assert.match(error.message, /the upstream closed the connection/);
});

test('gemini raises when a stream is cut', async () => {
    const stream = await gemini('', dies).models.generateContentStream({ model: 'm', contents: 'x' });
    const error = await raised((async () => {
        for await (const piece of stream)
            assert.ok(piece);
    })());
    assert.match(error.message, /the upstream closed the connection/);
});

// --- what the upstream says passes ---------------------------------------------------------------------------------

for (const status of [429, 500, 529]) {
    test(`K13: the upstream's own ${status} passes with its headers`, async () => {
        const error = await raised(openai().chat.completions.create({ model: 'm', messages }, { headers: { 'x-mock-status': `${status}` } }));
        assert.equal(error.status, status);
        assert.equal(error.headers.get('x-leasegate-reason'), null, 'not ours');
        if (status !== 500)
            assert.equal(error.headers.get('retry-after'), '1');
        const other = await raised(anthropic().messages.create({ model: 'm', max_tokens: 9, messages }, { headers: { 'x-mock-status': `${status}` } }));
        assert.equal(other.status, status);
    });
}

test('K12: an error event of the upstream passes unchanged, and the slot is free', async () => {
    const bytes = 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n';
    scripted.script = async (wire) => {
        for (; (await wire.message()).complete;)
            wire.send(`HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: ${bytes.length}\r\n\r\n${bytes}`);
    };
    const error = await raised(anthropic('/scripted').messages.stream({ model: 'one', max_tokens: 9, messages }).finalMessage());
    assert.match(error.message, /Overloaded/);
    const raw = await fetch(`${gate.url}/scripted/v1/messages`, { method: 'POST', body: JSON.stringify({ model: 'one', stream: true }) });
    assert.equal(await raw.text(), bytes);
});

// --- websockets ------------------------------------------------------------------------------------------------------

async function realtime(model = 'one') {
    const socket = new WebSocket(`${gate.url.replace('http', 'ws')}/v1/realtime?model=${model}`);
    await once(socket, 'open');
    return socket;
}

test('ws: echo; the lease is held until the client closes', async () => {
    const socket = await realtime();
    for (const text of ['one', 'x'.repeat(100000)]) {
        socket.send(text);
        const [data] = await once(socket, 'message');
        assert.equal(data.toString(), text);
    }
    await redis.holds(1, ':one');
    socket.close(1000);
    await once(socket, 'close');
    await redis.holds(0, '', 500);
});

test('ws: a second one over the limit is refused before it opens', async () => {
    const socket = await realtime();
    const second = new WebSocket(`${gate.url.replace('http', 'ws')}/v1/realtime?model=one`);
    const [, answer] = await once(second, 'unexpected-response');
    assert.equal(answer.statusCode, 429);
    assert.equal(answer.headers['x-leasegate-limit'], 'one');
    second.on('error', () => {});
    second.terminate();
    socket.close();
    await once(socket, 'close');
});

test('ws: the client vanishes: the upstream is left, the slot is free', async () => {
    const socket = await realtime();
    await mock.shows({ in_flight: 1 });
    socket.terminate();
    await mock.shows({ in_flight: 0 }, 500);
    await redis.holds(0, '', 500);
});

test('ws: the upstream closes first', async () => {
    scripted.script = async (wire) => {
        const m = await wire.message();
        const { createHash } = await import('node:crypto');
        const accept = createHash('sha1').update(m.headers.get('sec-websocket-key') + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest('base64');
        wire.send(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n\r\n`);
        wire.send(Buffer.from([0x88, 2, 0x03, 0xe9])); // close, 1001
        wire.finish();
    };
    const socket = new WebSocket(`${gate.url.replace('http', 'ws')}/scripted/v1/realtime?model=one`);
    const [code] = await once(socket, 'close');
    assert.equal(code, 1001);
    await waitUntil('the slot is free', async () => await redis.held() === 0);
});
