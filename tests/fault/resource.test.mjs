// resource.test.mjs - what it costs: descriptors, memory, Redis commands; and that none of it grows.
import assert from 'node:assert/strict';

import {
    call, checkLoad, checkRefusal, commandCounts, conf, dates, descriptors, during, fill, info, load, long, memoryKiB, metricsSettle, now, openStreams,
    redisNow, round, silent, sleep, startFleet, startGate, startMock, startRedis, test, waitUntil, within,
} from './tools.mjs';

const sanitized = (process.env.LEASEGATE_BUILD ?? '').includes('san-'); // freed memory is kept in quarantine there

// The number of descriptors when nothing has run for a while.
async function descriptorsAtRest(gate, wanted) {
    let seen;
    const told = async () => {
        const metrics = await gate.metrics();
        return ['client_connections', 'calls_in_flight', 'upstream_idle_connections', 'streams'].map((n) => `${n} ${metrics.get(`leasegate_${n}`)}`);
    };
    await waitUntil(async () => `${wanted ?? 'a steady number of'} descriptors, not ${seen}; ${await told()}`, async () => {
        const before = descriptors(gate);
        await sleep(50);
        seen = descriptors(gate);
        if (wanted !== undefined)
            return seen <= wanted + 1; // one of ours to /metrics
        return seen === before && await gate.metric('leasegate_upstream_idle_connections') === 0;
    }, 5000);
    return seen;
}

async function startLean({ cap = 1000, ...options } = {}) {
    const redis = await startRedis(), mock = await startMock();
    // `mark` goes upstream in two headers
    const settings = (n, mark = 'none') => conf({ redis, cap: n, ...options, upstream: {
        llm: { url: mock.url, pool_idle_timeout: '300ms', header: { 'x-first': { value: mark }, 'x-second': { value: mark } } } } });
    return { redis, mock, settings, gate: await startGate(settings(cap)) };
}

test('A11: 20,000 calls, a fifth of them given up: descriptors as before, memory bounded', async (t) => {
    const { redis, mock, gate } = await startLean();
    const storm = (requests, seed) => load(t, gate, {
        requests, concurrency: 50, abortRate: 0.2, stream: true, events: 3, delayMs: 1, seed, bodyBytes: 2000, duration: 60 });
    checkLoad(await storm(4000, 1), [200]); // pools and free lists fill
    const files = await descriptorsAtRest(gate), memory = memoryKiB(gate);
    const result = await storm(long ? 200000 : 20000, 2);
    checkLoad(result, [200]);
    await redis.holds(0);
    await mock.shows({ in_flight: 0 });
    const filesAfter = await descriptorsAtRest(gate, files);
    const grown = memoryKiB(gate) - memory;
    t.diagnostic(`${result.started} calls, ${result.aborted.before_first_byte + result.aborted.after_first_byte} given up; ` +
        `descriptors ${files} -> ${filesAfter}; ` +
        `memory ${memory} KiB, ${grown >= 0 ? '+' : ''}${grown} KiB`);
    assert.ok(sanitized || grown < 3000, `${grown} KiB more`);
});

test('H153: 100 reloads under load: no error, either limit whole, descriptors and memory flat', async (t) => {
    const { redis, mock, gate, settings } = await startLean({ cap: 20 });
    await fill([gate], 3);
    const running = load(t, gate, { concurrency: 10, duration: 600, stream: true, events: 3, delayMs: 5 });
    const marks = new Set(), turns = long ? 1000 : 100;
    let files, memory;
    for (let i = 0; i < turns; i++) {
        if (i === 20)
            [files, memory] = [descriptors(gate), memoryKiB(gate)];
        const [{ lines }, ...answers] = await Promise.all([
            gate.reload(settings(i % 2 ? 30 : 25, `mark-${i}`)),
            ...Array.from({ length: 3 }, () => call(gate, { 'x-mock-echo': '1' }))]);
        assert.deepEqual(lines.map((l) => l.level), ['info']);
        for (const { status, reason, body } of answers) {
            assert.equal(status, 200, reason);
            const sent = new Map(JSON.parse(body).headers);
            assert.ok(sent.get('x-first') !== undefined && sent.get('x-first') === sent.get('x-second'), 'one configuration, whole');
            marks.add(sent.get('x-first'));
        }
        await sleep(20);
    }
    const from = gate.log.length;
    for (let i = 0; i < 20; i++)
        gate.child.kill('SIGHUP'); // as fast as they come; several may be one
    await gate.waitForLog((l) => l.event === 'reload' && /in force$/.test(l.message), 3000, from);
    await sleep(200);
    running.child.kill('SIGINT');
    checkLoad(await running, [200]);
    const grown = memoryKiB(gate) - memory;
    await metricsSettle();
    t.diagnostic(`${await gate.metric('leasegate_config_reloads_total')} reloads, ${marks.size} of them met by a call that was watched; ` +
        `descriptors ${files} -> ${descriptors(gate)}; ` +
        `memory ${memory} KiB, ${grown >= 0 ? '+' : ''}${grown} KiB`);
    assert.equal(await gate.metric('leasegate_config_reload_failures_total'), 0);
    assert.ok(await gate.metric('leasegate_config_reloads_total') > turns && marks.size > turns / 4);
    assert.ok(sanitized || grown < 2000, `${grown} KiB more`);
    assert.ok(descriptors(gate) <= files + 12, 'no descriptor stays with an old configuration');
    await redis.holds(3);
    await mock.shows({ in_flight: 3 });
});

