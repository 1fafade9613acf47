// http-lease.test.mjs - one call, one lease, whatever happens on the wire: rows H087 to H100 of HTTP-CASES.md.
// The protocol itself is tested in tests/lua and in the limiter's flow tests.
import assert from 'node:assert/strict';
import { after, before } from 'node:test';

import { sleep, startGate, waitUntil, within } from './harness.mjs';
import { assertOwnAnswer, CHAT, chat, get, rowsOn, Stage } from './http-tools.mjs';

let stage;
const row = rowsOn(() => stage);

before(async () => {
    stage = await Stage.start();
});
after(() => stage.stop());

// A stage for one row that does to its servers what no other row could bear.
async function withOwn(options, body) {
    const own = await Stage.start(options);
    try {
        await own.mark();
        await body(own);
    } finally {
        await own.stop();
    }
}

const half = `POST ${CHAT} HTTP/1.1\r\nHost: gate\r\nContent-Length: 100\r\n\r\n{"messages":[`;

row('H087', 'the client closes during its body, before admission', async () => {
    for (const leave of [(wire) => wire.end(), (wire) => wire.reset(), (wire) => wire.close()]) {
        const wire = await stage.open();
        wire.write(half);
        await stage.turn();
        const from = stage.gate.log.length;
        leave(wire);
        await stage.gate.waitForLog((l) => l.event === 'call' && l.reason === 'client_gone' && l.phase === 'scan', 8000, from);
        await wire.until('the close', () => wire.ended || wire.closed);
        wire.close();
    }
    await stage.neverTaken();
});

row('H088', 'the client closes while the acquire is in flight: granted, released, nothing dialed', async () => {
    for (const leave of [(wire) => wire.end(), (wire) => wire.reset()]) {
        await stage.redis.pause();
        const connections = stage.up.connections.length, received = stage.up.received;
        const wire = await stage.open();
        wire.write(chat());
        await stage.turn();
        const from = stage.gate.log.length;
        leave(wire);
        await stage.gate.waitForLog((l) => l.event === 'call' && l.reason === 'client_gone' && l.phase === 'admit', 8000, from);
        await stage.redis.resume();
        await waitUntil('the release', async () => {
            await stage.witness.sync();
            return stage.witness.ids('release').includes(stage.witness.ids('admit').at(-1));
        }, 8000);
        await stage.released();
        assert.deepEqual([stage.up.connections.length, stage.up.received], [connections, received]);
        await stage.ready();
    }
});

row('H089', 'the reply comes behind the deadline: 429, and the late grant is released', async () => {
    await withOwn({}, async (own) => {
        await own.redis.pause();
        const wire = await own.open();
        wire.write(chat());
        assertOwnAnswer(await wire.response(), 429, { reason: 'redis_unavailable', close: false });
        await own.redis.resume();
        await own.released();
        await own.witness.sync();
        const [asked] = own.witness.ids('admit');
        if (asked !== undefined)
            await waitUntil('its release', async () => (await own.witness.sync(), own.witness.ids('release').includes(asked)), 8000);
        assert.equal(own.up.received, 0);
        await own.ready();
    });
});

row('H091', 'Redis hangs: 429 within its deadline, then at once', async () => {
    await withOwn({}, async (own) => {
        await own.redis.pause();
        const first = await own.open(), second = await own.open();
        first.write(chat());
        assertOwnAnswer(await first.response(), 429, { reason: 'redis_unavailable' });
        const from = Date.now();
        second.write(chat());
        assertOwnAnswer(await second.response(), 429, { reason: 'redis_unavailable' });
        assert.ok(Date.now() - from < within(800), 'the breaker is open: nothing is waited for');
        await own.redis.resume();
        await own.ready();
        await own.healthy();
        await own.released();
    });
});
row('H091', 'Redis resets and refuses: 429, and back again with a new server', async () => {
    await withOwn({}, async (own) => {
        const held = await own.send(get('/v1/models'));
        await own.redis.kill();
        const wire = await own.open();
        wire.write(chat());
        assertOwnAnswer(await wire.response(), 429, { reason: 'redis_unavailable' });
        held.exchange.reply();
        assert.equal((await held.wire.response()).status, 200, 'a running call is not touched');
        await own.redis.restart();
        await own.ready();
        await own.healthy();
        await own.released();
    });
});

row('H092', 'a stream of several ttl, a renewal lost on the way: the lease stays', async () => {
    const { wire, exchange } = await stage.send(chat());
    exchange.stream().chunk('data: 1\n\n');
    await wire.until('the first event', () => wire.rest.includes('data: 1'));
    await stage.witness.sync();
    const [id] = stage.witness.ids('admit').slice(-1), key = 'lg1:{main}:all:leases';
    const score = async () => Number(await stage.redis.command('ZSCORE', key, id));
    const first = await score();
    await stage.redis.pause();
    await sleep(within(1200)); // longer than Redis's deadline: the condition is the passing of time itself
    await stage.redis.resume();
    await waitUntil('the lease is renewed again', async () => await score() > first + within(1200), 8000);
    await waitUntil('and again, past its ttl', async () => await score() > first + within(2000), 8000);
    assert.equal(await stage.redis.held(':all:'), 1);
    exchange.chunk('data: [DONE]\n\n').last();
    assert.equal((await wire.response()).body.toString(), 'data: 1\n\ndata: [DONE]\n\n');
    await stage.ready();
});

