#!/bin/bash
# run.sh - the job of `make run`: a mock LLM API on a free port, and leasegate in front of it, until Ctrl-C.
#
# Environment: LEASEGATE_CONF (proxy.conf.example), LEASEGATE_UPSTREAM (a real API instead of the mock), and whatever
# the configuration itself reads. Both processes are stopped by this script, by pid, whichever way it ends.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

build=${LEASEGATE_BUILD:-build}
conf=${LEASEGATE_CONF:-proxy.conf.example}
ready_seconds=15
mock_pid=""
gate_pid=""

die()
{
    echo "run: $*" >&2
    exit 1
}

# Is there somebody who accepts on this port?
port_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

alive() { [ -n "$1" ] && kill -0 "$1" 2>/dev/null; }

# leasegate first, so that its last calls still find the mock.
# shellcheck disable=SC2317 # reached by the trap
stop()
{
    trap '' INT TERM
    local pid
    for pid in "$gate_pid" "$mock_pid"; do
        alive "$pid" || continue
        kill -TERM "$pid" 2>/dev/null
        for tenth in {1..70}; do
            alive "$pid" || break
            [ "$tenth" != 20 ] || kill -TERM "$pid" 2>/dev/null # a second one ends the calls that still run
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null
        wait "$pid" 2>/dev/null
    done
}
trap stop EXIT
trap 'echo; echo "run: stopping"; exit 0' INT TERM

# port_of WORD: the port of the first section of that name in the configuration as leasegate understands it.
port_of() { sed -nE "s/^$1 \"[^\"]*:([0-9]+)\".*/\1/p" <<<"$dump" | head -1; }

# answers PORT PATH: is the status of GET PATH 200?
# shellcheck disable=SC2317 # reached through wait_for
answers()
{
    local line
    exec 3<>"/dev/tcp/127.0.0.1/$1" || return 1
    printf 'GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%sConnection: close\r\n\r\n' "$2" \
        "${LEASEGATE_ADMIN_TOKEN:+Authorization: Bearer $LEASEGATE_ADMIN_TOKEN$'\r\n'}" >&3
    IFS= read -r -t 2 line <&3
    exec 3>&-
    [[ $line == "HTTP/1."?" 200"* ]]
}

# wait_for PID NAME COMMAND...: until COMMAND succeeds, while PID lives.
wait_for()
{
    local pid=$1 name=$2 deadline=$((SECONDS + ready_seconds))
    shift 2
    until "$@" 2>/dev/null; do
        alive "$pid" || die "$name ended at its start; what it said stands above"
        [ "$SECONDS" -lt "$deadline" ] || die "$name was not ready within $ready_seconds s"
        sleep 0.1
    done
}

[ -e "$conf" ] || die "$conf is not there"
mock_port=""
if [ -z "${LEASEGATE_UPSTREAM:-}" ]; then
    mock_port=9099
    while port_taken "$mock_port"; do
        mock_port=$((mock_port + 1))
    done
    export LEASEGATE_UPSTREAM=http://127.0.0.1:$mock_port
fi

dump=$("$build/leasegate" check --dump -c "$conf") || die "what is wrong with $conf stands above"
gate_port=$(port_of listen)
admin_port=$(port_of admin)
for port in $gate_port $admin_port; do
    [ "$port" != 0 ] || die "$conf asks for port 0, any free one: name the port, so that a curl line can be shown"
    if port_taken "$port"; then
        die "port $port of $conf is in use by another program: stop that one, or copy the file, change the port," \
            "and run: make run LEASEGATE_CONF=my.conf"
    fi
done

if [ -n "$mock_port" ]; then
    "$build/mock-llm" --port "$mock_port" &
    mock_pid=$!
    wait_for "$mock_pid" mock-llm port_taken "$mock_port"
fi

"$build/leasegate" run -c "$conf" &
gate_pid=$!
if [ -n "$admin_port" ]; then
    wait_for "$gate_pid" leasegate answers "$admin_port" /readyz
else
    wait_for "$gate_pid" leasegate port_taken "$gate_port"
fi

cat <<END

leasegate is ready: http://127.0.0.1:$gate_port in front of $LEASEGATE_UPSTREAM
Try a streamed call:

  curl -N http://127.0.0.1:$gate_port/v1/chat/completions -H 'content-type: application/json' -d '{"model":"gpt-4o","stream":true,"messages":[{"role":"user","content":"hello"}]}'

${admin_port:+Admin: http://127.0.0.1:$admin_port/readyz   metrics: http://127.0.0.1:$admin_port/metrics
}Ctrl-C stops both.

END

wait "$gate_pid"
status=$?
gate_pid=
die "leasegate ended by itself with status $status"
