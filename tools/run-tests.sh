#!/bin/bash
# run-tests.sh STAGE... - runs the tests of the stages unit, lua, flow, fault, one program or file at a time.
#
# Each runner's own output passes through as it comes. The last line is `N passed, N failed`, the sum over all
# runners; the status is 1 if any failed, if a program died without a verdict, or if nothing ran at all.
# Environment: LEASEGATE_BUILD (build directory), TEST_TIMEOUT_SECONDS per program or file (600), TESTS (only files
# whose path contains this), SAN (as given to make).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

build=${LEASEGATE_BUILD:-build}
limit=${TEST_TIMEOUT_SECONDS:-600}
only=${TESTS:-}
logs=$build/test-logs
passed=0 failed=0 skipped=0
failures=()
wrap=()

rm -rf "$logs"
mkdir -p "$logs"

# One report stops a test: a sanitizer that only prints would let it pass.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
# ThreadSanitizer of gcc 12 and clang 14 gives up where the kernel spreads mappings widely.
if [ "${SAN:-}" = thread ] && setarch "$(uname -m)" -R true 2>/dev/null; then
    wrap=(setarch "$(uname -m)" -R)
fi

# account NAME STATUS PASSED FAILED: adds one program's verdict, and its death where that is not among the failures.
account()
{
    local name=$1 status=$2 ok=$3 bad=$4

    if [ "$status" -ne 0 ] && [ "$bad" -eq 0 ]; then
        bad=1
        if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
            echo "$name: no end within ${limit} s, stopped"
        else
            echo "$name: ended with status $status"
        fi
    elif [ $((ok + bad)) -eq 0 ]; then
        bad=1
        echo "$name: ran no test"
    fi
    passed=$((passed + ok))
    failed=$((failed + bad))
    [ "$bad" -eq 0 ] || failures+=("$name")
}

# sum REGEX FILE: adds up the number that REGEX (one group) finds in each line.
sum() { sed -nE "s/$1/\\1/p" "$2" | awk '{ n += $1 } END { print n + 0 }'; }

# cmocka prints "[  PASSED  ] 3 test(s)." once per group, and "[  FAILED  ] 1 test(s)" likewise.
run_unit()
{
    local program=$1 name log status
    name=$(basename "$program")
    log=$logs/$name.log
    timeout -k 10 "$limit" ${wrap[@]+"${wrap[@]}"} "$program" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    account "$program" "$status" "$(sum '.*\[  PASSED  \] ([0-9]+) test.*' "$log")" \
        "$(sum '.*\[  FAILED  \] ([0-9]+) test.*' "$log")"
    skipped=$((skipped + $(sum '.*\[  SKIPPED \] ([0-9]+) test.*' "$log")))
}

# The reader gets the spec report, the sum comes from TAP. Node.js before 18.15 knows TAP alone.
reporters=()
tap_of()
{
    if [ ${#reporters[@]} -eq 0 ]; then
        if node --test-reporter=spec --test-reporter-destination=stdout -e 0 2>/dev/null; then
            reporters=(--test-reporter=spec --test-reporter-destination=stdout --test-reporter=tap)
        else
            reporters=(none)
        fi
    fi
}

run_node()
{
    local file=$1 tap status
    tap=$logs/$(tr '/' '-' <<<"$file").tap
    tap_of
    if [ "${reporters[0]}" = none ]; then
        timeout -k 10 "$limit" ${wrap[@]+"${wrap[@]}"} node --test "$file" 2>&1 | tee "$tap"
        status=${PIPESTATUS[0]}
    else
        timeout -k 10 "$limit" ${wrap[@]+"${wrap[@]}"} node --test "${reporters[@]}" \
            "--test-reporter-destination=$tap" "$file"
        status=$?
    fi
    [ -e "$tap" ] || : >"$tap"
    account "$file" "$status" "$(sum '^# pass ([0-9]+)$' "$tap")" \
        "$(($(sum '^# fail ([0-9]+)$' "$tap") + $(sum '^# cancelled ([0-9]+)$' "$tap")))"
    skipped=$((skipped + $(sum '^# skipped ([0-9]+)$' "$tap") + $(sum '^# todo ([0-9]+)$' "$tap")))
}

# The sources say what there is to run: a leftover program of a deleted test does not run.
items_of()
{
    case $1 in
    unit) compgen -G 'tests/unit/test_*.c' | sed "s|^tests/unit/\(.*\)\.c$|$build/tests/\1|" ;;
    lua) grep -ls 'node:test' tests/lua/*.mjs ;;
    flow | fault) compgen -G "tests/$1/*.test.mjs" ;;
    esac | { if [ -n "$only" ]; then grep -F -- "$only"; else cat; fi; } | sort
}

start=$SECONDS
for stage in "$@"; do
    mapfile -t items < <(items_of "$stage")
    number=0
    for item in ${items[@]+"${items[@]}"}; do
        number=$((number + 1))
        printf '\n== %s %d/%d: %s (%d passed, %d failed so far, %d s)\n' "$stage" "$number" "${#items[@]}" "$item" \
            "$passed" "$failed" "$((SECONDS - start))"
        case $stage in
        unit) run_unit "$item" ;;
        *) run_node "$item" ;;
        esac
    done
done

echo
if [ "$((passed + failed))" -eq 0 ]; then
    echo "no test was found for: $*"
    failed=1
fi
for name in ${failures[@]+"${failures[@]}"}; do
    echo "failed: $name"
done
[ "$skipped" -eq 0 ] || echo "skipped: $skipped"
echo "took $((SECONDS - start)) s; logs are in $logs"
echo "$passed passed, $failed failed" | tee "$logs/summary"
[ "$failed" -eq 0 ]
