// kill.test.mjs - instances that die: what they held is free again within ttl, not before, and without anybody's help.
import assert from 'node:assert/strict';

import {
    call, chat, checkRefusal, conf, dates, fill, heartbeat, KEY, live, now, openStreams, redisNow, round, silent, sleep, startFleet, startGate, startMock,
    startRedis, test, ttl, waitUntil, Wire, within,
} from './tools.mjs';

// Calls until one is served; gives Redis's time just after it.
async function firstServed(gate, redis, ms) {
    return waitUntil('a slot is free', async () => {
        const answer = await call(gate);
        if (answer.status === 200)
            return redisNow(redis);
        checkRefusal(answer, 'limit_full');
        return null;
    }, ms);
}

test('A07, A23, C21: kill -9 of the holder of 10 of 10: full again for the others within ttl, not before', async (t) => {
    const { redis, mock, gates: [a, b, c] } = await startFleet(3);
    await openStreams(a, 10, silent);
    checkRefusal(await call(b), 'limit_full');
    await sleep(heartbeat * 1.5); // in the middle of its beats
    await a.kill();
    const killed = now();
    const { time, dates: held } = await dates(redis);
    assert.equal(held.size, 10);
    const expiry = Math.min(...held.values()) + ttl;
    const first = await firstServed(b, redis, 4000);
    t.diagnostic(`first slot ${round(first - time)} ms after the kill; the oldest lease expired after ${round(expiry - time)} ms; ttl ${ttl} ms`);
    assert.ok(first >= expiry, 'no slot is given away before its lease has expired');
    await fill([b, c], 10);
    const full = now() - killed;
    t.diagnostic(`all 10 slots in use again ${round(full)} ms after the kill`);
    assert.ok(full <= ttl + within(1000));
    assert.equal((await mock.stats()).max_in_flight, 10);
    checkRefusal(await call(c), 'limit_full');
});

test('C02, A23: all instances killed and started anew: full service within ttl', async (t) => {
    const { redis, mock, gates } = await startFleet(2);
    await Promise.all(gates.map((g) => openStreams(g, 5, silent)));
    await Promise.all(gates.map((g) => g.kill()));
    const killed = now();
    const fresh = await Promise.all([0, 1].map(() => startGate(conf({ redis, mock }))));
    const started = now() - killed;
    await fill(fresh, 10);
    const full = now() - killed;
    t.diagnostic(`started anew after ${round(started)} ms, full after ${round(full)} ms; ttl ${ttl} ms`);
    assert.ok(full <= ttl + within(1000));
    assert.equal((await mock.stats()).max_in_flight, 10);
    assert.equal(await live(redis), 10);
});

test('C18: all instances replaced one after the other under load, some by SIGTERM, some by kill -9: the count is the truth', async (t) => {
    const { redis, mock, gates } = await startFleet(3);
    let served = 0, refused = 0, broken = 0, over = false;
    const client = async (i) => {
        for (; !over; i++) {
            const answer = await call(gates[i % 3], { 'x-mock-ttft-ms': 10 }).catch(() => null); // its instance may be dying
            served += answer?.status === 200;
            refused += answer?.status === 429;
            broken += answer === null;
            assert.ok(answer === null || answer.status === 200 || answer.status === 429, `${answer?.status}`);
            await sleep(2);
        }
    };
    const clients = Array.from({ length: 30 }, (_, i) => client(i));
    for (let i = 0; i < 6; i++) {
        await sleep(within(300));
        const old = gates[i % 3];
        gates[i % 3] = await startGate(conf({ redis, mock }));
        if (i % 2 === 0) {
            old.terminate();
            await old.ended();
        } else {
            await old.kill();
        }
    }
    over = true;
    await Promise.all(clients);
    const begun = now();
    await waitUntil('nothing counts that does not run', async () => (await live(redis)) === 0, ttl / within(1) + 100);
    const { max_in_flight: most } = await mock.shows({ in_flight: 0 });
    t.diagnostic(`${served} served, ${refused} refused, ${broken} broken with their instance; at most ${most} in flight; ` +
        `true ${round(now() - begun)} ms after the last`);
    assert.ok(served > 100 && most <= 10);
    await fill(gates, 10);
});

