#!/bin/bash
# fuzz.sh - runs each fuzzer of build/fuzz in turn for FUZZ_SECONDS (60), or those whose names are given.
#
# A fuzzer starts from tests/fuzz/corpus/NAME/, copied to build/fuzz/corpus/NAME/, where what it finds is kept; a
# dictionary tests/fuzz/NAME.dict is used if there is one. Crashing inputs land in build/fuzz/crash/. Status 1 if any.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

build=build/fuzz
seconds=${FUZZ_SECONDS:-60}
status=0 count=0

mkdir -p $build/crash
for source in tests/fuzz/fuzz_*.c; do
    [ -e "$source" ] || break
    name=$(basename "$source" .c)
    short=${name#fuzz_}
    [ $# -eq 0 ] || [[ " $* " == *" $short "* ]] || continue
    count=$((count + 1))
    corpus=$build/corpus/$short
    mkdir -p "$corpus"
    [ ! -d "tests/fuzz/corpus/$short" ] || cp -r "tests/fuzz/corpus/$short/." "$corpus/"
    dictionary=()
    [ ! -e "tests/fuzz/$short.dict" ] || dictionary=("-dict=tests/fuzz/$short.dict")
    printf '\n== %s for %s s, %s inputs\n' "$name" "$seconds" "$(find "$corpus" -type f | wc -l)"
    if ! "$build/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$build/crash/$short-" ${dictionary[@]+"${dictionary[@]}"} "$corpus"; then
        echo "fuzz: $name failed; its input is in $build/crash"
        status=1
    fi
done
if [ "$count" -eq 0 ]; then
    echo "fuzz: no fuzzer of that name"
    status=1
fi
exit $status
