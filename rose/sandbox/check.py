"""A program in the final state of a sandbox that none of the agent's processes can touch.

It runs in the sandbox's root, network and limits, but in process and mount namespaces beside the
agent's, not below them: they can't see, trace or end it, and see neither its files nor where it
writes its verdict. Nor does it see the agent's settings for test programs in the root. Servers that
the agent started go on. Left out: what the agent changed in the root itself, as its Python: a root
without an image has these read-only, an image has not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import stat
import tarfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NoReturn

from rose.sandbox import kernel, within
from rose.sandbox.backend import GUARDED
from rose.sandbox.init import begin_program

HOME = "/logs/home"  # the program's, empty
# What test programs and build tools take for their settings where it lies in a folder above the
# tests, as patterns of names: an agent that writes /pytest.ini could make any test pass.
SETTINGS = (
    *("pytest.ini", "pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py"),
    *("conftest.py", "__init__.py", "package.json", "node_modules", "tsconfig*.json"),
    *("jsconfig.json", "*.config.*", "go.mod", "go.work", "Cargo.toml", "pom.xml", "*.gradle*"),
    *("Gemfile", "Rakefile", "Pipfile", "uv.toml", "deno.json*", "pnpm-workspace.yaml", ".[!.]*"),
    *("Directory.*.props", "Directory.*.targets", "[Nn]u[Gg]et.config", "global.json"),
    *("rust-toolchain*", "dune-*", "cabal.project*", "stack.yaml", "WORKSPACE*", "MODULE.bazel"),
)
# Every sandbox has these in its root.
OWN = ("dev", "etc", "proc", "root", "run", "tmp")
MOST_ENTRIES = 1000  # mounts of a check's root; the kernel bounds those of a sandbox at 100,000
JOINED = ("user", "mnt", "net", "ipc", "uts")  # of /proc/PID/ns


def run(
    spec: dict[str, Any], order: dict[str, Any], image: str, spaces: list[int], fds: list[int]
) -> NoReturn:
    """Run a check, in a child of the keeper. `image`: the root folder that the sandbox began with;
    `spaces`: the sandbox's namespaces `JOINED`; `fds`: the program's files as a tar, its output,
    and where the result goes, as JSON: `code` and `files`, or `failed`."""
    files, output, to = fds
    with os.fdopen(files, "rb") as packed:
        tar = packed.read()
    new = kernel.NEWNS | kernel.NEWPID
    of_image = given(image)
    within.enter(spaces, new, to, lambda: _serve(spec, order, of_image, tar, output, to))


def _serve(
    spec: dict[str, Any],
    order: dict[str, Any],
    of_image: dict[str, bytes | None],
    tar: bytes,
    output: int,
    to: int,
) -> None:
    """Process 1 of the check's namespace."""
    try:
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        paths = [spec["workdir"], *(each["target"] for each in spec["mounts"])]
        enclose(f"/{GUARDED[0]}", of_image, paths)
        options = kernel.MS_NOSUID | kernel.MS_NODEV
        for name in GUARDED:
            kernel.mount("tmpfs", f"/{name}", "tmpfs", options, "mode=755,size=64m")
        for folder in (order["at"], HOME, *map(os.path.dirname, order["collect"])):
            os.makedirs(folder, exist_ok=True)
        unpack(tar, order["at"])
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                own = {"HOME": HOME, "PYTHONNOUSERSITE": "1"}  # /root is the agent's
                variables = spec["variables"] | own
                begin_program(order["argv"], spec | {"variables": variables}, spec["workdir"])
            finally:
                os._exit(127)
        os.close(output)
        code = None
        while code is None:  # orphans of the program are reaped on the way
            ended, status = os.waitpid(-1, 0)
            code = os.waitstatus_to_exitcode(status) if ended == pid else None
        with contextlib.suppress(ProcessLookupError):  # code under test may have left writers
            os.kill(-1, signal.SIGKILL)
        answer: dict[str, Any] = {"code": code, "files": {}}
        for path in order["collect"]:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                answer["files"][path] = file.read(order["limit"]).decode("latin-1")
    except Exception as error:  # whatever it is, the host must learn of it
        answer = within.failed(error)
    with os.fdopen(to, "wb") as result:
        result.write(json.dumps(answer).encode())
    os._exit(0)


def given(image: str) -> dict[str, bytes | None]:
    """Return the names in a sandbox's root as it began, and what is in those of its files that are
    `SETTINGS`."""
    found: dict[str, bytes | None] = {}
    for entry in os.scandir(image):
        found[entry.name] = None
        if is_setting(entry.name) and entry.is_file(follow_symlinks=False):
            # One that can't be read stays as it is in the sandbox.
            with contextlib.suppress(PermissionError), open(entry.path, "rb") as file:
                found[entry.name] = file.read()
    return found


def is_setting(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in SETTINGS)


def enclose(at: str, of_image: dict[str, bytes | None], paths: Iterable[str]) -> None:
    """Change to a root, mounted at `at` meanwhile, that has what the present one has in itself.

    Of `SETTINGS` it has those `of_image` alone, its files as they are there (`given`). What the
    agent's processes add to their root from now on is not in it, nor what they remove at this
    moment."""
    kernel.mount("tmpfs", at, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    needed = {*of_image, *OWN, *GUARDED, *(path.strip("/").split("/")[0] for path in paths)}
    entries = [e for e in os.scandir("/") if e.name in needed or not is_setting(e.name)]
    entries.sort(key=lambda e: (e.name not in needed, e.is_file(follow_symlinks=False)))
    for entry in entries[: max(MOST_ENTRIES, len(needed))]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _show(entry, f"{at}/{entry.name}", of_image.get(entry.name))
    kernel.change_root(at)


def _show(entry: os.DirEntry, target: str, content: bytes | None) -> None:
    """Make `entry` of the present root visible at `target`; with `content`, a file that has it."""
    if content is not None:
        with open(target, "wb") as file:
            file.write(content)
    elif entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
    else:
        folder = stat.S_ISDIR(os.lstat(entry.path).st_mode)
        make = os.mkdir if folder else os.mknod
        make(target)
        try:
            if entry.name == "proc":  # The kernel mounts one only where another is seen whole.
                kernel.mount("proc", target, "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
            elif entry.name not in GUARDED:
                kernel.bind(entry.path, target)
        except OSError:  # The agent has removed or replaced it.
            (os.rmdir if folder else os.unlink)(target)
            raise


def pack(folder: str) -> bytes:
    """The regular files of `folder` as a tar."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", encoding="utf-8") as tar:
        for at, _, names in os.walk(folder):
            for name in sorted(names):
                path = os.path.join(at, name)
                if os.path.isfile(path):
                    inside = os.path.relpath(path, folder)
                    info = tarfile.TarInfo(inside)
                    with open(path, "rb") as file:
                        data = file.read()
                    info.size, info.mode = len(data), os.stat(path).st_mode & 0o777
                    tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def unpack(tar: bytes, folder: str) -> None:
    """What `pack` made: regular files only, below `folder`."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as packed:
        for member in packed:
            inside = PurePosixPath(member.name)
            source = packed.extractfile(member) if member.isfile() else None
            if source is None or inside.is_absolute() or ".." in inside.parts:
                raise ValueError(f"a tar with more than files below its folder: {member.name!r}")
            target = os.path.join(folder, member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(source.read())
            os.chmod(target, member.mode)
