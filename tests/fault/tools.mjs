// tools.mjs - what the fault tests need beside ../flow/harness.mjs: fleets, streams under watch, load, a path to
// Redis that misbehaves, and the figures of a process.
//
// Clocks are short (ttl 1.2 s), so that an expiry takes a second; where a test shows that something happens without
// an expiry, the ttl is long (patient), so that waiting for it would fail the test.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { closeSync, existsSync, openSync, readdirSync, readFileSync, writeSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
import { endianness } from 'node:os';
import path from 'node:path';

import {
    build, chat, config, directory, root, sleep, slow, startGate, startMock, startRedis, test as flowTest, waitUntil, within, Wire,
} from '../flow/harness.mjs';

export * from '../flow/harness.mjs';

export const long = process.env.LEASEGATE_LONG === '1';
export const test = (name, body) => flowTest(name, { timeout: within(long ? 600000 : 60000) }, body);
export const heartbeat = within(400), ttl = within(1200), timeout = within(250);
export const short = { heartbeat: `${heartbeat}ms`, ttl: `${ttl}ms` };
export const patient = { heartbeat: `${within(800)}ms`, ttl: `${within(20000)}ms` };
export const KEY = 'lg1:{main}:all:leases';
export const now = () => performance.now();
export const round = (ms) => Math.round(ms * 100) / 100;

// --- fleets --------------------------------------------------------------------------------------------------

/*
 * The configuration of one instance: one limit `all`, a short clock, no line per call. Options as for config(), and `deadline`, of Redis
 * commands: ample where it is not what the test is about, so that a machine that is busy with other work is not taken for an outage.
 */
export const conf = ({ redis, mock, cap = 10, deadline = within(800), ...rest }) => config({
    redis: { timeout: `${deadline}ms`, ...(redis.kind === undefined ? redis : { url: redis.url }) },
    upstream: mock, lease: short, limit: { all: { concurrency: cap } }, log: { calls: 'no' }, ...rest });

// {redis, mock, gates, gate}: n instances that share one Redis and one upstream. `via(redis)` gives another way to it.
export async function startFleet(n, { via, redisOptions = [], ...options } = {}) {
    const redis = await startRedis(...redisOptions);
    const mock = await startMock();
    const way = via === undefined ? redis : await via(redis);
    const server = way instanceof Way ? { url: way.url } : way;
    const gates = await Promise.all(Array.from({ length: n }, () => startGate(conf({ redis: server, mock, ...options }))));
    return { redis, mock, gates, gate: gates[0], way };
}

// Runs body() while the instance is stopped; it goes on whatever happens.
export async function frozen(gate, body) {
    gate.child.kill('SIGSTOP');
    try {
        return await body();
    } finally {
        gate.child.kill('SIGCONT');
    }
}

// --- calls ---------------------------------------------------------------------------------------------------

const agent = new http.Agent({ keepAlive: true, maxSockets: Infinity });

// One call that takes no time upstream: {status, reason, headers, body, ms}. A broken connection rejects.
export function call(gate, fields = {}, target = '/v1/chat/completions') {
    const begun = now();
    const body = target.endsWith('/models') ? undefined : JSON.stringify({ model: 'gpt-4o', messages: [] });
    return new Promise((resolve, reject) => {
        const request = http.request({
            agent, host: '127.0.0.1', port: gate.port, path: target, method: body === undefined ? 'GET' : 'POST',
            headers: { ...(body === undefined ? {} : { 'content-type': 'application/json', 'content-length': body.length }), ...fields },
        }, (answer) => {
            let text = '';
            answer.setEncoding('utf8');
            answer.on('data', (piece) => (text += piece));
            answer.on('error', reject);
            answer.on('end', () => resolve({
                status: answer.statusCode, reason: answer.headers['x-leasegate-reason'], headers: answer.headers, body: text, ms: now() - begun }));
        });
        request.on('error', reject);
        request.end(body);
    });
}

