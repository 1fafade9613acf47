// Random interleavings of admit, renew, release, deaths and lost keys, compared with a model of forty lines.
//
// The model keeps, per scope, the set of live leases and nothing else: dead members are absent to it, so
// that whatever the scripts sweep, or leave, must not show. LEASEGATE_TEST_SEED repeats a run,
// LEASEGATE_TEST_STEPS lengthens it.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import {
    DEAD,
    LOST,
    Leases,
    OVER,
    RENEWED,
    RESTORED,
    TTL,
    age,
    liveIds,
    names,
    scopeSet,
} from './scripts.mjs';
import { startServer } from './server.mjs';

const SEED = Number(process.env.LEASEGATE_TEST_SEED ?? Date.now() % 2 ** 31);
const STEPS = Number(process.env.LEASEGATE_TEST_STEPS ?? 4000);

function randomFrom(seed) {
    let state = seed >>> 0;
    const next = () => {
        state = (state + 0x6d2b79f5) >>> 0;
        let x = Math.imul(state ^ (state >>> 15), state | 1);
        x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
        return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
    };
    return {
        below: (limit) => Math.floor(next() * limit),
        pick: (items) => items[Math.floor(next() * items.length)],
        some: (items, chance) => items.filter(() => next() < chance),
        chance: (probability) => next() < probability,
    };
}

class Model {
    live = new Map(); // key -> Set of the ids that are live in it

    scope(key) {
        if (!this.live.has(key)) this.live.set(key, new Set());
        return this.live.get(key);
    }

    admit(keys, caps, ids) {
        return ids.map((id) => {
            const full = keys.findIndex(
                (key, s) => !this.scope(key).has(id) && this.scope(key).size >= caps[s]
            );
            for (const key of keys) {
                if (full < 0) this.scope(key).add(id);
                else this.scope(key).delete(id);
            }
            return full + 1;
        });
    }

    renew(keys, caps, ids, strict) {
        return ids.map((id) => {
            const all = keys.every((key) => this.scope(key).has(id));
            const fits = keys.every((key, s) => this.scope(key).has(id) || this.scope(key).size < caps[s]);
            const lost = strict && !fits;
            for (const key of keys) {
                if (lost) this.scope(key).delete(id);
                else this.scope(key).add(id);
            }
            return all ? RENEWED : fits ? RESTORED : lost ? LOST : OVER;
        });
    }

    release(keys, ids) {
        for (const key of keys) for (const id of ids) this.scope(key).delete(id);
    }
}

let server;
before(async () => {
    server = await startServer('--zset-max-ziplist-entries', '16'); // both encodings, and the step between
});
after(() => server.stop());

async function compare(redis, model) {
    for (const [key, ids] of model.live) {
        assert.deepEqual(await liveIds(redis, key), [...ids].sort(), key);
        const rest = await redis.call('PTTL', key);
        if (ids.size > 0) assert.ok(rest > TTL, `${key} has PTTL ${rest}`);
        else assert.notEqual(rest, -1);
    }
}

