"""Paths of ROSE's own files, in a checkout or inside of the installed package.

A wheel has conf/, the model recipes of scripts/ and the scripts of slurm/ inside rose/ (setup.py).
A checkout has them beside rose/, and a run's processes have the checkout's folder in PYTHONPATH.
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
    own PYTHONPATH. An installed ROSE adds no folder."""
    return os.pathsep.join(filter(None, [str(CHECKOUT or ""), os.environ.get("PYTHONPATH")]))


def command() -> str:
    """Return the text by which a user in this folder starts the `rose` of this Python.

    1. If its environment is activated: `rose`.
    2. Otherwise, if the command is installed: its path, such as .venv/bin/rose.
    3. Otherwise: PYTHON -m rose.
    """
    script = Path(sys.executable).with_name("rose")
    found = shutil.which("rose")
    if found and Path(found).absolute() == script.absolute():
        return "rose"
    if script.is_file():
        return min(os.path.relpath(script), str(script), key=len)
    return f"{sys.executable} -m rose"
