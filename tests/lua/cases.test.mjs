// The rows of the case list that the scripts answer for, by their ids. What the invariants already
// say (invariants.mjs) is not said again: these are the stories, with their own numbers.
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import {
    DEAD,
    Leases,
    OVER,
    RENEWED,
    RESTORED,
    TTL,
    age,
    liveIds,
    names,
    scopeSet,
    serverTime,
} from './scripts.mjs';
import { startServer } from './server.mjs';

let server;
let redis;
let leases;
before(async () => {
    server = await startServer('--zset-max-ziplist-entries', '0');
    redis = server.connect();
    leases = await Leases.load(redis);
});
after(() => server.stop());

const refused = (reply) => reply.filter((code) => code !== 0).length;
const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

test('A05 fifty calls one after another through a limit of five', async () => {
    const [key] = scopeSet(1);
    for (const id of names(50)) {
        assert.deepEqual(await leases.admit([key], [5], [id]), [0]);
        assert.equal(await leases.release([key], [id]), 1);
    }
    assert.equal(await redis.call('EXISTS', key), 0);
});

test('A09 refused by the model, the tenant stays at one', async () => {
    const [tenant, model] = scopeSet(2);
    for (const [keys, caps, code] of [
        [[tenant, model], [10, 1], 2],
        [[model, tenant], [1, 10], 1],
    ]) {
        assert.deepEqual(await leases.admit(keys, caps, ['running']), [0]);
        const replies = await Promise.all(names(50).map((id) => leases.admit(keys, caps, [id])));
        assert.deepEqual(replies.flat(), new Array(50).fill(code));
        assert.equal(await redis.call('ZCARD', tenant), 1);
        await leases.release(keys, ['running']);
    }
});

test('A19 a release by a stranger, or of a refused call, frees nothing', async () => {
    const [key] = scopeSet(1);
    await leases.admit([key], [1], ['a/1']);
    assert.deepEqual(await leases.admit([key], [1], ['b/1']), [1]);
    assert.equal(await leases.release([key], ['b/1', 'a/11', 'a/', 'A/1']), 0);
    assert.deepEqual(await liveIds(redis, key), ['a/1']);
});

test('A22 one scope fails, the others are released, and a repeat finishes', async () => {
    const keys = scopeSet(3);
    await leases.admit(keys, [5, 5, 5], ['a']);
    await redis.call('RENAME', keys[0], `${keys[0]}:away`);
    await redis.call('SET', keys[0], 'x');
    await assert.rejects(leases.release(keys, ['a']), /WRONGTYPE/);
    assert.equal(await redis.call('EXISTS', keys[1], keys[2]), 0);
    await redis.call('RENAME', `${keys[0]}:away`, keys[0]);
    assert.equal(await leases.release(keys, ['a']), 1);
});

test('B05 B06 a silent call with a late first heartbeat is counted throughout', async () => {
    const [key] = scopeSet(1);
    await leases.admit([key], [1], ['silent']);
    for (let beat = 0; beat < 12; beat++) {
        await age(redis, key, ['silent'], (TTL * 3) / 4);
        assert.deepEqual(await leases.admit([key], [1], ['other']), [1]);
        assert.deepEqual(await leases.renew([key], [1], ['silent']), [RENEWED]);
    }
});

test('B07 renewed after the slot was re-sold: over, and nobody enters until it is true again', async () => {
    const [key] = scopeSet(1);
    await leases.admit([key], [1], ['a']);
    await age(redis, key, ['a'], DEAD);
    assert.deepEqual(await leases.admit([key], [1], ['b']), [0]);
    assert.deepEqual(await leases.renew([key], [1], ['a']), [OVER]);
    await leases.release([key], ['b']);
    assert.deepEqual(await leases.admit([key], [1], ['c']), [1]);
    assert.deepEqual(await leases.renew([key], [1], ['a']), [RENEWED]);
});

test('B10 the key outlives its leases, though few calls set its expiry', async () => {
    const [key] = scopeSet(1);
    const ttl = 20000;
    await leases.admit([key], [5], names(5), { ttl });
    // The worst moment by contract: the last refresh is half a ttl old, then admits without one.
    await redis.call('PEXPIRE', key, 2.5 * ttl);
    await leases.release([key], ['w/1']);
    assert.deepEqual(await leases.admit([key], [5], ['fresh'], { ttl }), [0]);
    const rest = await redis.call('PTTL', key);
    assert.ok(rest > 2 * ttl, `PTTL ${rest}`);
    for (const id of names(20, 'late')) assert.deepEqual(await leases.admit([key], [5], [id], { ttl }), [1]);
});

