"""Read the files of a store of weight versions from a folder, or from a relay by HTTP.

`open_source` returns the source for a folder's path or a relay's URL. The relay is a part
(rose/parts/relay).

Paths are relative to the store's root and separated by "/". Names that begin with a dot or end in
".part" are temporary files, and are neither listed nor read. A file never changes while its version
exists. If a resumed run rewrites it, it has another `Stat.tag`. Errors are `TransferError`s that
name the store and the path.
"""

from __future__ import annotations

import errno
import os
import re
import stat as modes
from pathlib import Path
from typing import NamedTuple, Protocol

from rose import extensions
from rose.transfer.errors import Corrupted, Missing, TransferError

_MAX_PATH = 180  # characters, because a relay's cache makes one file name of a path
# A file's or folder's name. Names that end in .part are of files that are being written.
_NAME = re.compile(r"[A-Za-z0-9_+=,-][A-Za-z0-9._+=,-]*(?<!\.part)")
# NFS reports ESTALE for a file that was removed while it was open or being opened.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
# If a disk can't read a part of a file, readers treat it like damaged bytes.
_KINDS = dict.fromkeys(_ABSENT, Missing) | {errno.EIO: Corrupted}
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")


class Refused(TransferError):
    """A retry would not help: the token is wrong, or the path or range can't exist."""


class Changed(Refused):
    """The file was rewritten, and its tag is not the requested one."""


class Stat(NamedTuple):
    size: int  # bytes
    tag: str  # [A-Za-z0-9._-]{1,64}, different after the file was rewritten


class Source(Protocol):
    """A store's files. Several threads may call it at once."""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in the folder `path` ("" is the root), [] if it doesn't exist."""

    def stat(self, path: str) -> Stat | None:
        """Return a file's size and tag, or None if it doesn't exist."""

    def read(
        self,
        path: str,
        offset: int = 0,
        length: int | None = None,
        fresh: bool = False,
        tag: str | None = None,
    ) -> bytes:
        """Return exactly `length` bytes from `offset`, or all from there if it is None. `fresh`
        skips caches, because their bytes were damaged. Raises `Missing`, `Changed` if `tag` is
        given and is not the file's, or `TransferError`."""

    def close(self) -> None: ...


def open_source(where: str | Path, token: str | None = None, timeout_s: float = 30.0) -> Source:
    """Return the store in the folder `where`, or behind the relay at http://host:port[/folder],
    which needs its `token` (see `read_token`). A relay that doesn't answer, or can't reach its
    upstream, is retried for `timeout_s` seconds."""
    if "://" not in str(where):
        return Folder(where)
    return extensions.only("relay_client").Relayed(str(where), token, timeout_s)


def read_token(path: str | Path) -> str:
    """Return the secret in a file. Raises `TransferError` if other users can read the file, or if
    its content is no token."""
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
    """Return `path` if it is a plain relative path, or "" with `root_too`; else raise `Refused`."""
    if (root_too and path == "") or (
        len(path) <= _MAX_PATH and all(map(_NAME.fullmatch, path.split("/")))
    ):
        return path
    raise Refused(
        f"path {path[:200]!r}: expected names of letters, digits and ._+=,- separated by /, none "
        f"beginning with a dot or ending in .part, {_MAX_PATH} characters at most"
    )


class Folder:
    """A store in a folder. Every read opens the file again, which makes an NFS client check whether
    it has changed."""

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
                return _read_range(descriptor, self.root / path, offset, length, fresh, tag)
            finally:
                os.close(descriptor)
        except OSError as error:
            kind = _KINDS.get(error.errno or 0, TransferError)
            raise kind(f"{self.root / path}: {error.strerror}") from error

    def close(self) -> None:
        """Do nothing: no file stays open between two reads."""

    def _inside(self, path: str, root_too: bool = False) -> str:
        """Return the path with links resolved. Raises `Refused` if it is outside of the root."""
        resolved = os.path.realpath(self.root / checked(path, root_too))
        if resolved != str(self.root) and not resolved.startswith(f"{self.root}{os.sep}"):
            raise Refused(f"{self.root / path}: a link out of the store")
        return resolved


def _read_range(
    descriptor: int, where: Path, offset: int, length: int | None, fresh: bool, tag: str | None
) -> bytes:
    """Read an open file as `Source.read` does."""
    status = os.fstat(descriptor)
    if not modes.S_ISREG(status.st_mode):
        raise Refused(f"{where}: no file, so there is nothing to read")
    found = _stat(status)
    if tag is not None and found.tag != tag:
        raise Changed(f"{where}: rewritten since its size was read (tag {found.tag}, not {tag})")
    end = found.size if length is None else offset + length
    if not 0 <= offset <= end <= found.size:
        raise Refused(f"{where}: bytes {offset} to {end} were asked for, it has {found.size}")
    if fresh:  # Drop the pages in memory, so that the bytes are read from the disk.
        os.posix_fadvise(descriptor, offset, end - offset, os.POSIX_FADV_DONTNEED)
    parts, at = [], offset
    while at < end:  # Linux returns at most 2 GiB per call.
        parts.append(os.pread(descriptor, end - at, at))
        if not parts[-1]:
            raise TransferError(f"{where}: ended at byte {at} of {found.size} while being read")
        at += len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _stat(status: os.stat_result) -> Stat:
    return Stat(status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")


class Mirrored:
    """A source that reads files from this node's mirror in `folder` (`rose.transfer.mirror`), or
    from `source` if they are not there. Bytes found damaged (`fresh`) are read from `source`."""

    def __init__(self, source: Source, folder: str | Path):
        self._source, self._mirror = source, Folder(folder)

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
                return self._mirror.read(path, offset, length)
            except TransferError:  # not sent to this node, removed since, or no memory left
                pass
        return self._source.read(path, offset, length, fresh, tag)

    def mirrors(self, folder: str) -> bool:
        """True if the mirror has files of this folder."""
        return bool(self._mirror.names(folder))

    def close(self) -> None:
        self._source.close()
