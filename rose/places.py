"""Where ROSE's own files are: in a checkout, or inside of the installed package.

A wheel has conf/, the model recipes of scripts/ and the scripts of slurm/ within rose/ (setup.py);
a checkout has them beside it, and its folder is put on the path of every process that a run starts.
"""

from __future__ import annotations

import os
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
