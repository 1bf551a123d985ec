"""Capture the state of a running sandbox in a folder, and restore sandboxes from it.

    about.json    backend, kind, spec, running programs; written last, to complete the capture
    listing.json  files that differ from the initial root, with their contents in data/N (layer.py)
    image/        the processes as CRIU wrote them (kind "process"); with gvisor the files, too
    last_pid      the newest process id; new processes of a restored sandbox get higher ones
    shell         the session's state as a script (replay.py), used if its process isn't restored

A capture of kind "files" has the files and the shell's state; one of kind "process" has processes,
too. All processes are stopped for some milliseconds, so that everything is captured at one moment.
Their parents don't notice the stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rose.parts.sandbox import criu, gvisor, replay
from rose.parts.sandbox.backend import Limits, Mount, SandboxError, Spec
from rose.parts.sandbox.namespaces import NAME, Keeper, Namespaces
from rose.parts.sandbox.piped import Piped

FORMAT = 1
FILES, PROCESS = "files", "process"
WAIT_S = 60.0  # most seconds of a capture or a restore; 0.1 s is usual
ABOUT, LISTING, SHELL, LAST_PID = "about.json", "listing.json", "shell", "last_pid"

Listing = list[dict[str, Any]]


@dataclass(frozen=True)
class Capture:
    """A finished capture. `seconds`: its duration; `bytes`: file contents that were copied."""

    folder: Path
    kind: str
    seconds: float
    bytes: int

    @property
    def listing(self) -> Listing:
        return json.loads((self.folder / LISTING).read_text(encoding="utf-8"))


async def take(
    shell: Namespaces | Piped,
    spec: Spec,
    backend: str,
    kind: str,
    folder: Path,
    since: Listing | None,
    state: bytes,
) -> Capture:
    """Capture the sandbox `shell` in the new folder `folder`. `since`: the listing of an earlier
    capture; files that are unchanged since then are not copied. `state`: the session's answer to
    `backend.ACCOUNT`. If it fails, remove the folder, unless it existed before, and raise
    `SandboxError`."""
    began = time.monotonic()
    folder = Path(folder)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise SandboxError(f"{folder}: no new folder for a capture: {error}") from None
    try:
        script = replay.script(state)
        (folder / SHELL).write_text(script, errors="surrogateescape", encoding="utf-8")
        if isinstance(shell, Namespaces):
            about = await _take_namespaces(shell, kind, folder, since)
        else:
            about = await _take_piped(shell, folder)
        write_about(folder, {"backend": backend, "kind": kind, **about}, spec)
    except BaseException as error:
        await asyncio.to_thread(shutil.rmtree, folder, True)
        if isinstance(error, OSError | ValueError):
            raise SandboxError(f"can't capture into {folder}: {error}") from error
        raise
    return Capture(folder, kind, time.monotonic() - began, about["bytes"])


async def _take_namespaces(
    shell: Namespaces, kind: str, folder: Path, since: Listing | None
) -> dict[str, Any]:
    """Capture with `namespaces` and return fields of about.json. Raises `SandboxError`, OSError."""
    program = criu.order() if kind == PROCESS else None
    for name in ("data", "image"):
        (folder / name).mkdir(mode=0o700)
        if shell.keeper.root:  # folder for writes by the sandbox's root user
            os.chown(folder / name, shell.user, shell.user)
    with contextlib.ExitStack() as held:
        fds = [await shell.upper()]
        held.callback(os.close, fds[0])
        for name in ("data", "image"):
            fds.append(os.open(folder / name, os.O_RDONLY | os.O_DIRECTORY))
            held.callback(os.close, fds[-1])
        fds.append(os.open(folder / LISTING, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        held.callback(os.close, fds[-1])
        fds.append(os.memfd_create("rose-since"))
        held.callback(os.close, fds[-1])
        if since is not None:
            await asyncio.to_thread(_write_listing, since, os.dup(fds[-1]))
            os.lseek(fds[-1], 0, os.SEEK_SET)
        order = {"criu": program, "session": shell.session}
        answer = await shell.beside("capture", order, *fds, wait_s=WAIT_S)
    # This is no field of about.json, because the store may combine this capture's files with an
    # earlier image and that image's about.json.
    (folder / LAST_PID).write_text(str(answer.pop("last_pid")), encoding="utf-8")
    version = program["version"] if program else ""
    await asyncio.to_thread(_take_ownership, folder, shell.keeper.root)
    return {"session": shell.session, "criu": version, "images": _image_sizes(folder), **answer}


def _write_listing(listing: Listing, to: int) -> None:
    with os.fdopen(to, "w", encoding="utf-8") as file:
        json.dump(listing, file)


async def _take_piped(shell: Piped, folder: Path) -> dict[str, Any]:
    """Capture a sandbox that another program runs. Its images contain the files, too."""
    for name in ("data", "image"):
        (folder / name).mkdir(mode=0o700)
    await shell.capture(folder / "image")
    (folder / LISTING).write_text("[]", encoding="utf-8")
    return {"images": _image_sizes(folder), "running": [], "bytes": 0}


def _image_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (folder / "image").iterdir()}


def _take_ownership(folder: Path, root: bool) -> None:
    """Make this user the owner of a capture's files, and let every user read them, because restored
    sandboxes have other users. `folder` itself stays private. Without `root`, all have one user."""
    if not root:
        return
    os.chmod(folder, 0o700)
    for name in ("data", "image"):
        for path in (folder / name, *(folder / name).iterdir()):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise SandboxError(f"{path}: neither a file nor a folder")
            os.chown(path, os.geteuid(), os.getegid())
            os.chmod(path, 0o755 if path.is_dir() else 0o644)


async def restore(saved: Saved, keeper: Callable[[], Keeper]) -> Namespaces | Piped:
    """Restore a sandbox with the backend that captured it. Raises `SandboxError`."""
    if saved.backend == gvisor.NAME:
        return await gvisor.begin(saved.spec, saved.folder / "image")
    return await _restore_namespaces(saved, keeper())


async def _restore_namespaces(saved: Saved, keeper: Keeper) -> Namespaces:
    """Restore a sandbox with `namespaces`; after kind "files" it has no session yet. Raises
    `SandboxError`."""
    program = criu.order() if saved.kind == PROCESS else None
    try:
        await asyncio.to_thread(_take_ownership, saved.folder, keeper.root)
        fds = [
            os.open(saved.folder / LISTING, os.O_RDONLY),
            os.open(saved.folder / "data", os.O_RDONLY | os.O_DIRECTORY),
            os.open(saved.folder / "image", os.O_RDONLY | os.O_DIRECTORY),
        ]
    except OSError as error:
        raise SandboxError(f"{saved.folder}: not a whole capture: {error}") from None
    try:
        made = await keeper.begin(saved.spec, (fds[0], fds[1]))
        try:
            if program is not None:
                order = {"criu": program}
                answer = await made.beside("revive", order, fds[2], wait_s=WAIT_S)
                await made.adopt(answer["pid"])
            await made.number_after(saved.last_pid)
        except BaseException:
            await made.close()
            raise
        return made
    finally:
        for fd in fds:
            os.close(fd)


async def tried(shell: Namespaces, keeper: Keeper) -> str:
    """Capture and restore a new sandbox with its processes. Return why that fails, else ""."""
    if problem := shell.captures()[PROCESS]:
        return problem
    with tempfile.TemporaryDirectory(prefix="rose-capture-") as top:
        folder = Path(top) / "c"
        try:
            await take(shell, Spec(), NAME, PROCESS, folder, None, replay.NOTHING)
            await (await _restore_namespaces(read(folder, None), keeper)).close()
        except SandboxError as error:
            return str(error)
    return ""


# --------------------------------------------------------------------------- the folder


@dataclass(frozen=True)
class Saved:
    """A capture to be restored. `kind` may be "files" although processes were captured, too."""

    folder: Path
    backend: str
    kind: str
    spec: Spec
    running: list[str] = field(default_factory=list)  # names of the programs that ran
    images: dict[str, int] = field(default_factory=dict)  # name -> bytes
    lost: list[str] = field(default_factory=list)  # descriptions of state that no capture keeps

    def check_images(self) -> None:
        """Raise `SandboxError` if an image is cut short: CRIU would wait for ever for its end."""
        for name, size in self.images.items():
            path = self.folder / "image" / name
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise SandboxError(f"{path}: {found} bytes of {size}: not a whole capture")

    @property
    def last_pid(self) -> int:
        """The newest process id at the capture; 0 if the folder has none. Raises `SandboxError`."""
        path = self.folder / LAST_PID
        try:
            return int(path.read_text(encoding="utf-8")) if path.is_file() else 0
        except ValueError as error:
            raise SandboxError(f"{path}: not a whole capture: {error}") from None

    @property
    def script(self) -> str:
        """The script that restores the shell's state."""
        return (self.folder / SHELL).read_text(errors="surrogateescape", encoding="utf-8")


