"""Run a check: a program that judges a sandbox's final state and that the agent can't touch.

A check has the sandbox's root, network and limits, but process and mount namespaces of its own. So
the agent's processes can't see, trace or end it, and can't see its files or its verdict. Settings
for test programs that the agent put into the root are hidden from the check. Servers that the agent
started keep running. An agent can change the programs of an image, such as its Python, and a check
then runs the changed ones. Without an image, programs are read-only.
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

from rose.parts.sandbox import kernel, within
from rose.parts.sandbox.backend import GUARDED
from rose.parts.sandbox.init import begin_program

HOME = "/logs/home"  # the check's home folder, empty
# Name patterns of settings that test programs and build tools read in any folder above the tests.
# With a /pytest.ini of its own, an agent could make any test pass.
SETTINGS = (
    *("pytest.ini", "pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py"),
    *("conftest.py", "__init__.py", "package.json", "node_modules", "tsconfig*.json"),
    *("jsconfig.json", "*.config.*", "go.mod", "go.work", "Cargo.toml", "pom.xml", "*.gradle*"),
    *("Gemfile", "Rakefile", "Pipfile", "uv.toml", "deno.json*", "pnpm-workspace.yaml", ".[!.]*"),
    *("Directory.*.props", "Directory.*.targets", "[Nn]u[Gg]et.config", "global.json"),
    *("rust-toolchain*", "dune-*", "cabal.project*", "stack.yaml", "WORKSPACE*", "MODULE.bazel"),
)
# Folders in the root of every sandbox
OWN = ("dev", "etc", "proc", "root", "run", "tmp")
MOST_ENTRIES = 1000  # most entries of a check's root, most of them mounts (kernel's limit: 100,000)
# Namespaces of the sandbox that a check joins, by their names in /proc/PID/ns
JOINED = ("user", "mnt", "net", "ipc", "uts")


def run(
    spec: dict[str, Any], order: dict[str, Any], image: str, spaces: list[int], fds: list[int]
) -> NoReturn:
    """Run a check in a child of the keeper (keeper.py). `order`: the host's request. `image`: the
    root folder with which the sandbox started. `spaces`: descriptors of the namespaces `JOINED`.
    `fds`: a tar of the program's files, the pipe for its output, and the pipe for the result. The
    result is JSON with `code` and `files`, or with `failed`."""
    files, output, to = fds
    with os.fdopen(files, "rb") as packed:
        tar = packed.read()
    new = kernel.NEWNS | kernel.NEWPID
    of_image = initial_entries(image)
    within.enter(spaces, new, to, lambda: _serve(spec, order, of_image, tar, output, to))


def _serve(
    spec: dict[str, Any],
    order: dict[str, Any],
    of_image: dict[str, bytes | None],
    tar: bytes,
    output: int,
    to: int,
) -> None:
    """Prepare the check's root, run its program and send the result to `to`, as process 1."""
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
                own = {"HOME": HOME, "PYTHONNOUSERSITE": "1"}  # not the agent's /root
                variables = spec["variables"] | own
                begin_program(order["argv"], spec | {"variables": variables}, spec["workdir"])
            finally:
                os._exit(127)
        os.close(output)
        code = None
        while code is None:  # a round per ended child, orphans included
            ended, status = os.waitpid(-1, 0)
            code = os.waitstatus_to_exitcode(status) if ended == pid else None
        # The tested code may have left processes that still write files.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        answer: dict[str, Any] = {"code": code, "files": {}}
        for path in order["collect"]:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                answer["files"][path] = file.read(order["limit"]).decode("latin-1")
    except Exception as error:  # any failure is reported to the host
        answer = within.failed(error)
    with os.fdopen(to, "wb") as result:
        result.write(json.dumps(answer).encode())
    os._exit(0)


def initial_entries(image: str) -> dict[str, bytes | None]:
    """Return the entries of `image`, the root with which a sandbox started. A file whose name
    matches `SETTINGS` is mapped to its content, and any other entry to None."""
    found: dict[str, bytes | None] = {}
    for entry in os.scandir(image):
        found[entry.name] = None
        if is_setting(entry.name) and entry.is_file(follow_symlinks=False):
            # Without permission, the check gets the sandbox's file.
            with contextlib.suppress(PermissionError), open(entry.path, "rb") as file:
                found[entry.name] = file.read()
    return found


def is_setting(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in SETTINGS)


def enclose(at: str, of_image: dict[str, bytes | None], paths: Iterable[str]) -> None:
    """Change to a new root with the entries of the present root. It is mounted at `at` first.

    Entries that match `SETTINGS` are left out, except the first folders of `paths` and the entries
    in `of_image`. If `of_image` has a file's content, the file is written with this content.
    Entries that the agent's processes add later, or remove during this call, don't appear."""
    kernel.mount("tmpfs", at, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    needed = {*of_image, *OWN, *GUARDED, *(path.strip("/").split("/")[0] for path in paths)}
    entries = [e for e in os.scandir("/") if e.name in needed or not is_setting(e.name)]
    entries.sort(key=lambda e: (e.name not in needed, e.is_file(follow_symlinks=False)))
    for entry in entries[: max(MOST_ENTRIES, len(needed))]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _show(entry, f"{at}/{entry.name}", of_image.get(entry.name))
    kernel.change_root(at)


def _show(entry: os.DirEntry, target: str, content: bytes | None) -> None:
    """Create `target` as `entry` of the present root, or as a file with `content` if given."""
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
            # The kernel permits a new proc mount only where a whole one is visible.
            if entry.name == "proc":
                kernel.mount("proc", target, "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
            elif entry.name not in GUARDED:
                kernel.bind(entry.path, target)
        except OSError:  # such as an entry that the agent has removed or replaced
            (os.rmdir if folder else os.unlink)(target)
            raise


def pack(folder: str) -> bytes:
    """Return the regular files of `folder` as a tar."""
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
    """Unpack a tar from `pack`. Raises ValueError if it has more than files below `folder`."""
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
