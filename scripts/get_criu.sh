#!/bin/bash
# CRIU 4.2 or later, which checkpoints of a sandbox's processes need, into a folder of its own:
#
#     scripts/get_criu.sh [PREFIX]        PREFIX/criu; $XDG_CACHE_HOME/rose/criu or ~/.cache/rose/criu
#
# Debian 12 and 13 have older ones, which fail on new kernels. So this takes the package of a later
# suite, with the C library and the loader that it was linked with; if that can't be, it builds that
# suite's source. The system's packages stay as they are, and it needs no root.
set -euo pipefail

PREFIX=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/rose/criu}")
SUITES=${ROSE_CRIU_SUITES:-testing unstable}
NEEDED=4.2
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
chmod 755 "$WORK"

fail() {
    echo "get_criu.sh: $*" >&2
    exit 1
}

. "$(dirname "$0")/other_suite.sh"

new_enough() { # CRIU: whether it runs and is new enough
    local version
    version=$("$1" --version 2>/dev/null | sed -n 's/^Version: //p')
    [ -n "$version" ] && [ "$(printf '%s\n' "$NEEDED" "$version" | sort -V | head -1)" = "$NEEDED" ]
}

if [ -x "$PREFIX/criu" ] && new_enough "$PREFIX/criu"; then
    echo "$PREFIX/criu: $("$PREFIX/criu" --version | head -1)"
    exit 0
fi
for program in apt-get dpkg; do
    command -v $program >/dev/null || fail "no $program here: build CRIU $NEEDED or later yourself, and" \
        "name it in ROSE_CRIU or put it on PATH"
done

finish() { # FOLDER: it becomes PREFIX, whole or not at all
    new_enough "$1/criu" || return 1
    "$1/criu" --version >"$1/version"
    mkdir -p "$(dirname "$PREFIX")"
    rm -rf "$PREFIX.old"
    [ ! -e "$PREFIX" ] || mv "$PREFIX" "$PREFIX.old"
    mv "$1" "$PREFIX"
    rm -rf "$PREFIX.old"
    echo "$PREFIX/criu: $(head -1 "$PREFIX/version")"
}

packaged() { # SUITE
    local made=$WORK/made-$1
    unpack "$1" criu "$made" || return 1
    cat >"$made/criu" <<'WRAPPER'
#!/bin/sh
# started through the loader of its own C library
here=$(dirname "$(readlink -f "$0")")
for loader in "$here"/root/usr/lib/*/ld-linux-*.so.* "$here"/root/usr/lib/ld-linux-*.so.*; do
    [ -e "$loader" ] && break
done
set -- --library-path "$(echo "$here"/root/usr/lib/*-linux-gnu)" "$here/root/usr/sbin/criu" "$@"
exec "$loader" "$@"
WRAPPER
    chmod 755 "$made/criu"
    finish "$made"
}

built() { # SUITE: its source, with this machine's compiler and libraries
    local at=$WORK/source-$1
    command -v make >/dev/null && command -v gcc >/dev/null || return 1
    mkdir -p "$at"
    apt_of "$1" update || return 1
    # apt checks the sums of what it has got; the second file, the packaging, may be missing
    (cd "$at" && apt_of "$1" source --download-only criu) >/dev/null || true
    local packed sum
    packed=$(find "$at" -name 'criu_*.orig.tar.*' ! -name '*.asc' | head -1)
    [ -n "$packed" ] && [ -f "$at"/criu_*.dsc ] || return 1
    sum=$(sha256sum "$packed" | cut -d' ' -f1)
    grep -q "^ $sum " "$at"/criu_*.dsc || fail "$packed is not what its .dsc says"
    mkdir "$at/criu" "$WORK/built-$1"
    tar -x -f "$packed" -C "$at/criu" --strip-components=1
    make -C "$at/criu" -j"$(nproc)" criu >"$WORK/make.log" 2>&1 || {
        tail -5 "$WORK/make.log" >&2
        echo "get_criu.sh: the build failed; it needs libbsd-dev libcap-dev libnl-3-dev libnet1-dev" \
            "libprotobuf-c-dev libprotobuf-dev protobuf-c-compiler protobuf-compiler uuid-dev pkg-config" >&2
        return 1
    }
    install -m 755 "$at/criu/criu/criu" "$WORK/built-$1/criu"
    finish "$WORK/built-$1"
}

for way in ${ROSE_CRIU_WAYS:-packaged built}; do
    for suite in $SUITES; do
        echo "get_criu.sh: $way, of the suite $suite" >&2
        if $way "$suite"; then
            exit 0
        fi
    done
done
fail "neither the packages nor the source of CRIU $NEEDED or later can be had from this machine's sources" \
    "(suites $SUITES; ROSE_CRIU_SUITES names others). Build it, and name it in ROSE_CRIU or put it on PATH"
