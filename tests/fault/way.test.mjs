// way.test.mjs - the network between leasegate and Redis delays, splits, swallows and cuts, at the worst byte.
import assert from 'node:assert/strict';

import {
    ADMIT_OR_RENEW, call, chat, checkLoad, checkRefusal, checkUndisturbed, conf, during, load, long, metricsSettle, mockTotal, now, openStreams,
    patient, RELEASE, round, silent, sleep, startFleet, startGate, startMock, startRedis, test, timeout, untilServed, waitUntil, Way, Wire, within,
} from './tools.mjs';

const startBehind = (t, n, options) => startFleet(n, { deadline: timeout, lease: patient, via: (redis) => Way.to(redis, t), ...options });

// Deals with the next message that matches, then goes out of the way.
function once(way, side, pattern, act) {
    return new Promise((resolve) => {
        way[side] = (text, cut, pass) => {
            if (!pattern.test(text))
                return false;
            way[side] = null;
            act(text, cut, pass);
            resolve();
            return true;
        };
    });
}

test('E17: every byte of every reply comes by itself', async (t) => {
    const { gate, way } = await startBehind(t, 1);
    way.split = true;
    for (let i = 0; i < 50; i++)
        assert.equal((await call(gate)).status, 200);
    way.cut(); // and the greeting too
    const back = await untilServed(gate, { refused: ['redis_unavailable'] });
    assert.ok(back < within(1500));
    checkLoad(await load(t, gate, { concurrency: 8, requests: 300 }), [200]);
});

test('E17: the connection cut at each byte of the reply to an admit: 429, never 500 nor a hang, and the lease is released', async (t) => {
    const { redis, mock, gate, way } = await startBehind(t, 1);
    const reply = '*1\r\n:0\r\n';
    for (let keep = 0; keep < reply.length; keep++) {
        await untilServed(gate, { refused: ['redis_unavailable'] });
        await redis.holds(0);
        const total = await mockTotal(mock);
        const struck = once(way, 'onReply', /^\*1\r\n:0\r\n$/, (text, cut, pass) => {
            pass(text.slice(0, keep));
            cut(5); // the part arrives before the end does
        });
        const answer = await call(gate);
        await struck;
        checkRefusal(answer, 'redis_unavailable');
        assert.ok(answer.ms < timeout + within(50));
        assert.equal(await mockTotal(mock), total, 'the upstream was not called');
        await redis.holds(0, '', 1500); // ttl is 20 s: it was released, not expired
    }
    await metricsSettle();
    assert.equal(await gate.metric('leasegate_leases_unknown_total'), reply.length);
});

for (const [name, forward] of [['before Redis has seen it', false], ['after Redis has run it', true]]) {
    test(`A17, E18, M08: cut exactly at a release, ${name}: repeated after the reconnect, well before ttl`, async (t) => {
        const { redis, gate, gates: [, other], way } = await startBehind(t, 2, { cap: 1 });
        for (let i = 0; i < 3; i++) {
            const [stream] = await openStreams(gate, 1, silent);
            const struck = forward
                ? once(way, 'onReply', /^:1\r\n$/, (text, cut) => cut())
                : once(way, 'onAsk', RELEASE, (text, cut) => cut());
            const begun = now();
            stream.stop();
            await struck;
            if (!forward)
                assert.equal(await redis.held(), 1, 'the release did not arrive');
            await redis.holds(0, '', 2000);
            t.diagnostic(`released ${round(now() - begun)} ms after the end of the call`);
            await untilServed(other);
            await untilServed(gate); // whose slot may be on its way back still
            await redis.holds(0);
        }
        await metricsSettle();
        assert.equal(await gate.metric('leasegate_releases_owed'), 0);
    });
}

