"""Where readers of weight versions get bytes: a folder that they see, or a relay (`relay.py`) over
HTTP.

`relay_client.open_source` makes one of a folder's path or a relay's URL.

Paths are relative to the store's root and separated by "/"; names that begin with a dot are other
people's temporary files, neither listed nor read. Files never change under their name while their
version lives; one that was written anew after a resumed run has another `Stat.tag`. A lease
(`hold`) keeps folders from the garbage collector, which asks `leases`. Errors are `TransferError`s
that name the store and the path.
"""

from __future__ import annotations

import errno
import os
import re
import stat as modes
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from rose.files import write_whole
from rose.transfer.errors import Missing, TransferError

LEASES = "leases"  # folder of the root
MAX_LEASE_S = (
    3600.0  # a reader renews within minutes; whoever does not is gone, and its lease with it
)
FORGET_S = (
    60.0  # expired for so long: removed. Not at once: its holder may be renewing it this moment
)
_MAX_PATH = 180  # characters: a relay makes one file name of a folder's path
_NAME = re.compile(r"[A-Za-z0-9_+=,-][A-Za-z0-9._+=,-]*")  # of a file or folder
_HOLDER = re.compile(r"[A-Za-z0-9._-]{1,100}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")


class Refused(TransferError):
    """Asking again would not help: wrong token, a path or range that cannot be."""


class Changed(Refused):
    """The file under this name is no longer the one with the tag that was asked for."""


class Stat(NamedTuple):
    size: int  # bytes
    tag: str  # [A-Za-z0-9._-]{1,64}: another one if the file was written anew


class Source(Protocol):
    """Used from several threads at once. `hold` refuses more than `MAX_LEASE_S` seconds."""

    def names(self, path: str) -> list[str]:
        """Sorted names in the folder `path` ("" is the root); [] if there is none."""

    def size(self, path: str) -> int | None:
        """Bytes of the file; None if there is none."""

    def stat(self, path: str) -> Stat | None: ...

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

    def hold(self, holder: str, edges: list[str], seconds: float) -> None:
        """Lease: these folders (such as "v000012/from-000011") are not collected for `seconds`.
        Replaces the holder's former list; [] gives all back."""

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
        f"beginning with a dot, {_MAX_PATH} characters at most"
    )


def checked_lease(holder: str, edges: list[str], seconds: float) -> None:
    """Raises `Refused` for what is no lease."""
    if not _HOLDER.fullmatch(holder):
        raise Refused(f"holder {holder[:200]!r}: expected 1 to 100 letters, digits or ._-")
    if edges and not 0 < seconds <= MAX_LEASE_S:
        raise Refused(
            f"lease of {holder} for {seconds} s: expected more than 0, {MAX_LEASE_S:.0f} at most; "
            "renew it"
        )
    for edge in edges:
        checked(edge)


class Folder:
    """A store in a folder. Every read opens the file anew: that is what makes NFS look whether it
    is still the one."""

    def __init__(self, root: str | Path):
        self.root = Path(os.path.realpath(root))
        self._warned = False

    def __str__(self) -> str:
        return str(self.root)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(
                name
                for name in os.listdir(self._inside(path, root_too=True))
                if _NAME.fullmatch(name)
            )
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise TransferError(f"{self.root / path}: {error.strerror}") from error

    def size(self, path: str) -> int | None:
        found = self.stat(path)
        return None if found is None else found.size

    def stat(self, path: str) -> Stat | None:
        try:
            status = os.stat(self._inside(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
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
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Missing(f"{self.root / path}: {error.strerror}") from error
        except OSError as error:
            raise TransferError(f"{self.root / path}: {error.strerror}") from error

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

    def hold(self, holder: str, edges: list[str], seconds: float) -> None:
        """As `Source.hold`. On a store that takes no files, or whose disk is full, a lease is not
        possible: warns once and goes on."""
        checked_lease(holder, edges, seconds)
        path = self.root / LEASES / f"{holder}.json"
        try:
            if edges:
                path.parent.mkdir(exist_ok=True)
                write_whole(
                    path, msgspec.json.encode({"edges": edges, "until": time.time() + seconds})
                )
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in (
                errno.EROFS,
                errno.EACCES,
                errno.EPERM,
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EFBIG,
            ):
                raise TransferError(f"{path}: lease not written: {error.strerror}") from error
            if not self._warned:
                warnings.warn(
                    f"{path}: {error.strerror}: this store takes no leases, so versions may be "
                    "collected while they are read, and readers then begin anew",
                    stacklevel=2,
                )
            self._warned = True

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


class _Lease(msgspec.Struct):
    edges: list[str]
    until: float  # unix seconds, of the holder's clock


def leases(root: str | Path, now: float) -> set[str]:
    """The folders that some reader holds at `now` (unix seconds)."""
    return set(held_until(root, now))


def held_until(root: str | Path, now: float) -> dict[str, float]:
    """Folders that are held at `now`, and until when (both unix seconds).

    No lease is longer than `MAX_LEASE_S` after its file was written, whatever it says. A file that
    can't be read holds nothing, as it doesn't say what: its reader finds a folder gone, at worst,
    and takes another route. Both kinds are removed when that time is over, expired ones after
    `FORGET_S`."""
    held: dict[str, float] = {}
    for path in Path(root, LEASES).glob("*.json"):
        with suppress(OSError):  # given back meanwhile; or not ours to remove
            longest = path.stat().st_mtime + MAX_LEASE_S
            try:
                lease = msgspec.json.decode(path.read_bytes(), type=_Lease)
                until = min(lease.until, longest)
            except (OSError, msgspec.DecodeError):
                lease, until = _Lease([], longest), longest
            if until > now:
                for edge in lease.edges:
                    held[edge] = max(until, held.get(edge, 0.0))
            elif until + FORGET_S < now:
                path.unlink()
    return held


class Within:
    """A folder of another source as a store of its own."""

    def __init__(self, source: Source, folder: str):
        self._source, self._folder = source, checked(folder)

    def __str__(self) -> str:
        return f"{self._source}/{self._folder}"

    def names(self, path: str) -> list[str]:
        return self._source.names(f"{self._folder}/{path}" if path else self._folder)

    def size(self, path: str) -> int | None:
        return self._source.size(f"{self._folder}/{path}")

    def stat(self, path: str) -> Stat | None:
        return self._source.stat(f"{self._folder}/{path}")

    def read(
        self,
        path: str,
        offset: int = 0,
        length: int | None = None,
        fresh: bool = False,
        tag: str | None = None,
    ) -> bytes:
        return self._source.read(f"{self._folder}/{path}", offset, length, fresh, tag)

    def hold(self, holder: str, edges: list[str], seconds: float) -> None:
        self._source.hold(holder, [f"{self._folder}/{edge}" for edge in edges], seconds)

    def close(self) -> None:
        self._source.close()
