// server.mjs - a private redis-server for one test file, on a unix socket in a new directory.
//
// LEASEGATE_TEST_REDIS names another binary (valkey-server, an older redis-server). The server is
// stopped by its pid: by stop(), or when this process exits.
import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Redis } from './resp.mjs';

export async function startServer(...options) {
    const directory = mkdtempSync(join(tmpdir(), 'leasegate-lua-'));
    const socket = join(directory, 's');
    const args = [
        '--port',
        '0',
        '--unixsocket',
        socket,
        '--dir',
        directory,
        '--save',
        '',
        '--appendonly',
        'no',
    ];
    const binary = process.env.LEASEGATE_TEST_REDIS ?? 'redis-server';
    const child = spawn(binary, [...args, ...options], { stdio: ['ignore', 'pipe', 'pipe'] });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) stream.on('data', (text) => (output += text));
    const exited = new Promise((resolve) => child.on('error', resolve).on('exit', resolve));
    let gone = false;
    exited.then(() => (gone = true));
    const killed = () => child.kill('SIGKILL');
    process.on('exit', killed);

    const clients = [];
    const server = {
        connect() {
            const client = new Redis(socket);
            clients.push(client);
            return client;
        },
        async stop() {
            for (const client of clients) client.close();
            child.kill('SIGKILL');
            await exited;
            process.off('exit', killed);
            rmSync(directory, { recursive: true, force: true });
        },
    };
    const answers = async () => {
        const client = new Redis(socket);
        const reply = await client.call('PING').catch(() => null);
        client.close();
        return reply === 'PONG';
    };
    for (const deadline = Date.now() + 20000; !(await answers()); await sleep(5)) {
        if (gone || Date.now() > deadline) {
            await server.stop();
            throw new Error(`${binary} did not start:\n${output}`);
        }
    }
    return server;
}
