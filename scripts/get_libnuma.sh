#!/bin/bash
# Unpack libnuma.so.1, which vLLM's kernels for CPUs link, without root and without installing it:
#
#     scripts/get_libnuma.sh FOLDER     FOLDER/libnuma.so.1
#
# It is taken from this system's own release, from where the system's packages come from (Debian, Ubuntu).
set -euo pipefail

FOLDER=$1
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
chmod 755 "$WORK"

fail() {
    echo "get_libnuma.sh: $*" >&2
    exit 1
}

. "$(dirname "$0")/other_suite.sh"

for program in apt-get dpkg; do
    command -v $program >/dev/null || fail "no $program here"
done
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
# Only the list of binary packages is needed.
lists=(-o Acquire::IndexTargets::deb-src::Sources::DefaultEnabled=false -o Acquire::Languages=none)
apt_of "$release" "${lists[@]}" update || fail "the package lists of $release can't be had"
(cd "$WORK" && apt_of "$release" "${lists[@]}" download libnuma1) || fail "libnuma1 can't be had"
dpkg -x "$WORK"/libnuma1_*.deb "$WORK/root"
mkdir -p "$FOLDER"
cp -L "$WORK"/root/usr/lib/*-linux-gnu/libnuma.so.1 "$FOLDER/.libnuma"
mv "$FOLDER/.libnuma" "$FOLDER/libnuma.so.1"
