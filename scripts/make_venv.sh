#!/bin/sh
# Makes a virtual environment with a Python for which requirements/ is locked:
#     PYTHON=python3.11 make_venv.sh DIR ["3.11 3.12"]      default: 3.11 alone, as of requirements/cpu.txt
# Needs no root. An environment with such a Python that is there already is kept, and gets what it lacks.
set -eu
build_tools="setuptools==78.1.1 wheel==0.48.0"  # packages that come as source are built with them
venv=$1 locked=${2:-3.11}
python=${PYTHON:-python3.11}

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "none"
}

is_locked() {
    case " $locked " in *" $1 "*) return 0;; esac
    return 1
}

if [ -x "$venv/bin/python" ] && is_locked "$(version "$venv/bin/python")"; then
    exec "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps $build_tools
fi
found=$(version "$python")
if ! is_locked "$found"; then
    echo "make: Python $locked is needed (the packages are locked for it), and '$python' is $found." >&2
    echo "      Install it (Debian 12: apt-get install python3 python3-venv) and, if it is not on PATH," >&2
    echo "      name it: make PYTHON=/path/to/python3.11 with the same target" >&2
    exit 2
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "make: '$python' lacks the venv module; Debian and Ubuntu: apt-get install python$found-venv" >&2
    exit 2
fi
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps $build_tools
