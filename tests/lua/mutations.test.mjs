// Do the invariants' tests see what they are for? Each line that keeps an invariant is broken here in turn,
// and the test of that invariant must fail - by its own assertion, not by a script that no longer compiles.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { INVARIANTS } from './invariants.mjs';
import { Leases, TEXT } from './scripts.mjs';
import { startServer } from './server.mjs';

// script, what it says (every occurrence is changed), what it says instead, invariants that must notice
const MUTATIONS = [
    ['admit', 'fits = live[s] + n <= cap[s] and fits', 'fits = true', '168'],
    ['admit', 'fits = live[s] + n <= cap[s] and fits', 'fits = live[s] < cap[s] and fits', '1'],
    ['admit', 'fits = live[s] + n <= cap[s] and fits', 'fits = not (live[s] + n > cap[s]) and fits', '1'],
    ['admit', 'not (live[s] < cap[s])', 'live[s] > cap[s]', '12348'],
    ['admit', 'not (live[s] < cap[s])', 'live[s] >= cap[s]', '1'],
    ['admit', 'live[s] = live[s] - dead', '', '2B'],
    ['admit', "redis.call('ZREMRANGEBYRANK', KEYS[s], 0, math.min(dead, SWEEP) - 1)", '', '2B'],
    ['admit', 'math.min(dead, SWEEP) - 1', 'dead - 1', 'B'],
    ['admit', 'math.min(dead, SWEEP) - 1', 'SWEEP - 1', '2'],
    ['admit', 'if dead > 0 then', 'if false then', '2'],
    ['admit', 'local cut = now - ttl', 'local cut = now - 1', '2'],
    ['admit', 'local cut = now - ttl', 'local cut = 0', '2'],
    ['admit', 'not held[s] and not', 'not', '4'],
    ['admit', "redis.call('ZREM', KEYS[s], id)", '', '6'],
    ['admit', 'live[s] = live[s] + (held[s] and 0 or 1)', '', '1'],
    ['admit', 'live[s] = live[s] + (held[s] and 0 or 1)', 'live[s] = live[s] + 1', '14'],
    ['admit', 'if full == 0 then\n                redis', 'if full ~= s then\n                redis', '6'],
    ['admit', 'expire[s] = refresh or live[s] == 0', 'expire[s] = refresh', 'K'],
    ['admit', 'expire[s] = refresh or live[s] == 0', 'expire[s] = live[s] == 0', 'K'],
    ['admit', 'live[s] = live[s] - dead\n                expire[s] = true', 'live[s] = live[s] - dead', 'K'],
    ['admit', '(held[s] and 1 or 0)\n                expire[s] = true', '(held[s] and 1 or 0)', 'K'],
    ['admit', '3 * ttl', 'ttl / 2', 'K'],
    [
        'admit',
        "live[s] = redis.call('ZCARD', KEYS[s])",
        "live[s] = redis.pcall('ZCARD', KEYS[s])\n    live[s] = type(live[s]) == 'number' and live[s] or 0",
        'W',
    ],
    [
        'admit',
        "redis.call('ZADD', KEYS[s], unpack(dated))",
        "redis.call('PEXPIRE', KEYS[s], 3 * ttl) redis.call('ZADD', KEYS[s], unpack(dated))",
        'M',
    ],
    ['admit', "local time = redis.call('TIME')", 'local time = { 1000000000, 0 }', 'C'],
    [
        'admit',
        "redis.call('ZADD', KEYS[s], unpack(dated))",
        "redis.call('ZADD', KEYS[s], 'GT', unpack(dated))",
        'C',
    ],
    ['admit', 'ttl % 1 == 0', 'true', 'W'],
    ['admit', 'scopes == 0 or', '', 'W'],
    ['renew', "'XX', 'CH'", "'CH'", 'T'],
    ['renew', "'XX', 'CH', ", "'XX', ", '5'],
    ['renew', '== len / 2', '>= 0', '6T'],
    ['renew', 'not (all and clean)', 'not all', '5'],
    ['renew', "'CH', unpack(dated)) == len / 2 and found", "'CH', unpack(dated)) == len / 2", 'T'],
    ['renew', 'clean = clean and dead[s] == 0', '', 'T'],
    ['renew', "redis.call('ZCARD', KEYS[s]) - dead[s]", "redis.call('ZCARD', KEYS[s])", 'T'],
    ['renew', 'math.min(dead[s], SWEEP) - 1', 'dead[s] - 1', 'B'],
    ['renew', 'if dead[s] > 0 then', 'if false then', 'B'],
    ['renew', '(held[s] or live[s] < cap[s])', 'live[s] < cap[s]', '8'],
    ['renew', '(held[s] or live[s] < cap[s])', 'true', '6T'],
    ['renew', '(held[s] or live[s] < cap[s])', '(held[s] or live[s] <= cap[s])', '6T'],
    ['admit', 'tonumber(score) > cut', 'true', '4'],
    ['renew', 'tonumber(score) > cut', 'true', 'T'],
    ['renew', 'local lost = strict and not room', 'local lost = false', '6T'],
    ['renew', 'local lost = strict and not room', 'local lost = not room', 'T'],
    ['renew', "redis.call('ZREM', KEYS[s], id)", '', '6'],
    ['renew', 'live[s] = live[s] + (held[s] and 0 or 1)', '', 'T'],
    ['renew', '-- 2. Key life.\nfor s = 1, scopes do', '-- 2. Key life.\nfor s = 1, 0 do', '5M'],
    ['renew', '-- 5. Key life of what was created.\nfor s = 1, scopes do', 'for s = 1, 0 do', 'K'],
    ['renew', "local time = redis.call('TIME')", 'local time = { 1000000000, 0 }', '5C'],
    ['renew', "'XX', 'CH'", "'XX', 'GT', 'CH'", ''],
    ['renew', "dead[s] = redis.call('ZCOUNT', KEYS[s], '-inf', cut)", 'dead[s] = 0', 'TW'],
    ['release', 'redis.pcall', 'redis.call', 'W'],
    ['release', 'for s = 1, #KEYS do', 'for s = 1, 1 do', '3'],
    ['release', 'failed = failed or done', '', 'W'],
    [
        'release',
        "'ZREM', KEYS[s], unpack(ARGV, from, math.min(from + CHUNK - 1, #ARGV))",
        "'ZPOPMIN', KEYS[s]",
        '3',
    ],
    ['release', 'math.min(from + CHUNK - 1, #ARGV)', 'from', '3'],
];

let server;
before(async () => {
    server = await startServer();
});
after(() => server.stop());

const byKey = Object.fromEntries(Object.entries(INVARIANTS).map(([name, check]) => [name[0], check]));

for (const [verb, line, instead, noticedBy] of MUTATIONS) {
    for (const key of noticedBy) {
        test(`${key} sees ${verb}: ${JSON.stringify(line)} -> ${JSON.stringify(instead)}`, async () => {
            assert.ok(
                TEXT[verb].includes(line),
                'the script no longer says this: bring the table up to date'
            );
            const text = { ...TEXT, [verb]: TEXT[verb].replaceAll(line, instead) };
            const redis = server.connect();
            const leases = await Leases.load(redis, text);
            const noticed = await byKey[key]({ server, redis, leases }).then(
                () => null,
                (error) => error
            );
            assert.ok(noticed, 'nothing failed');
            assert.equal(noticed.code, 'ERR_ASSERTION', noticed.stack);
        });
    }
}
