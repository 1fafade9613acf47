// outage.test.mjs - Redis frozen, killed, restarted empty, slow: new calls are refused at once, running ones never notice,
// and afterwards the count is true at once, without waiting for an expiry (ttl is long here).
import assert from 'node:assert/strict';

import {
    above, call, checkLoad, checkRefusal, checkUndisturbed, commandCounts, cpuMs, during, fill, histogram, info, KEY, load, long,
    metricsSettle, now, openStreams, patient, round, sleep, startFleet, test, timeout, untilServed, waitUntil, within,
} from './tools.mjs';

const LOOP = 'leasegate_loop_turn_seconds', LAG = '0.012800'; // the bound of the histogram above 10 ms
const outage = ['redis_unavailable'];
const start = (n, options) => startFleet(n, { deadline: timeout, ...options });

// Redis is stopped while body() runs.
async function withRedisStopped(redis, body) {
    await redis.pause();
    try {
        return await body();
    } finally {
        await redis.resume();
    }
}

test('B03, E01, E02, E03, E07, E10: Redis frozen under 1,000 calls a second', async (t) => {
    const { redis, gate } = await start(1, { cap: 2000, lease: patient });
    const streams = await openStreams(gate, 5);
    const lag = await histogram(gate, LOOP, LAG);
    const running = load(t, gate, { rate: 1000, concurrency: 1000, duration: 5, abortRate: 0.1 });
    await sleep(within(1000));
    streams.forEach((s) => s.calm());
    const cpu0 = await cpuMs(gate), lines = gate.log.length;

    const outageMs = within(2500);
    const { short, breakerMs } = await withRedisStopped(redis, async () => {
        const begun = now();
        await waitUntil('the breaker opens', async () => (await gate.admin('/readyz')).status === 503, 1500);
        const breakerMs = now() - begun;
        await sleep(within(100));
        checkRefusal(await call(gate), 'redis_unavailable');
        assert.equal((await call(gate, {}, '/v1/models')).status, 429); // the limit counts all calls
        const short = [];
        for (let i = 0; i < 3; i++)
            short.push(await load(t, gate, { rate: 500, concurrency: 200, duration: 0.4, seed: i + 9 }));
        await sleep(Math.max(0, outageMs - (now() - begun)));
        assert.ok(await gate.metric('leasegate_redis_failures_total') >= 1);
        assert.equal(await gate.metric('leasegate_redis_up_threads'), 0);
        return { short, breakerMs };
    });
    const back = await untilServed(gate, { refused: outage });
    const cpu = await cpuMs(gate) - cpu0;
    const said = gate.log.slice(lines).length;
    const result = await running;

    short.forEach((r) => checkLoad(r, [429], outage));
    checkLoad(result, [200, 429], outage);
    const p99 = Math.min(...short.map((r) => r.total_ms.p99)), p50 = Math.min(...short.map((r) => r.total_ms.p50));
    const seen = above(lag, await histogram(gate, LOOP, LAG));
    t.diagnostic(`breaker open after ${round(breakerMs)} ms; refusals in the outage: p50 ${round(p50)} ms, p99 ${round(p99)} ms (best of ` +
        `${short.map((r) => round(r.total_ms.p99)).join(', ')}); slowest call of all ${round(result.total_ms.max)} ms; ` +
        `served again ${round(back)} ms after SIGCONT; ${said} log lines; ` +
        `CPU ${round(cpu / (outageMs + back) * 100)} %; turns over 12.8 ms: ${seen.above} of ${seen.all} samples; ` +
        `${JSON.stringify(result.statuses)}`);
    // Aims: 2 ms, timeout + 50 ms, 10 ms. What stands here besides is for a machine that does other work too.
    assert.ok(p50 < within(2) && p99 < within(10), 'a refusal in an outage takes no time');
    assert.ok(result.total_ms.max < timeout + within(50 + 100), 'no call hangs longer than the deadline of a command');
    assert.ok(seen.above <= seen.all * 0.2, 'the loop never waits for Redis');
    assert.ok(back < within(1000));
    assert.ok(said <= (outageMs + back) / 1000 + 2, `${said} lines in ${outageMs} ms`);
    checkUndisturbed(streams, t);
    await redis.holds(5, '', 500); // no ghost of an admit that Redis ran after it was given up
    streams.forEach((s) => s.stop());
    await redis.holds(0, '', 500);
});

test('E07, E08: 500 calls at the moment Redis stops: each gets its answer in time, none leaves a ghost', async (t) => {
    const { redis, mock, gate } = await start(1, { cap: 1000, lease: patient });
    await call(gate);
    const total = (await mock.stats()).total;
    const result = await withRedisStopped(redis, async () => {
        const r = await load(t, gate, { concurrency: 500, requests: 500 });
        await sleep(timeout);
        return r;
    });
    checkLoad(result, [429], outage);
    assert.equal(result.statuses[429], 500);
    t.diagnostic(`slowest ${round(result.total_ms.max)} ms; unknown: ${await gate.metric('leasegate_leases_unknown_total')}`);
    assert.ok(result.total_ms.max < timeout + within(200));
    assert.equal((await mock.stats()).total, total, 'none of them reached the upstream');
    await untilServed(gate);
    await redis.holds(0, '', 500);
});

