// freeze.test.mjs - instances that stand still, by SIGSTOP, and clocks that are wrong.
import assert from 'node:assert/strict';

import {
    call, checkRefusal, checkUndisturbed, conf, dates, fill, frozen, heartbeat, live, metricsSettle, newClock, now, openStreams, redisNow,
    round, short, sleep, startFleet, startGate, startMock, startRedis, test, ttl, untilServed, waitUntil, withEnvironment, within,
} from './tools.mjs';

test('C03: an instance stands still for half a ttl: no lease is lost', async (t) => {
    const { redis, gates: [a, b] } = await startFleet(2, { cap: 5 });
    const streams = await openStreams(a, 5);
    for (let i = 0; i < 3; i++) {
        await sleep(heartbeat * (1 + i / 3)); // at another phase of its beat each time
        await frozen(a, async () => {
            for (const end = now() + ttl / 2; now() < end; await sleep(10))
                checkRefusal(await call(b), 'limit_full');
        });
        streams.forEach((s) => s.calm());
        await sleep(heartbeat);
        assert.equal(await live(redis), 5);
    }
    await metricsSettle();
    for (const word of ['restored', 'over', 'lost'])
        assert.equal(await a.metric(`leasegate_leases_${word}_total`), 0, word);
    checkUndisturbed(streams, t);
});

test('B07, C07, C22: an instance stands still for 3 ttl, others fill its slots, it wakes: all are counted, nobody new until it fits', async (t) => {
    const { redis, mock, gates: [a, b] } = await startFleet(2, { cap: 5 });
    const old = await openStreams(a, 5);
    let fresh, over;
    await frozen(a, async () => {
        const begun = now();
        fresh = await fill([b], 5);
        over = now();
        t.diagnostic(`slots given to others ${round(over - begun)} ms after the standstill, ttl ${ttl} ms`);
        await sleep(Math.max(0, 3 * ttl - (over - begun)));
        assert.equal(await live(redis), 5);
    });
    const woke = now();
    await waitUntil('the count tells the truth', async () => await live(redis) === 10, 1000);
    t.diagnostic(`counted again ${round(now() - woke)} ms after it woke`);
    assert.ok(now() - woke < heartbeat + within(200));
    for (const gate of [a, b])
        checkRefusal(await call(gate), 'limit_full');
    await metricsSettle();
    assert.equal(await a.metric('leasegate_leases_over_total'), 5);
    assert.equal(await a.metric('leasegate_leases_lost_total'), 0);
    old.forEach((s) => s.calm());
    await sleep(2 * heartbeat);
    checkUndisturbed(old, t);
    assert.equal(await a.metric('leasegate_leases_over_total'), 5, 'counted once each');
    for (const stream of old) { // down to the limit, one by one
        checkRefusal(await call(b), 'limit_full');
        stream.stop();
        await waitUntil('released', async () => (await mock.stats()).in_flight === await redis.held());
    }
    t.diagnostic(`over the limit for ${round(now() - over)} ms, until its calls ended`);
    checkRefusal(await call(a), 'limit_full');
    fresh[0].stop();
    await untilServed(b, { refused: ['limit_full'], ms: 1000 });
    assert.equal((await mock.stats()).max_in_flight, 10);
});

test('B07, C07, C22: the same with strict: what was lost is ended at once, the limit holds again', async (t) => {
    const { redis, mock, gates: [a, b] } = await startFleet(2, { cap: 5, lease: { ...short, strict: 'true' } });
    const old = await openStreams(a, 5);
    let over;
    await frozen(a, async () => {
        await fill([b], 5);
        over = now();
        await sleep(2 * ttl);
    });
    const woke = now();
    await mock.shows({ in_flight: 5 }, 1000);
    t.diagnostic(`over the limit for ${round(now() - over)} ms in all, ${round(now() - woke)} ms after it woke`);
    assert.ok(now() - woke < within(300));
    for (const stream of old) {
        await stream.wire.ended();
        assert.match(stream.wire.text, /lease_lost|slot was lost/);
        assert.equal(stream.wire.text.endsWith('0\r\n\r\n'), false, 'a cut stream does not look complete');
    }
    await redis.holds(5, '', 500);
    await metricsSettle();
    assert.equal(await a.metric('leasegate_leases_lost_total'), 5);
    checkRefusal(await call(a), 'limit_full');
    assert.equal(await live(redis), 5);
});