test('L02, L06: caps live: lowering harms nobody, raising lets in at once, 0 is a pause', async () => {
    const { redis, mock, gate, settings } = await startLean({ cap: 10 });
    const streams = await fill([gate], 10);
    await gate.reload(settings(5));
    checkRefusal(await call(gate), 'limit_full');
    await mock.shows({ in_flight: 10 });
    for (let left = 9; left >= 5; left--) {
        streams.pop().stop();
        await redis.holds(left);
        checkRefusal(await call(gate), 'limit_full');
    }
    streams.pop().stop();
    await redis.holds(4);
    assert.equal((await call(gate)).status, 200);
    await gate.reload(settings(12));
    streams.push(...await openStreams(gate, 8, silent)); // all at once
    checkRefusal(await call(gate), 'limit_full');
    await gate.reload(settings(0));
    checkRefusal(await call(gate), 'limit_full');
    streams.forEach((s) => s.stop());
    await redis.holds(0);
    checkRefusal(await call(gate), 'limit_full');
    await gate.reload(settings(1));
    assert.equal((await call(gate)).status, 200);
});

test('L05: the limit raised and lowered at random under load: the count stays right', async (t) => {
    const { redis, mock, gate, settings } = await startLean({ cap: 10 });
    let changes = 0, seed = 7;
    const running = load(t, gate, { concurrency: 30, duration: long ? 60 : 3, stream: true, events: 3, delayMs: 5, abortRate: 0.1, thinkMs: 5 });
    const result = await during(running, 30, async () => {
        seed = seed * 1103515245 + 12345 & 0x7fffffff;
        await gate.reload(settings(1 + seed % 15));
        changes++;
    });
    checkLoad(result, [200, 429], ['limit_full']);
    await redis.holds(0);
    const { max_in_flight: most } = await mock.shows({ in_flight: 0 });
    t.diagnostic(`${changes} changes, ${JSON.stringify(result.statuses)}, at most ${most} in flight`);
    assert.ok(most <= 15);
    assert.equal(await gate.metric('leasegate_limit_held{limit="all"}'), 0);
});

test('C08, L09: 2,000 silent streams: memory each, heartbeats in batches, each renewed in time', async (t) => {
    const beat = within(1000), ttl = 3 * beat, n = 2000;
    const { redis, mock, gate } = await startLean({ cap: n, lease: { heartbeat: `${beat}ms`, ttl: `${ttl}ms` } });
    checkLoad(await load(t, gate, { requests: 100, concurrency: 10 }), [200]);
    const memory = memoryKiB(gate);
    const running = load(t, gate, { concurrency: n, requests: n, duration: 60, stream: true, header: 'x-mock-first-event-ms: 600000', drainMs: 0 });
    await mock.shows({ in_flight: n }, 10000);
    await redis.holds(n);
    await metricsSettle();
    const each = (memoryKiB(gate) - memory) / n;
    await sleep(beat); // the first beat of the last
    await redis.command('CONFIG', 'RESETSTAT');
    const begun = now();
    let oldest = 0;
    for (const end = begun + 3 * beat; now() < end; await sleep(20)) {
        const { time, dates: held } = await dates(redis);
        assert.equal(held.size, n);
        oldest = Math.max(oldest, time - Math.min(...held.values()));
    }
    const beats = (now() - begun) / beat, { evalsha } = await commandCounts(redis);
    t.diagnostic(`${round(each)} KiB a stream; ${round(evalsha / beats)} script calls a heartbeat; ` +
        `longest time between two renewals ${round(oldest)} ms, heartbeat ${beat} ms, ttl ${ttl} ms`);
    assert.ok(evalsha / beats <= n / 250 + 2, 'at most 250 leases a call');
    assert.ok(oldest < ttl / 2);
    assert.ok(sanitized || each < 64, `${each} KiB`);
    running.child.kill('SIGKILL');
    await mock.shows({ in_flight: 0 }, 5000);
    await redis.holds(0);
});

test('L09: at rest, at most one Redis command a second a thread', async (t) => {
    const { redis, gate } = await startFleet(1, { workers: 2 });
    assert.equal((await call(gate)).status, 200);
    await sleep(within(1000)); // the sets of that call are forgotten
    const before = await info(redis, 'total_commands_processed'), begun = await redisNow(redis);
    await sleep(4000);
    const commands = await info(redis, 'total_commands_processed') - before - 2, seconds = (await redisNow(redis) - begun) / 1000; // TIME, INFO
    t.diagnostic(`${commands} commands in ${round(seconds)} s by 2 threads`);
    assert.ok(commands / seconds / 2 <= 1);
});

test('L01: without a limit a call costs no Redis command', async (t) => {
    const { redis, gate } = await startFleet(1, { limit: {} });
    // without a limit the gate is ready before it has greeted Redis
    await waitUntil('Redis is greeted', async () => await gate.metric('leasegate_redis_up_threads') > 0);
    await redis.command('CONFIG', 'RESETSTAT');
    const result = await load(t, gate, { requests: 500, concurrency: 10 });
    checkLoad(result, [200]);
    const { 'config|resetstat': _, config: __, info: ___, ...seen } = await commandCounts(redis);
    t.diagnostic(`500 calls: ${JSON.stringify(seen)}`);
    assert.deepEqual(Object.keys(seen).filter((name) => name !== 'ping'), []);
    const answer = await call(gate);
    assert.deepEqual(Object.keys(answer.headers).filter((name) => /ratelimit|leasegate-lease/.test(name)), []);
});
