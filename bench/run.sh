#!/usr/bin/env bash
# run.sh - `make bench`: what a call costs beside a proxy without a limiter, and what a body's scan costs.
# Arguments go to compare.mjs, e.g. `make bench BENCH='--rounds 9 --seconds 5'`.
set -euo pipefail
cd "$(dirname "$0")/.."

echo '== CPU per short call, 64 connections, proxy alone on one CPU'
node bench/compare.mjs "$@"
echo
echo '== CPU per short call, one connection in sequence, everything on one CPU'
node bench/compare.mjs --connections 1 --pin "$@"
echo
echo '== the model scanner'
"${LEASEGATE_BUILD:-build}/scanbench" 16
