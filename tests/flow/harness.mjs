// harness.mjs - real servers for the flow tests: Redis, mock-llm, leasegate, scripted upstreams, raw clients.
//
//     import { startGate, startMock, startRedis, test } from './harness.mjs';
//     let gate, mock, redis;
//     before(async () => {
//         redis = await startRedis();
//         mock = await startMock();
//         gate = await startGate(config({ redis, upstream: mock, limit: { all: { concurrency: 1 } } }));
//     });
//     test('A05: …', async () => { … });
//
// What a test starts ends with it; what before() starts ends with the file. `test` is node:test's, with three checks
// behind each test: no lease is left in any Redis, no call in any mock-llm, and no leasegate has crashed,
// complained (BUG, WARN, sanitizers) or left a worker. stop() sends SIGTERM and demands exit status 0.
//
// Environment: LEASEGATE_BUILD (build directory), LEASEGATE_TEST_SLOW (factor for all deadlines; 1, or 5 when the
// directory is a sanitizer's), LEASEGATE_TEST_REDIS (another redis-server), LEASEGATE_TEST_LOG=1 (prints the log of leasegate).
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import net from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { after, test as nodeTest } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import { Redis } from '../lua/resp.mjs';

export const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '../..');
export const build = path.resolve(root, process.env.LEASEGATE_BUILD ?? 'build');
export const slow = Number(process.env.LEASEGATE_TEST_SLOW ?? (build.includes('san-') ? 5 : 1));
export const directory = mkdtempSync(path.join(tmpdir(), 'leasegate-flow-'));
export { sleep };

// AddressSanitizer keeps freed blocks back, by default 256 MB of them: too many where memory is measured.
const quarantine = 'quarantine_size_mb=4';
// A deadline: so many milliseconds on an ordinary build.
export const within = (ms) => ms * slow;

// --- what is running -----------------------------------------------------------------------------------------

const scopes = [[]]; // of the file, and of the test that runs
let number = 0;

function keep(thing) {
    scopes[scopes.length - 1].push(thing);
    return thing;
}

const all = (kind) => scopes.flat().filter((thing) => thing.kind === kind && !thing.gone);

async function tearDown(scope) {
    const errors = [];
    // gates first: they release their leases and close their upstream connections
    const order = { wire: 0, gate: 1, mock: 2, upstream: 3, helper: 3, redis: 4 };
    for (const thing of scope.splice(0).sort((a, b) => order[a.kind] - order[b.kind])) {
        try {
            if (!thing.gone)
                await thing.stop();
        } catch (error) {
            errors.push(error);
        }
    }
    if (errors.length > 0)
        throw errors[0];
}

process.on('exit', () => {
    for (const thing of scopes.flat())
        thing.child?.kill('SIGKILL');
    rmSync(directory, { recursive: true, force: true });
});
after(() => tearDown(scopes[0]));

// Waits until probe() gives something true, and gives that. `what` and the last value stand in the failure.
export async function waitUntil(what, probe, ms = 3000) {
    const deadline = Date.now() + within(ms);
    for (let pause = 1; ; pause = Math.min(pause * 2, 20)) {
        const seen = await probe();
        if (seen)
            return seen;
        if (Date.now() > deadline)
            assert.fail(`not within ${within(ms)} ms: ${typeof what === 'function' ? await what() : what}`);
        await sleep(pause);
    }
}

// Closes all raw clients.
export function closeWires() {
    for (const wire of all('wire'))
        wire.stop();
}

// No lease, no call, no complaint: what must hold whenever nothing is running.
export async function checkAtRest(ms = 1500) {
    closeWires();
    for (const redis of all('redis').filter((r) => !r.paused)) {
        let held;
        await waitUntil(() => `no lease left in Redis: ${JSON.stringify(held)}`, async () => {
            held = await redis.leases();
            return Object.values(held).every((n) => n === 0);
        }, ms);
    }
    for (const mock of all('mock')) {
        let stats;
        await waitUntil(() => `nothing in flight at mock-llm: ${JSON.stringify(stats)}`, async () => {
            stats = await mock.stats();
            return stats.in_flight === 0;
        }, ms);
    }
    for (const gate of all('gate'))
        gate.checkHealth();
}

