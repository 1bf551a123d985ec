#!/bin/sh
# Makes a virtual environment for a package that can't be in ROSE's, and prints its Python:
#     make_foreign_venv.sh NAME          openenv, verifiers or triton, from requirements/NAME.txt, whose packages are all named
# It lies in the user's cache. One that is there already is kept: its folder's name has the hash of the lock. Nothing of ROSE is in it.
set -eu
lock=$(dirname "$0")/../requirements/$1.txt
cache=${ROSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rose}/venvs
venv=$cache/$1-$(sha256sum "$lock" | cut -c1-16)
mkdir -p "$cache"
exec 9>"$venv.lock"
flock 9      # two tests may want it at once
if [ ! -e "$venv/.complete" ]; then
    "${PYTHON:-python3}" -m venv --clear "$venv" >&2
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile -r "$lock" >&2
    touch "$venv/.complete"
fi
echo "$venv/bin/python"
