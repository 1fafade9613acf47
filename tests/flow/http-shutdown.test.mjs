// http-shutdown.test.mjs - SIGTERM and SIGHUP under traffic: rows H151 to H155 of HTTP-CASES.md. Each has a gate of its own.
import assert from 'node:assert/strict';
import { readdirSync } from 'node:fs';

import { sleep, test, waitUntil, within } from './harness.mjs';
import { assertGrowth, assertOwnAnswer, chat, closeAllWires, connect, get, rssBytes, Stage } from './http-tools.mjs';

const EVENT = 'data: {"a":1}\n\n';

// The drain has reached the worker.
const refusesConnections = (stage) =>
    waitUntil('new connections are refused', () => connect(stage.gate.port).then((w) => (w.close(), false), () => true), 8000);

function row(id, name, options, body) {
    test(`${id}: ${name}`, async () => {
        const stage = await Stage.start(options);
        try {
            await stage.mark();
            await body(stage);
            await stage.released();
            await stage.witness.sync();
            stage.witness.checkOrder();
            const released = stage.witness.ids('release');
            assert.equal(new Set(released).size, released.length, 'no lease is released twice');
        } finally {
            closeAllWires();
            await stage.stop();
        }
    });
}

async function streaming(stage) {
    const { wire, exchange } = await stage.send(chat());
    await exchange.whole;
    exchange.stream().chunk(EVENT);
    await wire.until('the first event', () => wire.rest.includes(EVENT));
    return { wire, exchange };
}

async function idleKeepAlive(stage) {
    const { wire, exchange } = await stage.send(get('/v1/models'));
    exchange.reply();
    await wire.response();
    return wire;
}

