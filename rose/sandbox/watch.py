"""What has changed in a sandbox since the last look, as its process 1 sees it.

Files: the overlay's upper layer lies in memory, where a change of content, attributes or links sets
the inode's ctime, which no program can choose, and one of names that of its folder. A folder is
read again if its own ctime moved or inotify has told of one of its files; so a look costs as much
as there are folders and changes, not files. One thing changes no time at all: a write through a
memory map to a page that was read before (measured, Linux 6.18: a tmpfs gives such pages writable).
inotify tells that a file which was open for writing was closed; such files, and those that living
processes have mapped, are `unsure`: a copy of their content may be stale although their times are
not. Without inotify every look reads everything and can't say that nothing changed.

Processes: one that was neither begun nor switched in by the scheduler has done nothing itself. What
others can do to it is looked for: to its priority and limits, to files without a name that it has
open, and to its pipes, terminals and sockets, where anything unread counts as changed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from dataclasses import dataclass, field
from typing import Any

from rose.sandbox import kernel, unread
from rose.sandbox.layer import SHARED
from rose.sandbox.unread import SYSTEM_V, TERMINALS
from rose.sandbox.written import Written

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC
UNSURE_BYTES = 32 << 10  # of paths as JSON, and more are all: an answer of process 1 is bounded
SETTLE_S = 2.0  # for the session's bash to wait for its next command: it does within a millisecond
READ_CALL = {"x86_64": "0", "aarch64": "63"}.get(os.uname().machine, "?")
# Of /proc/PID/status: what else a shell takes along when it is begun anew
ATTRIBUTES = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "SigCgt", "Cpus_allowed:", "Mems_allowed:")
OWN_PIPES = "/run/rose/"  # the session's, by which commands come and output goes
PENDING = ("SigPnd", "ShdPnd")


# --------------------------------------------------------------------------- files


@dataclass
class Folder:
    """One of the upper layer: `own` is its inode, mode and owners with its extended attributes,
    `files` the inode, mode and ctime of each file by its name, `folders` those in it."""

    own: tuple
    times: tuple[int, int, int]  # ctime, mtime, atime in ns
    files: dict[str, tuple[int, int, int]]
    folders: frozenset[str]

    def difference(self, new: Folder) -> str | None:
        """The name of something that differs, "" for the folder itself, None if nothing does: a
        file that came and went leaves its folder as it was."""
        for name in (self.files.items() ^ new.files.items()) | {
            (name, None) for name in self.folders ^ new.folders
        }:
            return name[0]
        changed, modified, accessed = new.times
        # names that come and go set both times; an mtime of its own was chosen by a program
        chosen = modified not in (self.times[1], changed) or (
            accessed == modified == changed and accessed != self.times[2]
        )
        return "" if self.own != new.own or chosen else None


class Layer:
    """What an agent can write below `at` in the sandbox ("": its root), where it lies in the folder
    `root` (a file descriptor). `queue`: inotify's, which all layers of a sandbox share, as a user
    has few; or why there is none."""

    def __init__(self, root: int, at: str, queue: int | OSError) -> None:
        self.root, self.at = root, f"/{at}".rstrip("/")
        self.known: dict[str, Folder] = {}  # path from the root of the layer -> what it was
        self.watched: dict[int, str] = {}  # number of inotify's -> path
        self.blind = ""  # why changes through memory maps can't be seen
        self.device = os.stat(f"/{at}").st_dev
        self.queue = queue
        if isinstance(queue, OSError):
            self._give_up(queue)

    def _give_up(self, error: OSError) -> None:
        remedy = "raise fs.inotify.max_user_instances and max_user_watches"
        self.blind = f"no inotify ({error}): {remedy}"

    def look(self, events: list[kernel.Event]) -> tuple[str | None, list[str] | None]:
        """A path that changed (None: none did), and the files whose content may have changed
        although their times have not (None: any). `events`: the queue's."""
        told, closed, lost = self._events(events)
        changed: str | None = None
        seen, left = set(), [""]
        while left:
            path = left.pop()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # gone just now
                found, difference = self._folder(path, lost or path in told)
                if difference is not None and changed is None:
                    changed = f"{path}/{difference}" if path and difference else path or difference
                seen.add(path)
                left += [f"{path}/{name}" if path else name for name in found.folders]
        if gone := self.known.keys() - seen:
            changed = changed or min(gone)
            for path in gone:
                del self.known[path]
        if lost or self.blind:
            return changed, None
        return changed, sorted(filter(self._is_there, closed))

    def _folder(self, path: str, told: bool) -> tuple[Folder, str | None]:
        """The folder as it is, read only if it may have changed, and what differs in it."""
        status = os.stat(path or ".", dir_fd=self.root, follow_symlinks=False)
        old = self.known.get(path)
        same = old is not None and old.own[0] == status.st_ino
        if same and not told and not self.blind and old.times[0] == status.st_ctime_ns:
            return old, None
        if not same:
            self._watch(path)
        new = self.known[path] = self._read(path)
        return new, old.difference(new) if old is not None else ""

    def _read(self, path: str) -> Folder:
        fd = os.open(path or ".", FOLDER_FLAGS, dir_fd=self.root)
        try:
            files, folders = {}, set()
            with os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(found.st_mode):
                            folders.add(entry.name)
                        else:
                            files[entry.name] = (found.st_ino, found.st_mode, found.st_ctime_ns)
            own = os.fstat(fd)
            with contextlib.suppress(OSError):  # a file system without them
                names = sorted(os.listxattr(fd))
                attributes = tuple((name, os.getxattr(fd, name)) for name in names)
        finally:
            os.close(fd)
        itself = (own.st_ino, own.st_mode, own.st_uid, own.st_gid, attributes)
        times = (own.st_ctime_ns, own.st_mtime_ns, own.st_atime_ns)
        return Folder(itself, times, files, frozenset(folders))

    def _watch(self, path: str) -> None:
        """What programs do they do in the overlay: the layer's own files tell of nothing."""
        if self.blind:
            return
        try:
            shown = f"{self.at}/{path}"
            if os.stat(shown, follow_symlinks=False).st_dev == self.device:
                self.watched[kernel.watch_folder(self.queue, shown)] = path
        except (FileNotFoundError, NotADirectoryError):
            pass  # it was removed just now
        except OSError as error:
            self._give_up(error)

    def _events(self, events: list[kernel.Event]) -> tuple[set[str], set[str], bool]:
        """The folders of whose files inotify tells, the files that were open for writing, and
        whether it has lost some, because there were too many."""
        told, closed, lost = set(), set(), False
        for folder, mask, name in events:
            lost = lost or bool(mask & kernel.IN_Q_OVERFLOW)
            path = self.watched.get(folder)
            if mask & kernel.IN_IGNORED:
                self.watched.pop(folder, None)
            elif path is not None:
                told.add(path)
                if mask & kernel.IN_CLOSE_WRITE and name:
                    closed.add(f"{path}/{name}" if path else name)
        return told, closed, lost

    def _is_there(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return folder in self.known and name in self.known[folder].files


# --------------------------------------------------------------------------- processes


@dataclass
class Running:
    """A living process: what it is, how often it was switched in, and what it has open."""

    name: str
    switches: tuple
    limits: tuple[str, ...] = ()  # priority, scheduling, and signals that wait for it
    nameless: dict[str, tuple] = field(default_factory=dict)  # files without a name, as `open`
    open: dict[str, tuple] = field(default_factory=dict)  # file -> its inode and ctime
    mapped: tuple[str, ...] = ()  # files that it may write through memory


class Processes:
    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Running] = {}  # process, clock ticks after boot at start

    def look(
        self, spare: tuple[int, ...], changed: bool, queues: Queues
    ) -> tuple[str | None, set[str]]:
        """What one of them did in words (None: nothing), and the files that some may write through
        memory. `changed`: whether files did: then one that is open in a process which has slept
        matters, as its image would not fit. `queues` gets theirs."""
        found: dict[tuple[str, str], Running] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in spare:
                with contextlib.suppress(OSError):  # it has ended just now
                    key, running = _process(name)
                    if key is not None:
                        found[key] = running
                        running.nameless = queues.hold(name)
        words = None
        for key, running in found.items():
            old = self.known.get(key)
            ran = old is None or old.switches != running.switches or "R" in running.switches
            if ran or changed:
                with contextlib.suppress(OSError):
                    running.open, running.mapped = _open_files(key[0])
            else:
                running.open, running.mapped = old.open, old.mapped
            if old is None:
                words = words or f"process {running.name} was begun"
            elif ran:
                words = words or f"process {running.name} ran"
            elif old.limits != running.limits:
                words = words or f"the limits or signals of process {running.name} changed"
            elif old.nameless != running.nameless:
                words = words or f"process {running.name} has a file without a name, which changed"
            elif old.open != running.open:
                other = next(iter(old.open.items() ^ running.open.items()))[0]
                words = words or f"process {running.name} has {other} open, which changed"
        for key in self.known.keys() - found.keys():
            words = words or f"process {self.known[key].name} ended"
        mapped = {m for each in (self.known, found) for r in each.values() for m in r.mapped}
        self.known = found
        return words, mapped

    def resume(self) -> None:
        """Take the switches anew: who saves a process makes it run."""
        for key, running in self.known.items():
            with contextlib.suppress(OSError):
                again, now = _process(key[0])
                if again == key:
                    running.switches = now.switches