test('E01, E24: on_outage = "allow" lets calls through uncounted, and says so', async (t) => {
    const { redis, mock, gate } = await start(1, {
        cap: 2, lease: patient, via: async (r) => ({ url: r.url, on_outage: 'allow', timeout: `${timeout}ms` }) });
    // with "allow" it is ready before Redis is
    await waitUntil('Redis is connected', async () => JSON.parse((await gate.admin('/readyz')).text).redis === 'ok');
    const streams = await openStreams(gate, 2);
    checkRefusal(await call(gate), 'limit_full');
    assert.equal(await gate.metric('leasegate_uncounted_calls_total'), 0);
    await withRedisStopped(redis, async () => {
        const first = await call(gate); // the one that finds it out
        assert.equal(first.status, 200);
        assert.equal(first.headers['x-leasegate-lease'], undefined);
        const result = await load(t, gate, { rate: 500, duration: 0.6 });
        checkLoad(result, [200]);
        assert.equal(await gate.metric('leasegate_uncounted_calls_total'), result.completed + 1);
        const ready = await gate.admin('/readyz');
        assert.equal(ready.status, 200);
        assert.notEqual(JSON.parse(ready.text).redis, 'ok');
        t.diagnostic(`first ${round(first.ms)} ms, then ${result.completed} calls, slowest ${round(result.total_ms.max)} ms`);
        assert.ok(first.ms < timeout + within(100));
    });
    await waitUntil('the limit counts again', async () => (await call(gate)).status === 429, 1000);
    await redis.holds(2, '', 500);
    checkUndisturbed(streams, t);
    assert.ok((await mock.stats()).max_in_flight >= 2);
});

test('E10, L01: in an outage, calls that no limit counts go on', async () => {
    const { redis, gate } = await start(1, { limit: { chat: { model: ['gpt-*'], concurrency: 2 } } });
    await withRedisStopped(redis, async () => {
        for (let i = 0; i < 3; i++)
            assert.equal((await call(gate, {}, '/v1/models')).status, 200);
        checkRefusal(await call(gate), 'redis_unavailable');
        assert.equal((await call(gate, {}, '/v1/models')).status, 200);
    });
});

test('E12, E13, B11: Redis restarted empty with 5 streams running: they never notice, their leases are put back, nobody gets in over them', async (t) => {
    const { redis, mock, gates } = await start(2, { lease: patient });
    const streams = [...await openStreams(gates[0], 3), ...await openStreams(gates[1], 2)];
    await redis.kill();
    await waitUntil('both have noticed', async () => (await Promise.all(gates.map((g) => call(g)))).every((a) => a.status === 429));
    const begun = now();
    await redis.restart();
    const runs = gates.map((g) => load(t, g, { concurrency: 20, duration: 2, thinkMs: 5, ttftMs: 20 }));
    const results = await Promise.all(runs);
    results.forEach((r) => checkLoad(r, [200, 429], ['limit_full', ...outage]));
    assert.equal((await mock.stats()).max_in_flight, 10, 'used to the full, and never over');
    await redis.holds(5, '', 500);
    checkUndisturbed(streams, t);
    await metricsSettle();
    const restored = await Promise.all(gates.map((g) => g.metric('leasegate_leases_restored_total')));
    t.diagnostic(`restored ${restored.join(' + ')}; ${round(now() - begun)} ms; refused ${JSON.stringify(results.map((r) => r.refusals))}`);
    assert.deepEqual(restored, [3, 2]);
    for (const gate of gates)
        assert.equal(await gate.metric('leasegate_leases_over_total'), 0);
});

test('E12: Redis restarted empty, full of running calls, again and again: never over the limit', async (t) => {
    const { redis, mock, gates } = await start(2, { lease: patient });
    const streams = [...await openStreams(gates[0], 5), ...await openStreams(gates[1], 5)];
    for (let i = 0; i < 3; i++) {
        await redis.restart();
        await redis.holds(10, '', 2000);
        for (const gate of gates)
            await waitUntil('the limit is full', async () => (await call(gate)).reason === 'limit_full', 3000);
    }
    assert.equal((await mock.stats()).max_in_flight, 10);
    checkUndisturbed(streams, t);
});

