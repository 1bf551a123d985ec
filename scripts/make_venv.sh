#!/bin/sh
# Makes a virtual environment with Python 3.11, for which requirements/ is locked: PYTHON=python3.11 make_venv.sh DIR
# Needs no root. An environment of Python 3.11 that is there already is kept, and gets what it lacks.
set -eu
build_tools="setuptools==78.1.1 wheel==0.48.0"  # packages that come as source are built with them
venv=$1
python=${PYTHON:-python3.11}

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "none"
}

if [ -x "$venv/bin/python" ] && [ "$(version "$venv/bin/python")" = 3.11 ]; then
    exec "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps $build_tools
fi
found=$(version "$python")
if [ "$found" != 3.11 ]; then
    echo "make: Python 3.11 is needed (the packages are locked for it), and '$python' is $found." >&2
    echo "      Install it (Debian 12: apt-get install python3 python3-venv) and, if it is not on PATH," >&2
    echo "      name it: make train PYTHON=/path/to/python3.11" >&2
    exit 2
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "make: '$python' lacks the venv module; Debian and Ubuntu: apt-get install python3.11-venv" >&2
    exit 2
fi
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps $build_tools