row('H093', 'calls that end at the moment of their heartbeat: no renewal behind a release', async () => {
    const from = stage.witness.position;
    await Promise.all(Array.from({ length: 30 }, async (_, i) => {
        const { wire, exchange } = await stage.send(get(`/v1/models/${i}`));
        await sleep(i * within(20)); // spread over two heartbeats
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
        wire.close();
    }));
    await stage.released();
    await stage.witness.sync();
    assert.ok(stage.witness.ids('renew', from).length > 0, 'there were renewals to go wrong');
    stage.witness.checkOrder(from);
});

row('H094', 'the upstream`s end and the client`s close in one turn: one record, one release', async () => {
    for (const leave of [(wire) => wire.end(), (wire) => wire.reset()]) {
        const { wire, exchange } = await stage.send(chat());
        exchange.stream().chunk('data: 1\n\n');
        await wire.until('the first event', () => wire.rest.includes('data: 1'));
        const address = `127.0.0.1:${wire.socket.localPort}`, from = stage.witness.position;
        process.kill(stage.gate.pid, 'SIGSTOP');
        exchange.chunk('data: 2\n\n').last();
        leave(wire);
        await sleep(20); // both are in the kernel's hands
        process.kill(stage.gate.pid, 'SIGCONT');
        const line = await stage.gate.waitForLog((l) => l.event === 'call' && l.client === address);
        await stage.released();
        await stage.witness.sync();
        assert.equal(stage.witness.ids('release', from).filter((id) => id === line.lease).length, 1);
        await stage.healthy();
        assert.equal(stage.gate.log.filter((l) => l.event === 'call' && l.client === address).length, 1);
        wire.close();
    }
});

row('H095', 'a process that is killed, or stopped for longer than ttl', async () => {
    await withOwn({ limit: { all: { concurrency: 1 } } }, async (own) => {
        const other = await startGate(own.text());
        const stopped = await own.send(chat());
        process.kill(own.gate.pid, 'SIGSTOP');
        const usurper = await waitUntil('others get its slot', () => own.tryCall({ port: other.port }), 8000);
        process.kill(own.gate.pid, 'SIGCONT');
        await own.held(2); // the truth: both run
        stopped.exchange.reply();
        assert.equal((await stopped.wire.response()).status, 200);
        await own.held(1); // it took away its own and no other
        await other.kill(); // the other one dies with its call
        await usurper.wire.ending();
        const heir = await waitUntil('the ghost`s slot is free', () => own.tryCall(), 8000);
        heir.exchange.reply();
        assert.equal((await heir.wire.response()).status, 200);
        await own.released();
    });
});

row('H098', 'no slot: 429 as every SDK wants it, and the connection stays', async () => {
    await withOwn({ limit: { one: { concurrency: 1 } } }, async (own) => {
        const first = await own.send(chat()), second = await own.open();
        second.write(chat());
        const response = await second.response();
        assertOwnAnswer(response, 429, { reason: 'limit_full', close: false });
        assert.equal(response.value('x-leasegate-limit'), 'one');
        assert.match(response.json().error.message, /one/);
        first.exchange.reply();
        await first.wire.response();
        await own.released();
        const again = await own.send(chat(), { wire: second });
        again.exchange.reply();
        assert.equal((await second.response()).status, 200);
        await own.released();
    });
});

row('H099', 'an SDK`s retries are calls of their own', async () => {
    const calls = [];
    for (const count of [0, 1, 2])
        calls.push(await stage.send(chat(`x-stainless-retry-count: ${count}`, 'Idempotency-Key: same', 'X-Request-Id: same')));
    await stage.held(3);
    await stage.witness.sync();
    calls[0].exchange.reply();
    assert.equal((await calls[0].wire.response()).status, 200);
    await stage.held(2);
    for (const { wire, exchange } of calls.slice(1)) {
        exchange.reply();
        assert.equal((await wire.response()).status, 200);
    }
});

row('H100', 'a reload changes the limit: running calls renew and release where they are', async () => {
    await withOwn({ limit: { old: { concurrency: 5 } } }, async (own) => {
        const running = await own.send(chat());
        await own.redis.holds(1, ':old:');
        await own.gate.reload(own.text({ limit: { fresh: { concurrency: 1 } } }));
        const second = await own.send(chat());
        await own.redis.holds(1, ':fresh:');
        const third = await own.open();
        third.write(chat());
        assertOwnAnswer(await third.response(), 429, { reason: 'limit_full' });
        await own.witness.sync();
        const from = own.witness.position;
        await waitUntil('the old one is renewed under its old name', async () => (await own.witness.sync(),
            own.witness.commands(from).some((c) => c.verb === 'renew' && c.keys[0].includes(':old:'))), 8000);
        running.exchange.reply();
        await running.wire.response();
        await own.redis.holds(0, ':old:');
        await own.redis.holds(1, ':fresh:');
        second.exchange.reply();
        await second.wire.response();
        await own.released();
    });
});
row('H100', 'a reload cannot change the prefix or the Redis URL: it is refused whole', async () => {
    await withOwn({}, async (own) => {
        const running = await own.send(chat());
        for (const [from, to] of [[`url = "${own.redis.url}"`, `url = "${own.redis.url}"\n    prefix = "lg9"`], [own.redis.url, 'unix:///nowhere/redis']]) {
            const { line, lines } = await own.gate.reload(own.text().replace(from, to));
            assert.match(line.message, /old configuration stays/);
            assert.ok(lines.some((l) => /needs a restart/.test(l.message)), JSON.stringify(lines));
        }
        await own.held(1);
        running.exchange.reply();
        assert.equal((await running.wire.response()).status, 200);
        await own.released();
        await own.healthy();
    });
});