// Calls again and again until one is answered 200; gives the milliseconds it took. What else may be answered is `refused`.
export async function untilServed(gate, { refused = ['limit_full', 'redis_unavailable'], ms = 3000 } = {}) {
    const begun = now();
    await waitUntil('a call is served', async () => {
        const answer = await call(gate);
        assert.ok(answer.status === 200 || (answer.status === 429 && refused.includes(answer.reason)), `${answer.status} ${answer.reason}`);
        return answer.status === 200;
    }, ms);
    return now() - begun;
}

// A refusal as SDKs want it.
export function checkRefusal(answer, reason) {
    assert.equal(answer.status, 429);
    assert.equal(answer.reason, reason);
    assert.match(answer.headers['retry-after'], /^([1-9]|[1-5]\d|60)$/);
    assert.equal(answer.headers['x-should-retry'], 'true');
    assert.equal(typeof JSON.parse(answer.body).error, 'object');
}

// --- streams -------------------------------------------------------------------------------------------------

const every20 = { 'x-mock-events': 1000000, 'x-mock-delay-ms': 20 };
export const silent = { 'x-mock-events': 2, 'x-mock-first-event-ms': 600000 };

/*
 * An SSE call under watch: {wire, status, reason, pieces, gap()}. gap(): the longest silence since the first byte, or since
 * the last calm(). Streams live until their wire is stopped; the test's end stops them too.
 */
export async function openStream(gate, fields = every20) {
    const wire = await Wire.connect(gate.port);
    const stream = { wire, pieces: 0, worst: 0, last: 0 };
    wire.socket.on('data', () => {
        const at = now();
        if (stream.pieces++ > 0)
            stream.worst = Math.max(stream.worst, at - stream.last);
        stream.last = at;
        if (wire.text.length > 65536)
            wire.text = wire.text.slice(-4096);
    });
    stream.gap = () => Math.max(stream.worst, now() - stream.last);
    stream.calm = () => {
        stream.worst = 0;
        stream.last = now();
    };
    wire.send(chat(fields, 'gpt-4o', { stream: true }));
    await wire.until('\r\n\r\n', 5000);
    stream.status = Number(wire.text.slice(9, 12));
    stream.reason = /x-leasegate-reason: (\S+)/i.exec(wire.text)?.[1];
    stream.stop = () => wire.stop();
    return stream;
}

export async function openStreams(gate, n, fields) {
    const streams = await Promise.all(Array.from({ length: n }, () => openStream(gate, fields)));
    for (const stream of streams)
        assert.equal(stream.status, 200, `a stream is served: ${stream.reason}`);
    return streams;
}

// They run, and ran all the time: no silence longer than `ms` (of 20 ms between two events).
export function checkUndisturbed(streams, t, ms = 600) {
    const worst = Math.max(...streams.map((s) => s.gap()));
    t.diagnostic(`longest silence of ${streams.length} streams: ${round(worst)} ms (an event is due every 20 ms)`);
    for (const stream of streams)
        assert.equal(stream.wire.end, null, 'the stream runs');
    assert.ok(worst < within(ms), `streams were silent for ${round(worst)} ms`);
}

// Takes slots until `n` streams are held, from the gates in turn; gives them. Refusals are counted in `refusals`.
export async function fill(gates, n, { fields = silent, ms = 5000, refusals = [] } = {}) {
    const held = [];
    for (let i = 0; held.length < n; i++) {
        const begun = now();
        const stream = await openStream(gates[i % gates.length], fields);
        if (stream.status === 200) {
            held.push(stream);
        } else {
            refusals.push(stream.reason);
            stream.stop();
            assert.ok((ms -= (now() - begun + 10) / slow) > 0, `only ${held.length} of ${n} slots could be taken: ${refusals.slice(-3)}`);
            await sleep(10);
        }
    }
    return held;
}

// --- load ----------------------------------------------------------------------------------------------------

/*
 * loadgen against one instance: a promise of its JSON, with `child`. Options by their names: {concurrency: 10, abortRate: 0.2, …};
 * true stands for a bare option.
 */
