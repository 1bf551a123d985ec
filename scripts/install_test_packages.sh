#!/bin/sh
# Makes sure that the programs which only the tests need are there: a Chromium, which opens report.html, and the Slurm
# that slurm/dev_cluster.sh starts, iproute2, and CRIU and gVisor, which have folders of their own. Installs Debian's packages where it may (root); else says what is missing and fails.
set -eu

find_browser() {
    for browser in chromium chromium-browser google-chrome; do
        command -v "$browser" >/dev/null 2>&1 && return 0
    done
    return 1
}

if ! find_browser; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "make test: no Chromium found, and the tests of report.html need one." >&2
        echo "           Install it (Debian: sudo apt-get install chromium) and run make test again." >&2
        exit 2
    fi
    echo "installing chromium, which the tests of report.html need"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium >/dev/null
fi
if ! command -v ip >/dev/null 2>&1 && [ ! -x /usr/sbin/ip ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "make test: no ip found (iproute2), which makes the hosts of tests/comm/test_address.py." >&2
        exit 2
    fi
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends iproute2 >/dev/null
fi
for program in criu runsc; do # without them everything else can be tested
    "$(dirname "$0")/get_$program.sh" || echo "make test: no $program: tests/sandbox/test_capture.py will fail" >&2
done
exec "$(dirname "$0")/../slurm/dev_cluster.sh" install
