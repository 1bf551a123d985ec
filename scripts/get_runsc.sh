#!/bin/bash
# gVisor's runsc, for the backend `gvisor`, into a folder of its own; PATH must name it then:
#
#     scripts/get_runsc.sh [PREFIX]     PREFIX/runsc; $XDG_CACHE_HOME/rose/runsc or ~/.cache/rose/runsc
#
# Debian 12 has it in its backports (20240729), whose package, a program without libraries, does for Debian 13 too.
set -euo pipefail

PREFIX=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/rose/runsc}")
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
chmod 755 "$WORK"

fail() {
    echo "get_runsc.sh: $*" >&2
    exit 1
}

. "$(dirname "$0")/other_suite.sh"

if ! "$PREFIX/runsc" --version >/dev/null 2>&1; then
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    for suite in "$release-backports" "$release" bookworm-backports testing unstable ""; do
        [ -n "$suite" ] || fail "none of this machine's suites of Debian has runsc"
        unpack "$suite" runsc "$WORK/made" 2>/dev/null && break
    done
    mkdir -p "$PREFIX"
    mv "$WORK/made/root/usr/bin/runsc" "$PREFIX/.runsc"
    mv "$PREFIX/.runsc" "$PREFIX/runsc"
fi
echo "$PREFIX/runsc: $("$PREFIX/runsc" --version | head -1)"
