// invariants.mjs - what must hold of the lease protocol, one function each.
//
// The numbers are those of the design's list of invariants; the letters are what these rest on. Each
// takes { server, redis, leases } and throws AssertionError where the scripts break it: invariants.test.mjs
// runs them on the scripts as they are, mutations.test.mjs on scripts with a line broken on purpose.
import assert from 'node:assert/strict';
import {
    DEAD,
    LOST,
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

const granted = (reply) => reply.filter((code) => code === 0).length;
const zeros = (count) => new Array(count).fill(0);
const rejects = (promise, pattern) =>
    promise.then(
        (reply) => assert.fail(`expected ${pattern}, got ${reply}`),
        (error) => assert.match(error.message, pattern)
    );

async function assertKeysExpire(redis, keys) {
    for (const key of keys) {
        const rest = await redis.call('PTTL', key);
        if (rest !== -2) assert.ok(rest > TTL, `${key} has PTTL ${rest}`);
    }
}

// 100 askers on 10 connections, one call each, none waits for another's reply: 10 slots, 10 grants.
export async function neverOverTheLimit({ server, redis, leases }) {
    const keys = scopeSet(2);
    const clients = Array.from({ length: 10 }, () => leases.on(server.connect()));
    const single = await Promise.all(names(100).map((id, i) => clients[i % 10].admit(keys, [12, 10], [id])));
    assert.equal(granted(single.flat()), 10);
    assert.deepEqual(
        single.flat().filter((code) => code !== 0),
        new Array(90).fill(2)
    );
    assert.equal(await redis.call('ZCARD', keys[0]), 10);

    const [shared] = scopeSet(1);
    const batches = await Promise.all(
        clients.map((client, i) => client.admit([shared], [25], names(7, `b${i}`)))
    );
    assert.equal(granted(batches.flat()), 25, 'batches fill the limit exactly');
    assert.equal(await redis.call('ZCARD', shared), 25);

    // A batch with repeats in it, for the last slots.
    const [key] = scopeSet(1);
    assert.deepEqual(await leases.admit([key], [2], ['a', 'a', 'b', 'c', 'b']), [0, 0, 0, 1, 0]);
    assert.equal(await redis.call('ZCARD', key), 2);
    for (const cap of ['0', '-1', 'nan']) {
        assert.deepEqual(await leases.admit(scopeSet(1), [cap], ['x']), [1], `cap ${cap} has no room`);
    }
}

// The holders of all slots are dead: whoever asks next gets the slots at once, whatever the number of ghosts.
export async function killedHolderIsReclaimed({ redis, leases }) {
    for (const [cap, ghosts] of [
        [1, 1],
        [10, 10],
        [10, 650],
        [300, 300],
    ]) {
        const [key] = scopeSet(1);
        await age(redis, key, names(ghosts, 'killed'), DEAD);
        const asked = names(cap + 1, 'next');
        assert.deepEqual(await leases.admit([key], [cap], asked), [...zeros(cap), 1]);
        assert.equal((await liveIds(redis, key)).length, cap);
        for (let i = 0; i < 5; i++) await leases.admit([key], [cap], ['late']);
        assert.equal(await redis.call('ZCARD', key), cap, 'the ghosts are swept in the end');
        await assertKeysExpire(redis, [key]);
    }
    const [key] = scopeSet(1);
    await age(redis, key, ['old'], TTL - 20000);
    assert.deepEqual(await leases.admit([key], [1], ['next']), [1], 'not before the ttl');
}

// Releases that come twice, late or from strangers touch nobody else.
export async function releaseTouchesOnlyItsOwn({ redis, leases }) {
    const keys = scopeSet(2);
    assert.deepEqual(await leases.admit(keys, [2, 2], ['a', 'b']), [0, 0]);
    assert.equal(await leases.release(keys, ['a']), 2);
    assert.equal(await leases.release(keys, ['a']), 0, 'twice');
    assert.equal(await leases.release(keys, ['stranger', '', 'A']), 0, 'never granted');
    assert.deepEqual(await liveIds(redis, keys[0]), ['b']);
    assert.deepEqual(await leases.admit(keys, [2, 2], ['c', 'd']), [0, 1], 'no second slot came of it');

    await age(redis, keys[0], ['b'], DEAD);
    await age(redis, keys[1], ['b'], DEAD);
    assert.deepEqual(await leases.admit(keys, [2, 2], ['e']), [0], 'b is reclaimed');
    assert.equal(await leases.release(keys, ['b']), 0, 'late');
    for (const key of keys) assert.deepEqual(await liveIds(redis, key), ['c', 'e']);

    assert.equal(await leases.release(keys, ['c', 'e', 'c']), 4);
    assert.equal(await redis.call('EXISTS', ...keys), 0, 'nothing stays behind');
    const many = names(2500);
    await leases.admit(keys, [9999, 9999], many);
    assert.equal(await leases.release(keys, many), 5000);
}

// Asking again with an id that holds is granted, full or not, and takes nothing.
export async function repeatTakesNoSecondSlot({ redis, leases }) {
    const keys = scopeSet(2);
    for (let round = 0; round < 3; round++) {
        assert.deepEqual(await leases.admit(keys, [3, 2], ['a']), [0]);
    }
    assert.deepEqual(await leases.admit(keys, [3, 2], ['a', 'b', 'a']), [0, 0, 0]);
    assert.deepEqual(await leases.admit(keys, [3, 2], ['c', 'b', 'a']), [2, 0, 0], 'while full');
    await age(redis, keys[0], ['a'], 5000);
    assert.deepEqual(await leases.admit(keys, [1, 1], ['a']), [0], 'while over the limit');
    const date = Number(await redis.call('ZSCORE', keys[0], 'a'));
    assert.ok((await serverTime(redis)) - date < 4000, 'the date is set to now');
    for (const key of keys) assert.equal(await redis.call('ZCARD', key), 2);

    // Held in one scope only: room is needed in the other, and there alone.
    await redis.call('DEL', keys[1]);
    assert.deepEqual(await leases.admit(keys, [2, 1], ['a']), [0]);
    assert.deepEqual(await leases.admit(keys, [2, 1], ['b']), [2]);

    // One that is dead holds nothing, though it may wait for its sweep behind many older ones.
    const [key] = scopeSet(1);
    await age(redis, key, names(500, 'ghost'), DEAD + 1000);
    await age(redis, key, ['late'], DEAD);
    assert.deepEqual(await leases.admit([key], [1], ['a', 'late']), [0, 1]);
}

// Two hours of heartbeats, each at the last moment, while others try for the slot.
export async function longCallKeepsItsSlot({ redis, leases }) {
    const keys = scopeSet(2);
    await leases.admit(keys, [1, 9], ['long'], { refresh: 1 });
    for (let beat = 0; beat < 20; beat++) {
        for (const key of keys) await age(redis, key, ['long'], TTL - 20000);
        await redis.call('PEXPIRE', keys[0], 20000);
        assert.deepEqual(await leases.renew(keys, [1, 9], ['long']), [RENEWED]);
        assert.deepEqual(await leases.admit(keys, [1, 9], ['thief']), [1]);
        await assertKeysExpire(redis, keys);
    }
    // With a ghost beside it, which opens the long way.
    for (const key of keys) await age(redis, key, ['long'], TTL - 20000);
    await age(redis, keys[1], ['ghost'], DEAD);
    assert.deepEqual(await leases.renew(keys, [1, 9], ['long']), [RENEWED]);
    for (const key of keys) {
        const date = Number(await redis.call('ZSCORE', key, 'long'));
        assert.ok((await serverTime(redis)) - date < TTL / 2, 'dated anew');
    }
    // In the millisecond of its grant or of another heartbeat, too.
    for (let i = 0; i < 200; i++) {
        const replies = await Promise.all([0, 1, 2].map(() => leases.renew(keys, [1, 9], ['long'])));
        assert.deepEqual(replies.flat(), [RENEWED, RENEWED, RENEWED]);
    }
    // One command for any number, and one ZADD per scope and 500 ids inside.
    const many = names(1000);
    await leases.admit(keys, [1001, 1009], many);
    await age(redis, keys[0], many, 5000);
    await age(redis, keys[1], many, 5000);
    await redis.call('CONFIG', 'RESETSTAT');
    assert.deepEqual(await leases.renew(keys, [1, 9], many), zeros(1000), 'over a lowered limit, too');
    const stats = await redis.call('INFO', 'commandstats');
    assert.match(stats, /cmdstat_evalsha:calls=1,/);
    assert.match(stats, /cmdstat_zadd:calls=4,/);
    assert.doesNotMatch(stats, /cmdstat_zscore/);
}

// A refusal by any scope, wherever it stands in the set, leaves nothing in the others.
export async function allScopesOrNone({ redis, leases }) {
    for (const full of [0, 1, 2]) {
        const keys = scopeSet(3);
        const caps = [10, 10, 10];
        caps[full] = 1;
        await leases.admit([keys[full]], [1], ['holder']);
        const cards = () => Promise.all(keys.map((key) => redis.call('ZCARD', key)));
        const before = await cards();
        for (let i = 0; i < 10; i++) {
            assert.deepEqual(await leases.admit(keys, caps, names(5)), new Array(5).fill(full + 1));
            assert.deepEqual(await cards(), before);
        }
    }
    // A repeat that is refused had been granted before its key was lost: it is nowhere, afterwards.
    const keys = scopeSet(2);
    await leases.admit(keys, [5, 1], ['a']);
    await redis.call('DEL', keys[1]);
    await leases.admit([keys[1]], [1], ['other']);
    assert.deepEqual(await leases.admit(keys, [5, 1], ['a']), [2]);
    assert.equal(await redis.call('ZSCORE', keys[0], 'a'), null);

    // And a lease that is lost is lost in every scope, also in those that had it or had room.
    await leases.admit([keys[0]], [5], ['a']);
    assert.deepEqual(await leases.renew(keys, [5, 1], ['a', 'b'], { strict: 1 }), [LOST, LOST]);
    assert.equal(await redis.call('ZCARD', keys[0]), 0);
    assert.deepEqual(await liveIds(redis, keys[1]), ['other']);
}

// A lower limit ends nobody and admits nobody; a higher one admits at once; 0 closes.
export async function limitMayChange({ redis, leases }) {
    const [key] = scopeSet(1);
    const running = names(10);
    assert.deepEqual(await leases.admit([key], [10], running), zeros(10));
    for (const cap of [5, 0]) {
        for (const strict of [0, 1]) {
            await age(redis, key, running, 5000);
            assert.deepEqual(await leases.renew([key], [cap], running, { strict }), zeros(10));
            // The long way round (a gap of one, a ghost beside them) comes to the same.
            await age(redis, key, ['ghost'], DEAD);
            assert.deepEqual(await leases.renew([key], [cap], running, { strict }), zeros(10));
        }
        assert.deepEqual(await leases.admit([key], [cap], ['new']), [1]);
    }
    await leases.release([key], running.slice(0, 5));
    assert.deepEqual(await leases.admit([key], [5], ['new']), [1]);
    await leases.release([key], running.slice(5, 6));
    assert.deepEqual(await leases.admit([key], [5], ['new', 'newer']), [0, 1]);
    assert.deepEqual(await leases.admit([key], [7], ['newer', 'newest']), [0, 0], 'raised');
    assert.equal(await redis.call('ZCARD', key), 7);
}

// T: the count tells the truth: what renew finds gone is put back, and said to be.
export async function renewRestores({ redis, leases }) {
    const keys = scopeSet(2);
    await leases.admit(keys, [3, 3], ['a', 'b', 'c']);
    for (const key of keys) {
        for (const each of keys) await age(redis, each, ['a', 'b', 'c'], 5000);
        await redis.call('DEL', key);
        assert.deepEqual(await leases.renew(keys, [3, 3], ['a', 'b']), [RESTORED, RESTORED]);
    }
    assert.deepEqual(await leases.admit(keys, [3, 3], ['thief']), [1]);
    assert.deepEqual(await leases.renew(keys, [3, 3], ['c', 'a']), [RESTORED, RENEWED]);

    await redis.call('DEL', ...keys);
    assert.deepEqual(await leases.admit(keys, [2, 3], ['x', 'y']), [0, 0], 'others came first');
    assert.deepEqual(await leases.renew(keys, [2, 3], ['a', 'b'], { strict: 1 }), [LOST, LOST]);
    assert.deepEqual(await leases.renew(keys, [3, 3], ['a', 'b', 'x']), [RESTORED, OVER, RENEWED]);
    assert.equal(await redis.call('ZCARD', keys[0]), 4, 'four run, four are counted');
    await leases.release(keys, ['x']);
    assert.deepEqual(await leases.admit(keys, [3, 3], ['z']), [1], 'nobody enters until it fits again');
    await leases.release(keys, ['y']);
    assert.deepEqual(await leases.admit(keys, [3, 3], ['z']), [0]);

    // Dead and not swept is the same as gone.
    for (const strict of [0, 1]) {
        const [key] = scopeSet(1);
        await age(redis, key, ['late'], DEAD);
        assert.deepEqual(await leases.renew([key], [1], ['late'], { strict }), [RESTORED]);
        await age(redis, key, ['late'], DEAD);
        assert.deepEqual(await leases.renew([key], [0], ['late'], { strict }), [strict ? LOST : OVER]);
        assert.equal(await redis.call('ZCARD', key), strict ? 0 : 1);

        await age(redis, key, names(500, 'ghost'), DEAD + 1000);
        await age(redis, key, ['late'], DEAD);
        assert.deepEqual(await leases.renew([key], [0], ['late'], { strict }), [strict ? LOST : OVER]);
    }
}

// K: every key always expires, and later than any lease in it may.
export async function keysAlwaysExpire({ redis, leases }) {
    const create = scopeSet(2);
    await leases.admit(create, [2, 2], ['a']);
    await assertKeysExpire(redis, create);
    await leases.release(create, ['a']);
    await leases.admit(create, [1, 1], ['b', 'c']);
    await assertKeysExpire(redis, create); // emptied by a release, created by the id-by-id way

    const [swept] = scopeSet(1); // emptied by the sweep, created by the same call
    await age(redis, swept, ['ghost'], DEAD);
    await leases.admit([swept], [1], ['a']);
    await assertKeysExpire(redis, [swept]);

    const removed = scopeSet(2); // emptied by a refusal, created by the next id of the same call
    await age(redis, removed[0], ['a'], 0);
    await age(redis, removed[1], ['b', 'other'], 0);
    assert.deepEqual(await leases.admit(removed, [1, 2], ['a', 'b']), [2, 0]);
    await assertKeysExpire(redis, [removed[0]]);

    const lost = scopeSet(2);
    await leases.renew(lost, [1, 1], ['a']); // created by renew
    await assertKeysExpire(redis, lost);
    await redis.call('DEL', lost[0]);
    await age(redis, lost[0], ['x'], 0);
    assert.deepEqual(await leases.renew(lost, [1, 1], ['b', 'x'], { strict: 1 }), [LOST, LOST]);
    await assertKeysExpire(redis, lost);
    await redis.call('DEL', ...lost);
    await age(redis, lost[0], ['a'], DEAD); // emptied by the sweep of renew
    await leases.renew(lost, [1, 1], ['a']);
    await assertKeysExpire(redis, lost);

    const [kept] = scopeSet(1); // refreshed, whatever the outcome for the ids
    await leases.admit([kept], [1], ['a']);
    for (const ids of [['a'], ['refused'], []]) {
        await redis.call('PEXPIRE', kept, 1000);
        await leases.admit([kept], [1], ids, { refresh: 1 });
        await assertKeysExpire(redis, [kept]);
    }
    await redis.call('PERSIST', kept);
    await leases.renew([kept], [1], ['a']);
    await assertKeysExpire(redis, [kept]);
    assert.equal(await redis.call('PTTL', kept).then((rest) => rest > 0), true);
}

// B: no call removes more than 200 dead members, and none refuses for their sake.
export async function sweepIsBounded({ redis, leases }) {
    const [key] = scopeSet(1);
    await age(redis, key, names(1000, 'ghost'), DEAD);
    let left = 1000;
    for (const call of [
        () => leases.admit([key], [2], ['a']).then((reply) => assert.deepEqual(reply, [0])),
        () => leases.admit([key], [2], ['b', 'c']).then((reply) => assert.deepEqual(reply, [0, 1])),
        () => leases.renew([key], [2], ['a', 'b']).then((reply) => assert.deepEqual(reply, [0, 0])),
    ]) {
        await call();
        const ghosts = (await redis.call('ZCARD', key)) - (await liveIds(redis, key)).length;
        assert.ok(ghosts === left - 200, `${left} ghosts before, ${ghosts} after`);
        left = ghosts;
    }
    const [room] = scopeSet(1);
    await age(redis, room, names(10, 'ghost'), DEAD);
    await leases.admit([room], [20], ['a']);
    assert.equal(await redis.call('ZCARD', room), 11, 'where there is room, nothing is swept');
}

// W: a key of another type is an error, and nothing is left half done in the other scopes.
export async function wrongTypeFailsClosed({ redis, leases }) {
    for (const wrong of [0, 1]) {
        const keys = scopeSet(2);
        const right = keys[1 - wrong];
        await redis.call('SET', keys[wrong], '7');
        await rejects(leases.admit(keys, [5, 5], ['a']), /WRONGTYPE/);
        await rejects(leases.renew(keys, [5, 5], ['a']), /WRONGTYPE/);
        assert.equal(await redis.call('EXISTS', right), 0);
        assert.equal(await redis.call('PTTL', keys[wrong]), -1, 'a stranger’s key gets no expiry');
        await age(redis, right, ['a'], 0);
        await rejects(leases.release(keys, ['a']), /WRONGTYPE/);
        assert.equal(await redis.call('EXISTS', right), 0, 'released in the scope that can');
    }
    for (const bad of [
        [0, 5],
        [-1, 5],
        ['nan', 5],
        ['1.5', 5],
        ['x', 5],
        [TTL, 'x'],
    ]) {
        const [key] = scopeSet(1);
        await rejects(leases.admit([key], [bad[1]], ['a'], { ttl: bad[0] }), /./);
        if (bad[1] === 5) await rejects(leases.renew([key], [5], ['a'], { ttl: bad[0] }), /bad arguments/);
        assert.equal(await redis.call('EXISTS', key), 0);
    }
    await rejects(leases.admit([], [], ['a']), /bad arguments/);
    await rejects(leases.renew([], [], ['a']), /bad arguments/);
}

// M: over maxmemory nothing enters; what runs goes on, and what ends gives its slot back.
export async function outOfMemoryFailsClosed({ redis, leases }) {
    const keys = scopeSet(2);
    await leases.admit(keys, [9, 9], ['a', 'b', 'c']);
    const absent = scopeSet(2);
    await redis.call('CONFIG', 'SET', 'maxmemory', '1');
    try {
        await rejects(leases.admit(keys, [9, 9], ['d']), /OOM/);
        await rejects(leases.admit(keys, [9, 9], ['d'], { refresh: 1 }), /OOM/);
        await rejects(leases.admit(keys, [9, 3], ['a', 'd']), /OOM/);
        assert.deepEqual(await leases.admit(keys, [3, 3], ['d']), [1], 'a refusal writes nothing');
        await assert.doesNotReject(async () => {
            assert.deepEqual(await leases.renew(keys, [9, 9], ['a', 'b']), [RENEWED, RENEWED]);
            assert.deepEqual(await leases.renew(absent, [9, 9], ['a']), [RESTORED]);
            assert.equal(await leases.release(keys, ['a', 'b']), 4);
        });
    } finally {
        await redis.call('CONFIG', 'SET', 'maxmemory', '0');
    }
    for (const key of keys) assert.deepEqual(await liveIds(redis, key), ['c']);
    await assertKeysExpire(redis, [...keys, ...absent]);
}

// C: dates are this server's; one from the future is live, and set right by the next heartbeat.
export async function clockIsTheServers({ redis, leases }) {
    const keys = scopeSet(2);
    const before = await serverTime(redis);
    await leases.admit(keys, [1, 1], ['a']);
    const inRange = async () => {
        for (const key of keys) {
            const date = Number(await redis.call('ZSCORE', key, 'a'));
            assert.ok(
                date >= before && date <= (await serverTime(redis)),
                `${date} is not from ${before} to now`
            );
        }
    };
    await inRange();
    for (const renew of [
        () => leases.renew(keys, [1, 1], ['a']),
        () => leases.admit(keys, [1, 1], ['a']),
        () => leases.admit(keys, [9, 9], ['a']),
    ]) {
        for (const key of keys) await age(redis, key, ['a'], -3600000);
        assert.deepEqual(await leases.admit(keys, [1, 1], ['thief']), [1]);
        assert.deepEqual(await renew(), [RENEWED]);
        await inRange();
    }
}

export const INVARIANTS = {
    '1 never more leases than the limit': neverOverTheLimit,
    '2 a killed holder is reclaimed by whoever asks next': killedHolderIsReclaimed,
    '3 a release touches nothing but its own': releaseTouchesOnlyItsOwn,
    '4 asking again takes no second slot': repeatTakesNoSecondSlot,
    '5 a call of hours keeps its slot': longCallKeepsItsSlot,
    '6 all scopes or none': allScopesOrNone,
    '8 a limit may be lowered and raised': limitMayChange,
    'T renew restores the truth': renewRestores,
    'K every key expires': keysAlwaysExpire,
    'B the sweep is bounded': sweepIsBounded,
    'W wrong types and arguments fail closed': wrongTypeFailsClosed,
    'M over maxmemory admit fails closed, renew and release work': outOfMemoryFailsClosed,
    'C the clock is the server’s': clockIsTheServers,
};
