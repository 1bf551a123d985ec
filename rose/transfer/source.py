"""Where readers of weight versions get bytes: a folder that they see, or a relay (`relay.py`) over
HTTP.

`relay_client.open_source` makes one of a folder's path or a relay's URL.

Paths are relative to the store's root and separated by "/"; names that begin with a dot or end in
".part" are temporary files, neither listed nor read. Files never change under their name while
their version lives; one that was written anew after a resumed run has another `Stat.tag`. Errors
are `TransferError`s that name the store and the path.
"""

from __future__ import annotations

import errno
import os
import re
import stat as modes
from pathlib import Path
from typing import NamedTuple, Protocol

from rose.transfer.errors import Missing, TransferError

_MAX_PATH = 180  # characters: a relay makes one file name of a folder's path
# of a file or folder; not what `rose.files` renames when it is whole
_NAME = re.compile(r"[A-Za-z0-9_+=,-][A-Za-z0-9._+=,-]*(?<!\.part)")
# ESTALE is how NFS says that what was open, or looked up, is removed
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")


class Refused(TransferError):
    """Asking again would not help: wrong token, a path or range that cannot be."""


class Changed(Refused):
    """The file under this name is no longer the one with the tag that was asked for."""


class Stat(NamedTuple):
    size: int  # bytes
    tag: str  # [A-Za-z0-9._-]{1,64}: another one if the file was written anew


class Source(Protocol):
    """Used from several threads at once."""

    def names(self, path: str) -> list[str]:
        """Sorted names in the folder `path` ("" is the root); [] if there is none."""

    def stat(self, path: str) -> Stat | None:
        """None if there is no such file."""

    def read(
        self,
        path: str,
        offset: int = 0,
        length: int | None = None,
        fresh: bool = False,
        tag: str | None = None,
    ) -> bytes:
        """Exactly `length` bytes (None: to the end) from `offset`. `fresh`: trust no cache, for
        bytes that were found corrupted. Raises `Missing`, `Changed` if a `tag` is given and is not
        the file's, or `TransferError`."""

    def close(self) -> None: ...


def read_token(path: str | Path) -> str:
    """The secret in this file. Raises `TransferError` if others can read the file, or if it holds
    none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except OSError as error:
        raise TransferError(f"token file {path}: {error.strerror}") from error
    if status.st_mode & 0o077:
        raise TransferError(
            f"token file {path} has mode {modes.S_IMODE(status.st_mode):04o}: others can read it, "
            "so it is no secret; make a new one with mode 0600"
        )
    if not _TOKEN.fullmatch(token):
        raise TransferError(
            f"token file {path}: expected 16 to 256 letters, digits or ._~+/=-, "
            f"as of `openssl rand -hex 32`; found {len(token)} characters"
        )
    return token


def checked(path: str, root_too: bool = False) -> str:
    """`path` if it is a plain relative one ("" only with `root_too`). Raises `Refused`."""
    if (root_too and path == "") or (
        len(path) <= _MAX_PATH and all(map(_NAME.fullmatch, path.split("/")))
    ):
        return path
    raise Refused(
        f"path {path[:200]!r}: expected names of letters, digits and ._+=,- separated by /, none "
        f"beginning with a dot or ending in .part, {_MAX_PATH} characters at most"
    )


class Folder:
    """A store in a folder. Every read opens the file anew: that is what makes NFS look whether it
    is still the one."""

    def __init__(self, root: str | Path):
        self.root = Path(os.path.realpath(root))

    def __str__(self) -> str:
        return str(self.root)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(
                name
                for name in os.listdir(self._inside(path, root_too=True))
                if _NAME.fullmatch(name)
            )
        except OSError as error:
            if error.errno in _ABSENT:
                return []
            raise TransferError(f"{self.root / path}: {error.strerror}") from error

    def stat(self, path: str) -> Stat | None:
        try:
            status = os.stat(self._inside(path))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise TransferError(f"{self.root / path}: {error.strerror}") from error
        return _stat(status) if modes.S_ISREG(status.st_mode) else None

    def read(
        self,
        path: str,
        offset: int = 0,
        length: int | None = None,
        fresh: bool = False,
        tag: str | None = None,
    ) -> bytes:
        try:
            descriptor = os.open(self._inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return self._read(descriptor, path, offset, length, fresh, tag)
            finally:
                os.close(descriptor)
        except OSError as error:
            kind = Missing if error.errno in _ABSENT else TransferError
            raise kind(f"{self.root / path}: {error.strerror}") from error

    def _read(
        self,
        descriptor: int,
        path: str,
        offset: int,
        length: int | None,
        fresh: bool,
        tag: str | None,
    ) -> bytes:
        status = os.fstat(descriptor)
        if not modes.S_ISREG(status.st_mode):
            raise Refused(f"{self.root / path}: no file, so there is nothing to read")
        found = _stat(status)
        if tag is not None and found.tag != tag:
            raise Changed(
                f"{self.root / path}: written anew since it was looked at (tag {found.tag}, not "
                f"{tag})"
            )
        end = found.size if length is None else offset + length
        if not 0 <= offset <= end <= found.size:
            raise Refused(
                f"{self.root / path}: bytes {offset} to {end} were asked for, it has {found.size}"
            )
        if fresh:
            # from the disk, not the memory
            os.posix_fadvise(descriptor, offset, end - offset, os.POSIX_FADV_DONTNEED)
        parts, at = [], offset
        while at < end:  # Linux gives 2 GiB at most at a time
            parts.append(os.pread(descriptor, end - at, at))
            if not parts[-1]:
                raise TransferError(
                    f"{self.root / path}: ended at byte {at} of {found.size} while being read"
                )
            at += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Nothing stays open."""

    def _inside(self, path: str, root_too: bool = False) -> str:
        """The file itself, links followed. Raises `Refused` if it is outside of the root."""
        resolved = os.path.realpath(self.root / checked(path, root_too))
        if resolved != str(self.root) and not resolved.startswith(f"{self.root}{os.sep}"):
            raise Refused(f"{self.root / path}: a link out of the store")
        return resolved


def _stat(status: os.stat_result) -> Stat:
    return Stat(status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")


class Mirrored:
    """`source`, whose files are read from `folder`, this node's memory, where they are there: what
    `rose.transfer.mirror` keeps. Bytes found damaged there (`fresh`) are read from `source`."""

    def __init__(self, source: Source, folder: str | Path):
        self._source, self._near = source, Folder(folder)

    def __str__(self) -> str:
        return str(self._source)

    def names(self, path: str) -> list[str]:
        return self._source.names(path)

    def stat(self, path: str) -> Stat | None:
        return self._source.stat(path)

    def read(
        self,
        path: str,
        offset: int = 0,
        length: int | None = None,
        fresh: bool = False,
        tag: str | None = None,
    ) -> bytes:
        if not fresh:
            try:
                return self._near.read(path, offset, length)
            except TransferError:  # not sent to this node, removed since, or no memory left
                pass
        return self._source.read(path, offset, length, fresh, tag)

    def mirrors(self, folder: str) -> bool:
        """Whether files of this folder are read from this node's memory."""
        return bool(self._near.names(folder))

    def close(self) -> None:
        self._source.close()