const WS = get('/v1/realtime?model=m1', 'Connection: Upgrade', 'Upgrade: websocket', 'Sec-WebSocket-Version: 13', 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==');

async function tunnel(stage) {
    const { wire, exchange } = await stage.send(WS);
    exchange.write('HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n');
    assert.equal((await wire.response()).status, 101);
    return { wire, up: exchange.wire };
}

async function echoes({ wire, up }) {
    const at = wire.rest.length;
    wire.write('ping');
    await up.until('ping', () => up.rest.endsWith('ping'));
    up.write('pong');
    await wire.until('pong', () => wire.rest.length === at + 4);
}

row('H151', 'SIGTERM: streams end by themselves, idle connections are closed, the accept queue is served', { drain_timeout: `${within(20000)}ms` }, async (stage) => {
    const streams = [], idle = [];
    for (let i = 0; i < 50; i++)
        streams.push(await streaming(stage));
    const waiting = await stage.send(chat());
    for (let i = 0; i < 20; i++)
        idle.push(await idleKeepAlive(stage));
    process.kill(stage.gate.pid, 'SIGSTOP');
    const queued = [];
    for (let i = 0; i < 5; i++)
        queued.push((await connect(stage.gate.port)).write(get('/v1/models')));
    stage.gate.terminate();
    process.kill(stage.gate.pid, 'SIGCONT');
    for (const wire of queued) { // accepted: answered, by a refusal that says so or by the upstream
        const answer = await Promise.race([wire.response(), stage.up.next().then((x) => (x.reply(), null), () => null)]) ?? await wire.response();
        assert.ok([200, 429].includes(answer.status), `${answer.status}`);
        if (answer.status === 429) // a call that was served may have been answered before the drain began
            assertOwnAnswer(answer, 429, { reason: 'draining', close: true });
        await wire.closesCleanly();
    }
    for (const wire of idle) {
        await wire.closesCleanly();
        assert.equal(wire.rest, '');
    }
    await refusesConnections(stage);
    await stage.held(51);
    waiting.exchange.reply();
    const response = await waiting.wire.response();
    assert.equal(response.value('connection'), 'close');
    await waiting.wire.closesCleanly();
    for (const { wire, exchange } of streams) {
        exchange.chunk(EVENT).last();
        assert.equal((await wire.response()).body.toString(), EVENT + EVENT);
        await wire.closesCleanly();
    }
    await stage.gate.ended();
});
row('H151', 'a call on a connection that is kept alive during the drain is refused or served, never dropped', { drain_timeout: `${within(20000)}ms` }, async (stage) => {
    const { wire, exchange } = await streaming(stage);
    wire.write(get('/v1/models/behind'));
    stage.gate.terminate();
    await refusesConnections(stage); // the log line alone is ahead of the worker
    exchange.last();
    await wire.response();
    await wire.closesCleanly(); // its head had gone out before the drain, so the connection just ends
    await stage.gate.ended();
});
row('H151', 'what is still running at drain_timeout is cut, its lease released', { drain_timeout: `${within(300)}ms` }, async (stage) => {
    const stream = await streaming(stage), { wire: waiting } = await stage.send(chat());
    stage.gate.terminate();
    assertOwnAnswer(await waiting.response(), 503, { reason: 'drain_timeout', close: true });
    await stream.wire.until('an end', () => stream.wire.ended || stream.wire.closed);
    assert.match(stream.wire.rest, /data: \{"error":/);
    assert.ok(!stream.wire.rest.includes('\r\n0\r\n'));
    await stage.gate.ended();
});

row('H152', 'a reload never cuts a WebSocket; a drain does so at its deadline', { drain_timeout: `${within(500)}ms` }, async (stage) => {
    const t = await tunnel(stage);
    for (let i = 0; i < 3; i++) {
        assert.match((await stage.gate.reload(stage.text())).line.message, /is in force/);
        await echoes(t);
    }
    await stage.held(1);
    stage.gate.terminate();
    await stage.gate.waitForLog((l) => l.event === 'drain');
    await echoes(t);
    await t.wire.until('the cut', () => t.wire.ended || t.wire.closed);
    await t.up.until('the cut', () => t.up.ended || t.up.closed);
    await stage.gate.ended();
});

row('H153', 'a hundred reloads under load: every call sees one whole configuration, nothing grows', {}, async (stage) => {
    const texts = ['one', 'two'].map((name) => stage.text().replaceAll('value = "llm"', `value = "${name}"`).replace('limit "all"', `limit "${name}"`));
    const long = await streaming(stage), descriptors = () => readdirSync(`/proc/${stage.gate.pid}/fd`).length;
    let running = true, calls = 0;
    const load = (async () => {
        const wire = await stage.open();
        while (running) {
            await stage.mark();
            const { exchange } = await stage.send(chat(), { wire });
            const name = exchange.value('x-upstream');
            exchange.reply();
            assert.equal((await wire.response()).status, 200);
            await stage.witness.sync();
            const [scopes] = await stage.scopes();
            assert.equal(scopes[0], name === 'llm' ? 'all' : name, 'limit and upstream are of one configuration');
            calls++;
        }
    })();
    let fds, rss;
    for (let i = 0; i < 100; i++) {
        assert.match((await stage.gate.reload(texts[i % 2])).line.message, /is in force/);
        if (i === 20)
            [fds, rss] = [descriptors(), rssBytes(stage.gate.pid)];
    }
    running = false;
    await load;
    assert.ok(calls > 10, `${calls}`);
    assert.ok(descriptors() <= fds + 4, `${descriptors()} descriptors, ${fds} before`);
    assertGrowth(stage.gate.pid, rss, 4 << 20);
    long.exchange.last();
    assert.equal((await long.wire.response()).body.toString(), EVENT);
});

row('H154', 'a reload of a bad file leaves all as it was', {}, async (stage) => {
    const { wire, exchange } = await streaming(stage);
    for (const [text, where] of [[stage.text().replace('workers', 'workerz'), /:1: /], [`${stage.text()}limit "x" {`, /conf/], [stage.text().replace('listen "127.0.0.1:0" {', 'listen "127.0.0.1:0" {\n    tls_cert = "/nowhere.pem"\n    tls_key = "/nowhere.key"'), /nowhere/]]) {
        const { line, lines } = await stage.gate.reload(text);
        assert.match(line.message, /old configuration stays/);
        assert.ok(lines.some((l) => l.level === 'error' && where.test(l.message)), JSON.stringify(lines));
        await stage.healthy();
    }
    exchange.last();
    assert.equal((await wire.response()).body.toString(), EVENT);
});

for (const [first, second] of [['SIGTERM', 'SIGTERM'], ['SIGTERM', 'SIGINT'], ['SIGINT', 'SIGINT']])
    row('H155', `${second} behind ${first} ends at once, and releases`, { drain_timeout: '600s' }, async (stage) => {
        const { wire } = await streaming(stage);
        stage.gate.terminate(first);
        await stage.gate.waitForLog((l) => l.event === 'drain');
        await stage.held(1);
        stage.gate.terminate(second);
        await wire.until('the cut', () => wire.ended || wire.closed);
        wire.end();
        await stage.gate.ended(5000);
    });
row('H155', 'writing to a dead client does not end the process', {}, async (stage) => {
    const { wire, exchange } = await streaming(stage);
    wire.reset();
    for (let i = 0; i < 20 && !exchange.wire.ended && !exchange.wire.closed; i++) {
        exchange.chunk(EVENT);
        await sleep(2);
    }
    await stage.released();
    await stage.healthy();
});
