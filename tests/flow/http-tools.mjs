// http-tools.mjs - HTTP as bytes, for the rows of HTTP-CASES.md: a client that sends exactly what it is told, an
// upstream that is scripted reply by reply, a witness of every lease command, and certificates.
//
// No parser of Node.js has a say here: it would refuse, repair or hide the very things that are tested.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { mkdtempSync, readFileSync } from 'node:fs';
import net from 'node:net';
import path from 'node:path';
import tls from 'node:tls';

import { build, config, directory, root, startGate, startRedis, test, waitUntil, within } from './harness.mjs';

// How long a condition may take to come true. Generous: a busy machine must not fail a test.
const PATIENCE_MS = within(8000);

// --- messages ---------------------------------------------------------------------------------------------------

// One head at bytes[at..]: {start, fields, value(name), all(name), text, end}, or null when it is not whole.
function parseHead(bytes, at) {
    const end = bytes.indexOf('\r\n\r\n', at);
    if (end < 0)
        return null;
    const text = bytes.toString('latin1', at, end + 4);
    const [start, ...lines] = text.slice(0, -4).split('\r\n');
    const fields = lines.map((line) => {
        const colon = line.indexOf(':');
        return [line.slice(0, colon), line.slice(colon + 1).replace(/^[ \t]+|[ \t]+$/g, '')];
    });
    const all = (name) => fields.filter(([n]) => n.toLowerCase() === name).map(([, v]) => v);
    return { start, fields, text, end: end + 4, all, value: (name) => all(name)[0] };
}

// A chunked body at bytes[at..], read strictly: {body, chunks, trailer, end}, or null when it is not whole.
function parseChunked(bytes, at) {
    const chunks = [];
    for (;;) {
        const eol = bytes.indexOf('\r\n', at);
        if (eol < 0)
            return null;
        const line = bytes.toString('latin1', at, eol);
        assert.match(line, /^[0-9a-fA-F]+$/, 'a chunk size and nothing else');
        const size = parseInt(line, 16);
        at = eol + 2;
        if (size === 0) {
            const last = bytes.indexOf('\r\n', at);
            if (last < 0)
                return null;
            assert.equal(last, at, 'no trailer fields');
            return { body: Buffer.concat(chunks), chunks, end: last + 2 };
        }
        if (bytes.length < at + size + 2)
            return null;
        chunks.push(bytes.subarray(at, at + size));
        assert.equal(bytes.toString('latin1', at + size, at + size + 2), '\r\n', 'CRLF behind chunk data');
        at += size + 2;
    }
}

// The body behind a head. `ended`: no more bytes come.
function parseBody(bytes, head, { request = false, method = 'GET', ended = false }) {
    const status = request ? 0 : Number(head.start.split(' ')[1]);
    const length = head.value('content-length');
    if (head.value('transfer-encoding') !== undefined) {
        assert.deepEqual(head.all('transfer-encoding'), ['chunked']);
        assert.equal(length, undefined, 'never both framings');
        const parsed = parseChunked(bytes, head.end);
        return parsed === null ? null : { by: 'chunked', ...parsed };
    }
    if (!request && (method === 'HEAD' || status < 200 || status === 204 || status === 304))
        return { by: 'none', body: Buffer.alloc(0), end: head.end };
    if (length !== undefined) {
        assert.equal(head.all('content-length').length, 1);
        assert.match(length, /^\d+$/);
        const end = head.end + Number(length);
        return bytes.length < end ? null : { by: 'length', body: bytes.subarray(head.end, end), end };
    }
    if (request)
        return { by: 'none', body: Buffer.alloc(0), end: head.end };
    return ended ? { by: 'eof', body: bytes.subarray(head.end), end: bytes.length } : null;
}

// --- one connection ---------------------------------------------------------------------------------------------

// A socket with everything that came on it. It sends FIN only when told to.
export class Wire {
    #room = Buffer.alloc(0);
    #used = 0;
    #waiting = new Set();
    at = 0; // what has been read as messages
    received = 0;
    ended = false; // FIN came
    closed = false;
    error = null;

