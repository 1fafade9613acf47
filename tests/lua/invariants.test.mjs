// The invariants, on the scripts as they are, with ZSETs as skip lists and as listpacks.
import { after, before, describe, test } from 'node:test';
import { INVARIANTS } from './invariants.mjs';
import { Leases } from './scripts.mjs';
import { startServer } from './server.mjs';

for (const entries of ['0', '128']) {
    describe(`zset-max-listpack-entries ${entries}`, () => {
        let server;
        before(async () => {
            server = await startServer('--zset-max-ziplist-entries', entries); // the name that 6.x knows, too
        });
        after(() => server.stop());
        for (const [name, check] of Object.entries(INVARIANTS)) {
            test(name, async () => {
                const redis = server.connect();
                await check({ server, redis, leases: await Leases.load(redis) });
            });
        }
    });
}
