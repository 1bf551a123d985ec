#!/bin/bash
# gVisor's runsc, for the backend `gvisor`, into a folder of its own; PATH must name it then:
#
#     scripts/get_runsc.sh [PREFIX]     PREFIX/runsc; $XDG_CACHE_HOME/rose/runsc or ~/.cache/rose/runsc
#
# Debian has it in the backports of its stable release (12: 20240729).
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
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")-backports
    unpack "$suite" runsc "$WORK/made" || fail "$suite has no runsc here"
    mkdir -p "$PREFIX"
    mv "$WORK/made/root/usr/bin/runsc" "$PREFIX/.runsc"
    mv "$PREFIX/.runsc" "$PREFIX/runsc"
fi
echo "$PREFIX/runsc: $("$PREFIX/runsc" --version | head -1)"
