// lint-paths.mjs - nothing that is tracked may depend on one machine: no home or work folder by its absolute path,
// no package registry or mirror by its name, no `resolved` address in the lock file. Status 1 if there is any.
import { readFileSync } from 'node:fs';
import { tracked } from './lint-sources.mjs';

const RULES = [
    [/(?<![\w./${}~-])\/(?:work|root|Users)\//, 'absolute path of one machine'],
    [/(?<![\w./${}~-])\/home\/\w/, 'absolute path of one machine'],
    [/\bregistry\.[a-z]+\.(?:org|com|io)\b/i, 'host name of a package registry'],
    [/\b(?:deb|archive|security|snapshot|ports)\.(?:debian|ubuntu)\.(?:org|com)\b/i, 'host name of a package mirror'],
    [/^\s*"resolved":\s*"https?:/, 'address of a package in the lock file (see .npmrc)'],
    [/^(?:<{7}|>{7}) /, 'conflict marker'],
];

let count = 0;
for (const file of tracked()) {
    const bytes = readFileSync(file);
    if (bytes.includes(0)) continue;
    bytes.toString('utf8').split('\n').forEach((text, i) => {
        for (const [pattern, what] of RULES) {
            if (!pattern.test(text)) continue;
            console.error(`${file}:${i + 1}: ${what}: ${text.trim().slice(0, 100)}`);
            count++;
        }
    });
}
if (count > 0) {
    console.error(`lint-paths: ${count} lines`);
    process.exit(1);
}