test('A17: every release fails for two seconds: all are made good at once afterwards', async (t) => {
    const { redis, mock, gate, way } = await startBehind(t, 1, { cap: 100 });
    const streams = await openStreams(gate, 20, silent);
    way.onAsk = (text, cut) => /\$7\r\nEVALSHA/.test(text) && (cut(), true);
    streams.slice(0, 15).forEach((s) => s.stop());
    await mock.shows({ in_flight: 5 });
    await sleep(within(1000));
    assert.equal(await redis.held(), 20, 'nothing got through');
    streams.slice(15).forEach((s) => s.stop());
    await mock.shows({ in_flight: 0 });
    await sleep(within(1000));
    await metricsSettle();
    assert.equal(await gate.metric('leasegate_releases_owed'), 20);
    way.onAsk = null;
    const begun = now();
    await redis.holds(0, '', 1500);
    t.diagnostic(`20 releases made good ${round(now() - begun)} ms after the way is free`);
    await untilServed(gate, { refused: ['redis_unavailable'] });
});

for (const [name, side] of [['never sent', 'onAsk'], ['reply lost', 'onReply']]) {
    test(`C04, E18: one heartbeat lost (${name}): the stream goes on, its lease stays`, async (t) => {
        const lease = { heartbeat: `${within(500)}ms`, ttl: `${within(2500)}ms` };
        const { redis, gate, way } = await startBehind(t, 1, { lease, cap: 1 });
        const streams = await openStreams(gate, 1);
        const struck = side === 'onAsk'
            ? once(way, 'onAsk', ADMIT_OR_RENEW, () => {})
            : once(way, 'onReply', /^\*1\r\n:0\r\n$/, () => {});
        await struck;
        await waitUntil('the deadline strikes', async () => await gate.metric('leasegate_redis_failures_total') === 1);
        await waitUntil('it is usable again', async () => (await call(gate)).reason === 'limit_full');
        assert.equal(await redis.held(), 1);
        await sleep(within(1000));
        assert.equal(await redis.held(), 1);
        checkUndisturbed(streams, t);
        for (const word of ['restored', 'over', 'lost'])
            assert.equal(await gate.metric(`leasegate_leases_${word}_total`), 0, word);
        checkRefusal(await call(gate), 'limit_full');
    });
}

test('E07: replies later than the deadline: refused in time, the upstream is not called, the late lease is released', async (t) => {
    const { redis, mock, gate, way } = await startBehind(t, 1);
    await call(gate);
    await redis.holds(0);
    const total = await mockTotal(mock);
    way.delay = timeout + within(200);
    const answer = await call(gate);
    checkRefusal(answer, 'redis_unavailable');
    t.diagnostic(`refused after ${round(answer.ms)} ms, deadline ${timeout} ms`);
    assert.ok(answer.ms < timeout + within(50));
    assert.equal(await redis.held(), 1, 'Redis has granted it');
    checkRefusal(await call(gate), 'redis_unavailable');
    assert.equal(await mockTotal(mock), total);
    way.delay = 0;
    const back = await untilServed(gate, { refused: ['redis_unavailable'] });
    await redis.holds(0, '', 500);
    t.diagnostic(`served ${round(back)} ms after the way is fast again`);
    assert.ok(back < within(1500));
});

test('E07: a slow way that keeps the deadline costs time, nothing else', async (t) => {
    const { gate, way } = await startBehind(t, 1, { cap: 100 });
    way.delay = timeout / 5;
    const result = await load(t, gate, { concurrency: 20, requests: 100 });
    checkLoad(result, [200]);
    t.diagnostic(`replies ${timeout / 5} ms late: calls p50 ${round(result.total_ms.p50)} ms`);
    assert.ok(result.total_ms.p50 >= timeout / 5);
});

test('E24: the peer goes silent: refused within the deadline, streams go on, served within a second of its return', async (t) => {
    const { redis, gate, way } = await startBehind(t, 1);
    const streams = await openStreams(gate, 3);
    way.hole = true;
    const first = await call(gate);
    checkRefusal(first, 'redis_unavailable');
    assert.ok(first.ms < timeout + within(50), `${first.ms} ms`);
    await sleep(within(1500));
    const accepted = way.accepted;
    const second = await call(gate);
    checkRefusal(second, 'redis_unavailable');
    way.hole = false;
    const back = await untilServed(gate, { refused: ['redis_unavailable'] });
    t.diagnostic(`first ${round(first.ms)} ms, later ${round(second.ms)} ms; served ${round(back)} ms after the way is back; ${accepted} connects`);
    assert.ok(back < within(1000));
    assert.ok(second.ms < within(50));
    checkUndisturbed(streams, t);
    await redis.holds(3, '', 500);
});

