"""Task folders of terminal-bench and harbor, as far as they work without Docker.

A task has NAME/instruction.md, NAME/tests/test.sh (with its files beside it) and NAME/environment/,
whose files except Dockerfile are put into the working directory. NAME/environment/rootfs is an
unpacked root file system; without it the task uses the host's, read-only. NAME/task.toml may set
`agent.timeout_sec`, `verifier.timeout_sec`, `environment.{workdir,cpus,memory_mb,storage_mb}`. The
verdict is the number in /logs/verifier/reward.txt; without that file it is 1 for exit code 0, else
0. Not supported: docker_image, and building Dockerfiles.
"""

from __future__ import annotations

import functools
import math
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from rose import inputs
from rose.config import ConfigError
from rose.files import user_text
from rose.parts.sandbox import SandboxError, Spec

SPLITS = ("train", "held_out")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Task:
    """A task. `image`: its root file system, None for the host's. `agent_s`, `verifier_s`: most
    seconds of the episode and of the tests. `limits`: fields of `sandbox.Limits` that it sets."""

    name: str
    folder: Path
    instruction: str
    image: str | None
    workdir: str = "/app"
    agent_s: float = TIMEOUT_S
    verifier_s: float = TIMEOUT_S
    limits: tuple[tuple[str, float], ...] = ()
    digest: str = ""  # the folder's digest when it was read

    def verify(self) -> None:
        """Raise `ConfigError` if a file of the task has been edited since this process read it."""
        if self.digest != inputs.digest(self.folder):
            raise ConfigError(
                f"env.args.tasks: {self.folder} has changed since this attempt of the run began, "
                "so answers of one group would get different tests; restore it"
            )

    def files(self) -> dict[str, bytes]:
        """Return the files for the working directory, by path."""
        self.verify()
        root = self.folder / "environment"
        found = (p for p in sorted(root.rglob("*")) if p.is_file())
        inside = {p.relative_to(root): p for p in found}
        return {
            str(name): path.read_bytes()
            for name, path in inside.items()
            if name.parts[0] not in ("rootfs", "Dockerfile")
        }


@functools.lru_cache(16)
def load(place: str) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Return the training and held-out tasks of a folder: from its folders train and held_out, or
    split by hashes of the names. Raises `ConfigError` that names the broken tasks."""
    root = Path(place)
    if not root.is_dir():
        raise ConfigError(f"env.args.tasks={place!r}: no such folder; ladder needs none")
    inputs.verify(root)
    split = [(root / name).is_dir() for name in SPLITS]
    folders = [root / name for name in SPLITS] if all(split) else [root]
    broken: list[str] = []
    read = [[_try_to_read(p, root, broken) for p in _folders(f)] for f in folders]
    if broken:
        shown = "; ".join(broken[:8]) + (f"; and {len(broken) - 8} more" if broken[8:] else "")
        raise ConfigError(f"env.args.tasks={place!r}: {shown}")
    if len(read) == 1:
        by = [[t for t in read[0] if xxhash.xxh3_64_intdigest(t.name.encode()) % 8 != 0], []]
        by[1] = [t for t in read[0] if t not in by[0]]
        read = by
    train, held_out = (tuple(tasks) for tasks in read)
    if not train and not held_out:
        raise ConfigError(f"env.args.tasks={place!r}: no task folders in it")
    return train or held_out, held_out or train


def _folders(folder: Path) -> list[Path]:
    """Return the subfolders that may be tasks: all except hidden ones, such as .git."""
    return [p for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith(".")]


def doubt(train: tuple[Task, ...], held_out: tuple[Task, ...]) -> str:
    """Return a warning if held-out tasks are also training tasks, else ""."""
    known = {task.digest for task in train}
    both = [task.name for task in held_out if task.digest in known]
    words = (
        f"env.args.tasks: {len(both)} of {len(held_out)} held-out tasks are training tasks, too "
        f"({', '.join(both[:3])}), so evaluation measures what was trained; folders train and "
        "held_out with different tasks tell them apart"
    )
    return words if both else ""


def foreign_files_doubt(train: tuple[Task, ...], held_out: tuple[Task, ...]) -> str:
    """Return a warning about images whose top folder has files of other users, else "". A sandbox
    without root can't change such files."""
    user = os.geteuid()
    images = {task.image: task.name for task in (*train, *held_out) if task.image and user}
    found = [name for image, name in images.items() if not _all_of(user, image)]
    words = (
        f"env.args.tasks: environment/rootfs of {len(found)} tasks ({', '.join(found[:3])}) has "
        f"files of other users than {user}, which sandboxes without root show as nobody's and "
        f"can't change; chown -R {user} them"
    )
    return words if found else ""


