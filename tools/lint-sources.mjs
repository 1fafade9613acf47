// lint-sources.mjs - the files that the lint scripts look at, and C text without comments and strings.
import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync } from 'node:fs';

// All .c and .h below the given folders, sorted.
export function sources(folders) {
    const found = [];
    const walk = (dir) => {
        for (const entry of readdirSync(dir, { withFileTypes: true })) {
            const path = `${dir}/${entry.name}`;
            if (entry.isDirectory()) walk(path);
            else if (/\.[ch]$/.test(entry.name)) found.push(path);
        }
    };
    folders.filter(existsSync).forEach(walk);
    return found.sort();
}

// What git tracks, and what it would: new files that .gitignore does not name.
export function tracked() {
    const out = execFileSync('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], { encoding: 'utf8' });
    return out.split('\0').filter((path) => path !== '' && existsSync(path));
}

// Comments and the insides of literals become spaces; lines keep their numbers.
export function bareC(text) {
    const token = /\/\*[\s\S]*?\*\/|\/\/[^\n]*|"(?:\\[\s\S]|[^"\\\n])*"|'(?:\\[\s\S]|[^'\\\n])*'/g;
    return text.replace(token, (t) => t.replace(/[^\n]/g, ' '));
}
