// compare.mjs - CPU per short call of leasegate, leases included, beside nginx as a plain proxy without any limiter,
// in the same minutes on the same machine.
//
//   node bench/compare.mjs [--rounds 7] [--seconds 3] [--connections 64] [--pin]
//
// Each round runs every candidate once, in turn, so that what else the machine does hits all alike; the figures are
// medians over the rounds, the ratio is the median of the rounds' ratios. CPU is utime + stime of the proxy's
// processes from /proc/PID/stat, the load's own share excluded. --pin: everything on one CPU (the steadiest layout);
// otherwise load, mock and Redis on CPU 0 and the proxy alone on CPU 1.
import { spawn, execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync, mkdirSync } from 'node:fs';
import { connect, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const arg = (name, otherwise) => {
  const i = process.argv.indexOf(`--${name}`);
  return i < 0 ? otherwise : process.argv[i + 1];
};
const rounds = Number(arg('rounds', 7));
const seconds = Number(arg('seconds', 3));
const connections = Number(arg('connections', 64));
const onePin = process.argv.includes('--pin');
const build = process.env.LEASEGATE_BUILD ?? 'build';
const proxyCpu = onePin ? '0' : '1';
const dir = mkdtempSync(join(tmpdir(), 'leasegate-compare-'));
const children = [];

const start = (cpu, program, args, options = {}) => {
  const child = spawn('taskset', ['-c', cpu, program, ...args], { stdio: ['ignore', 'pipe', 'pipe'], ...options });
  child.stdout.resume();
  child.stderr.resume();
  children.push(child);
  return child;
};
const freePort = () =>
  new Promise((resolve) => {
    const s = createServer().listen(0, '127.0.0.1', () => {
      const { port } = s.address();
      s.close(() => resolve(port));
    });
  });
const answers = (port) =>
  new Promise((resolve) => {
    const s = connect(port, '127.0.0.1', () => {
      s.destroy();
      resolve(true);
    }).on('error', () => resolve(false));
  });
const ready = async (port) => {
  for (let i = 0; i < 200; i++) {
    if (await answers(port)) return;
    await new Promise((r) => setTimeout(r, 50));
  }
  throw new Error(`nothing listens on port ${port}`);
};
const ticks = Number(execFileSync('getconf', ['CLK_TCK']));
/* utime + stime of the process and of the children it has now, in microseconds */
const cpu = (pid) => {
  const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
  const f = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  const kids = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').trim();
  const own = ((Number(f[11]) + Number(f[12])) * 1e6) / ticks;
  return own + (kids ? kids.split(' ').reduce((sum, k) => sum + cpu(k), 0) : 0);
};
const median = (list) => {
  const s = [...list].sort((a, b) => a - b);
  return s.length % 2 ? s[(s.length - 1) / 2] : (s[s.length / 2 - 1] + s[s.length / 2]) / 2;
};
const load = async (port) => {
  const child = spawn('taskset', ['-c', '0', join(build, 'loadgen'), '--url', `http://127.0.0.1:${port}/v1/chat/completions`,
    '--concurrency', String(connections), '--duration', String(seconds), '--json'], { stdio: ['ignore', 'pipe', 'ignore'] });
  let out = '';
  child.stdout.on('data', (d) => (out += d));
  await new Promise((r) => child.on('close', r));
  return JSON.parse(out);
};

const main = async () => {
  const ports = { mock: await freePort(), redis: await freePort(), nginx: await freePort(), gate: await freePort() };
  start('0', join(build, 'mock-llm'), ['--port', String(ports.mock)]);
  const redis = start('0', 'redis-server', ['--port', String(ports.redis), '--bind', '127.0.0.1', '--save', '', '--appendonly', 'no',
    '--zset-max-ziplist-entries', '0', '--dir', dir]);
  mkdirSync(join(dir, 'logs'));
  writeFileSync(join(dir, 'nginx.conf'), `
worker_processes 1; daemon off; pid ${dir}/nginx.pid; error_log ${dir}/error.log;
events { worker_connections 8192; }
http {
  access_log off; keepalive_requests 1000000000; client_body_temp_path ${dir}/a; proxy_temp_path ${dir}/b;
  fastcgi_temp_path ${dir}/c; uwsgi_temp_path ${dir}/d; scgi_temp_path ${dir}/e;
  upstream llm { server 127.0.0.1:${ports.mock}; keepalive 256; keepalive_requests 1000000000; }
  server { listen 127.0.0.1:${ports.nginx};
    location / { proxy_pass http://llm; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } }
}`);
  const nginx = start(proxyCpu, 'nginx', ['-p', dir, '-c', join(dir, 'nginx.conf'), '-e', join(dir, 'error.log')]);
  writeFileSync(join(dir, 'gate.conf'), `
workers = 1
listen "127.0.0.1:${ports.gate}" {}
redis { url = "redis://127.0.0.1:${ports.redis}" }
upstream "llm" { url = "http://127.0.0.1:${ports.mock}" }
route "/" { upstream = "llm" }
log { calls = false }
limit "all" { model = {"*"} concurrency = 100000 }
`);
  const gate = start(proxyCpu, join(build, 'leasegate'), ['-c', join(dir, 'gate.conf')]);
  await Promise.all(Object.values(ports).map(ready));
  const candidates = [
    { name: 'nginx proxy_pass, no limiter', port: ports.nginx, pid: nginx.pid },
    { name: 'leasegate, exact leases', port: ports.gate, pid: gate.pid },
  ];
  for (const c of candidates) await load(c.port); // warm
  const rows = candidates.map(() => []);
  for (let round = 0; round < rounds; round++) {
    for (const [i, c] of candidates.entries()) {
      const before = cpu(c.pid);
      const redisBefore = cpu(redis.pid);
      const r = await load(c.port);
      const calls = r.completed;
      rows[i].push({ us: (cpu(c.pid) - before) / calls, redis: (cpu(redis.pid) - redisBefore) / calls, rate: calls / seconds,
        p50: r.total_ms.p50, p99: r.total_ms.p99, bad: calls - (r.statuses['200'] ?? 0) });
      process.stderr.write(`round ${round + 1}/${rounds} ${c.name}: ${rows[i].at(-1).us.toFixed(1)} us/call\n`);
    }
  }
  const f = (list, key) => `${median(list.map((r) => r[key])).toFixed(1)}`;
  console.log(`${connections} connections, ${rounds} rounds of ${seconds} s, ${onePin ? 'everything on one CPU' : 'proxy alone on CPU 1'}`);
  for (const [i, c] of candidates.entries()) {
    const ratios = rows[i].map((r, k) => r.us / rows[0][k].us);
    console.log(`${c.name.padEnd(30)} ${f(rows[i], 'us').padStart(7)} CPU-us/call   ${f(rows[i], 'rate').padStart(9)} calls/s   Redis ${f(rows[i], 'redis')} us/call   p50 ${median(rows[i].map((r) => r.p50)).toFixed(3)} p99 ${median(rows[i].map((r) => r.p99)).toFixed(3)} ms   ` +
      `ratio ${median(ratios).toFixed(2)} (${Math.min(...ratios).toFixed(2)}-${Math.max(...ratios).toFixed(2)})   not 200: ${rows[i].reduce((s, r) => s + r.bad, 0)}`);
  }
};

main()
  .catch((e) => {
    console.error(e);
    process.exitCode = 1;
  })
  .finally(() => {
    for (const c of children) c.kill('SIGTERM');
    setTimeout(() => rmSync(dir, { recursive: true, force: true }), 500);
  });