test('C07, A19: the clients of a frozen instance leave, others take its slots, it wakes: its late releases touch nobody', async () => {
    const { redis, mock, gates: [a, b] } = await startFleet(2, { cap: 5 });
    const old = await openStreams(a, 5);
    await frozen(a, async () => {
        await fill([b], 5);
        old.forEach((s) => s.stop());
        await sleep(ttl);
    });
    await mock.shows({ in_flight: 5 });
    await redis.holds(5, '', 500);
    for (const end = now() + 2 * heartbeat; now() < end; await sleep(20)) {
        assert.equal(await live(redis), 5);
        checkRefusal(await call(a), 'limit_full');
    }
});

test('C07: strict, and Redis away for longer than ttl: calls are ended before others may be let into their slots', async (t) => {
    const { redis, mock, gate } = await startFleet(1, { cap: 5, lease: { ...short, strict: 'true' } });
    const streams = await openStreams(gate, 5);
    const last = Math.min(...(await dates(redis)).dates.values());
    await redis.pause();
    const begun = now();
    try {
        await mock.shows({ in_flight: 0 }, 3000);
    } finally {
        await redis.resume();
    }
    const ended = now() - begun;
    t.diagnostic(`ended ${round(ended)} ms after Redis stopped; ttl ${ttl} ms, heartbeat ${heartbeat} ms`);
    assert.ok(ended < ttl, 'before their leases expire');
    assert.ok(last > 0);
    await Promise.all(streams.map((s) => s.wire.ended()));
    await untilServed(gate, { refused: ['redis_unavailable'] });
    await redis.holds(0, '', 500);
});

test('D06, D07: instances whose clocks are 10 s slow, right, and 10 s fast: the number admitted is the limit', async (t) => {
    const redis = await startRedis(), mock = await startMock();
    const gates = await Promise.all([-10, 0, 10].map((skew) => startGate(conf({ redis, mock }), { env: newClock(skew).env })));
    const said = gates.map((g) => Date.parse(g.log[0].time) - Date.now());
    t.diagnostic(`clocks of the instances, by their logs: ${said.map((ms) => `${round(ms / 1000)} s`).join(', ')}`);
    assert.ok(said[0] < -8000 && said[2] > 8000, 'their clocks are wrong');
    const taken = await Promise.all(gates.map((g) => fill([g], 3)));
    const [last] = await fill([gates[0]], 1);
    for (const end = now() + 3 * ttl; now() < end; await sleep(50)) {
        for (const gate of gates)
            checkRefusal(await call(gate), 'limit_full');
        const { time, dates: held } = await dates(redis);
        assert.equal(held.size, 10);
        for (const date of held.values())
            assert.ok(time - date >= -1 && time - date < ttl, `dated by Redis: ${date - time} ms`);
    }
    taken[2][0].stop();
    await redis.holds(9, '', 500);
    const [again] = await fill([gates[0]], 1);
    assert.equal(await live(redis), 10);
    [last, again].forEach((s) => s.stop());
    assert.equal((await mock.stats()).max_in_flight, 10);
});

test('D04: the clock of Redis is set forward and back by an hour: nobody new gets in for good, nothing stays stuck', async (t) => {
    const { env, shift } = newClock();
    const redis = await withEnvironment(env, startRedis);
    const mock = await startMock();
    const gates = await Promise.all([0, 1].map(() => startGate(conf({ redis, mock, cap: 5 }))));
    const streams = await openStreams(gates[0], 5);
    const skew = async () => await redisNow(redis) - Date.now();
    assert.ok(Math.abs(await skew()) < 5000);

    shift(3600);
    await waitUntil('Redis has the new time', async () => await skew() > 3500000, 1000);
    await sleep(heartbeat * 1.5); // they beat, whatever the time
    assert.equal(await live(redis), 5);
    checkRefusal(await call(gates[1]), 'limit_full');
    checkRefusal(await call(gates[0]), 'limit_full');

    shift(0);
    await waitUntil('Redis has the old time', async () => await skew() < 5000, 1000);
    await sleep(heartbeat * 1.5);
    checkRefusal(await call(gates[1]), 'limit_full');
    const { time, dates: held } = await dates(redis);
    for (const date of held.values())
        assert.ok(date <= time + 1, 'a heartbeat has set the date right');
    checkUndisturbed(streams, t);
    streams.forEach((s) => s.stop());
    await redis.holds(0, '', 500);
    assert.equal((await call(gates[1])).status, 200);
    assert.equal((await mock.stats()).max_in_flight, 5);
});