def _read(path: str, errors: str = "replace") -> str:
    with open(path, errors=errors, encoding="utf-8") as file:
        return file.read()


def _process(pid: str) -> tuple[tuple[str, str] | None, Running]:
    """Its number and start, None if only its exit code is left. Raises OSError."""
    before, _, after = _read(f"/proc/{pid}/stat").rpartition(")")
    values = after.split()
    running = Running(before.partition("(")[2], ())
    if values[0] in "ZX":
        return None, running
    limits = (_read(f"/proc/{pid}/limits"), _read(f"/proc/{pid}/oom_score_adj"))
    running.limits = (*values[15:17], *values[37:39], *limits)
    threads = os.listdir(f"/proc/{pid}/task") if values[17] != "1" else [pid]
    for thread in sorted(threads):
        for line in _read(f"/proc/{pid}/task/{thread}/status").split("\n"):
            if "ctxt_switches" in line:
                running.switches += (thread, line.split()[1])
            elif line == "State:\tR (running)":
                running.switches += ("R",)
            elif line.startswith(PENDING):
                running.limits += (line,)
    return (pid, values[19]), running


def _open_files(pid: str) -> tuple[dict[str, tuple], tuple[str, ...]]:
    """The regular files that a process has open or mapped, with inode and ctime, but for those that
    it can only append to; and those that it may write through memory. Raises OSError."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode) and not _appends(_descriptor(pid, fd)):
            found[os.readlink(path)] = (status.st_ino, status.st_ctime_ns)
    mapped = []
    for line in _read(f"/proc/{pid}/maps", "surrogateescape").split("\n")[:-1]:
        _, rights, *_, path = line.split(" ", 5)
        path = path.strip().removesuffix(" (deleted)")
        if path.startswith("/"):
            found[path] = ()
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                found[path] = (status.st_ino, status.st_ctime_ns)
            if "w" in rights and "s" in rights:
                mapped.append(path.lstrip("/"))
    return found, tuple(mapped)


class Queues:
    """Pipes, terminals and sockets that processes have open, of one look."""

    def __init__(self) -> None:
        # device and inode, or what a terminal's either end is -> process and descriptor
        self.ends: dict[tuple, tuple[int, int]] = {}
        self.sockets: set[int] = set()

    def hold(self, pid: str) -> dict[str, tuple]:
        """Take those of a process along; its open files without a name, with inode, size and ctime:
        nothing else keeps them. Raises OSError."""
        found = {}
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with contextlib.suppress(FileNotFoundError):  # closed just now
                status, link = os.stat(path), os.readlink(path)
                if stat.S_ISSOCK(status.st_mode):
                    self.sockets.add(status.st_ino)
                elif stat.S_ISFIFO(status.st_mode) and not link.startswith(OWN_PIPES):
                    self.ends[status.st_dev, status.st_ino] = int(pid), int(fd)
                elif link.startswith(TERMINALS):  # of several masters each is one of its own
                    which = (pid, fd) if link.endswith("ptmx") else ()
                    self.ends[link, *which] = int(pid), int(fd)
                elif stat.S_ISREG(status.st_mode) and link.endswith(" (deleted)"):
                    found[link] = (status.st_ino, status.st_size, status.st_ctime_ns)
        return found

    def full(self) -> str | None:
        """A word for one that has something unread, or may have."""
        for pid, fd in self.ends.values():
            with contextlib.suppress(ProcessLookupError):
                if unread.waiting(pid, fd):
                    return "a pipe or terminal"
        return "a socket" if self.sockets and self.sockets & unread.sockets() else None


def _descriptor(pid: str, fd: str) -> dict[str, str]:
    """Of /proc/PID/fdinfo: `pos`, `flags` (octal) and, where there is one, the last `lock`."""
    lines = _read(f"/proc/{pid}/fdinfo/{fd}").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _appends(descriptor: dict[str, str]) -> bool:
    flags = int(descriptor["flags"], 8)
    return bool(flags & os.O_APPEND) and flags & os.O_ACCMODE == os.O_WRONLY


# --------------------------------------------------------------------------- the session


def waits(session: int) -> bool:
    """Whether the session's bash waits for its next command, within `SETTLE_S`: only then has it
    put its file descriptors back."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        if _read(f"/proc/{session}/syscall").startswith(f"{READ_CALL} 0x0 "):
            return True
        time.sleep(0.0002)
    return False