test('E12: instances that come back to an empty Redis one after the other: the first does not give away what the last still holds', async (t) => {
    // the heartbeat is shorter than a step of the backoff, so a pause of one heartbeat would not do
    const { redis, mock, gates } = await start(3, { cap: 9, lease: { heartbeat: `${within(100)}ms`, ttl: `${within(20000)}ms` } });
    const streams = (await Promise.all(gates.map((g) => openStreams(g, 3)))).flat();
    for (let i = 0; i < (long ? 20 : 3); i++) {
        await redis.kill();
        await sleep(within(1200)); // the backoff is at its longest, and they are out of step
        await redis.restart();
        await Promise.all(gates.map((g) => load(t, g, { concurrency: 5, duration: 1.2 * within(1), thinkMs: 2, ttftMs: 20 })));
    }
    const { max_in_flight: most } = await mock.stats();
    t.diagnostic(`at most ${most} in flight, limit 9, 9 running all the time`);
    assert.equal(most, 9);
    await redis.holds(9);
    checkUndisturbed(streams, t);
});

test('E09: Redis restarted between calls: served again within two seconds', async (t) => {
    const { redis, gate } = await start(1);
    for (let i = 0; i < 2; i++) {
        assert.equal((await call(gate)).status, 200);
        await redis.restart();
        const back = await untilServed(gate, { refused: outage, ms: 3000 });
        t.diagnostic(`served ${round(back)} ms after the restart`);
        assert.ok(back < within(2000));
    }
});

test('E09: SCRIPT FLUSH under load: no client sees it', async (t) => {
    const { redis, gate } = await start(1, { cap: 1000, lease: patient });
    const streams = await openStreams(gate, 5);
    let flushes = 0;
    const result = await during(load(t, gate, { concurrency: 20, duration: 2 }), 50, async () => {
        await redis.command('SCRIPT', 'FLUSH');
        flushes++;
    });
    checkLoad(result, [200]);
    const { script = 0, 'script|load': loads = script } = await commandCounts(redis);
    t.diagnostic(`${result.completed} calls, ${flushes} flushes, ${loads} scripts loaded`);
    assert.ok(flushes > 20);
    checkUndisturbed(streams, t);
    await metricsSettle();
    assert.equal(await gate.metric('leasegate_redis_failures_total'), 0);
});

test('E08, E18, E23: CLIENT KILL under load: refusals at most, running calls undisturbed, one connect a step', async (t) => {
    const { redis, mock, gate } = await start(1, { cap: 1000, lease: patient });
    const streams = await openStreams(gate, 5);
    const connects = () => info(redis, 'total_connections_received');
    const before = await connects();
    let kills = 0;
    const result = await during(load(t, gate, { concurrency: 20, duration: 3, thinkMs: 1 }), 200, async () => {
        await redis.command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
        kills++;
    });
    checkLoad(result, [200, 429], outage);
    const reconnects = await connects() - before;
    t.diagnostic(`${JSON.stringify(result.statuses)}, ${kills} kills, ${reconnects} connects`);
    assert.ok(result.statuses[200] > 100);
    assert.ok(reconnects <= kills + 1, 'no more connects than there were cuts');
    checkUndisturbed(streams, t);
    await untilServed(gate);
    await redis.holds(5, '', 500);
    await mock.shows({ in_flight: 5 });
});

test('E15: thousands of calls, hundreds at a time, over one connection to Redis a thread', async (t) => {
    const { redis, gate } = await start(1, { cap: 1000, workers: 2 });
    const before = await info(redis, 'total_connections_received');
    const result = await load(t, gate, { concurrency: 200, requests: long ? 100000 : 5000 });
    checkLoad(result, [200]);
    const names = (await redis.command('CLIENT', 'LIST')).split('\n').filter((l) => / name=leasegate /.test(l));
    assert.equal(names.length, 2);
    assert.equal(await info(redis, 'total_connections_received'), before, 'nothing was connected for the load');
});

test('E21: calls around the age at which a connect deadline would strike are no failures', async (t) => {
    const { redis, gate } = await start(1, { via: async (r) => ({ url: r.url, timeout: '100ms' }) });
    for (let i = 1; i <= 6; i++) {
        await redis.command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
        await waitUntil('the cut is noticed', async () => (await call(gate)).status === 429);
        await untilServed(gate, { refused: outage });
        await sleep(85);
        for (const end = now() + 30; now() < end;)
            assert.equal((await call(gate)).status, 200);
        await metricsSettle();
        assert.equal(await gate.metric('leasegate_redis_failures_total'), i, 'the cuts, and nothing else');
    }
});

test('B11, C16: the key deleted by hand with 5 calls running: the next heartbeat puts them back', async (t) => {
    const { redis, mock, gate } = await start(1, { cap: 5, lease: { heartbeat: `${within(400)}ms`, ttl: `${within(20000)}ms` } });
    const streams = await fill([gate], 5);
    await redis.command('DEL', KEY);
    const begun = now();
    await redis.holds(5, '', 1000);
    t.diagnostic(`put back after ${round(now() - begun)} ms, heartbeat ${within(400)} ms`);
    checkRefusal(await call(gate), 'limit_full');
    await redis.command('DEL', KEY);
    streams.forEach((s) => s.stop());
    await mock.shows({ in_flight: 0 });
    await redis.holds(0);
    assert.equal(gate.log.some((l) => l.event === 'lease'), false, 'to release what is not there is no error');
});
