// lint-tables.mjs - what the tables in the code say, the documents must say too, and nothing else.
//
//   config/config_table.c   each option stands in proxy.conf.example and in config/README.md
//   proxy/*.[ch]            each metric stands in a document; each metric that a document, a dashboard or an alert
//                           names is one that the code prints
//
// Prints each difference and ends with status 1 if there is any. Options that the example has and the table has not
// are found by `leasegate check`, which a test runs on it.
import { existsSync, readFileSync } from 'node:fs';
import { sources, tracked } from './lint-sources.mjs';

const differences = [];

function read(path) {
    if (existsSync(path)) return readFileSync(path, 'utf8');
    differences.push(`${path}: is not there`);
    return '';
}

// Rows are R(SECTION, "name", TYPE, ...).
function checkOptions() {
    const table = read('config/config_table.c');
    const example = read('proxy.conf.example');
    const reference = read('config/README.md');
    const rows = [...table.matchAll(/^\s*R\((\w+),\s*"([^"]+)"/gm)];
    if (rows.length === 0) differences.push('config/config_table.c: no row R(SECTION, "name", ...) was found');
    for (const [, section, name] of rows) {
        const option = `${section === 'TOP' ? '' : `${section.toLowerCase()} `}${name}`;
        if (!new RegExp(`(?<!\\w)${name}\\s*\\+?=`).test(example)) differences.push(`proxy.conf.example: lacks ${option}`);
        if (!new RegExp(`\`(?:\\w+\\.)?${name}\``).test(reference)) differences.push(`config/README.md: lacks ${option}`);
    }
}

// A histogram is printed under its name with one of these endings; all share the table's one name.
function baseName(metric) {
    return metric.replace(/_(bucket|sum|count)$/, '');
}

function checkMetrics() {
    const printed = new Set();
    for (const file of sources(['proxy'])) {
        for (const [, name] of readFileSync(file, 'utf8').matchAll(/"[^"\n]*?(?<!\w)(leasegate_[a-z0-9_]+)/g)) printed.add(baseName(name));
    }
    const told = new Set();
    for (const file of tracked().filter((path) => /\.(md|json|ya?ml)$/.test(path) && !path.startsWith('package'))) {
        readFileSync(file, 'utf8').split('\n').forEach((text, i) => {
            for (const [name] of text.matchAll(/(?<![\w/.-])leasegate_[a-z0-9_]+/g)) {
                told.add(baseName(name));
                if (!printed.has(baseName(name))) differences.push(`${file}:${i + 1}: no metric is called ${name}`);
            }
        });
    }
    for (const name of printed) {
        if (!told.has(name)) differences.push(`no document says what ${name} is`);
    }
}

checkOptions();
checkMetrics();
if (differences.length > 0) {
    console.error(differences.join('\n'));
    console.error(`lint-tables: ${differences.length} differences`);
    process.exit(1);
}
