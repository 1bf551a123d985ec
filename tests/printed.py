"""What a page of docs/ prints for its readers to write and to type."""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def files(page: str) -> dict[str, str]:
    """Path to content, of each block of code under a paragraph that begins with the path."""
    text = (DOCS / page).read_text()
    found = re.findall(r"^`([\w./-]+)`[^\n]*:\n\n```\w+\n(.*?)```$", text, re.DOTALL | re.M)
    return dict(found)


def commands(page: str) -> list[list[str]]:
    """Return the arguments of each `python launch.py` in the page's blocks of commands."""
    blocks = re.findall(r"^```sh\n(.*?)```$", (DOCS / page).read_text(), re.DOTALL | re.M)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("python launch.py")]


def overrides(page: str, name: str) -> list[str]:
    """Return the arguments of the page's command that has `name=`, which is left out."""
    (found,) = [run for run in commands(page) if f"name={name}" in run]
    return [each for each in found if each != f"name={name}"]


def write(page: str, folder: Path) -> None:
    for path, content in files(page).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
