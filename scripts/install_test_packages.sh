#!/bin/sh
# Make sure that what only the tests need is there. As root on Debian and Ubuntu it installs what is missing; else it
# says what is missing, with the command that brings it, and fails:
#   a compiler and Python's headers    pycosat comes as source, and torch compiles in some tests
#   libnuma                            of vLLM's kernels, also in the environments that tests make
#   a Chromium                         opens report.html
#   iproute2, procps                   make the hosts of tests/comm/test_address.py; end processes
#   e2fsprogs                          makes the small disks of tests/disk.py
#   Slurm, munge and MariaDB           slurm/dev_cluster.sh
#   CRIU and gVisor                    tests/parts/sandbox/test_capture.py; they have folders of their own
# With the argument `compiler` it looks after the first of these alone.
set -eu

has() {
    for program in "$@"; do
        command -v "$program" >/dev/null 2>&1 && return 0
    done
    return 1
}

has_headers() { # of the Python that `make` takes: the environment's, or the system's
    for python in "${VENV:-.venv}/bin/python" python3; do
        has "$python" || continue
        "$python" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
        return
    done
}

headers() { # the package of that Python's headers, where the system has one
    for python in "${VENV:-.venv}/bin/python" python3; do
        has "$python" || continue
        package=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev
        dpkg -s "${package%-dev}" >/dev/null 2>&1 || break
        echo "$package"
        return
    done
    echo python3-dev
}

PATH=$PATH:/usr/sbin:/sbin
missing=""
need() { # PACKAGES COMMAND...: the packages are needed where the command fails
    packages=$1
    shift
    "$@" || missing="$missing $packages"
}
need gcc has gcc
need g++ has g++
need "$(headers)" has_headers
if [ "${1:-}" != compiler ]; then
    need chromium has chromium chromium-browser google-chrome
    need iproute2 has ip
    need procps has ps
    need e2fsprogs has mke2fs
    need libnuma1 sh -c 'ldconfig -p | grep -q "libnuma\.so\.1 "'
fi

if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ] || ! has apt-get; then
        echo "make test: missing here:$missing. Debian, Ubuntu: sudo apt-get install$missing" >&2
        exit 2
    fi
    echo "installing$missing, which the tests need"
    apt-get -qq update
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null
fi
[ "${1:-}" != compiler ] || exit 0
for program in criu runsc; do # without them everything else can be tested
    "$(dirname "$0")/get_$program.sh" || echo "make test: no $program: tests/parts/sandbox/test_capture.py will fail" >&2
done
exec "$(dirname "$0")/../slurm/dev_cluster.sh" install
