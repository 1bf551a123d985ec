"""Atomic and private writes, locks that end with the process that holds them, and explanations for
a disk that refuses writes.

A full disk, an exhausted quota or a mount that became read-only ends a run. The launcher reports
it once, even if the ranks could not. Imports nothing of ROSE. Not handled: disks that lose data
which they accepted, and file systems without flock.
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
    """Create, write and remove a file in `folder`. Return the error if that fails, with the
    folder's name in it; None if it succeeds."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # NFS and quotas report errors only here
    except OSError as error:
        return OSError(error.errno, error.strerror, str(folder))
    return None


def advice(refused: OSError | None, message: str = "") -> str:
    """Explain which folder refused a write, and what to do. `refused` is the result of `refusal`;
    if it is None, `message`, another error's text, is searched for a disk's error. Returns "" if
    neither shows a refused write."""
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
    """Return the path with its ~ replaced by the home folder. Shells leave the ~ of
    --option=~/path as it is."""
    return Path(os.path.expanduser(path))


def printable(text: object) -> str:
    """Return `text` with its control characters replaced, so that a terminal doesn't obey them.
    Text of a model, an environment or an agent's program may contain them."""
    return str(text).translate(PICTURES)


def own_folder(path: Path, follow: bool = False, parents: bool = True) -> None:
    """Create the folder `path` for this user alone, or accept one that this user owns. Without
    `follow` a symbolic link is refused: in a folder like TMPDIR it may be another user's, and lead
    to another folder of this user. Raises an OSError that names `path`."""
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
    """True for a pointer, which a clone without Git LFS has for a large file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def user_text(path: Path) -> str:
    """Return the text of a user's UTF-8 file, without its byte order mark. Raises OSError, and
    ValueError for a file that is not UTF-8 or is a pointer of Git LFS."""
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
    """Return the values of a user's file of JSON lines. Only a line feed ends a line: JSON texts
    may contain U+2028 and other characters at which `str.splitlines` would end it. Raises as
    `user_text`, and a ValueError that names a line without valid JSON."""
    values = []
    for number, line in enumerate(user_text(path).split("\n"), 1):
        try:
            values += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is no JSON ({error})") from None
    return values


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the block's end. Only one
    process may write `path` at a time. Readers see the old file or the whole new one, and a failure
    leaves the old file as it is. Raises an OSError that names `path`."""
    # A killed process may have left this file; it is overwritten.
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        # On a disk that is now read-only, the temporary file remains. The next write overwrites it.
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_whole(path: Path, data: bytes, sync: bool = False, private: bool = False) -> None:
    """Replace the content of `path` by `data`, atomically. With `sync`, `data` is on the disk when
    this returns. With `private`, only this user can ever read it. Raises as `whole` does."""
    with whole(path) as part, _open_new(part, private) as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _open_new(path: Path, private: bool) -> BinaryIO:
    """Open a file for writing; with `private`, a new file that only this user can read."""
    if not private:
        return path.open("wb")
    path.unlink(missing_ok=True)  # an earlier file may be open to others
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def lock_now(file: IO) -> None:
    """Lock this open file until it is closed or this process dies. Raises BlockingIOError if
    another process holds the lock, and OSError on a file system without locks."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock of the file `path`, which is created if absent. Raises a `TimeoutError` that
    names `path` if another process still holds the lock after `deadline_s`."""
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
    """A file for logs and traces. A write that the disk refuses is dropped, because no process
    needs these files and reporting an error must not raise another."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class Closes(Protocol):
    def close(self) -> None: ...


def close_all(*files: Closes) -> None:
    """Close each file. If the disk refuses a last write, the error is printed and not raised: it
    would hide the error that may have made the caller close the files."""
    for file in files:
        try:
            file.close()
        except OSError as error:
            print(
                f"{type(file).__name__} not written to its end: {error}",
                file=sys.stderr,
                flush=True,
            )