def session_state(session: int) -> dict[str, str]:
    """What the kernel holds of the session, in parts with names. Raises OSError."""
    values = _read(f"/proc/{session}/stat").rpartition(")")[2].split()
    status = _read(f"/proc/{session}/status").splitlines()
    parts = {
        "the shell itself": f"{session} {values[19]}",
        "the shell's priority": " ".join(values[15:17] + values[37:39]),
        "the shell's rights and signals": "\n".join(x for x in status if x.startswith(ATTRIBUTES)),
        "the working directory": os.readlink(f"/proc/{session}/cwd"),
        "System V's shared memory": "".join(map(_read, SYSTEM_V)),
    }
    lines = []
    for fd in sorted(os.listdir(f"/proc/{session}/fd"), key=int):
        about, seen = _descriptor(str(session), fd), os.stat(f"/proc/{session}/fd/{fd}")
        line = f"{fd} {os.readlink(f'/proc/{session}/fd/{fd}')} {about['flags']}"
        line += f" {about.get('lock', '')}"
        if stat.S_ISREG(seen.st_mode) and not _appends(about):
            line += f" {about['pos']} {seen.st_ino} {seen.st_ctime_ns}"
        lines.append(line)
    return parts | {"the shell's open files": "\n".join(lines)}


class Watch:
    """What process 1 remembers between two looks. `upper`: the root of the overlay's upper layer (a
    file descriptor)."""

    def __init__(self, upper: int) -> None:
        shared = os.open(f"/{SHARED}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.queue: int | OSError = kernel.event_queue()
        except OSError as error:
            self.queue = error
        self.layers = (Layer(upper, "", self.queue), Layer(shared, SHARED, self.queue))
        self.processes = Processes()
        self.written = Written(self.queue)
        self.events: list[kernel.Event] = []  # the queue's, for the next look
        self.session: dict[str, str] = {}
        self.full: str | None = None

    def _events(self) -> list[kernel.Event]:
        new = kernel.events(self.queue) if isinstance(self.queue, int) else []
        return self.events + new

    def resume(self) -> None:
        """Count what a capture did to processes as no change of the agent's."""
        self.processes.resume()
        self.events = self.written.others(self._events())

    def look(self, session: int, spare: tuple[int, ...]) -> dict[str, Any]:
        """`session`: the process of the session's bash; `spare`: others that are not the agent's.
        `files` and `processes` say in words what changed since the last look (null: nothing did),
        `unsure` as `Layer.look`, `blind` why a change of files may not be seen. Raises OSError."""
        if session == 0 or not waits(session):
            raise OSError(errno.EAGAIN, "the shell does not wait for a command")
        changed: str | None = None
        unsure: set[str] | None = set()
        events, self.events = self._events(), []
        for layer in self.layers:
            path, doubted = layer.look(events)
            changed = f"{layer.at}/{path}" if changed is None and path is not None else changed
            if doubted is None or unsure is None:
                unsure = None
            else:
                unsure |= {f"{layer.at}/{each}"[1:] for each in doubted}
        queues = Queues()
        queues.hold(str(session))
        words, mapped = self.processes.look((1, session, *spare), changed is not None, queues)
        words = words or self.written.seen(events)
        names = {key: running.name for key, running in self.processes.known.items()}
        self.written.watch({**names, (str(session), ""): "the shell"})
        state, before = session_state(session), self.session
        self.session = state
        for key, value in state.items():
            if before.get(key) != value:
                words = words or f"{key} changed"
        try:
            full = queues.full()
        except OSError as error:
            full = f"it can't be seen ({error}) whether a pipe, terminal or socket"
        if full or self.full:
            words = words or f"{full or self.full} had something unread"
        self.full = full
        named = None if unsure is None else sorted(unsure | mapped)
        if named is not None and len(json.dumps(named)) > UNSURE_BYTES:
            named = None
        return {
            "files": None if changed is None else f"{changed} changed",
            "processes": words,
            "unsure": named,
            "blind": " ".join(filter(None, (layer.blind for layer in self.layers))),
        }