def write_about(folder: Path, about: dict[str, Any], spec: Spec) -> None:
    """Write about.json, the last file of a capture, atomically."""
    text = json.dumps({"format": FORMAT, "spec": asdict(spec), "made": time.time(), **about})
    (folder / f".{ABOUT}").write_text(text, encoding="utf-8")
    os.replace(folder / f".{ABOUT}", folder / ABOUT)


def read(folder: Path, kind: str | None) -> Saved:
    """Read a capture, to be restored as `kind` (None: its own kind). Raises `SandboxError`."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']!r}; this ROSE reads {FORMAT}")
        given = dict(about["spec"])
        given["limits"] = Limits(**given["limits"])
        given["mounts"] = tuple(Mount(**each) for each in given["mounts"])
        spec = Spec(**given)
        running, images = list(about["running"]), dict(about["images"])
        lost = list(about.get("lost", []))
        saved = Saved(folder, about["backend"], about["kind"], spec, running, images, lost)
        if saved.kind not in (FILES, PROCESS) or not (folder / SHELL).is_file():
            raise ValueError(f"kind={saved.kind!r}, or no {SHELL}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        words = f"{type(error).__name__}: {error}"
        raise SandboxError(f"{folder}: not a whole capture: {words}") from None
    if saved.backend not in (NAME, gvisor.NAME):
        raise SandboxError(f"{folder}: captured with {saved.backend!r}, which this ROSE has not")
    restores_files_alone = saved.backend != gvisor.NAME
    if kind not in ((None, FILES, saved.kind) if restores_files_alone else (None, saved.kind)):
        raise SandboxError(
            f"kind={kind!r}: {folder} is a capture of kind {saved.kind!r} with {saved.backend}"
        )
    saved = replace(saved, kind=kind or saved.kind)
    if saved.kind == PROCESS:
        saved.check_images()
    return saved
