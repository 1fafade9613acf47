#!/bin/bash
# deps.sh SET... - makes sure that what a set of targets needs is on this machine, and installs what is missing.
#
# Sets: build, run (build too), test (run too), lint, fuzz, bench. Each need is probed by what is used of it, not by
# package name, so a Node.js or an llhttp from elsewhere is as good. On Debian and its kin, as root or with sudo, apt
# installs the rest; elsewhere the missing ones are named and the script ends with status 1. Nothing else of the
# system is changed, and no service is started by the packages.
set -euo pipefail
cd "$(dirname "$0")/.." || exit 1

# set, Debian package, probe. A probe `pkg:` asks pkg-config, `cmd:` the PATH, `file:` for any of the paths.
needs='
build gcc               cmd:gcc
build libc6-dev         file:/usr/include/stdio.h
build pkgconf           cmd:pkg-config
build libuv1-dev        pkg:libuv
build libhiredis-dev    pkg:hiredis
build libssl-dev        pkg:openssl
build zlib1g-dev        pkg:zlib
build libzstd-dev       pkg:libzstd
build libconfuse-dev    pkg:libconfuse
build LLHTTP            llhttp
run   redis-server      cmd:redis-server
run   curl              cmd:curl
run   ca-certificates   file:/etc/ssl/certs/ca-certificates.crt:/etc/ssl/cert.pem:/etc/pki/tls/cert.pem
test  libcmocka-dev     pkg:cmocka
test  openssl           cmd:openssl
test  nodejs            cmd:node
test  npm               cmd:npm
lint  clang-format      cmd:clang-format
lint  clang-tidy        cmd:clang-tidy
lint  cppcheck          cmd:cppcheck
lint  nodejs            cmd:node
lint  git               cmd:git
lint  shellcheck        cmd:shellcheck
fuzz  clang             cmd:clang
fuzz  LIBFUZZER         libfuzzer
bench nginx-light       cmd:nginx
bench nodejs            cmd:node
'

say() { printf 'deps: %s\n' "$*" >&2; }

llhttp_here()
{
    pkg-config --exists libllhttp 2>/dev/null || [ -e /usr/include/llhttp.h ] || [ -e /usr/local/include/llhttp.h ] ||
        { [ -e /usr/share/llhttp/llhttp.c ] && [ -e /usr/share/include/llhttp/llhttp.h ]; }
}

# Debian packages the fuzzer's runtime apart from clang, under a versioned name.
libfuzzer_here()
{
    command -v clang >/dev/null &&
        compgen -G "$(clang -print-resource-dir)/lib/*/libclang_rt.fuzzer*" >/dev/null
}

probe()
{
    case $1 in
    pkg:*) pkg-config --exists "${1#pkg:}" 2>/dev/null ;;
    cmd:*) command -v "${1#cmd:}" >/dev/null ;;
    file:*)
        local path
        local -a paths
        IFS=: read -ra paths <<<"${1#file:}"
        for path in "${paths[@]}"; do
            [ ! -e "$path" ] || return 0
        done
        return 1
        ;;
    llhttp) llhttp_here ;;
    libfuzzer) libfuzzer_here ;;
    esac
}

# The real package behind a name in capitals; what it is depends on the release.
package_of()
{
    case $1 in
    LLHTTP)
        if apt-cache show libllhttp-dev 2>/dev/null | grep -q '^Package'; then
            echo libllhttp-dev
        else
            echo node-llhttp
        fi
        ;;
    LIBFUZZER)
        local version
        version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -1)
        echo "libclang-rt-${version:-14}-dev"
        ;;
    *) echo "$1" ;;
    esac
}

missing_of()
{
    local wanted=" $* " set package how
    while read -r set package how; do
        [ -n "$set" ] || continue
        [[ $wanted == *" $set "* ]] || continue
        probe "$how" || echo "$package"
    done <<<"$needs" | sort -u
}

as_root=()
may_install()
{
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    [ "$(id -u)" = 0 ] && return 0
    command -v sudo >/dev/null || return 1
    as_root=(sudo)
    [ -t 0 ] || as_root=(sudo -n)
    "${as_root[@]}" true 2>/dev/null
}

# Packages such as redis-server start their service when installed; 101 from policy-rc.d forbids it.
policy=/usr/sbin/policy-rc.d
remove_policy() { "${as_root[@]}" rm -f "$policy"; }
forbid_services()
{
    [ ! -e "$policy" ] || return 0
    trap remove_policy EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
}

apt_get()
{
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 \
        -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@"
}

install_missing()
{
    local -a packages=()
    local name log=build/deps.log

    mkdir -p build
    say "apt: reading package lists"
    apt_get update >"$log" 2>&1 || say "apt-get update failed (see $log); going on with the lists that are here"
    for name in "$@"; do
        packages+=("$(package_of "$name")")
    done
    say "apt: installing ${packages[*]}"
    forbid_services
    if ! apt_get install --no-install-recommends "${packages[@]}" >>"$log" 2>&1; then
        tail -20 "$log" >&2
        say "apt-get could not install them; all of its output is in $log"
        exit 1
    fi
}

# npm writes node_modules/.package-lock.json last, so it is the stamp of a finished install.
install_npm()
{
    [ ! package-lock.json -nt node_modules/.package-lock.json ] || {
        say "npm: installing the clients that the flow tests use"
        npm ci --no-audit --no-fund --ignore-scripts --loglevel=error
        touch node_modules/.package-lock.json
    }
}

sets="$*"
case " $sets " in *" test "*) sets+=" run" ;; esac
case " $sets " in *" run "*) sets+=" build" ;; esac

# shellcheck disable=SC2086 # a list of words
missing=$(missing_of $sets)
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086
    if ! may_install; then
        say "missing, by their Debian names (llhttp is libllhttp-dev, or node-llhttp on Debian 12):"
        sed 's/^LLHTTP$/libllhttp-dev/; s/^LIBFUZZER$/libclang-rt-dev/; s/^/    /' <<<"$missing" >&2
        say "install them with this system's package manager, or run again as root or with sudo on Debian 12 or 13"
        exit 1
    fi
    # shellcheck disable=SC2086
    install_missing $missing
    # shellcheck disable=SC2086
    missing=$(missing_of $sets)
    if [ -n "$missing" ]; then
        say "still missing after installation: $(tr '\n' ' ' <<<"$missing")"
        exit 1
    fi
fi
case " $sets " in *" test "*) install_npm ;; esac
