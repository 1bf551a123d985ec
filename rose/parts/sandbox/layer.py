"""Record a sandbox's changed files as a listing and contents, and fill a new layer with them.

`record` walks the overlay's upper layer and /dev/shm, which is not part of the overlay. `fill`
fills an empty layer. Both run in the sandbox's user namespace: owners are those that the agent
sees, and root may read each file. A listing has one entry per file, and a folder comes before its
contents:

    path        from the root, "." for the root; bytes beyond UTF-8 as os.fsdecode returns them
    kind        file, dir, link, whiteout (a removed file of the lower layer), fifo or socket
    mode, uid, gid, size, mtime_ns, ctime_ns, ino, xattrs (values as latin-1), target (of a link)
    same        path of an earlier entry that is the same file (a hard link)
    data        "data/N"; null for a file that has not changed since the listing `since`
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from typing import Any

SHARED = "dev/shm"
# File times have the resolution of the kernel's clock tick. So a write soon after the capture may
# not change them. A ctime younger than `TICK_NS` is recorded as 0, which the next capture takes as
# changed. The value is twice the longest tick, 10 ms (CONFIG_HZ=100).
TICK_NS = 20_000_000
KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "whiteout",  # device 0:0 of an overlay; a sandbox can make no other device
}
MODES = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "whiteout": stat.S_IFCHR}
KEYS = {"path", "kind", "mode", "uid", "gid", "mtime_ns", "xattrs"}
DATA = re.compile(r"data/(\d+)")

Entry = dict[str, Any]


class Recorder:
    """Records folders. `into`: descriptor of a folder for contents. `since`: path -> entry of an
    earlier listing. `mapped`: inodes that processes may have written without changing times."""

    def __init__(self, into: int, since: dict[str, Entry], mapped: frozenset[int]) -> None:
        self.into, self.since, self.mapped = into, since, mapped
        self.entries: list[Entry] = []
        self.bytes = 0  # size of the contents that were copied
        self._first: dict[tuple[int, int], str] = {}  # (device, inode) -> path of the first entry
        self._copied = 0

    def record(self, root: int, prefix: str) -> None:
        """Record `root` (a file descriptor) as `prefix`, and make it the working directory."""
        os.fchdir(root)
        self._record_entry(prefix, ".")
        self._record_contents(prefix, ".")

    def _record_contents(self, prefix: str, at: str) -> None:
        waiting = [at]
        while waiting:
            folder = waiting.pop()
            for name in sorted(os.listdir(folder)):
                path = name if folder == "." else f"{folder}/{name}"
                shown = path if prefix == "." else f"{prefix}/{path}"
                if self._record_entry(shown, path) == "dir":
                    waiting.append(path)

    def _record_entry(self, shown: str, path: str) -> str:
        """Record `path` as `shown`, copy its content if necessary, and return its kind."""
        found = os.lstat(path)
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "")
        if not kind:
            raise ValueError(f"/{shown}: a kind of file that can't be captured")
        entry: Entry = {
            "path": shown,
            "kind": kind,
            "mode": stat.S_IMODE(found.st_mode),
            "uid": found.st_uid,
            "gid": found.st_gid,
            "size": found.st_size if kind == "file" else 0,
            "mtime_ns": found.st_mtime_ns,
            "ctime_ns": 0 if time.time_ns() - found.st_ctime_ns < TICK_NS else found.st_ctime_ns,
            "ino": found.st_ino,
            "xattrs": {},
            "target": os.readlink(path) if kind == "link" else None,
            "data": None,
        }
        if kind in ("file", "dir"):
            for name in os.listxattr(path):
                entry["xattrs"][name] = os.getxattr(path, name).decode("latin-1")
        if kind != "dir" and found.st_nlink > 1 and kind != "whiteout":
            first = self._first.setdefault((found.st_dev, found.st_ino), shown)
            if first != shown:
                entry["same"] = first
        if kind == "file" and "same" not in entry and not self._unchanged(entry):
            entry["data"] = f"data/{self._copied}"
            self._copy(path, str(self._copied))
            self._copied += 1
        self.entries.append(entry)
        return kind

    def _unchanged(self, entry: Entry) -> bool:
        before = self.since.get(entry["path"])
        return (
            before is not None
            and "same" not in before
            and entry["ino"] not in self.mapped
            and entry["ctime_ns"] != 0
            and all(before.get(k) == entry[k] for k in ("ino", "size", "mtime_ns", "ctime_ns"))
        )

    def _copy(self, path: str, name: str) -> None:
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        target = os.open(name, flags, 0o600, dir_fd=self.into)
        try:
            self.bytes += copy(source, target)
        finally:
            os.close(source)
            os.close(target)


def copy(source: int, target: int) -> int:
    """Copy a regular file with its holes, and return the bytes of its data. Raises OSError."""
    size, at, copied = os.fstat(source).st_size, 0, 0
    os.ftruncate(target, size)
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole to the end
                break
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(target, source, at, end - at)
            if sent == 0:
                return copied
            at += sent
            copied += sent
    return copied


class Filler:
    """Fills layers from a listing and the folder `data` with contents (file descriptors). Raises
    OSError, and ValueError for a listing that `record` can't have written."""

    def __init__(self, listing: int, data: int) -> None:
        self.data = data
        with os.fdopen(listing, encoding="utf-8") as file:
            try:
                entries = list(json.load(file))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"the listing is damaged: {error}") from None
        shared = (SHARED, f"{SHARED}/")
        self.entries: dict[str, list[Entry]] = {".": [], SHARED: []}
        for entry in entries:
            if not (isinstance(entry, dict) and set(entry) >= KEYS):
                raise ValueError(f"an entry without all of {', '.join(sorted(KEYS))}: {entry!r}")
            inside = entry["path"] == shared[0] or str(entry["path"]).startswith(shared[1])
            self.entries[SHARED if inside else "."].append(entry)

    def fill(self, root: str, prefix: str) -> None:
        """Fill the empty folder `root` with the entries below `prefix`."""
        back = os.open(".", os.O_RDONLY)
        os.chdir(root)
        try:
            made = {".": "dir"}
            entries = [(self._relative(e["path"], prefix), e) for e in self.entries[prefix]]
            for path, entry in entries:
                self._create(path, entry, made, prefix)
            for path, entry in reversed(entries):  # last, because new entries change folders' times
                os.utime(path, ns=(entry["mtime_ns"],) * 2, follow_symlinks=False)
        finally:
            os.fchdir(back)
            os.close(back)

    @staticmethod
    def _relative(path: Any, prefix: str) -> str:
        if path == prefix:
            return "."
        return str(path) if prefix == "." else str(path).removeprefix(f"{prefix}/")

    def _create(self, path: str, entry: Entry, made: dict[str, str], prefix: str) -> None:
        """Create an entry. Its folder was created here, too, so that no link leads elsewhere."""
        kind, name = entry["kind"], os.path.basename(path)
        if path != "." and (made.get(os.path.dirname(path) or ".") != "dir" or path in made):
            raise ValueError(f"{path!r}: not below a folder of the listing, or twice in it")
        if name in ("", "..") or kind not in KINDS.values() or (path == "." and kind != "dir"):
            raise ValueError(f"{path!r} is no {kind!r}")
        if "same" in entry:
            first = self._relative(entry["same"], prefix)
            if made.get(first) != kind:
                raise ValueError(f"{path!r}: the same as {first!r}, which is no {kind} before it")
            os.link(first, path, follow_symlinks=False)
            made[path] = kind
            return
        if kind == "dir":
            if path != ".":
                os.mkdir(path, 0o700)
        elif kind == "link":
            os.symlink(entry["target"], path)
        elif kind == "file":
            self._create_file(path, entry)
        else:
            os.mknod(path, MODES[kind] | 0o600)
        made[path] = kind
        os.chown(path, entry["uid"], entry["gid"], follow_symlinks=False)
        if kind != "link":
            os.chmod(path, entry["mode"])
        for key, value in entry["xattrs"].items():
            os.setxattr(path, key, value.encode("latin-1"))

    def _create_file(self, path: str, entry: Entry) -> None:
        found = DATA.fullmatch(str(entry.get("data")))
        if found is None:
            raise ValueError(
                f"the content of {path!r} is not in this capture but in an earlier one; "
                "`Store.save` combines them"
            )
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW
            source = os.open(found[1], flags, dir_fd=self.data)
            try:
                size = os.fstat(source).st_size
                if size != entry.get("size"):
                    raise ValueError(f"{path!r}: data has {size} bytes, not {entry.get('size')}")
                copy(source, target)
            finally:
                os.close(source)
        finally:
            os.close(target)


def mapped() -> frozenset[int]:
    """Return inodes of files that processes have mapped for writing, which changes no times."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/maps", "rb") as file:
                for line in file:
                    fields = line.split(None, 5)
                    if fields[1][1:2] == b"w" and fields[1][3:4] == b"s":
                        found.add(int(fields[4]))
    return frozenset(found)
