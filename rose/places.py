"""Where ROSE's own files are: in a checkout, or inside of the installed package.

A wheel has conf/, the model recipes of scripts/ and the scripts of slurm/ within rose/ (setup.py);
a checkout has them beside it, and its folder is put on the path of every process that a run starts.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent  # above the package: a checkout, or the folder of installed packages
INSTALLED = (PACKAGE / "conf").is_dir()
FILES = PACKAGE if INSTALLED else REPOSITORY  # above conf/, scripts/ and slurm/
CONF = FILES / "conf"
SLURM = FILES / "slurm"  # scripts for sbatch
CHECKOUT = None if INSTALLED else REPOSITORY


def python_path() -> str:
    """PYTHONPATH of a process that imports ROSE: this process's, after the checkout's folder. An
    installed ROSE is found as any other package is."""
    return os.pathsep.join(filter(None, [str(CHECKOUT or ""), os.environ.get("PYTHONPATH")]))


def command() -> str:
    """Return what starts the command `rose` of this Python's environment from this folder.

    The name alone is enough where the environment is activated; else it is the path, as
    .venv/bin/rose, or the module where ROSE isn't installed as a command.
    """
    script = Path(sys.executable).with_name("rose")
    found = shutil.which("rose")
    if found and Path(found).absolute() == script.absolute():
        return "rose"
    if script.is_file():
        return min(os.path.relpath(script), str(script), key=len)
    return f"{sys.executable} -m rose"
