// server.test.mjs - a Redis that answers, but not what one hoped for: refused passwords, a replica, no memory, foreign keys.
// Each has its name in /readyz, refuses new calls, leaves running ones alone, and ends by itself when the cause does.
import assert from 'node:assert/strict';

import {
    call, checkRefusal, checkUndisturbed, conf, fill, KEY, now, openStreams, patient, round, silent, sleep, startFleet, startGate, startMock, startRedis,
    test, timeout, untilServed, waitUntil, within,
} from './tools.mjs';

const readyz = async (gate) => {
    const { status, text } = await gate.admin('/readyz');
    return { ...JSON.parse(text), status };
};

const unready = (gate, trouble, ms = 3000) => {
    let seen;
    return waitUntil(() => `/readyz says ${trouble}: ${JSON.stringify(seen)}`, async () => {
        seen = await readyz(gate);
        return seen.status === 503 && seen.redis === trouble;
    }, ms);
};

// Ready again, and serving, within `ms`.
async function recovers(t, gate, ms = 1500) {
    const back = await untilServed(gate, { refused: ['redis_unavailable', 'redis_error', 'redis_oom', 'redis_wrongtype'], ms: 2 * ms });
    t.diagnostic(`served ${round(back)} ms after the cause is gone`);
    assert.ok(back < within(ms));
    await waitUntil('/readyz is 200', async () => (await readyz(gate)).status === 200);
}

test('E16: a wrong password at the start: not ready, with the reason; calls are refused; right as soon as the server takes it', async (t) => {
    const redis = await startRedis(), mock = await startMock();
    await redis.command('CONFIG', 'SET', 'requirepass', 'right');
    const url = `unix://:wrong@${redis.path}`;
    const gate = await startGate(conf({ redis: { url }, mock, lease: patient }), { ready: false });
    await unready(gate, 'auth');
    checkRefusal(await call(gate), 'redis_unavailable');
    const line = await gate.waitForLog((l) => l.event === 'redis' && l.level === 'warn');
    assert.match(line.message, /auth/);
    assert.equal(gate.log.some((l) => /wrong@|:wrong/.test(JSON.stringify(l))), false, 'the password stays out of the log');
    await redis.command('CONFIG', 'SET', 'requirepass', 'wrong');
    await recovers(t, gate);
    assert.equal((await mock.stats()).total, 1);
});

test('E16: no password where one is asked for', async (t) => {
    const redis = await startRedis(), mock = await startMock();
    await redis.command('CONFIG', 'SET', 'requirepass', 'secret');
    const gate = await startGate(conf({ redis, mock }), { ready: false });
    await unready(gate, 'auth');
    checkRefusal(await call(gate), 'redis_unavailable');
    await redis.command('CONFIG', 'SET', 'requirepass', '');
    await recovers(t, gate);
});

test('E16: the password is changed while calls run: fail closed once the connection is lost, streams go on', async (t) => {
    const { redis, gate } = await startFleet(1, { lease: patient });
    const streams = await openStreams(gate, 3);
    await redis.command('CONFIG', 'SET', 'requirepass', 'rotated');
    assert.equal((await call(gate)).status, 200, 'a connection that is in order stays');
    await redis.command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
    await unready(gate, 'auth');
    checkRefusal(await call(gate), 'redis_unavailable');
    await redis.command('CONFIG', 'SET', 'requirepass', '');
    await recovers(t, gate);
    checkUndisturbed(streams, t);
    await redis.holds(3, '', 500);
});

test('E16: the password is changed at the server, then in the configuration: a reload takes it, streams go on', async (t) => {
    const redis = await startRedis(), mock = await startMock();
    await redis.command('CONFIG', 'SET', 'requirepass', 'old');
    const settings = (password) => conf({ redis: { url: `unix://:${password}@${redis.path}` }, mock, lease: patient });
    const gate = await startGate(settings('old'));
    const streams = await openStreams(gate, 3);
    await redis.command('CONFIG', 'SET', 'requirepass', 'new');
    await redis.command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
    await unready(gate, 'auth');
    checkRefusal(await call(gate), 'redis_unavailable');
    await gate.reload(settings('new'));
    await recovers(t, gate);
    checkUndisturbed(streams, t);
    await redis.holds(3, '', 500);
});

