#!/bin/sh
# Makes sure that the programs which only the tests need are there: a Chromium, which opens report.html.
# Installs Debian's package where it may (root); else says what is missing and fails.
set -eu

for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null 2>&1; then
        exit 0
    fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing chromium, which the tests of report.html need"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium >/dev/null
    exit 0
fi
echo "make test: no Chromium found, and the tests of report.html need one." >&2
echo "           Install it (Debian: sudo apt-get install chromium) and run make test again." >&2
exit 2
