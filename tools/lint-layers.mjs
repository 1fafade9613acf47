// lint-layers.mjs - keeps the walls between rooms standing: holds every #include of proxy/, config/, bench/ and
// tests/ against tools/layers.txt. Prints each breach as file:line and ends with status 1 if there is any.
import { existsSync, readFileSync } from 'node:fs';
import { basename, dirname } from 'node:path';
import { sources } from './lint-sources.mjs';

const TABLE = 'tools/layers.txt';
const rooms = new Map(); // name -> { layer, extra: Set }
const only = []; // { header, rooms: [] }
const breaches = [];

function breach(file, line, text) {
    breaches.push(`${file}:${line}: ${text}`);
}

readFileSync(TABLE, 'utf8').split('\n').forEach((text, i) => {
    const [kind, name, ...rest] = text.replace(/#.*/, '').trim().split(/\s+/);
    if (kind === '') return;
    if (kind === 'room' && rest.length > 0) rooms.set(name, { layer: Number(rest[0]), extra: new Set(rest.slice(1)) });
    else if (kind === 'only' && rest.length > 0) only.push({ header: name, rooms: rest });
    else breach(TABLE, i + 1, `not a row: ${text}`);
});
for (const [name, room] of rooms) {
    for (const other of room.extra) {
        if (!rooms.has(other)) breach(TABLE, 1, `room ${name} names ${other}, which has no row`);
        else if (rooms.get(other).layer > room.layer) breach(TABLE, 1, `room ${name} may not reach up to ${other}`);
    }
}

// 'openssl/*' covers openssl/ssl.h; without a star the whole name must agree.
function covers(pattern, name) {
    return pattern.endsWith('*') ? name.startsWith(pattern.slice(0, -1)) : pattern === name;
}

// The row of a room: its own, or that of its family (`config_*`).
function rowOf(name) {
    return rooms.get(name) ?? [...rooms].find(([pattern]) => covers(pattern, name))?.[1];
}

function checkThirdParty(file, line, header) {
    const rule = only.find((r) => covers(r.header, header));
    if (rule === undefined) return;
    const room = basename(file).replace(/\.[ch]$/, '');
    const allowed = rule.rooms.some((r) => (r.includes('/') ? covers(r, file) : isRoom(file) && r === room));
    if (!allowed) breach(file, line, `<${header}> belongs to ${rule.rooms.join(', ')} alone`);
}

// Rooms live in proxy/ and config/; tests, fuzzers and bench programs stand outside of the layers.
function isRoom(file) {
    return file.startsWith('proxy/') || file.startsWith('config/');
}

function checkRoom(file, line, header) {
    const from = basename(file).replace(/\.[ch]$/, '');
    const to = basename(header).replace(/\.h$/, '');
    const room = rowOf(from);
    const target = rowOf(to);
    if (room === undefined || from === to) return;
    if (target === undefined) {
        breach(file, line, `"${header}" is no room of ${TABLE}`);
    } else if (target.layer >= room.layer && ![...room.extra].some((pattern) => covers(pattern, to))) {
        breach(file, line, `${from} (layer ${room.layer}) may not include ${to} (layer ${target.layer})`);
    }
}

// A header beside the file, in one of the include directories, or made by the build.
function isOurs(file, header) {
    return [dirname(file), '.', 'proxy', 'config', 'build/gen'].some((dir) => existsSync(`${dir}/${header}`)) ||
        rowOf(basename(header).replace(/\.h$/, '')) !== undefined;
}

for (const file of sources(['proxy', 'config', 'bench', 'tests'])) {
    if (isRoom(file) && rowOf(basename(file).replace(/\.[ch]$/, '')) === undefined) {
        breach(file, 1, `no row in ${TABLE}: say in which layer this room stands`);
    }
    readFileSync(file, 'utf8').split('\n').forEach((text, i) => {
        const match = /^\s*#\s*include\s*([<"])([^>"]+)[>"]/.exec(text);
        if (match === null) return;
        checkThirdParty(file, i + 1, match[2]);
        if (isRoom(file) && (match[1] === '"' || isOurs(file, match[2]))) checkRoom(file, i + 1, match[2]);
    });
}

if (breaches.length > 0) {
    console.error(breaches.join('\n'));
    console.error(`lint-layers: ${breaches.length} breaches of ${TABLE}`);
    process.exit(1);
}
