"""Atomic and private writes, locks that end with their holder's process, and explanations for a
disk that refuses writes.

A full disk, an exhausted quota or a mount that became read-only ends a run. The launcher reports
it once, even if the ranks could not. Imports nothing of ROSE. Left out: disks that lose data which
they accepted, and file systems without flock.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import io
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_ADVICE = "it is a pointer of Git LFS, not the file itself; run git lfs pull in its repository"
PAUSE_S = 0.2  # seconds between two polls of a lock that another process holds
PROBE_BYTES = 65_536  # free space below which a folder counts as full; a line of metrics fits
REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there or have the quota raised",
    errno.EROFS: "have it mounted writable again",
}
CONTINUE = "the same launch.py command then continues the run from its last checkpoint"


def refusal(folder: Path | str) -> OSError | None:
    """Return the error with which `folder` refuses a new file, naming the folder; None if it
    accepts one. The probe's file is removed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # NFS and quotas report errors only here
    except OSError as error:
        return OSError(error.errno, error.strerror, str(folder))
    return None


def advice(refused: OSError | None, message: str = "") -> str:
    """Explain what happened and what to do where a folder refused a write. '' where none did.
    `message`: an error's text, which may name such a refusal if `refused` is None."""
    if refused is not None:
        remedy = REMEDIES.get(refused.errno, "make it writable again")
        return f"{refused.filename}: {refused.strerror}; {remedy}; {CONTINUE}"
    found = next((number for number in REMEDIES if os.strerror(number) in message), None)
    return f"{os.strerror(found)}, see below where; {REMEDIES[found]}; {CONTINUE}" if found else ""


# Visible replacements for control characters: ESC becomes ␛. Newline and tab are kept.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    code: 0xFFFD for code in range(0x7F, 0xA0)
}


def at_home(path: str) -> Path:
    """Return the path of a command's option, with the home folder for its ~. Shells don't replace
    that of --option=~/path."""
    return Path(os.path.expanduser(path))


def printable(text: object) -> str:
    """Return `text` for a terminal, without the control characters that an agent's program, an
    environment or a model may have put into it."""
    return str(text).translate(PICTURES)


def own_folder(path: Path, follow: bool = False, parents: bool = True) -> None:
    """Create the folder `path` for this user alone, or accept one that this user owns. Without
    `follow` a symbolic link is refused: in a folder like TMPDIR another user may have placed it, to
    lead to another folder of this user's. Raises an OSError that names `path`."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=parents)
    found = path.stat() if follow else path.lstat()
    if stat.S_ISLNK(found.st_mode):
        problem = "is a symbolic link, maybe of another user; name the folder that it leads to"
        raise PermissionError(errno.EPERM, problem, str(path))
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"belongs to user {found.st_uid}", str(path))


def is_lfs_pointer(path: Path) -> bool:
    """True for what a clone without Git LFS has in the place of a large file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def user_text(path: Path) -> str:
    """Return the text of a user's UTF-8 file, without its byte order mark. Raises OSError, and
    ValueError for what is no such text."""
    data = Path(path).read_bytes()
    if data.startswith(LFS_POINTER):
        raise ValueError(LFS_ADVICE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        known = "UTF-16" if utf16 else "ENCODING"
        raise ValueError(
            f"it is not UTF-8 ({error.reason} at byte {error.start}); convert it with iconv "
            f"-f {known} -t UTF-8"
        ) from None


def json_lines(path: Path) -> list[Any]:
    """Return the values of a user's file of JSON lines. Only a line feed ends one: texts in JSON
    may hold U+2028 and others at which `str.splitlines` ends a line. Raises as `user_text`, and
    ValueError that names the line that is no JSON."""
    values = []
    for number, line in enumerate(user_text(path).split("\n"), 1):
        try:
            values += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is no JSON ({error})") from None
    return values


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the block's end it is renamed to `path`. Only one
    process may write `path` at a time. A reader sees the old file or the new one, and a failure
    leaves the old one alone. Raises an OSError that names `path`."""
    part = path.with_name(f"{path.name}.part")  # may exist after a killed process; overwritten
    try:
        yield part
        part.replace(path)
    except OSError as error:
        # On a disk that is now read-only the part stays, and the next write overwrites it.
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_whole(path: Path, data: bytes, sync: bool = False, private: bool = False) -> None:
    """Replace the content of `path` by `data`, atomically. `sync`: it is on the disk when this
    returns. `private`: only this user can read it, at any time. Raises as `whole` does."""
    with whole(path) as part, _new(part, private) as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _new(path: Path, private: bool) -> BinaryIO:
    if not private:
        return path.open("wb")
    path.unlink(missing_ok=True)  # an earlier file may be open to others
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def lock_now(file: IO) -> None:
    """Lock this open file until it is closed, or its process dies. Raises BlockingIOError while
    another process holds the lock, OSError on a file system without locks."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock of `path`, a file that is created if absent. Raises a `TimeoutError` that names
    it after `deadline_s` seconds."""
    until = time.monotonic() + deadline_s
    with path.open("w", encoding="utf-8") as file:
        while True:
            try:
                lock_now(file)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{path}: held by another process for over {deadline_s:.0f} s"
                    ) from None
                time.sleep(PAUSE_S)
        yield


class Lossy(io.FileIO):
    """A file for logs and traces, which no process needs to continue. A write that the disk refuses
    is dropped, so that reporting an error neither fails nor hides that error."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class Closes(Protocol):
    def close(self) -> None: ...


def close_all(*files: Closes) -> None:
    """Close each file. A refused write is only printed, so that it does not hide the error for
    which the caller may be closing them."""
    for file in files:
        try:
            file.close()
        except OSError as error:
            print(
                f"{type(file).__name__} not written to its end: {error}",
                file=sys.stderr,
                flush=True,
            )
