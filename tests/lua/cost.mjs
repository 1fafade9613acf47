// cost.mjs - what the scripts cost Redis. Prints the tables of lua/README.md: node tests/lua/cost.mjs
//
// Not a test: it judges nothing. One connection over a unix socket, calls in flight up to 64 ids. CPU is
// the server's own used_cpu_sys + used_cpu_user, so it includes reading, parsing and replying; "script" is
// what commandstats says of EVALSHA. The driver runs on another core than the server, if there are two.
import { DEAD, Leases, age, names } from './scripts.mjs';
import { startServer } from './server.mjs';

const KEYS = ['lg1:{cost}:limit:leases', 'lg1:{cost}:limit/tenant:leases'];
const ROOM = 1000000;
const PAIRS = Number(process.env.LEASEGATE_COST_PAIRS ?? 200000);

async function used(redis) {
    const info = await redis.call('INFO', 'everything');
    const number = (pattern) => Number(pattern.exec(info)?.[1] ?? 0);
    return {
        cpu: (number(/used_cpu_sys:([\d.]+)/) + number(/used_cpu_user:([\d.]+)/)) * 1e6,
        script: number(/cmdstat_evalsha:calls=\d+,usec=(\d+)/),
        calls: number(/cmdstat_evalsha:calls=(\d+)/),
    };
}

async function prepare(redis, leases, keys, live) {
    await redis.call('DEL', ...KEYS);
    for (let i = 0; i < live; i += 100) {
        await leases.admit(
            keys,
            keys.map(() => ROOM),
            names(Math.min(100, live - i), `held${i}`),
            { refresh: 1 }
        );
    }
}

// Admissions and releases in turn, `batch` ids a call; the set stays below live + 64.
async function pairs(redis, leases, scopes, live, batch) {
    const keys = KEYS.slice(0, scopes);
    const caps = keys.map(() => ROOM);
    await prepare(redis, leases, keys, live);
    const total = batch === 1 ? PAIRS / 4 : PAIRS;
    const before = await used(redis);
    let done = 0;
    while (done < total) {
        let last;
        for (let inFlight = 0; inFlight < 64; inFlight += batch) {
            const ids = names(batch, `5f3a91c07e22-${done}`);
            leases.admit(keys, caps, ids);
            last = leases.release(keys, ids);
            done += batch;
        }
        if ((await last) !== scopes * batch) throw new Error('a pair did not do its work');
    }
    const after = await used(redis);
    const each = (what) => ((after[what] - before[what]) / done).toFixed(2);
    console.log(`| ${scopes} | ${live} | ${batch} | ${each('cpu')} | ${each('script')} |`);
}

// One call after the other; time in Redis per call, from its own histogram (upper bounds, in powers of two).
async function calls(redis, what, count, call) {
    await redis.call('CONFIG', 'RESETSTAT');
    for (let i = 0; i < count; i++) await call(i);
    const mean = await used(redis).then(({ script, calls: made }) => script / made);
    const histogram = await redis.call('LATENCY', 'HISTOGRAM', 'evalsha').catch(() => null); // Redis >= 7.0
    const bins = histogram?.[1]?.[3] ?? [];
    const at = bins.findIndex((value, i) => i % 2 === 1 && value >= count * 0.99);
    console.log(`| ${what} | ${mean.toFixed(1)} | ${bins[at - 1] ?? '-'} | ${bins.at(-2) ?? '-'} |`);
}

for (const entries of [0, 128]) {
    const server = await startServer('--zset-max-ziplist-entries', String(entries));
    const redis = server.connect();
    const leases = await Leases.load(redis);
    console.log(`\nadmit + release, us per pair, zset-max-listpack-entries ${entries}\n`);
    console.log('| scopes | live | batch | CPU of Redis | script |\n|---|---|---|---|---|');
    for (const batch of [1, 8, 64]) await pairs(redis, leases, 1, 60, batch);
    if (entries === 0) {
        for (const batch of [1, 8, 64]) await pairs(redis, leases, 1, 10000, batch);
        for (const batch of [1, 8, 64]) await pairs(redis, leases, 2, 60, batch);
        console.log('\none call, us in Redis\n\n| call | mean | p99 <= | max <= |\n|---|---|---|---|');
        const key = KEYS[0];
        await prepare(redis, leases, [key], 10000);
        const held = (count, i) => names(100, `held${(i % 100) * 100}`).slice(0, count);
        await calls(redis, 'admit 1, 10,000 live', 10000, (i) => leases.admit([key], [ROOM], [`n/${i}`]));
        await calls(redis, 'admit 1, refused', 10000, (i) => leases.admit([key], [100], [`r/${i}`]));
        await calls(redis, 'admit 64, refused', 2000, (i) => leases.admit([key], [100], names(64, `r${i}`)));
        await calls(redis, 'renew 100', 2000, (i) => leases.renew([key], [ROOM], held(100, i)));
        await calls(redis, 'renew 100, the long way', 1000, async (i) => {
            await age(redis, key, ['ghost'], DEAD);
            await leases.renew([key], [ROOM], held(100, i));
        });
        for (const [what, call] of [
            ['admit 64, 100,000 dead', (i) => leases.admit([key], [64], names(64, `n${i}`))],
            ['renew 64, 100,000 dead', () => leases.renew([key], [64], names(64))],
        ]) {
            await redis.call('DEL', key);
            for (let i = 0; i < 100; i++) await age(redis, key, names(1000, `ghost${i}`), DEAD);
            await calls(redis, what, 400, call);
        }
    }
    await server.stop();
}
