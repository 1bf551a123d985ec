#!/bin/bash
# Run a command in a fresh clone on a freshly made Debian, which has nothing of this machine:
#
#     scripts/fresh_machine.sh bookworm make train        # Debian 12, Python 3.11
#     scripts/fresh_machine.sh trixie make train          # Debian 13, Python 3.13
#
# Run it as root in the checkout; the clone has what is committed. The system has Python with venv, make and git, and
# the packages that EXTRA names (EXTRA=libnuma1,gcc). pip there has its own defaults, without this machine's wheels,
# indexes and settings. The system is removed at the end, also after an interruption; KEEP=1 keeps it.
set -euo pipefail

fail() {
    echo "fresh_machine.sh: $*" >&2
    exit 2
}

[ $# -ge 2 ] || fail "usage: scripts/fresh_machine.sh bookworm|trixie COMMAND..."
[ "$(id -u)" = 0 ] || fail "needs root, to make a system and to mount in it"
suite=$1
shift
mirror=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list 2>/dev/null |
    grep -oE '^(URIs:|deb )[^#]*' | grep -oE '[a-z]+://[^ ]*/debian/?( |$)' | head -n 1 | tr -d ' ') || true
[ -n "$mirror" ] || fail "this machine's apt names no mirror of Debian"
command -v mmdebstrap >/dev/null || { apt-get -qq update && apt-get -qq install -y mmdebstrap >/dev/null; } ||
    fail "apt-get could not install mmdebstrap"
root=$(mktemp -d /tmp/fresh-XXXXXX)
child=""
end() {
    [ -z "$child" ] || kill -KILL -- "-$child" 2>/dev/null || true
    [ "${KEEP:-}" ] && echo "kept: $root" >&2 || rm -rf --one-file-system "$root"
}
trap end EXIT
trap 'exit 130' INT TERM HUP
set -m # each command in the background is a process group, which `end` kills

# In the background, because bash handles a signal only when a command in the foreground has ended.
mmdebstrap --quiet --variant=minbase \
    --include="python3,python3-venv,make,git,ca-certificates${EXTRA:+,$EXTRA}" \
    "$suite" "$root" "deb [trusted=yes] $mirror $suite main" &
child=$!
wait $child
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
# A mirror that is a snapshot has lists that are out of date.
echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/99-snapshot"
git clone --quiet . "$root/root/project"

# Mounts and processes are in namespaces of their own and end with the command. The root is changed by pivot_root,
# since a kernel gives no user namespaces to a process in a chroot.
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8 \
    unshare --mount --pid --fork --kill-child --propagation private bash -euc '
        root=$1; shift
        mount --bind "$root" "$root"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/dev/shm"
        mount -t tmpfs tmpfs "$root/run"
        mount -t proc proc "$root/proc"
        mount --rbind /sys "$root/sys"
        mkdir "$root/run/old"
        cd "$root"
        pivot_root . run/old
        cd /root/project
        umount -l /run/old
        exec "$@"
    ' fresh "$root" "$@" &
child=$!
wait $child
