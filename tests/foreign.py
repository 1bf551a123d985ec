"""Virtual environments of packages that can't be in ROSE's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "make_foreign_venv.sh"
INSTALL_S = 900


def python_of(name: str) -> Path:
    """The Python of the one that requirements/NAME.txt describes; made where it isn't there."""
    made = subprocess.run(
        [str(SCRIPT), name],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=INSTALL_S,
    )
    return Path(made.stdout.strip())