test('E23: a peer that resets every connection: one attempt a step, a line a second', async (t) => {
    const { gate, way } = await startBehind(t, 1);
    way.refuse = true;
    way.cut();
    const from = gate.log.length, accepted = way.accepted, seconds = 3;
    await sleep(within(seconds * 1000));
    const attempts = way.accepted - accepted, lines = gate.log.length - from;
    t.diagnostic(`${attempts} attempts and ${lines} lines in ${within(seconds * 1000)} ms`);
    assert.ok(attempts >= 3 && attempts <= seconds * 10 * within(1));
    assert.ok(lines <= within(seconds) + 1);
    checkRefusal(await call(gate), 'redis_unavailable');
    way.refuse = false;
    assert.ok(await untilServed(gate, { refused: ['redis_unavailable'] }) < within(1000));
});

test('E08: calls that wait for a reply when the connection is cut: each is answered, none twice', async (t) => {
    const { redis, mock, gate, way } = await startBehind(t, 1, { cap: 1000 });
    await call(gate);
    const total = await mockTotal(mock);
    way.onReply = () => true; // swallowed
    const wires = await Promise.all(Array.from({ length: 200 }, () => Wire.connect(gate.port)));
    wires.forEach((w) => w.send(chat()));
    await redis.holds(200);
    way.cut();
    way.onReply = null;
    const answers = await Promise.all(wires.map((w) => w.message()));
    assert.deepEqual(new Set(answers.map((a) => `${a.status} ${a.headers.get('x-leasegate-reason')}`)), new Set(['429 redis_unavailable']));
    assert.ok(wires.every((w) => w.text === ''));
    assert.equal(await mockTotal(mock), total);
    await redis.holds(0, '', 1500);
});

test('E17, E18: the way cut at random bytes, scripts flushed, clients gone at random: never over the limit, nothing left', async (t) => {
    const redis = await startRedis(), mock = await startMock();
    const ways = await Promise.all([0, 1, 2].map(() => Way.to(redis, t)));
    const gates = await Promise.all(ways.map((way) => startGate(conf({ redis: { url: way.url }, mock, lease: patient }))));
    const streams = await openStreams(gates[0], 2);
    let seed = 42, cuts = 0;
    const random = (n) => (seed = seed * 1103515245 + 12345 & 0x7fffffff) % n;
    for (const way of ways) {
        for (const side of ['onAsk', 'onReply']) {
            way[side] = (text, cut, pass) => {
                if (random(1500) !== 0)
                    return false;
                pass(Buffer.from(text.slice(0, random(text.length)), 'latin1'));
                cuts++;
                cut(1 + random(20));
                return true;
            };
        }
    }
    const runs = gates.map((gate, i) => load(t, gate, {
        concurrency: 20, duration: long ? 60 : 5, abortRate: 0.2, stream: true, events: 3, delayMs: 3, thinkMs: 5, seed: i + 1 }));
    await during(Promise.all(runs), 300, () => redis.command('SCRIPT', 'FLUSH'));
    const results = await Promise.all(runs);
    for (const way of ways)
        way.onAsk = way.onReply = null;
    results.forEach((r) => checkLoad(r, [200, 429], ['limit_full', 'redis_unavailable', 'redis_error']));
    await redis.holds(2, '', 2500); // every release was made good
    const { max_in_flight: most } = await mock.shows({ in_flight: 2 });
    t.diagnostic(`${cuts} cuts; ${JSON.stringify(results.map((r) => r.statuses))}, ${JSON.stringify(results[0].refusals)}; at most ${most} in flight`);
    assert.ok(most <= 10 && cuts > 10);
    checkUndisturbed(streams, t);
});
