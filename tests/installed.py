"""A virtual environment into which pip has installed ROSE's wheel, made of an sdist of this
checkout. What ROSE needs is that of the tests' own environment, seen from there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 600
PARTS = ("rose", "conf", "scripts", "slurm", "pyproject.toml", "setup.py", "MANIFEST.in")


class Installed:
    def __init__(self, folder: Path) -> None:
        self.venv, source = folder / "venv", folder / "source"
        self.bin = self.venv / "bin"
        for part in (*PARTS, "README.md", "LICENSE"):
            if (REPOSITORY / part).is_dir():
                junk = shutil.ignore_patterns("__pycache__")
                shutil.copytree(REPOSITORY / part, source / part, ignore=junk)
            else:
                shutil.copy(REPOSITORY / part, source)
        sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
        self._run("-c", sdist, cwd=source)
        shutil.rmtree(source)
        (made,) = folder.glob("*.tar.gz")
        with tarfile.open(made) as sdist:  # Python 3.11.2 knows no filter; the file is our own
            sdist.extractall(folder / "unpacked")
        (source,) = (folder / "unpacked").iterdir()
        wheel = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
        self._run("-c", wheel, cwd=source)
        shutil.rmtree(folder / "unpacked")
        pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
        (wheel,) = folder.glob("*.whl")
        self._run("-m", "venv", "--without-pip", str(self.venv))
        python = ("--python", str(self.bin / "python"))
        self._run(*pip, *python, "install", "--no-deps", "--no-index", str(wheel))
        inside = {"base": str(self.venv), "platbase": str(self.venv)}
        self.site = Path(sysconfig.get_path("purelib", vars=inside))
        (self.site / "lock.pth").write_text(sysconfig.get_path("purelib") + "\n")
        ours = Path(sys.prefix)  # mpich's wheel has files beside the packages
        cases = (*ours.glob("lib/*.so*"), ours / "lib" / "mpich", *ours.glob("bin/mpi*"))
        cases += (*ours.glob("bin/hydra*"),)
        for file in cases:
            (self.venv / file.relative_to(ours)).symlink_to(file)

    @property
    def environ(self) -> dict[str, str]:
        """This process's, with the environment activated and no checkout on the path."""
        own = {"PATH": f"{self.bin}:{os.environ['PATH']}", "COLUMNS": "200"}
        return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own

    @staticmethod
    def _run(*arguments: str, cwd: Path | None = None) -> None:
        command = [sys.executable, *arguments]
        subprocess.run(command, cwd=cwd, check=True, timeout=SECONDS, capture_output=True)

    def rose(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
        """The ended command `rose`, in a folder that knows no checkout."""
        return subprocess.run(
            [str(self.bin / "rose"), *arguments],
            cwd=cwd,
            env=self.environ | variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
