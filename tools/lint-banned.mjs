// lint-banned.mjs - calls that this code does without. Prints each as file:line; status 1 if there is any.
import { readFileSync } from 'node:fs';
import { bareC, sources } from './lint-sources.mjs';

// where: folders; except: files that are the rule's own home.
const RULES = [
    {
        names: ['sprintf', 'vsprintf', 'strcpy', 'stpcpy', 'strcat', 'strncpy', 'strncat', 'strtok', 'gets'],
        where: ['proxy', 'config', 'bench', 'tests'],
        why: 'no bound on what is written: use snprintf, or a slice',
    },
    {
        names: ['atoi', 'atol', 'atoll', 'atof'],
        where: ['proxy', 'config', 'bench', 'tests'],
        why: 'says nothing of bad input: use the parsers of str.h',
    },
    {
        names: ['malloc', 'calloc', 'realloc', 'reallocarray', 'free', 'strdup', 'strndup', 'asprintf', 'vasprintf'],
        where: ['proxy', 'config'],
        except: ['proxy/mem.c'],
        why: 'not counted and never made to fail in tests: use mem.h',
    },
    {
        names: ['assert'],
        where: ['proxy', 'config'],
        why: 'gone with NDEBUG: use BUG_ON',
    },
    {
        names: ['localtime', 'gmtime', 'ctime', 'asctime', 'inet_ntoa', 'gethostbyname', 'getpwnam'],
        where: ['proxy', 'config'],
        why: 'static storage, and there are several threads: use the _r form',
    },
    {
        names: ['system', 'popen', 'alloca', 'longjmp'],
        where: ['proxy', 'config'],
        why: 'no shell, no unbounded stack, no jumps',
    },
];

let count = 0;
for (const { names, where, except = [], why } of RULES) {
    const call = new RegExp(`(?<![\\w.]|->)(${names.join('|')})\\s*\\(`, 'g');
    for (const file of sources(where)) {
        if (except.includes(file)) continue;
        bareC(readFileSync(file, 'utf8')).split('\n').forEach((text, i) => {
            for (const match of text.matchAll(call)) {
                console.error(`${file}:${i + 1}: ${match[1]}(): ${why}`);
                count++;
            }
        });
    }
}
if (count > 0) {
    console.error(`lint-banned: ${count} banned calls`);
    process.exit(1);
}