test('B11 E12 the key is deleted with five running: all come back through the check', async () => {
    const [key] = scopeSet(1);
    const running = names(5);
    await leases.admit([key], [5], running);
    await redis.call('DEL', key);
    assert.deepEqual(await leases.admit([key], [5], ['quick']), [0]);
    assert.deepEqual(await leases.renew([key], [5], running), [RESTORED, RESTORED, RESTORED, RESTORED, OVER]);
    assert.equal(await redis.call('ZCARD', key), 6);
    assert.equal(await leases.release([key], ['nobody']), 0);
});

test('B15 a hundred ask at once for ten', async () => {
    const [key] = scopeSet(1);
    const askers = await Promise.all(
        names(100).map((id) => leases.on(server.connect()).admit([key], [10], [id]))
    );
    assert.equal(refused(askers.flat()), 90);
    assert.ok((await redis.call('PTTL', key)) > TTL);
});

test('B18 a string where the leases should be', async () => {
    const [key] = scopeSet(1);
    await redis.call('SET', key, '3');
    await assert.rejects(leases.admit([key], [5], ['a']), /WRONGTYPE/);
    await assert.rejects(leases.renew([key], [5], ['a']), /WRONGTYPE/);
    await assert.rejects(leases.release([key], ['a']), /WRONGTYPE/);
    assert.equal(await redis.call('GET', key), '3');
});

test('B19 the examples of key names in lua/README.md are what its rule gives', () => {
    const readme = readFileSync(new URL('../../lua/README.md', import.meta.url), 'utf8');
    const rule = (value) =>
        /^(?!h-)[A-Za-z0-9._-]{1,64}$/.test(value)
            ? value
            : `h-${createHash('sha256').update(value).digest('hex').slice(0, 32)}`;
    const table = readme.slice(readme.indexOf('| value | in the key |'), readme.indexOf('Member: lease id'));
    const rows = [...table.matchAll(/^\| (?:`(.+)`|\(empty\)) \| `(.+)` \|$/gm)];
    assert.ok(rows.length >= 4, `${rows.length} rows`);
    for (const [, value = '', name] of rows) assert.equal(name, rule(value));
});

test('C05 C06 heartbeats and releases in flight together, in this order, leave nothing', async () => {
    const keys = scopeSet(2);
    for (let round = 0; round < 20; round++) {
        const ids = names(500, `r${round}`);
        const replies = await Promise.all([
            leases.admit(keys, [500, 500], ids),
            leases.renew(keys, [500, 500], ids),
            leases.release(keys, ids),
        ]);
        assert.equal(replies[2], 1000);
    }
    assert.equal(await redis.call('EXISTS', ...keys), 0);
});

test('C09 nine beating leases do not keep the tenth, orphaned one', async () => {
    const [key] = scopeSet(1);
    await leases.admit([key], [10], names(10));
    const beating = names(9);
    for (let beat = 0; beat < 10; beat++) {
        await age(redis, key, ['w/10'], beat * 1000 + (beat === 9 ? DEAD : 0));
        if (beat < 9) assert.deepEqual(await leases.admit([key], [10], ['new']), [1]);
        await leases.renew([key], [10], beating);
    }
    assert.deepEqual(await leases.admit([key], [10], ['new']), [0]);
    assert.equal(await redis.call('ZSCORE', key, 'w/10'), null);
});

test('C11 10,000 held leases in one key: an admit is still far below 1 ms', async () => {
    const [key] = scopeSet(1);
    for (let i = 0; i < 10; i++) await leases.admit([key], [20000], names(1000, `h${i}`));
    await redis.call('CONFIG', 'RESETSTAT');
    for (const id of names(1000)) await leases.admit([key], [20000], [id]);
    for (let i = 0; i < 1000; i++) assert.deepEqual(await leases.admit([key], [11000], ['late']), [1]);
    const [, calls, usec] = /cmdstat_evalsha:calls=(\d+),usec=(\d+)/.exec(
        await redis.call('INFO', 'commandstats')
    );
    assert.equal(calls, '2000');
    assert.ok(usec / calls < 500, `${usec / calls} us a call`);
    assert.equal(await redis.call('ZCARD', key), 11000);
});