// What a server as a whole may answer: [name, reason, break it, mend it].
const states = [
    ['READONLY, a replica', 'readonly', ['REPLICAOF', '127.0.0.1', '1'], ['REPLICAOF', 'NO', 'ONE']],
    ['NOREPLICAS', 'noreplicas', ['CONFIG', 'SET', 'min-replicas-to-write', '1'], ['CONFIG', 'SET', 'min-replicas-to-write', '0']],
    ['MASTERDOWN', 'masterdown', [['CONFIG', 'SET', 'replica-serve-stale-data', 'no'], ['REPLICAOF', '127.0.0.1', '1']],
        [['REPLICAOF', 'NO', 'ONE'], ['CONFIG', 'SET', 'replica-serve-stale-data', 'yes']]],
    ['NOPERM', 'noperm', ['ACL', 'SETUSER', 'default', '-evalsha'], ['ACL', 'SETUSER', 'default', '+evalsha']],
    ['NOPERM for TIME (D03)', 'noperm', ['ACL', 'SETUSER', 'default', '-time'], ['ACL', 'SETUSER', 'default', '+time']],
];
for (const [name, reason, breakIt, mendIt] of states) {
    test(`E05, E16: ${name}: named, refused, streams go on, and it heals by itself`, async (t) => {
        const { redis, gate } = await startFleet(1, { lease: patient });
        const streams = await openStreams(gate, 3);
        const run = async (commands) => {
            for (const command of Array.isArray(commands[0]) ? commands : [commands])
                await redis.command(...command);
        };
        await run(breakIt);
        try {
            checkRefusal(await call(gate), 'redis_unavailable');
            await unready(gate, reason);
            const from = gate.log.length, begun = now();
            for (let i = 0; i < 50; i++) {
                checkRefusal(await call(gate), 'redis_unavailable');
                await sleep(10);
            }
            const lines = gate.log.length - from;
            assert.ok(lines <= (now() - begun) / 1000 + 1, `${lines} lines`);
        } finally {
            await run(mendIt);
        }
        await recovers(t, gate);
        checkUndisturbed(streams, t);
        await redis.holds(3, '', 500);
        streams.forEach((s) => s.stop());
        await redis.holds(0, '', 500);
    });
}

test('E05: a server that is a replica from the start', async (t) => {
    const redis = await startRedis(), mock = await startMock();
    await redis.command('REPLICAOF', '127.0.0.1', '1');
    const gate = await startGate(conf({ redis, mock }), { ready: false });
    await unready(gate, 'readonly');
    checkRefusal(await call(gate), 'redis_unavailable');
    await redis.command('REPLICAOF', 'NO', 'ONE');
    await recovers(t, gate);
});

test('E05: LOADING: named, refused, and served as soon as it has loaded', async (t) => {
    const { redis, gate } = await startFleet(1, { lease: patient, redisOptions: ['--enable-debug-command', 'yes', '--dbfilename', 'loading.rdb'] });
    const streams = await openStreams(gate, 3);
    for (let i = 0; i < 10; i++)
        await redis.command('MSET', ...Array.from({ length: 200 }, (_, k) => [`filler:${i}:${k}`, 'x']).flat());
    await redis.command('CONFIG', 'SET', 'key-load-delay', 700); // us a key
    await redis.command('CONFIG', 'SET', 'loading-process-events-interval-bytes', 1024);
    const loaded = redis.command('DEBUG', 'RELOAD');
    let seen;
    await waitUntil(() => `/readyz names it: ${JSON.stringify(seen)}`, async () => {
        seen = await readyz(gate);
        return seen.redis === 'loading';
    });
    checkRefusal(await call(gate), 'redis_unavailable');
    assert.equal(await loaded, 'OK');
    await recovers(t, gate);
    checkUndisturbed(streams, t);
    await redis.holds(3, '', 500);
});

test('E11: maxmemory without eviction: admit is refused as redis_oom, releases and heartbeats work', async (t) => {
    const { redis, gate } = await startFleet(1, { lease: { heartbeat: `${within(300)}ms`, ttl: `${within(1000)}ms` } });
    const streams = await openStreams(gate, 4);
    await redis.command('CONFIG', 'SET', 'maxmemory', 1);
    checkRefusal(await call(gate), 'redis_oom');
    const line = await gate.waitForLog((l) => l.event === 'lease' && l.level === 'error');
    assert.match(line.message, /OOM/);
    streams.slice(2).forEach((s) => s.stop());
    await redis.holds(2, '', 500);
    await sleep(within(2000)); // two ttl
    assert.equal(await redis.held(), 2, 'the running ones are renewed');
    assert.equal(await gate.metric('leasegate_leases_restored_total'), 0);
    checkRefusal(await call(gate), 'redis_oom');
    await redis.command('CONFIG', 'SET', 'maxmemory', 0);
    await recovers(t, gate, 200);
    checkUndisturbed(streams.slice(0, 2), t);
});