export function test(name, options, body) {
    if (typeof options === 'function')
        [options, body] = [{}, options];
    return nodeTest(name, { timeout: within(30000), ...options }, async (t) => {
        const scope = [];
        scopes.push(scope);
        try {
            await body(t);
            await checkAtRest();
        } finally {
            for (const redis of all('redis').filter((r) => r.paused))
                await redis.resume(); // a test that failed must not take the others with it
            closeWires();
            await tearDown(scope);
            scopes.pop();
        }
    });
}

async function firstLine(child, pattern, what) {
    let text = '';
    const timer = setTimeout(() => child.kill('SIGKILL'), within(10000));
    for await (const piece of child.stdout) {
        text += piece;
        const m = pattern.exec(text);
        if (m !== null) {
            clearTimeout(timer);
            child.stdout.resume();
            return m;
        }
    }
    throw new Error(`${what} did not start: ${text}`);
}

// --- Redis ---------------------------------------------------------------------------------------------------

class RedisServer {
    kind = 'redis';
    gone = false;
    paused = false;

    constructor(options) {
        this.options = options;
        this.path = path.join(directory, `redis-${++number}`);
        this.url = `unix://${this.path}`;
    }

    async start() {
        const binary = process.env.LEASEGATE_TEST_REDIS ?? 'redis-server';
        this.child = spawn(binary, ['--port', '0', '--unixsocket', this.path, '--dir', directory, '--save', '', '--appendonly', 'no',
            ...this.options], { stdio: 'ignore' });
        this.exited = once(this.child, 'exit');
        this.gone = false;
        this.client = await waitUntil(`${binary} answers`, async () => {
            const client = new Redis(this.path);
            if (await client.call('PING').catch(() => null) === 'PONG')
                return client;
            client.close();
            return null;
        }, 10000);
        return this;
    }

    command(...args) {
        return this.client.call(...args);
    }

    // {key: members} of all leases.
    async leases() {
        const keys = await this.command('KEYS', '*:leases');
        const counts = await Promise.all(keys.map((key) => this.command('ZCARD', key)));
        return Object.fromEntries(keys.map((key, i) => [key, counts[i]]));
    }

    // Members of all keys whose name contains `part`.
    async held(part = '') {
        return Object.entries(await this.leases()).reduce((sum, [key, n]) => sum + (key.includes(part) ? n : 0), 0);
    }

    async holds(n, part = '', ms = 2000) {
        let seen;
        await waitUntil(() => `Redis holds ${n} leases ${part}, not ${seen}`, async () => (seen = await this.held(part)) === n, ms);
    }

    // Every command from now on, as arrays of words; stop() ends it.
    async monitor() {
        const socket = net.connect(this.path);
        const lines = [];
        let text = '';
        socket.setEncoding('latin1');
        socket.on('error', () => {});
        socket.on('data', (piece) => {
            text += piece;
            const whole = text.split('\r\n');
            text = whole.pop();
            for (const line of whole) {
                const m = /^\+[\d.]+ \[\d+ (\S*)\] (.*)$/.exec(line);
                if (m !== null)
                    lines.push({ lua: m[1] === 'lua', words: [...m[2].matchAll(/"((?:[^"\\]|\\.)*)"/g)].map((w) => w[1]) });
            }
        });
        socket.write('MONITOR\r\n');
        await once(socket, 'data');
        return { lines, stop: () => socket.destroy() };
    }

    async pause() {
        this.paused = true;
        this.child.kill('SIGSTOP');
    }

    async resume() {
        this.child.kill('SIGCONT');
        await this.command('PING');
        this.paused = false;
    }

    async kill() {
        this.client.close();
        this.child.kill('SIGKILL');
        await this.exited;
        this.gone = true;
    }

    // A new, empty server in the place of the old one.
    async restart() {
        if (!this.gone)
            await this.kill();
        await this.start();
    }

    async stop() {
        await this.kill();
    }
}

export async function startRedis(...options) {
    return keep(await new RedisServer(options).start());
}

// --- mock-llm ------------------------------------------------------------------------------------------------

class Mock {
    kind = 'mock';
    gone = false;

