"""Paths of ROSE's own files, in a checkout or inside of the installed package.

A wheel has conf/, the model recipes of scripts/ and the scripts of slurm/ within rose/ (setup.py).
A checkout has them beside rose/, and every process that a run starts has its folder in PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent  # the checkout, or the folder of installed packages
INSTALLED = (PACKAGE / "conf").is_dir()
FILES = PACKAGE if INSTALLED else REPOSITORY  # the folder with conf/, scripts/ and slurm/
CONF = FILES / "conf"
SLURM = FILES / "slurm"  # scripts for sbatch
CHECKOUT = None if INSTALLED else REPOSITORY


def python_path() -> str:
    """Return PYTHONPATH for a process that imports ROSE: the checkout's folder, then this process's
    own. An installed ROSE needs no folder there."""
    return os.pathsep.join(filter(None, [str(CHECKOUT or ""), os.environ.get("PYTHONPATH")]))


def command() -> str:
    """Return the text that starts the command `rose` of this Python's environment in this folder.

    1. The environment is activated: `rose`.
    2. Else, where the command is installed: its path, as .venv/bin/rose.
    3. Else: PYTHON -m rose.
    """
    script = Path(sys.executable).with_name("rose")
    found = shutil.which("rose")
    if found and Path(found).absolute() == script.absolute():
        return "rose"
    if script.is_file():
        return min(os.path.relpath(script), str(script), key=len)
    return f"{sys.executable} -m rose"
