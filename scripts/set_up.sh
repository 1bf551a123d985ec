#!/bin/sh
# Find a Python for which requirements/ is locked, and let it set up an environment (scripts/set_up.py):
#     scripts/set_up.sh DIR cpu|gpu|test
# PYTHON names the interpreter; without it the first of CANDIDATES that fits is taken. Needs no root.
set -eu
LOCKED="3.11 3.12 3.13"
# The distribution's own Python comes first, because it has its headers and libraries beside it.
CANDIDATES="/usr/bin/python3.11 python3.11 /usr/bin/python3 python3 python3.12 python3.13"

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "none"
}

is_locked() {
    case " $LOCKED " in *" $1 "*) return 0 ;; esac
    return 1
}

makes_environments() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null
}

has_pip() { # one whose making was interrupted has none
    "$1" -m pip --version >/dev/null 2>&1
}

if [ -x "$1/bin/python" ] && is_locked "$(version "$1/bin/python")" && has_pip "$1/bin/python"; then
    exec "$1/bin/python" "$(dirname "$0")/set_up.py" "$@"
fi
tried="" without_venv=""
for python in ${PYTHON:-$CANDIDATES}; do
    found=$(version "$python")
    if ! is_locked "$found"; then
        tried="$tried, '$python' is $found"
    elif ! makes_environments "$python"; then
        without_venv=${without_venv:-$python}
    else
        exec "$python" "$(dirname "$0")/set_up.py" "$@"
    fi
done
if [ -n "$without_venv" ]; then
    package=python$(version "$without_venv")-venv
    echo "make: '$without_venv' lacks the venv module. Debian and Ubuntu: sudo apt-get install $package" >&2
else
    echo "make: one of Python $LOCKED is needed (the packages are locked for them), and ${tried#, }." >&2
    echo "      Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv) and, if it is" >&2
    echo "      not on PATH, name it: make PYTHON=/path/to/python3.12 with the same target" >&2
fi
exit 2