    async start(args) {
        this.child = spawn(path.join(build, 'mock-llm'), ['--port', '0', ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
        this.exited = once(this.child, 'exit');
        [, this.port] = await firstLine(this.child, /listening on 127\.0\.0\.1:(\d+)/, 'mock-llm');
        this.port = Number(this.port);
        this.url = `http://127.0.0.1:${this.port}`;
        return this;
    }

    async stats() {
        return (await fetch(`${this.url}/stats`)).json();
    }

    async reset() {
        await fetch(`${this.url}/reset`, { method: 'POST' });
    }

    // Waits until the counters have these values: {in_flight: 1, aborted: 2}.
    async shows(wanted, ms = 2000) {
        let seen;
        await waitUntil(() => `mock-llm shows ${JSON.stringify(wanted)}: ${JSON.stringify(seen)}`, async () => {
            seen = await this.stats();
            return Object.entries(wanted).every(([k, v]) => seen[k] === v);
        }, ms);
        return seen;
    }

    async stop() {
        this.child.kill('SIGTERM');
        const [code, signal] = await this.exited;
        this.gone = true;
        assert.equal(code, 0, `mock-llm ends with status 0 (signal ${signal})`);
    }
}

export async function startMock(...args) {
    return keep(await new Mock().start(args));
}

// --- leasegate -----------------------------------------------------------------------------------------------

const titled = new Set(['listen', 'admin', 'upstream', 'header', 'route', 'map', 'limit', 'override']);
const quote = (text) => `"${String(text).replace(/["\\]/g, '\\$&')}"`;

function write(section, indent = '') {
    let text = '';
    for (const [name, value] of Object.entries(section)) {
        if (Array.isArray(value)) {
            text += `${indent}${name} = {${value.map(quote).join(', ')}}\n`;
        } else if (typeof value !== 'object') {
            text += `${indent}${name} = ${quote(value)}\n`;
        } else if (titled.has(name) || Object.values(value).every((v) => typeof v === 'object' && !Array.isArray(v))) {
            for (const [title, options] of Object.entries(value))
                text += `${indent}${name} ${quote(title)} {\n${write(options, indent + '    ')}${indent}}\n`;
        } else {
            text += `${indent}${name} {\n${write(value, indent + '    ')}${indent}}\n`;
        }
    }
    return text;
}

/*
 * The text of a configuration. `redis` and `upstream` may be what startRedis, startMock and startUpstream gave, or
 * sections; an upstream's sections may leave the url to `url`. All else as in config/README.md; what is left out gets
 * values that suit tests: one thread, free ports, a short clock.
 */
export function config({ redis, upstream, url, ...rest } = {}) {
    const given = upstream?.kind !== undefined ? { llm: { url: upstream.url } } : upstream ?? {};
    const upstreams = Object.fromEntries(Object.entries(given).map(([name, options]) =>
        [name, { ...(url === undefined ? {} : { url }), ...options }]));
    const server = redis?.kind !== undefined ? { url: redis.url } : redis;
    const short = { timeout: `${within(250)}ms` };
    const several = server !== undefined && Object.values(server).every((v) => typeof v === 'object');
    return write({
        workers: 1,
        drain_timeout: `${within(5000)}ms`,
        listen: { '127.0.0.1:0': {} },
        admin: { '127.0.0.1:0': {} },
        ...(server === undefined ? {} : {
            redis: several ? Object.fromEntries(Object.entries(server).map(([k, v]) => [k, { ...short, ...v }])) : { ...short, ...server },
        }),
        lease: { heartbeat: `${within(300)}ms`, ttl: `${within(1500)}ms` },
        upstream: upstreams,
        route: { '/': { upstream: Object.keys(upstreams)[0] } },
        ...rest,
    });
}

const complaints = ['ERROR: AddressSanitizer', 'ERROR: LeakSanitizer', 'runtime error', 'WARNING: ThreadSanitizer', 'BUG at', 'surprised at'];

class Gate {
    kind = 'gate';
    gone = false;
    log = []; // lines as objects
    noise = []; // other lines of standard error
    #waiting = new Set();

    constructor(text) {
        this.file = path.join(directory, `proxy-${++number}.conf`);
        this.write(text);
    }

    // Replaces the configuration file; reload() puts it in force.
    write(text) {
        writeFileSync(this.file, text);
    }

    async start({ ready = true, env = {} } = {}) {
        this.child = spawn(path.join(build, 'leasegate'), ['-c', this.file], {
            stdio: ['ignore', 'ignore', 'pipe'], cwd: directory, env: { ASAN_OPTIONS: quarantine, ...process.env, ...env } });
        this.exited = once(this.child, 'exit');
        this.exited.then(([code, signal]) => (this.exit = { code, signal }));
        this.closed = once(this.child.stderr, 'close');
        let text = '';
        this.child.stderr.setEncoding('utf8');
        this.child.stderr.on('data', (piece) => {
            const lines = (text + piece).split('\n');
            text = lines.pop();
            lines.forEach((line) => this.#take(line));
        });
        this.child.stderr.on('close', () => text !== '' && this.#take(text));
        const port = async (what) => Number(/\(port (\d+)\)/.exec((await this.waitForLog((l) => l.message?.startsWith(what), 20000)).message)[1]);
        this.port = await port('listening on');
        this.url = `http://127.0.0.1:${this.port}`;
        this.adminPort = await port('admin on');
        this.adminUrl = `http://127.0.0.1:${this.adminPort}`;
        this.ports = this.log.filter((l) => l.message?.startsWith('listening on')).map((l) => Number(/\(port (\d+)\)/.exec(l.message)[1]));
        if (ready)
            await waitUntil('leasegate is ready', async () => (await this.admin('/readyz')).status === 200, 10000);
        return this;
    }

    #take(line) {
        if (process.env.LEASEGATE_TEST_LOG === '1')
            console.error(line);
        let parsed;
        try {
            parsed = JSON.parse(line);
        } catch {
            this.noise.push(line);
            return;
        }
        this.log.push(parsed);
        for (const check of this.#waiting)
            check(parsed);
    }

    get pid() {
        return this.child.pid;
    }

    // The first line, of those that came from `from` on, that the predicate likes.
    waitForLog(predicate, ms = 3000, from = 0) {
        const found = this.log.slice(from).find(predicate);
        if (found !== undefined)
            return Promise.resolve(found);
        return new Promise((resolve, reject) => {
            const end = (act, value) => {
                this.#waiting.delete(check);
                clearTimeout(timer);
                act(value);
            };
            const check = (line) => predicate(line) && end(resolve, line);
            const timer = setTimeout(() => end(reject, new Error(
                `no such log line within ${within(ms)} ms; the last ones: ` +
                [...this.log.slice(-8).map((l) => JSON.stringify(l)), ...this.noise.slice(-20)].join('\n'))), within(ms));
            this.#waiting.add(check);
            this.exited.then(() => this.closed).then(() => end(reject, new Error(`leasegate has ended: ${this.noise.slice(-20).join('\n')}`)));
        });
    }

    // The line of the call whose x-request-id this is.
    callLine(id, ms = 3000) {
        return this.waitForLog((l) => l.event === 'call' && l.id === id, ms);
    }

    async admin(target, options) {
        const answer = await fetch(`${this.adminUrl}${target}`, options);
        return { status: answer.status, headers: answer.headers, text: await answer.text() };
    }

    // Map from `name{labels}` to number.
    async metrics() {
        const { status, text } = await this.admin('/metrics');
        assert.equal(status, 200);
        return new Map(text.split('\n').filter((l) => l !== '' && !l.startsWith('#')).map((line) => {
            const at = line.lastIndexOf(' ');
            return [line.slice(0, at), Number(line.slice(at + 1))];
        }));
    }

    async metric(name) {
        return (await this.metrics()).get(name) ?? 0;
    }

    async reload(text) {
        const from = this.log.length;
        if (text !== undefined)
            this.write(text);
        this.child.kill('SIGHUP');
        const line = await this.waitForLog((l) => l.event === 'reload' && /in force$/.test(l.message), 5000, from);
        return { line, lines: this.log.slice(from).filter((l) => l.event === 'reload') };
    }

    checkHealth() {
        const bad = this.noise.findIndex((line) => complaints.some((c) => line.includes(c)));
        assert.equal(bad, -1, `leasegate complains: ${this.noise.slice(bad).join('\n')}`);
        assert.equal(this.exit, undefined, `leasegate has ended: ${JSON.stringify(this.exit)}: ${this.noise.join('\n')}`);
    }

    terminate(signal = 'SIGTERM') {
        this.child.kill(signal);
    }

    // Waits for the end that terminate() asked for, or a test by other means.
    async ended(ms = 10000) {
        const timer = setTimeout(() => this.child.kill('SIGABRT'), within(ms));
        const [code, signal] = await this.exited;
        clearTimeout(timer);
        await this.closed;
        this.gone = true;
        assert.deepEqual({ code, signal }, { code: 0, signal: null }, `leasegate ends by itself: ${this.noise.slice(-40).join('\n')}`);
        const bad = this.noise.findIndex((line) => complaints.some((c) => line.includes(c)));
        assert.equal(bad, -1, `leasegate complains: ${this.noise.slice(bad).join('\n')}`);
    }

    async stop() {
        this.terminate();
        await this.ended();
    }

    async kill() {
        this.child.kill('SIGKILL');
        await this.exited;
        this.gone = true;
    }
}

export async function startGate(text, options) {
    const gate = new Gate(text);
    keep(gate);
    try {
        return await gate.start(options);
    } catch (error) {
        gate.child.kill('SIGKILL');
        gate.gone = true;
        throw error;
    }
}

// Runs leasegate to its end: {code, out, err}.
export async function runGate(...args) {
    const child = spawn(path.join(build, 'leasegate'), args, { stdio: ['ignore', 'pipe', 'pipe'], cwd: directory });
    let out = '', err = '';
    child.stdout.on('data', (piece) => (out += piece));
    child.stderr.on('data', (piece) => (err += piece));
    const [code] = await once(child, 'close');
    return { code, out, err };
}

// --- raw connections -----------------------------------------------------------------------------------------

/*
 * One TCP connection under full control: a client's, or the accepted one of a scripted upstream. What comes is
 * collected as latin1 in `text`; a FIN does not end our side.
 */
export class Wire {
    kind = 'wire';
    gone = false;
    text = '';
    end = null; // 'fin' | 'reset'
    #waiting = new Set();

    constructor(socket) {
        this.socket = socket;
        socket.setNoDelay(true);
        socket.on('data', (piece) => {
            this.text += piece.toString('latin1');
            this.#look();
        });
        socket.on('end', () => this.#ends('fin'));
        socket.on('error', () => this.#ends('reset'));
        socket.on('close', () => this.#ends('closed'));
    }

    static async connect(port, { host = '127.0.0.1', readable = true } = {}) {
        const socket = net.connect({ port, host, allowHalfOpen: true });
        const wire = keep(new Wire(socket));
        if (!readable)
            socket.pause();
        await once(socket, 'connect');
        return wire;
    }

    #ends(how) {
        this.end = this.end === null || how === 'reset' ? how : this.end;
        this.#look();
    }

    #look() {
        for (const check of this.#waiting)
            check();
    }

    send(bytes) {
        this.socket.write(typeof bytes === 'string' ? Buffer.from(bytes, 'latin1') : bytes);
        return this;
    }

    // Waits until probe() of this wire is true, gives its value.
    wait(what, probe, ms = 3000) {
        return new Promise((resolve, reject) => {
            const settle = (act, value) => {
                this.#waiting.delete(check);
                clearTimeout(timer);
                act(value);
            };
            const check = () => {
                const seen = probe();
                if (seen)
                    settle(resolve, seen);
            };
            const timer = setTimeout(() => settle(reject, new Error(
                `not within ${within(ms)} ms: ${what}; end: ${this.end}; got: ${JSON.stringify(this.text.slice(-600))}`)), within(ms));
            this.#waiting.add(check);
            check();
        });
    }

    // Until the text contains `part` (string or RegExp).
    until(part, ms) {
        return this.wait(`contains ${part}`, () => (typeof part === 'string' ? this.text.includes(part) : part.test(this.text)), ms);
    }

    // How the other side ended: 'fin' or 'reset'.
    ended(ms) {
        return this.wait('the other side ends', () => this.end, ms);
    }

    // A whole HTTP message, taken off the text: {head, status, headers, body, complete}. `complete` is false when the connection ended first.
    message(ms, { bodyless = false } = {}) {
        return this.wait('a whole message', () => {
            const m = readMessage(this.text, this.end, bodyless);
            if (m === null)
                return null;
            this.text = this.text.slice(m.length);
            return m;
        }, ms);
    }

    finish() { // FIN; we read on
        this.socket.end();
    }

    reset() {
        this.socket.resetAndDestroy();
    }

    stop() {
        this.gone = true;
        this.socket.destroy();
    }
}

// Reads one HTTP/1.1 message off the front of `text`; null when more is needed. Interim responses are skipped and counted.
export function readMessage(text, end = null, bodyless = false) {
    let start = 0, interim = [];
    for (;;) {
        const at = text.indexOf('\r\n\r\n', start);
        if (at < 0)
            return end === null ? null : { head: text.slice(start), status: 0, headers: new Map(), body: '', complete: false, length: text.length, end, interim };
        const [first, ...lines] = text.slice(start, at).split('\r\n');
        const status = Number(/^HTTP\/1\.[01] (\d{3})/.exec(first)?.[1] ?? 0);
        if (status >= 100 && status < 200 && status !== 101) {
            interim.push(status);
            start = at + 4;
            continue;
        }
        const headers = new Map(lines.map((l) => [l.slice(0, l.indexOf(':')).toLowerCase(), l.slice(l.indexOf(':') + 1).trim()]));
        const message = { head: text.slice(start, at), first, status, headers, interim, end };
        const body = readBody(text, at + 4, message, end, bodyless);
        return body === null ? null : { ...message, ...body };
    }
}

function readBody(text, from, { status, headers }, end, bodyless) {
    if (bodyless || status === 101 || status === 204 || status === 304)
        return { body: '', complete: true, length: from };
    if (headers.get('transfer-encoding')?.toLowerCase() === 'chunked') {
        let body = '', at = from;
        for (;;) {
            const eol = text.indexOf('\r\n', at);
            const n = eol < 0 ? NaN : parseInt(text.slice(at, eol), 16);
            if (eol < 0 || text.length < eol + 2 + n + 2)
                return end === null ? null : { body: body + (eol < 0 ? '' : text.slice(eol + 2)), complete: false, length: text.length };
            if (n === 0)
                return { body, complete: true, length: eol + 4 };
            body += text.slice(eol + 2, eol + 2 + n);
            at = eol + 2 + n + 2;
        }
    }
    if (headers.has('content-length') || status === 0) {
        const n = Number(headers.get('content-length') ?? 0);
        if (text.length >= from + n)
            return { body: text.slice(from, from + n), complete: true, length: from + n };
        return end === null ? null : { body: text.slice(from), complete: false, length: text.length };
    }
    return end === null ? null : { body: text.slice(from), complete: end === 'fin', length: text.length };
}

// A request as bytes. `body` undefined: none; `chunked`: as chunks of that size.
export function request(method, target, headers = {}, body, { chunked } = {}) {
    const fields = { Host: 'test', ...headers };
    if (body !== undefined && chunked === undefined)
        fields['Content-Length'] ??= Buffer.byteLength(body, 'latin1');
    if (chunked !== undefined)
        fields['Transfer-Encoding'] = 'chunked';
    let text = `${method} ${target} HTTP/1.1\r\n` + Object.entries(fields).map(([k, v]) => `${k}: ${v}\r\n`).join('') + '\r\n';
    if (body === undefined)
        return text;
    if (chunked === undefined)
        return text + body;
    for (let at = 0; at < body.length; at += chunked) {
        const part = body.slice(at, at + chunked);
        text += `${part.length.toString(16)}\r\n${part}\r\n`;
    }
    return `${text}0\r\n\r\n`;
}

export const chat = (fields = {}, model = 'gpt-4o', more = {}) =>
    request('POST', '/v1/chat/completions', { 'Content-Type': 'application/json', ...fields },
        JSON.stringify({ model, messages: [{ role: 'user', content: 'hi' }], ...more }));

// --- scripted upstreams --------------------------------------------------------------------------------------

/*
 * A server whose every connection is played by `script(wire, index)`. A script that throws fails the test at stop().
 */
class Upstream {
    kind = 'upstream';
    gone = false;
    wires = [];
    #failure;

    async start(script, options) {
        this.script = script;
        this.server = net.createServer({ allowHalfOpen: true, ...options }, (socket) => {
            const wire = new Wire(socket);
            this.wires.push(wire);
            Promise.resolve(this.script(wire, this.wires.length - 1)).catch((error) => {
                if (!this.gone)
                    this.#failure ??= error;
            });
        });
        this.server.listen(0, '127.0.0.1');
        await once(this.server, 'listening');
        this.port = this.server.address().port;
        this.url = `http://127.0.0.1:${this.port}`;
        return this;
    }

    // The n-th connection (from 0), once it is there.
    connection(n = 0, ms = 3000) {
        return waitUntil(`connection ${n} to the scripted upstream`, () => this.wires[n], ms);
    }

    async stop() {
        this.gone = true;
        this.server.close();
        for (const wire of this.wires)
            wire.stop();
        if (this.#failure !== undefined)
            throw this.#failure;
    }
}

export async function startUpstream(script, options = {}) {
    return keep(await new Upstream().start(script, options));
}

// A port whose connections are not accepted, and whose backlog is full: connecting to it hangs, until wake() makes it
// an HTTP server that answers `awake`.
export async function startDeafPort() {
    const child = spawn(process.execPath, ['-e',
        `const s = require('http').createServer((q, a) => a.end('awake')); s.listen({port: 0, host: '127.0.0.1', backlog: 1}, () => {
            process.stdout.write('port ' + s.address().port + '\\n', () => process.kill(process.pid, 'SIGSTOP')); });`],
    { stdio: ['ignore', 'pipe', 'inherit'] });
    const exited = once(child, 'exit');
    const port = Number((await firstLine(child, /port (\d+)/, 'the deaf port'))[1]);
    const fillers = [];
    for (let hung = 0; hung < 2;) { // until the kernel takes no more
        const socket = net.connect(port, '127.0.0.1');
        socket.on('error', () => {});
        fillers.push(socket);
        if (await Promise.race([once(socket, 'connect').then(() => false), sleep(within(150)).then(() => true)]))
            hung++;
    }
    return keep({
        kind: 'helper', gone: false, child, port, url: `http://127.0.0.1:${port}`,
        wake: () => {
            fillers.forEach((socket) => socket.destroy());
            child.kill('SIGCONT');
        },
        stop: async () => {
            fillers.forEach((socket) => socket.destroy());
            child.kill('SIGKILL');
            await exited;
        },
    });
}
