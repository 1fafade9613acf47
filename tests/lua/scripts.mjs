// scripts.mjs - the three scripts as functions, and what tests look at beside them.
//
// Text is read from lua/; a test may hand in changed text (see mutations.test.mjs).
import { readFileSync } from 'node:fs';

export const VERBS = ['admit', 'renew', 'release'];
export const TEXT = Object.fromEntries(
    VERBS.map((verb) => [verb, readFileSync(new URL(`../../lua/${verb}.lua`, import.meta.url), 'latin1')])
);
export const RENEWED = 0;
export const RESTORED = 1;
export const OVER = 2;
export const LOST = 3;
// Longer than any test runs: nothing dies by itself. Age is made by writing old dates (age()).
export const TTL = 600000;

// The scripts over one connection. `keys` is the scope set, `caps` one cap per key.
export class Leases {
    static async load(redis, text = TEXT) {
        const leases = new Leases();
        leases.redis = redis;
        leases.sha = {};
        for (const verb of VERBS) leases.sha[verb] = await redis.call('SCRIPT', 'LOAD', text[verb]);
        return leases;
    }

    on(redis) {
        return Object.assign(new Leases(), { redis, sha: this.sha });
    }

    admit(keys, caps, ids, { ttl = TTL, refresh = 0 } = {}) {
        return this.redis.call(
            'EVALSHA',
            this.sha.admit,
            keys.length,
            ...keys,
            ttl,
            refresh,
            ...caps,
            ...ids
        );
    }

    renew(keys, caps, ids, { ttl = TTL, strict = 0 } = {}) {
        return this.redis.call('EVALSHA', this.sha.renew, keys.length, ...keys, ttl, strict, ...caps, ...ids);
    }

    release(keys, ids) {
        return this.redis.call('EVALSHA', this.sha.release, keys.length, ...keys, ...ids);
    }
}

export async function serverTime(redis) {
    const [seconds, micros] = await redis.call('TIME');
    return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000);
}

// Dates members `ms` back (negative: into the future) by the server's clock. Adds those that are absent.
export async function age(redis, key, ids, ms) {
    const date = (await serverTime(redis)) - ms;
    for (let i = 0; i < ids.length; i += 500) {
        await redis.call('ZADD', key, ...ids.slice(i, i + 500).flatMap((id) => [date, id]));
    }
}

export const DEAD = TTL + 1000; // an age at which a lease is dead

export async function liveIds(redis, key, ttl = TTL) {
    return (await redis.call('ZRANGEBYSCORE', key, `(${(await serverTime(redis)) - ttl}`, '+inf')).sort();
}

export function names(count, instance = 'w') {
    return Array.from({ length: count }, (_, i) => `${instance}/${i + 1}`);
}

let sets = 0;
// Key names that no other test uses, of one cluster slot each time.
export function scopeSet(count) {
    sets += 1;
    return Array.from({ length: count }, (_, i) => `lg1:{t${sets}}:limit${i + 1}:leases`);
}