test('E11: a key that is evicted is put back by the next heartbeat', async (t) => {
    const { redis, gate } = await startFleet(1, { lease: { heartbeat: `${within(300)}ms`, ttl: `${within(5000)}ms` } });
    await openStreams(gate, 4, silent);
    await redis.command('CONFIG', 'SET', 'maxmemory-policy', 'allkeys-lru');
    await redis.command('CONFIG', 'SET', 'maxmemory', 1);
    await waitUntil('the key is evicted', async () => {
        await redis.command('SET', 'x', 'y').catch(() => {});
        return await redis.command('EXISTS', KEY) === 0;
    });
    await redis.command('CONFIG', 'SET', 'maxmemory', 0);
    const begun = now();
    await redis.holds(4, '', 600);
    t.diagnostic(`4 leases put back ${round(now() - begun)} ms after there was room`);
    await waitUntil('it is counted', async () => await gate.metric('leasegate_leases_restored_total') >= 4);
});

test('B18, C14: the key is of another type: refused as redis_wrongtype, the log names the key, it heals with the key', async (t) => {
    const { redis, mock, gate } = await startFleet(1);
    await redis.command('SET', KEY, 'not ours');
    for (let i = 0; i < 20; i++)
        checkRefusal(await call(gate), 'redis_wrongtype');
    const line = await gate.waitForLog((l) => l.event === 'lease' && l.level === 'error');
    assert.ok(line.message.includes(KEY), line.message);
    assert.match(line.message, /WRONGTYPE/);
    assert.ok(gate.log.filter((l) => l.event === 'lease').length <= 2, 'one line a second');
    assert.equal((await mock.stats()).total, 0);
    assert.equal((await readyz(gate)).status, 200, 'the server is in order, other limits may work');
    await redis.command('DEL', KEY);
    await recovers(t, gate, 200);
    t.diagnostic(line.message);
});

test('A09, A22, B18: one of two keys is of another type: nothing is taken in the other, what is held there is given back', async () => {
    const { redis, mock, gate } = await startFleet(1, {
        limit: { account: { concurrency: 10 }, gpt: { model: ['gpt-*'], concurrency: 10 } }, lease: patient });
    const streams = await fill([gate], 3);
    assert.equal(await redis.held(':account:'), 3);
    await redis.command('DEL', 'lg1:{main}:gpt:leases');
    await redis.command('SET', 'lg1:{main}:gpt:leases', 'not ours');
    for (let i = 0; i < 10; i++)
        checkRefusal(await call(gate), 'redis_wrongtype');
    const card = () => redis.command('ZCARD', 'lg1:{main}:account:leases');
    assert.equal(await card(), 3);
    streams.forEach((s) => s.stop());
    await mock.shows({ in_flight: 0 });
    await waitUntil('released in the key that is in order', async () => await card() === 0);
    await redis.command('DEL', 'lg1:{main}:gpt:leases');
    await untilServed(gate, { refused: ['redis_wrongtype'] });
});

test('C14: other programs\' members in the key count, none of them for ever', async () => {
    const { redis, gate } = await startFleet(1, { cap: 1 });
    await redis.command('ZADD', KEY, Date.now() - 3600000, 'garbage', Date.now(), 'stranger/1');
    checkRefusal(await call(gate), 'limit_full');
    await untilServed(gate, { refused: ['limit_full'], ms: 3000 });
});

test('E07: DEBUG SLEEP beyond the deadline: refused in time, served afterwards, no ghost', async (t) => {
    const { redis, gate } = await startFleet(1, { deadline: timeout, lease: patient, redisOptions: ['--enable-debug-command', 'yes'] });
    const streams = await openStreams(gate, 2);
    const slept = redis.command('DEBUG', 'SLEEP', within(700) / 1000);
    await sleep(20);
    const answer = await call(gate);
    checkRefusal(answer, 'redis_unavailable');
    assert.ok(answer.ms < timeout + within(50), `${answer.ms} ms`);
    const second = await call(gate);
    checkRefusal(second, 'redis_unavailable');
    t.diagnostic(`first ${round(answer.ms)} ms, second ${round(second.ms)} ms`);
    await slept;
    await recovers(t, gate);
    await redis.holds(2, '', 500);
    checkUndisturbed(streams, t);
});