export function load(t, gate, options) {
    const words = Object.entries(options).filter(([, v]) => v !== false).flatMap(([name, value]) => {
        const option = `--${name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`)}`;
        return value === true ? [option] : [value].flat().flatMap((v) => [option, String(v)]);
    });
    const child = spawn(path.join(build, 'loadgen'), ['--url', `${gate.url}/v1/chat/completions`, '--json', '--quiet', ...words],
        { stdio: ['ignore', 'pipe', 'inherit'] });
    let text = '';
    child.stdout.on('data', (piece) => (text += piece));
    t.after(() => child.kill('SIGKILL'));
    const result = new Promise((resolve, reject) => child.on('close', (code) => {
        try {
            resolve({ ...JSON.parse(text), code });
        } catch {
            reject(new Error(`loadgen ended with ${code}: ${text}`));
        }
    }));
    result.catch(() => {}); // it may end before anyone waits
    result.child = child;
    return result;
}

// No error, no malformed refusal, and no status but these.
export function checkLoad(result, statuses, reasons = []) {
    assert.equal(result.malformed_refusals, 0, `malformed refusals: ${JSON.stringify(result.malformed)}`);
    assert.deepEqual(Object.entries(result.errors).filter(([, n]) => n > 0), [], 'no errors at the client');
    assert.deepEqual(Object.keys(result.statuses).filter((s) => !statuses.includes(Number(s))), [], `statuses: ${JSON.stringify(result.statuses)}`);
    assert.deepEqual(Object.keys(result.refusals).filter((r) => !reasons.includes(r)), [], `refusals: ${JSON.stringify(result.refusals)}`);
}

// Runs body() again and again until `done` is settled.
export async function during(done, pause, body) {
    let over = false;
    done.then(() => (over = true), () => (over = true));
    for (let i = 0; !over; i++) {
        await body(i);
        await sleep(pause);
    }
    return done;
}

// --- Redis ---------------------------------------------------------------------------------------------------

export const redisNow = async (redis) => {
    const [s, us] = await redis.command('TIME');
    return Number(s) * 1000 + Number(us) / 1000;
};

// Map of lease id to its date, and Redis's time just before.
export async function dates(redis, key = KEY) {
    const [time, flat] = await Promise.all([redisNow(redis), redis.command('ZRANGE', key, 0, -1, 'WITHSCORES')]);
    return { time, dates: new Map(Array.from({ length: flat.length / 2 }, (_, i) => [flat[2 * i], Number(flat[2 * i + 1])])) };
}

// Leases that are live: not expired.
export async function live(redis, key = KEY) {
    return redis.command('ZCOUNT', key, `(${await redisNow(redis) - ttl}`, '+inf');
}

// {evalsha: 12, ping: 1, …} since the last CONFIG RESETSTAT.
export async function commandCounts(redis) {
    const text = await redis.command('INFO', 'commandstats');
    return Object.fromEntries([...text.matchAll(/cmdstat_(\S+?):calls=(\d+)/g)].map((m) => [m[1], Number(m[2])]));
}

export async function info(redis, name) {
    return Number(new RegExp(`^${name}:(\\d+)`, 'm').exec(await redis.command('INFO'))[1]);
}

/*
 * A way to Redis that misbehaves on demand, as {url}: a TCP listener in front of the server's unix socket.
 *
 *     delay     ms that each reply is late          split     every byte of a reply is a write of its own
 *     hole      true: nothing passes, either way    refuse    true: connections are reset as soon as they come
 *     onAsk     (text, cut, pass) of what leasegate sends; returns true where it has dealt with it
 *     onReply   the same of what Redis sends. cut(): both sides are reset; cut(ms): nothing more passes, and then they are
 */
export class Way {
    delay = 0;
    split = false;
    hole = false;
    refuse = false;
    onAsk = null;
    onReply = null;
    accepted = 0;
    #pairs = new Set();

    static async to(redis, t) {
        const way = new Way();
        way.server = net.createServer((client) => way.#join(client, redis));
        await new Promise((done) => way.server.listen(0, '127.0.0.1', done));
        way.url = `redis://127.0.0.1:${way.server.address().port}`;
        t.after(() => {
            way.server.close();
            way.cut();
        });
        return way;
    }

    cut() {
        for (const cut of this.#pairs)
            cut();
    }

    #join(client, redis) {
        this.accepted++;
        client.setNoDelay(true);
        client.on('error', () => {});
        if (this.refuse)
            return client.resetAndDestroy();
        const server = net.connect(redis.path);
        const cut = (ms) => {
            if (ms > 0) {
                cut.silent = true;
                setTimeout(cut, ms);
                return;
            }
            this.#pairs.delete(cut);
            client.resetAndDestroy();
            server.destroy();
        };
        this.#pairs.add(cut);
        server.on('error', () => cut());
        client.on('close', () => cut());
        server.on('close', () => cut());
        client.on('data', (piece) => this.#pass(piece, server, this.onAsk, cut));
        server.on('data', async (piece) => {
            if (this.delay > 0)
                await sleep(this.delay);
            this.#pass(piece, client, this.onReply, cut, this.split);
        });
    }

    #pass(piece, to, hook, cut, split = false) {
        const pass = (bytes) => to.destroyed || to.write(bytes);
        if (this.hole || cut.silent || hook?.(piece.toString('latin1'), cut, pass))
            return;
        for (let i = 0; split && i < piece.length; i++)
            pass(piece.subarray(i, i + 1));
        if (!split)
            pass(piece);
    }
}