test(`model: seed ${SEED}, ${STEPS} steps`, async (t) => {
    t.diagnostic(`LEASEGATE_TEST_SEED=${SEED}`);
    const random = randomFrom(SEED);
    const clients = Array.from({ length: 4 }, () => server.connect());
    const leases = await Leases.load(clients[0]);
    const model = new Model();
    const scopes = scopeSet(5);
    const pool = names(60);
    const caps = new Map(scopes.map((key, i) => [key, 3 + 4 * i]));
    let log = [];

    for (let step = 0; step < STEPS; step++) {
        // A burst of calls on one connection, in flight together; each burst on any connection.
        const redis = random.pick(clients);
        const on = leases.on(redis);
        const expected = [];
        const calls = [];
        for (let burst = 1 + random.below(4); burst > 0; burst--) {
            const keys = random.some(scopes, 0.4);
            if (keys.length === 0) keys.push(random.pick(scopes));
            if (random.chance(0.5)) keys.reverse();
            const capsOf = keys.map((key) => caps.get(key));
            const ids = Array.from({ length: random.below(random.chance(0.05) ? 60 : 6) }, () =>
                random.pick(pool)
            );
            const verb = random.pick(['admit', 'admit', 'renew', 'release']);
            log.push(`${verb} ${keys} ${capsOf} ${ids}`);
            if (verb === 'admit') {
                expected.push(model.admit(keys, capsOf, ids));
                calls.push(on.admit(keys, capsOf, ids, { refresh: random.below(2) }));
            } else if (verb === 'renew') {
                const strict = random.below(2);
                expected.push(model.renew(keys, capsOf, ids, strict));
                calls.push(on.renew(keys, capsOf, ids, { strict }));
            } else {
                model.release(keys, ids);
                calls.push(on.release(keys, ids).then(() => 'done'));
                expected.push('done');
            }
        }
        assert.deepEqual(await Promise.all(calls), expected, `step ${step}:\n${log.slice(-8).join('\n')}`);

        // What else befalls a scope: holders die, the key is lost, the limit changes, the clock goes back.
        const key = random.pick(scopes);
        const fate = random.below(40);
        if (fate < 6) {
            const dead = random.some([...model.scope(key)], 0.5);
            await age(redis, key, dead, DEAD + random.below(9999));
            for (const id of dead) model.scope(key).delete(id);
            log.push(`die ${key} ${dead}`);
        } else if (fate === 6) {
            await redis.call('DEL', key);
            model.scope(key).clear();
            log.push(`DEL ${key}`);
        } else if (fate < 9) {
            caps.set(key, random.below(20));
        } else if (fate === 9) {
            await age(redis, key, random.some([...model.scope(key)], 0.5), -3600000);
        } else if (fate === 10 && (await redis.call('EXISTS', key)) === 1) {
            await age(redis, key, names(250, `ghost${step}`), DEAD);
        }
        if (step % 20 === 0) await compare(redis, model);
        log = log.slice(-8);
    }
    await compare(clients[0], model);
});

// Eight holders at once, nobody in step with anybody. What they believe to hold is in sum never over the limit.
test(`stress: 8 connections, seed ${SEED}`, async () => {
    const keys = scopeSet(2);
    const caps = [17, 13];
    const watch = server.connect();
    const leases = await Leases.load(watch);
    let held = 0; // granted, and its release not yet sent
    let highest = 0;
    let grants = 0;

    async function holder(number) {
        const random = randomFrom(SEED + number);
        const on = leases.on(server.connect());
        let mine = [];
        for (let round = 0; round < 300; round++) {
            const ids = names(1 + random.below(6), `h${number}.${round}`);
            const reply = await on.admit(keys, caps, ids);
            const got = ids.filter((_, i) => reply[i] === 0);
            grants += got.length;
            held += got.length;
            highest = Math.max(highest, held);
            mine.push(...got);
            if (random.chance(0.3)) {
                const renewed = await on.renew(keys, caps, mine);
                assert.ok(renewed.every((code) => code === RENEWED));
            }
            const end = random.some(mine, 0.6);
            mine = mine.filter((id) => !end.includes(id));
            held -= end.length;
            assert.equal(await on.release(keys, end), 2 * end.length);
        }
        held -= mine.length;
        await on.release(keys, mine);
    }

    let running = true;
    const watching = (async () => {
        while (running) {
            const cards = await Promise.all(keys.map((key) => watch.call('ZCARD', key)));
            assert.ok(cards[0] <= caps[0] && cards[1] <= caps[1], `cards ${cards}`);
        }
    })();
    try {
        await Promise.all([1, 2, 3, 4, 5, 6, 7, 8].map(holder));
    } finally {
        running = false;
        await watching;
    }
    assert.ok(highest <= 13, `${highest} held at once`);
    assert.ok(
        highest === 13 && grants > 1000,
        `too idle to prove anything: ${highest} at most, ${grants} grants`
    );
    assert.equal(await watch.call('EXISTS', ...keys), 0);
});