@functools.cache  # cached, because each trajectory creates an environment
def _all_of(user: int, image: str) -> bool:
    """True if all entries of the folder `image` belong to the user."""
    with os.scandir(image) as entries:
        return all(entry.stat(follow_symlinks=False).st_uid == user for entry in entries)


def _try_to_read(folder: Path, root: Path, broken: list[str]) -> Task | None:
    """Return a task. If it can't be read, add the error to `broken` and return None."""
    name = str(folder.relative_to(root))
    try:
        return _read_and_check(folder, name)
    except (ValueError, OSError) as error:
        broken.append(f"task {name}: {error}")
        return None


def _text(path: Path) -> str:
    """Return the file's text; "" if there is no such file."""
    try:
        return user_text(path) if path.is_file() else ""
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _read_and_check(folder: Path, name: str) -> Task:
    instruction = _text(folder / "instruction.md").strip()
    if not instruction:
        raise ValueError("no instruction.md, or an empty one")
    if not (folder / "tests/test.sh").is_file():
        raise ValueError("no tests/test.sh")
    if b"\r\n" in (folder / "tests/test.sh").read_bytes():
        raise ValueError(
            r"tests/test.sh has Windows line ends (\r\n), and bash takes \r for a part of each "
            r"command; remove them with sed -i 's/\r$//'"
        )
    try:
        read: dict[str, Any] = tomllib.loads(_text(folder / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"task.toml: {error}") from None
    for part in ("agent", "verifier", "environment"):
        if not isinstance(read.get(part, {}), dict):
            raise ValueError(f"task.toml: {part}={read[part]!r}: a table, [{part}]")
    environment = read.get("environment", {})
    rootfs = folder / "environment/rootfs"
    if rootfs.is_dir():  # lexists, as bin may be a link that is valid only inside the image
        if not any(os.path.lexists(rootfs / name / "bash") for name in ("bin", "usr/bin")):
            raise ValueError("environment/rootfs has no /bin/bash, which runs commands and tests")
    else:
        if environment.get("docker_image"):
            raise ValueError(
                f"environment.docker_image={environment['docker_image']!r} is missing: without "
                "Docker it must be unpacked in environment/rootfs"
            )
        if (folder / "environment/Dockerfile").is_file():
            raise ValueError(
                "environment/Dockerfile is not built here: its root file system must be "
                "unpacked in environment/rootfs"
            )
    asked = {"memory_mib": "memory_mb", "disk_mib": "storage_mb", "cpus": "cpus"}
    limits = {ours: environment[key] for ours, key in asked.items() if key in environment}
    seconds = [read.get(part, {}).get("timeout_sec", TIMEOUT_S) for part in ("agent", "verifier")]
    for key, value in [*limits.items(), *zip(("agent", "verifier"), seconds, strict=True)]:
        whole = key in ("memory_mib", "disk_mib")
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            kind = "whole number" if whole else "number"
            name = f"environment.{asked[key]}" if key in asked else f"{key}.timeout_sec"
            raise ValueError(f"task.toml: {name}={value!r} is no {kind} above 0")
    image, workdir = str(rootfs) if rootfs.is_dir() else None, environment.get("workdir", "/app")
    try:
        Spec(image=image, workdir=str(workdir))
    except SandboxError as error:
        raise ValueError(f"task.toml: environment.{error}") from None
    return Task(
        name=name,
        folder=folder,
        instruction=instruction,
        image=image,
        workdir=workdir,
        agent_s=float(seconds[0]),
        verifier_s=float(seconds[1]),
        limits=tuple(limits.items()),
        digest=inputs.digest(folder),
    )