// One script call with one id in one scope, as bytes; the verbs differ in their number of words.
export const RELEASE = /\*5\r\n\$7\r\nEVALSHA/;
export const ADMIT_OR_RENEW = /\*8\r\n\$7\r\nEVALSHA/;

// --- the process ---------------------------------------------------------------------------------------------

export const descriptors = (gate) => readdirSync(`/proc/${gate.pid}/fd`).length;
export const memoryKiB = (gate) => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${gate.pid}/status`, 'utf8'))[1]);

export async function cpuMs(gate) {
    const fields = readFileSync(`/proc/${gate.pid}/stat`, 'latin1').split(') ')[1].split(' ');
    return (Number(fields[11]) + Number(fields[12])) * 10; // clock ticks of 10 ms
}

// Counts that a thread publishes are at most 200 ms old.
export const metricsSettle = () => sleep(within(250));

// Samples of a histogram above a bound (one of its own bounds), and all of them: {above, all}.
export async function histogram(gate, name, bound) {
    const metrics = await gate.metrics();
    const all = metrics.get(`${name}_count`) ?? 0;
    return { above: all - metrics.get(`${name}_bucket{le="${bound}"}`), all };
}
export const above = (before, after) => ({ above: after.above - before.above, all: after.all - before.all });

/*
 * A clock of its own for a process: {env, shift(seconds)}; clock.c says how. Sanitizers want to be first among the libraries; they
 * work all the same.
 */
let clocks = 0;
export function newClock(seconds = 0) {
    const library = path.join(directory, 'clock.so'), file = path.join(directory, `clock-${++clocks}`);
    if (!existsSync(library))
        execFileSync(process.env.CC ?? 'cc', ['-shared', '-fPIC', '-O2', '-o', library, path.join(root, 'tests/fault/clock.c')]);
    const shift = (s) => {
        const bytes = Buffer.alloc(8);
        (endianness() === 'LE' ? bytes.writeBigInt64LE(BigInt(s)) : bytes.writeBigInt64BE(BigInt(s)));
        const fd = openSync(file, existsSync(file) ? 'r+' : 'w'); // never cut short: it is mapped
        writeSync(fd, bytes, 0, 8, 0);
        closeSync(fd);
    };
    shift(seconds);
    return { shift, env: { LD_PRELOAD: library, LEASEGATE_TEST_CLOCK: file, ASAN_OPTIONS: `${process.env.ASAN_OPTIONS ?? ''}:verify_asan_link_order=0` } };
}

// Runs start() with more in the environment that its children inherit.
export async function withEnvironment(env, start) {
    const before = { ...process.env };
    Object.assign(process.env, env);
    try {
        return await start();
    } finally {
        for (const name of Object.keys(env)) {
            delete process.env[name];
            if (before[name] !== undefined)
                process.env[name] = before[name];
        }
    }
}

export const mockTotal = async (mock) => (await mock.stats()).total;