    constructor(socket, { keep = true } = {}) {
        this.socket = socket;
        socket.setNoDelay?.(true);
        socket.on('data', (chunk) => {
            this.received += chunk.length;
            if (keep)
                this.#take(chunk);
            this.#tell();
        });
        socket.on('end', () => { this.ended = true; this.#tell(); });
        socket.on('error', (error) => { this.error = error; this.#tell(); });
        socket.on('close', () => { this.closed = true; this.#tell(); });
    }

    #tell() {
        for (const look of [...this.#waiting])
            look();
    }

    #take(chunk) {
        if (this.#used + chunk.length > this.#room.length) {
            const grown = Buffer.allocUnsafe(2 * (this.#used + chunk.length));
            this.#room.copy(grown, 0, 0, this.#used);
            this.#room = grown;
        }
        this.#used += chunk.copy(this.#room, this.#used);
    }

    get bytes() {
        return this.#room.subarray(0, this.#used);
    }

    // What has come and was not read as a message yet.
    get rest() {
        return this.bytes.toString('latin1', this.at);
    }

    write(data) {
        if (!this.closed)
            this.socket.write(typeof data === 'string' ? Buffer.from(data, 'latin1') : data);
        return this;
    }

    end() {
        this.socket.end();
        return this;
    }

    reset() {
        this.socket.resetAndDestroy();
        return this;
    }

    close() {
        this.socket.destroy();
    }

    until(what, probe, ms = PATIENCE_MS) {
        return new Promise((resolve, reject) => {
            const finish = (settle, value) => {
                clearTimeout(timer);
                this.#waiting.delete(look);
                settle(value);
            };
            const look = () => {
                try {
                    const seen = probe();
                    if (seen !== undefined && seen !== null && seen !== false)
                        finish(resolve, seen);
                } catch (error) {
                    finish(reject, error);
                }
            };
            const timer = ms === Infinity ? undefined : setTimeout(() => finish(reject, new Error(
                `${what}: not within ${ms} ms; ${this.ended ? 'ended; ' : ''}${this.error ?? ''} got ` +
                JSON.stringify(this.bytes.toString('latin1', this.at, this.at + 400)))), ms);
            this.#waiting.add(look);
            look();
        });
    }

    head(ms) {
        return this.until('a head', () => {
            const head = parseHead(this.bytes, this.at);
            if (head === null && (this.ended || this.closed))
                throw new Error(`no head: ${this.error ?? 'FIN'}; got ${JSON.stringify(this.rest.slice(0, 400))}`);
            return head;
        }, ms);
    }

    // The next response, whole. method: of the request that it answers.
    async response({ method, ms } = {}) {
        const head = await this.head(ms);
        const seen = await this.until('the rest of the response', () => {
            const body = parseBody(this.bytes, head, { method, ended: this.ended });
            if (body === null && (this.ended || this.closed))
                throw new Error(`the response was cut: ${this.error ?? 'FIN'} behind ${this.received} bytes`);
            return body;
        }, ms);
        this.at = seen.end;
        const [, status, phrase] = /^HTTP\/1\.1 (\d{3}) (.*)$/.exec(head.start) ?? assert.fail(`status line: ${head.start}`);
        return { ...head, ...seen, status: Number(status), phrase, text: head.text, json: () => JSON.parse(seen.body.toString()) };
    }

    // How the other side ends: 'fin' or 'reset'.
    async ending(ms) {
        await this.until('an end of the connection', () => this.ended || this.closed, ms);
        if (this.ended)
            return 'fin';
        return this.error?.code === 'ECONNRESET' || this.error?.code === 'EPIPE' ? 'reset' : `${this.error}`;
    }

    // The other side ended and takes our FIN too: both directions are closed without an error.
    async closesCleanly(ms) {
        assert.equal(await this.ending(ms), 'fin');
        this.end();
        await this.until('the close', () => this.closed, ms);
        assert.equal(this.error, null);
    }

    // No more bytes have come than what was read, at this moment.
    isQuiet() {
        return this.rest === '' && !this.ended && !this.closed;
    }
}

const wires = new Set();

// A client's connection. tls: options of tls.connect.
export async function connect(port, { host = '127.0.0.1', tls: secure, keep } = {}) {
    const socket = secure ? tls.connect({ host, port, allowHalfOpen: true, ...secure }) : net.connect({ host, port, allowHalfOpen: true });
    const wire = new Wire(socket, { keep });
    wires.add(wire);
    socket.on('close', () => wires.delete(wire));
    await once(socket, secure ? 'secureConnect' : 'connect');
    return wire;
}

export function closeAllWires() {
    for (const wire of wires)
        wire.close();
}

// --- an upstream, reply by reply --------------------------------------------------------------------------------

// One request that reached the upstream. `whole` resolves with its body ({body, by}) or null if that was cut.
class Exchange {
    constructor(wire, head) {
        this.wire = wire;
        Object.assign(this, head);
    }

    write(text) {
        this.answered?.(text.slice(0, 12).toString('latin1') !== 'HTTP/1.1 101');
        this.wire.write(text);
        return this;
    }

    reply(body = '{}', { status = '200 OK', fields = [] } = {}) {
        return this.write(`HTTP/1.1 ${status}\r\n${fields.map((f) => `${f}\r\n`).join('')}Content-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`);
    }

    // The head of an event stream, chunked.
    stream(...fields) {
        return this.write(`HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n${fields.map((f) => `${f}\r\n`).join('')}Transfer-Encoding: chunked\r\n\r\n`);
    }

    chunk(text) {
        const bytes = Buffer.from(text, 'latin1');
        return this.write(Buffer.concat([Buffer.from(`${bytes.length.toString(16)}\r\n`), bytes, Buffer.from('\r\n')]));
    }

    last() {
        return this.write('0\r\n\r\n');
    }
}

export class RawUpstream {
    connections = []; // Wires, in the order of accepting
    requests = 0;
    #queue = [];
    #takers = [];

    // tls: options of tls.createServer. onSocket(socket): takes a connection over; nothing is read from it.
    static async start({ tls: secure, onSocket, onWire, host = '127.0.0.1' } = {}) {
        const up = new RawUpstream();
        const accept = (socket) => {
            socket.on('error', () => {});
            if (onSocket !== undefined)
                return onSocket(socket);
            const wire = new Wire(socket);
            up.connections.push(wire);
            onWire?.(wire);
            up.#serve(wire);
        };
        up.onSocket = onSocket;
        up.sockets = new Set();
        up.server = secure ? tls.createServer({ allowHalfOpen: true, ...secure }, accept) : net.createServer({ allowHalfOpen: true }, accept);
        up.server.on('connection', (socket) => {
            up.sockets.add(socket);
            socket.on('error', () => {});
            socket.on('close', () => up.sockets.delete(socket));
        });
        up.server.on('tlsClientError', () => {});
        up.server.listen(0, host);
        await once(up.server, 'listening');
        up.port = up.server.address().port;
        up.url = `${secure ? 'https' : 'http'}://${host}:${up.port}`;
        return up;
    }

    async #serve(wire) {
        for (;;) {
            const head = await wire.until('a request', () => parseHead(wire.bytes, wire.at) ?? (wire.ended || wire.closed ? 'end' : null), Infinity).catch(() => 'end');
            if (head === 'end')
                return;
            wire.at = head.end;
            this.requests++;
            const exchange = new Exchange(wire, head);
            if (head.value('upgrade') !== undefined) { // what follows a 101 is no HTTP
                const answer = new Promise((done) => { exchange.answered = done; });
                this.#give(exchange);
                if (!await answer)
                    return;
                continue;
            }
            let settle;
            exchange.whole = new Promise((done) => { settle = done; });
            this.#give(exchange);
            const body = await wire.until('a request body', () => parseBody(wire.bytes, head, { request: true }) ?? (wire.ended || wire.closed ? 'cut' : null), Infinity).catch(() => 'cut');
            if (body === 'cut') {
                settle(null);
                return;
            }
            wire.at = body.end;
            settle(body);
        }
    }

    // Requests that nobody has taken yet.
    waiting() {
        return [...this.#queue];
    }

    // Requests that nobody took are dropped, with their connections.
    forget() {
        for (const { wire } of this.#queue.splice(0))
            wire.close();
    }

    #give(exchange) {
        const taker = this.#takers.shift();
        if (taker === undefined)
            this.#queue.push(exchange);
        else
            taker(exchange);
    }

    // The next request that nobody has taken yet; its head is there, its body perhaps not.
    next(ms = PATIENCE_MS) {
        const ready = this.#queue.shift();
        if (ready !== undefined)
            return Promise.resolve(ready);
        return new Promise((resolve, reject) => {
            const taker = (exchange) => { clearTimeout(timer); resolve(exchange); };
            const timer = setTimeout(() => {
                this.#takers.splice(this.#takers.indexOf(taker), 1);
                reject(new Error(`no request reached the upstream within ${ms} ms`));
            }, ms);
            this.#takers.push(taker);
        });
    }

    // Everything that ever came, in bytes: unchanged means that nothing reached it.
    get received() {
        return this.connections.reduce((sum, wire) => sum + wire.received, 0);
    }

    async stop() {
        for (const socket of this.sockets)
            socket.destroy();
        this.server.close();
        await once(this.server, 'close');
    }
}

// --- leases -----------------------------------------------------------------------------------------------------

const sha = (verb) => createHash('sha1').update(readFileSync(path.join(root, 'lua', `${verb}.lua`))).digest('hex');

// Every lease command of one Redis, in order, as its MONITOR shows them.
export class Witness {
    #verbs = new Map(['admit', 'renew', 'release'].map((verb) => [sha(verb), verb]));

    static async start(redis) {
        const witness = new Witness();
        witness.redis = redis;
        witness.monitor = await redis.monitor();
        return witness;
    }

    // Everything that Redis has run before this moment has been seen.
    async sync() {
        const mark = randomUUID();
        await this.redis.command('ECHO', mark);
        await waitUntil('MONITOR follows', () => this.monitor.lines.some(({ words }) => words[1] === mark), PATIENCE_MS);
    }

    get position() {
        return this.monitor.lines.length;
    }

    // {verb, keys, ids} of the commands behind a position.
    commands(from = 0) {
        return this.monitor.lines.slice(from).flatMap(({ lua, words }) => {
            const verb = lua || words[0].toLowerCase() !== 'evalsha' ? undefined : this.#verbs.get(words[1]);
            const n = Number(words[2]);
            return verb === undefined ? [] : [{ verb, keys: words.slice(3, 3 + n), ids: words.slice(3 + n + (verb === 'release' ? 0 : 2 + n)) }];
        });
    }

    // Nothing but a release may follow a release (H093).
    checkOrder(from = 0) {
        const ended = new Set();
        for (const { verb, ids } of this.commands(from)) {
            for (const id of ids) {
                assert.ok(verb === 'release' || !ended.has(id), `${verb} of ${id} behind its release`);
                if (verb === 'release')
                    ended.add(id);
            }
        }
    }

    ids(verb, from = 0) {
        return this.commands(from).filter((c) => c.verb === verb).flatMap((c) => c.ids);
    }
}

// --- certificates -----------------------------------------------------------------------------------------------

// A CA and certificates of it, made by openssl when they are needed.
export class Certificates {
    constructor() {
        this.directory = mkdtempSync(path.join(directory, 'certs-'));
        this.ca = this.#make('ca', '/CN=test CA', ['-addext', 'basicConstraints=critical,CA:TRUE']);
    }

    #make(name, subject, more) {
        const cert = path.join(this.directory, `${name}.pem`), key = path.join(this.directory, `${name}.key`);
        execFileSync('openssl', ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', '2',
            '-subj', subject, '-keyout', key, '-out', cert, ...more], { stdio: 'pipe' });
        return { cert, key, pem: () => ({ cert: readFileSync(cert), key: readFileSync(key) }) };
    }

    // san: e.g. "DNS:localhost,IP:127.0.0.1"
    issue(name, san, more = []) {
        return this.#make(name, `/CN=${name}`, ['-CA', this.ca.cert, '-CAkey', this.ca.key, '-addext', `subjectAltName=${san}`,
            '-addext', 'basicConstraints=critical,CA:FALSE', ...more]);
    }
}

// --- requests ---------------------------------------------------------------------------------------------------

export const get = (target, ...fields) => `GET ${target} HTTP/1.1\r\nHost: gate\r\n${fields.map((f) => `${f}\r\n`).join('')}\r\n`;

export const post = (target, body, ...fields) =>
    `POST ${target} HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n${fields.map((f) => `${f}\r\n`).join('')}` +
    `Content-Length: ${Buffer.byteLength(body, 'latin1')}\r\n\r\n${body}`;

export const CHAT = '/v1/chat/completions';
export const chatBody = '{"model":"m1","messages":[]}';
export const chat = (...fields) => post(CHAT, chatBody, ...fields);

// --- what the gateway answers by itself -------------------------------------------------------------------------

const RETRIED = new Set([429, 500, 502, 503, 504]);

/*
 * An answer of the gateway's own (H167, H169, H171): JSON in the API's shape with a Content-Length, both ids, a reason,
 * and about trying again just what SDKs obey. status: one or several that are right. close: the connection ends.
 */
export function assertOwnAnswer(response, status, { reason, api = 'openai', close, bodyless = false } = {}) {
    const wanted = [status].flat();
    assert.ok(wanted.includes(response.status), `${response.status} ${response.value('x-leasegate-reason')} instead of ${wanted}: ${response.body}`);
    assert.ok(response.phrase.length > 0);
    assert.equal(response.value('content-type'), 'application/json');
    assert.ok(Number(response.value('content-length')) > 0);
    assert.ok(response.value('x-request-id').length > 0);
    assert.equal(response.value('request-id'), response.value('x-request-id'));
    if (reason !== undefined)
        assert.ok([reason].flat().includes(response.value('x-leasegate-reason')), `${response.value('x-leasegate-reason')} instead of ${reason}`);
    else
        assert.match(response.value('x-leasegate-reason'), /^[a-z_]+$/);
    if (RETRIED.has(response.status)) {
        assert.equal(response.value('x-should-retry'), 'true');
        const s = Number(response.value('retry-after')), ms = Number(response.value('retry-after-ms'));
        assert.ok(Number.isInteger(s) && s >= 1 && s <= 60, `retry-after ${s}`);
        assert.ok(Number.isInteger(ms) && ms > 0 && ms <= 60000 && Math.ceil(ms / 1000) === s, `retry-after-ms ${ms}`);
    } else {
        assert.notEqual(response.value('x-should-retry'), 'true');
        assert.equal(response.value('retry-after'), undefined);
    }
    if (close !== undefined)
        assert.equal(response.value('connection')?.toLowerCase() === 'close', close, `Connection: ${response.value('connection')}`);
    if (bodyless)
        return;
    const json = response.json();
    if (api === 'openai') {
        assert.deepEqual(Object.keys(json), ['error']);
        assert.deepEqual(Object.keys(json.error).sort(), ['code', 'message', 'param', 'type']);
        assert.equal(json.error.code, response.value('x-leasegate-reason'));
    } else if (api === 'anthropic') {
        assert.equal(json.type, 'error');
        assert.equal(json.request_id, response.value('request-id'));
        assert.equal(typeof json.error.type, 'string');
    } else {
        assert.equal(json.error.code, response.status);
        assert.match(json.error.status, /^[A-Z_]+$/);
    }
    assert.ok(json.error.message.length > 0);
}

// --- one gate, one upstream, one Redis, for the rows of a file --------------------------------------------------

/*
 * Routes: /v1, /v1beta, /openai go to `llm` and /model to `bedrock`, whose bodies are searched for a model; /plain goes to
 * `plain`, which is counted at the head; anything else is a 404. All are the same scripted upstream; x-upstream says which was meant.
 */
export class Stage {
    #from = 0;
    #received = 0;
    #connections = 0;

    // llm: options of all three upstreams, bedrock: of that one; upstream: of RawUpstream; the rest goes into config().
    static async start({ llm = {}, bedrock = {}, upstream = {}, url = (up) => up.url, ...rest } = {}) {
        const stage = new Stage();
        stage.up = await RawUpstream.start(upstream);
        stage.redis = await startRedis();
        stage.text = (more = {}) => Stage.config(stage.redis, url(stage.up), { ...rest, ...more }, { ...llm, ...more.llm }, bedrock);
        stage.gate = await startGate(stage.text());
        stage.witness = await Witness.start(stage.redis);
        return stage;
    }

    static config(redis, url, { llm: _, ...rest }, llm, bedrock) {
        const upstream = (name, more) => ({ url, first_byte_timeout: '60s', idle_timeout: '60s', header: { 'x-upstream': { value: name } }, ...llm, ...more });
        return config({
            redis: { url: redis.url, timeout: `${within(1000)}ms` },
            upstream: { llm: upstream('llm'), plain: upstream('plain'), bedrock: upstream('bedrock', bedrock) },
            route: {
                '/plain': { upstream: 'plain' }, '/model': { upstream: 'bedrock' },
                ...Object.fromEntries(['/v1', '/v1beta', '/openai'].map((prefix) => [prefix, { upstream: 'llm' }])),
            },
            limit: { all: { concurrency: 1000 }, models: { model: ['*'], upstream: ['llm', 'bedrock'], per: ['model'], concurrency: 500 } },
            ...rest,
        });
    }

    async stop() {
        this.witness.monitor.stop();
        await this.up.stop();
    }

    open(options = {}) {
        return connect(options.port ?? this.gate.port, options);
    }

    // From here on neverTaken() and scopes() look.
    async mark() {
        await this.witness.sync();
        this.#from = this.witness.position;
        this.#received = this.up.received;
        this.#connections = this.up.connections.length;
    }

    // Since the last mark: no lease was asked for, and no byte and no connection reached the upstream.
    async neverTaken() {
        await this.witness.sync();
        assert.deepEqual(this.witness.ids('admit', this.#from), []);
        assert.equal(this.up.received, this.#received, 'nothing reached the upstream');
        assert.equal(this.up.connections.length, this.#connections, 'the upstream was not even dialed');
    }

    // Keys of the scopes that leases were asked for since the last mark, without prefix and tag.
    async scopes() {
        await this.witness.sync();
        return this.witness.commands(this.#from).filter((c) => c.verb === 'admit').map((c) => c.keys.map((k) => /\}:(.*):leases$/.exec(k)[1]));
    }

    held(n = 1) {
        return this.redis.holds(n, '{main}:all:', PATIENCE_MS);
    }

    released() {
        return this.redis.holds(0, '', PATIENCE_MS);
    }

    // Sends bytes on a new connection (or on `wire`) and gives that and what reached the upstream.
    async send(bytes, { wire, ...options } = {}) {
        wire ??= await this.open(options);
        wire.write(bytes);
        const exchange = await this.up.next();
        exchange.whole?.then(() => {});
        return { wire, exchange };
    }

    // A call that has reached the upstream, or null when it was refused for the time being.
    async tryCall(options) {
        const wire = await this.open(options);
        wire.write(chat());
        await waitUntil('a refusal or a call', () => wire.received > 0 || this.up.waiting().length > 0, PATIENCE_MS);
        if (wire.received === 0)
            return { wire, exchange: await this.up.next() };
        assertOwnAnswer(await wire.response(), 429);
        wire.close();
        return null;
    }

    // Calls are taken again.
    async ready() {
        const call = await waitUntil('calls are taken again', () => this.tryCall(), PATIENCE_MS);
        call.exchange.reply();
        assert.equal((await call.wire.response()).status, 200);
        call.wire.close();
    }

    async healthy() {
        const { wire, exchange } = await this.send(chat());
        const { body } = await exchange.whole;
        assert.equal(body.toString(), chatBody);
        exchange.reply('{"ok":true}');
        const response = await wire.response();
        assert.equal(response.status, 200);
        assert.deepEqual(response.json(), { ok: true });
        wire.close();
    }

    // A round trip through the worker: what was sent to it before has been read.
    async turn() {
        this.pinger = this.pinger === undefined || this.pinger.ended || this.pinger.closed ? await this.open() : this.pinger;
        this.pinger.write(get('/nowhere'));
        assert.equal((await this.pinger.response()).status, 404);
    }

    /*
     * These bytes are refused: one answer of our own that says so and `Connection: close`, then an orderly end; no lease, nothing
     * upstream. With `splits`, also when they come in two parts, for every place of the cut.
     */
    async refuses(bytes, status, { splits = true, ...expected } = {}) {
        const judge = async (wire) => {
            assertOwnAnswer(await wire.response(expected), status, { close: true, ...expected });
            await wire.until('an end', () => wire.ended || wire.closed);
            assert.equal(wire.rest, '', 'one answer and no more');
            await wire.closesCleanly();
        };
        const whole = await this.open();
        whole.write(bytes);
        await judge(whole).catch((error) => { error.message = `${JSON.stringify(bytes.slice(0, 200))}: ${error.message}`; throw error; });
        if (splits && bytes.length <= 400) {
            const cuts = Array.from({ length: bytes.length - 1 }, (_, i) => i + 1);
            const wires = await Promise.all(cuts.map((cut) => this.open().then((w) => w.write(bytes.slice(0, cut)))));
            await this.turn();
            await Promise.all(wires.map((wire, i) => judge(wire.write(bytes.slice(cuts[i]))).catch((error) => {
                error.message = `cut behind byte ${cuts[i]} of ${JSON.stringify(bytes)}: ${error.message}`;
                throw error;
            })));
        }
        await this.neverTaken();
    }
}

/*
 * Gives row(id, name, body): a test for one row of the table, on the stage that stage() gives when it runs. Behind the body: a request
 * on a fresh connection works, no lease is left, none was released twice, and none was renewed behind its release (H093).
 */
export function rowsOn(stage) {
    return (id, name, body, options = {}) => test(`${id}: ${name}`, options, async (t) => {
        const s = stage();
        s.up.forget();
        await s.mark();
        const from = s.witness.position;
        try {
            await body(t);
            await s.healthy();
            await s.released();
            await s.witness.sync();
            const released = s.witness.ids('release', from);
            s.witness.checkOrder(from);
            // after a reply that came too late (a machine that stood still) a release is rightly sent again
            const lost = s.gate.log.some((l) => l.event === 'redis' && /not usable/.test(l.message));
            for (const lease of lost ? [] : new Set(s.witness.ids('admit', from)))
                assert.ok(released.filter((l) => l === lease).length <= 1, `not more than one release of ${lease}`);
        } catch (error) { // the next row finds nothing of this one
            for (const socket of s.up.sockets)
                socket.destroy();
            throw error;
        } finally {
            closeAllWires();
        }
    });
}

// What a sanitizer keeps for itself: freed blocks, shadows.
const memorySlack = build.includes('san-') ? 16 : 1;

export function assertGrowth(pid, before, limit) {
    const grown = rssBytes(pid) - before;
    assert.ok(grown < limit * memorySlack, `grew by ${grown} bytes`);
}

export function rssBytes(pid) {
    return Number(/VmRSS:\s+(\d+) kB/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))[1]) * 1024;
}