test('C12 after a run of everything, each key of ours expires', async () => {
    let cursor = '0';
    let seen = 0;
    do {
        const [next, keys] = await redis.call(
            'SCAN',
            cursor,
            'MATCH',
            'lg1:*:leases',
            'TYPE',
            'zset',
            'COUNT',
            '1000'
        );
        cursor = next;
        for (const key of keys) assert.ok((await redis.call('PTTL', key)) > 0, key);
        seen += keys.length;
    } while (cursor !== '0');
    assert.ok(seen > 5, `${seen} keys`);
});

test('C13 asked in the same millisecond, held for ten ttls: never over', async () => {
    const [key] = scopeSet(1);
    const replies = await Promise.all(names(64).map((id) => leases.admit([key], [8], [id])));
    assert.equal(refused(replies.flat()), 56);
    const holding = names(64).filter((_, i) => replies[i][0] === 0);
    for (let beat = 0; beat < 20; beat++) {
        await age(redis, key, holding, TTL / 2);
        await leases.renew([key], [8], holding);
        assert.deepEqual(await leases.admit([key], [8], ['new']), [1]);
    }
});

test('C14 L06 the limit is in the call, not in Redis; 0 never admits', async () => {
    const [key] = scopeSet(1);
    assert.deepEqual(await leases.admit([key], [0], ['a']), [1]);
    assert.deepEqual(await leases.admit([key], [1], ['a']), [0]);
    assert.deepEqual(await leases.admit([key], [0], ['b']), [1]);
    await redis.call('ZADD', key, '-1', 'garbage', '0', '', '17', 'x'.repeat(500));
    assert.deepEqual(await leases.admit([key], [2], ['b']), [0], 'garbage of no date is swept like the dead');
    assert.equal(await redis.call('ZCARD', key), 2);
});