test('C09: one orphan among nine that beat on is gone after ttl, and only it', async (t) => {
    const { redis, gates: [a, b] } = await startFleet(2);
    await openStreams(b, 9, silent);
    await openStreams(a, 1, silent);
    await a.kill();
    const killed = now();
    assert.equal(await live(redis), 10);
    await waitUntil('the orphan has expired', async () => (await live(redis)) === 9, 3000);
    t.diagnostic(`the orphan counted for ${round(now() - killed)} ms, ttl ${ttl} ms`);
    await sleep(2 * ttl); // the others keep the key alive
    assert.equal(await live(redis), 9);
    const [tenth] = await fill([b], 1);
    checkRefusal(await call(b), 'limit_full');
    assert.equal(await redis.command('ZCARD', KEY), 10, 'the orphan was swept by the one who took its place');
    tenth.stop();
});

test('C10, C12: what a killed instance held for 50 tenants leaves no key behind', async (t) => {
    const redis = await startRedis(), mock = await startMock();
    const gate = await startGate(conf({ redis, mock, tenant: { from: 'header:x-tenant-id' }, limit: { tenants: { per: ['tenant'], concurrency: 2 } } }));
    await Promise.all(Array.from({ length: 50 }, (_, i) => openStreams(gate, 1, { ...silent, 'x-tenant-id': `t${i}` })));
    assert.equal(await redis.command('DBSIZE'), 50);
    await gate.kill();
    const killed = now();
    await waitUntil('all keys have expired', async () => await redis.command('DBSIZE') === 0, 6000);
    t.diagnostic(`all keys gone ${round(now() - killed)} ms after the kill; 3 ttl: ${3 * ttl} ms`);
});

test('B04, B05, B10, C13, M01: a stream that is silent for 5 ttl keeps its slot', async (t) => {
    const lease = { heartbeat: `${within(200)}ms`, ttl: `${within(600)}ms` };
    const { redis, mock, gate, gates: [, other] } = await startFleet(2, { cap: 1, lease, deadline: within(250) });
    const [stream] = await openStreams(gate, 1, silent);
    const begun = now();
    let refused = 0, leastPttl = Infinity, oldest = 0;
    while (now() - begun < 5 * within(600)) {
        checkRefusal(await call(refused++ % 2 ? gate : other), 'limit_full');
        const { time, dates: held } = await dates(redis);
        oldest = Math.max(oldest, time - [...held.values()][0]);
        leastPttl = Math.min(leastPttl, await redis.command('PTTL', KEY));
        await sleep(20);
    }
    t.diagnostic(`${refused} others refused; date of the lease at most ${round(oldest)} ms old, key's expiry at least ${leastPttl} ms away`);
    assert.ok(leastPttl > within(600), 'the key outlives the youngest lease in it');
    assert.equal((await mock.stats()).max_in_flight, 1);
    stream.stop();
    await redis.holds(0, '', 1000);
    assert.equal((await call(other)).status, 200);
});

for (const how of ['FIN', 'RST']) {
    test(`A02, A13, A15: a client that goes by ${how}, in mid-stream or before the first byte: upstream closed, slot free within 300 ms`, async (t) => {
        const { redis, mock, gate } = await startFleet(1, { cap: 1 });
        const cases = {
            'mid-stream': [{ 'x-mock-events': 100000, 'x-mock-delay-ms': 5 }, true, (w) => w.until('mock_sent_ns')],
            'stream, before its first byte': [{ 'x-mock-ttft-ms': 600000 }, true, () => mock.shows({ in_flight: 1 })],
            'answer that is being thought about': [{ 'x-mock-ttft-ms': 600000 }, false, () => mock.shows({ in_flight: 1 })],
        };
        for (const [name, [fields, stream, begun]] of Object.entries(cases)) {
            const wire = await Wire.connect(gate.port);
            wire.send(chat(fields, 'gpt-4o', { stream }));
            await begun(wire);
            await redis.holds(1);
            const left = now();
            if (how === 'RST')
                wire.reset();
            else
                wire.finish();
            await mock.shows({ in_flight: 0 }, 300);
            await redis.holds(0, '', 300);
            const took = now() - left;
            t.diagnostic(`${name}: all free after ${round(took)} ms`);
            assert.ok(took < within(300));
            assert.equal((await call(gate)).status, 200);
        }
    });
}