test('D03 E16 an ACL user needs just the commands of lua/README.md; else NOPERM', async () => {
    const readme = readFileSync(new URL('../../lua/README.md', import.meta.url), 'utf8');
    const [, list] = /in the scripts ([A-Z,\s]+)\./.exec(readme);
    const commands = list.split(/[,\s]+/).map((name) => `+${name.toLowerCase()}`);
    const [key] = scopeSet(1);
    for (const without of [null, ...commands]) {
        const allowed = commands.filter((name) => name !== without);
        await redis.call(
            'ACL',
            'SETUSER',
            'lease',
            'reset',
            'on',
            '>secret',
            '~lg1:*',
            '+@scripting',
            ...allowed
        );
        const client = server.connect();
        await client.call('AUTH', 'lease', 'secret');
        const own = leases.on(client);
        const everything = async () => {
            await age(redis, key, ['ghost'], DEAD);
            assert.deepEqual(await own.admit([key], [1], ['a', 'b']), [0, 1]);
            assert.deepEqual(await own.renew([key], [1], ['a', 'b'], { strict: 1 }), [0, 3]);
            assert.equal(await own.release([key], ['a']), 1);
        };
        if (without === null) await everything();
        else await assert.rejects(everything(), /NOPERM|can't run this command|ACL failure in script/i, `${without} is not needed`);
        if (without === '+time') assert.equal(await redis.call('ZSCORE', key, 'a'), null);
        await redis.call('DEL', key);
    }
});

test('D04 D05 the clock an hour back: live, and right again after one heartbeat', async () => {
    const [key] = scopeSet(1);
    await leases.admit([key], [2], ['a', 'orphan']);
    await age(redis, key, ['a', 'orphan'], -3600000);
    assert.deepEqual(await leases.admit([key], [2], ['b']), [1], 'a negative age is no age');
    assert.deepEqual(await leases.renew([key], [2], ['a']), [RENEWED]);
    assert.ok(Number(await redis.call('ZSCORE', key, 'a')) <= (await serverTime(redis)));
});

test('D06 dates are the server’s, exact to the millisecond', async () => {
    const [key] = scopeSet(1);
    for (const call of [() => leases.admit([key], [1], ['a']), () => leases.renew([key], [1], ['a'])]) {
        const earliest = await serverTime(redis);
        await call();
        const latest = await serverTime(redis);
        const date = await redis.call('ZSCORE', key, 'a');
        assert.match(date, /^\d{13}$/);
        assert.ok(earliest <= Number(date) && Number(date) <= latest, `${earliest} ${date} ${latest}`);
    }
});

test('E11 over maxmemory: no admission, but heartbeats and releases', async () => {
    const [key] = scopeSet(1);
    await leases.admit([key], [9], ['a', 'b']);
    await redis.call('CONFIG', 'SET', 'maxmemory', '1');
    try {
        await assert.rejects(leases.admit([key], [9], ['c']), /OOM/);
        assert.deepEqual(await leases.renew([key], [9], ['a', 'b']), [RENEWED, RENEWED]);
        assert.equal(await leases.release([key], ['a']), 1);
    } finally {
        await redis.call('CONFIG', 'SET', 'maxmemory', '0');
    }
    assert.deepEqual(await liveIds(redis, key), ['b']);
});

test('E09 after SCRIPT FLUSH the call says NOSCRIPT and has done nothing', async () => {
    const own = await startServer();
    try {
        const client = own.connect();
        const first = await Leases.load(client);
        const [key] = scopeSet(1);
        await client.call('SCRIPT', 'FLUSH');
        await assert.rejects(first.admit([key], [1], ['a']), /NOSCRIPT/);
        assert.deepEqual(await (await Leases.load(client)).admit([key], [1], ['a']), [0]);
    } finally {
        await own.stop();
    }
});

test('E19 100,000 dead members: no call removes more than 200, none takes long', async () => {
    const [key] = scopeSet(1);
    for (let i = 0; i < 100; i++) await age(redis, key, names(1000, `ghost${i}`), DEAD);
    const times = [];
    let card = 100000;
    for (let i = 0; i < 100; i++) {
        const ids = names(8, `n${i}`);
        const start = process.hrtime.bigint();
        const reply = await leases.admit([key], [8], ids);
        times.push(Number(process.hrtime.bigint() - start) / 1e6);
        assert.equal(refused(reply), i === 0 ? 0 : 8, 'the dead refuse nobody, the living do');
        const left = await redis.call('ZCARD', key);
        assert.equal(card - left, i === 0 ? 192 : 200);
        card = left;
    }
    // The median: a busy machine may stop this process, or Redis, at any time.
    assert.ok(median(times) < 5, `${median(times)} ms`);
    await redis.call('DEL', key);
});

test('F01 F04 on a cluster: one tag is one slot, two are CROSSSLOT', async () => {
    const own = await startServer('--cluster-enabled', 'yes');
    try {
        const client = own.connect();
        await client.call('CLUSTER', 'ADDSLOTS', ...Array.from({ length: 16384 }, (_, slot) => slot));
        const node = await Leases.load(client);
        const keys = [
            'lg1:{acct}:gpt-4o:leases',
            'lg1:{acct}:tenants/h-e3b0c44298fc1c149afbf4c8996fb924:leases',
        ];
        const deadline = Date.now() + 20000; // the cluster is up some time after its last slot was assigned
        while (/cluster_state:fail/.test(await client.call('CLUSTER', 'INFO'))) {
            assert.ok(Date.now() < deadline);
            await sleep(10);
        }
        assert.deepEqual(await node.admit(keys, [1, 1], ['a', 'b']), [0, 1]);
        assert.deepEqual(await node.renew(keys, [1, 1], ['a']), [RENEWED]);
        await assert.rejects(node.admit([keys[0], 'lg1:{other}:x:leases'], [9, 9], ['c']), /CROSSSLOT/);
        assert.equal(await node.release(keys, ['a']), 2);
    } finally {
        await own.stop();
    }
});

test('E05 a replica refuses: READONLY, nothing granted', async () => {
    const [key] = scopeSet(1);
    const own = await startServer();
    try {
        const client = own.connect();
        const replica = await Leases.load(client);
        await client.call('REPLICAOF', '127.0.0.1', '1');
        await assert.rejects(replica.admit([key], [1], ['a']), /READONLY/);
        await assert.rejects(replica.renew([key], [1], ['a']), /READONLY/);
        await assert.rejects(replica.release([key], ['a']), /READONLY/);
    } finally {
        await own.stop();
    }
});
