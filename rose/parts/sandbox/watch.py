"""Find what has changed in a sandbox since the last look, from its process 1.

Files: the overlay's upper layer is in memory. A change of content, attributes or links sets the
inode's ctime, which no program can choose. A change of names sets the folder's ctime. So a folder
is read again only if its own ctime changed or inotify reported one of its files. A write through a
memory map to a page that was read before changes no time (measured, Linux 6.18). Therefore files
that a process has mapped, or closed after writing, are `unsure`: a copy may be stale although their
times are the same. Without inotify, every look reads all folders and can't exclude a change.

Processes: a process that was neither started nor scheduled has done nothing itself. Other processes
can change its priority and limits, its open files without a name, and its pipes, terminals and
sockets. All of these are compared, and unread data counts as a change.
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

from rose.parts.sandbox import kernel, unread
from rose.parts.sandbox.layer import SHARED
from rose.parts.sandbox.unread import SYSTEM_V, TERMINALS
from rose.parts.sandbox.written import Written

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC
UNSURE_BYTES = 32 << 10  # most bytes of `unsure` in an answer; beyond it, null (all files)
SETTLE_S = 2.0  # seconds for bash to wait for its next command, which takes a millisecond
READ_CALL = {"x86_64": "0", "aarch64": "63"}.get(os.uname().machine, "?")  # number of read(2)
# Lines of /proc/PID/status that are state of the session
ATTRIBUTES = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "SigCgt", "Cpus_allowed:", "Mems_allowed:")
OWN_PIPES = "/run/rose/"  # folder of the session's pipes of commands, output and exit codes
PENDING = ("SigPnd", "ShdPnd")


# --------------------------------------------------------------------------- files


@dataclass
class Folder:
    """A folder of the upper layer. `own`: its inode, mode, owners and extended attributes. `files`:
    name -> inode, mode and ctime of a file in it. `folders`: names of the folders in it."""

    own: tuple
    times: tuple[int, int, int]  # ctime, mtime, atime in ns
    files: dict[str, tuple[int, int, int]]
    folders: frozenset[str]

    def difference(self, new: Folder) -> str | None:
        """Return the name of an entry that differs, "" for the folder itself, or None if nothing
        differs. A file that was created and removed again makes no difference."""
        for name in (self.files.items() ^ new.files.items()) | {
            (name, None) for name in self.folders ^ new.folders
        }:
            return name[0]
        changed, modified, accessed = new.times
        # A change of names sets ctime and mtime to the same value. A program has set the times if
        # the mtime is neither the old one nor the ctime, or if the atime is new and equals both.
        chosen = modified not in (self.times[1], changed) or (
            accessed == modified == changed and accessed != self.times[2]
        )
        return "" if self.own != new.own or chosen else None


class Layer:
    """The files that an agent can write below `at` in the sandbox ("": its root). They are in the
    folder `root` (a file descriptor). `queue`: inotify's queue, or the error if there is none. All
    layers of a sandbox share the queue, because a user may have few."""

    def __init__(self, root: int, at: str, queue: int | OSError) -> None:
        self.root, self.at = root, f"/{at}".rstrip("/")
        self.known: dict[str, Folder] = {}  # path from the layer's root -> folder at the last look
        self.watched: dict[int, str] = {}  # watch number of inotify -> path
        self.blind = ""  # why changes through memory maps can't be seen
        self.device = os.stat(f"/{at}").st_dev
        self.queue = queue
        if isinstance(queue, OSError):
            self._set_blind(queue)

    def _set_blind(self, error: OSError) -> None:
        remedy = "raise fs.inotify.max_user_instances and max_user_watches"
        self.blind = f"no inotify ({error}): {remedy}"

    def look(self, events: list[kernel.Event]) -> tuple[str | None, list[str] | None]:
        """Return a path that changed (None: none did), and the files whose content may have changed
        although their times have not (None: any file). `events`: new events of the queue."""
        reported, closed, lost = self._events(events)
        changed: str | None = None
        seen, left = set(), [""]
        while left:
            path = left.pop()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # gone just now
                found, difference = self._folder(path, lost or path in reported)
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
        return changed, sorted(filter(self._is_known, closed))

    def _folder(self, path: str, reported: bool) -> tuple[Folder, str | None]:
        """Return the folder and how it differs from before. Read it only if it may have changed."""
        status = os.stat(path or ".", dir_fd=self.root, follow_symlinks=False)
        old = self.known.get(path)
        same = old is not None and old.own[0] == status.st_ino
        if same and not reported and not self.blind and old.times[0] == status.st_ctime_ns:
            return old, None
        if not same:
            self._watch(path)
        new = self.known[path] = self._read_folder(path)
        return new, old.difference(new) if old is not None else ""

    def _read_folder(self, path: str) -> Folder:
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
            with contextlib.suppress(OSError):  # a file system without attributes
                names = sorted(os.listxattr(fd))
                attributes = tuple((name, os.getxattr(fd, name)) for name in names)
        finally:
            os.close(fd)
        itself = (own.st_ino, own.st_mode, own.st_uid, own.st_gid, attributes)
        times = (own.st_ctime_ns, own.st_mtime_ns, own.st_atime_ns)
        return Folder(itself, times, files, frozenset(folders))

    def _watch(self, path: str) -> None:
        """Watch the folder as the overlay shows it, because the layer itself has no events."""
        if self.blind:
            return
        try:
            shown = f"{self.at}/{path}"
            if os.stat(shown, follow_symlinks=False).st_dev == self.device:
                self.watched[kernel.watch_folder(self.queue, shown)] = path
        except (FileNotFoundError, NotADirectoryError):
            pass  # removed just now
        except OSError as error:
            self._set_blind(error)

    def _events(self, events: list[kernel.Event]) -> tuple[set[str], set[str], bool]:
        """Return the folders of files with events, the files that were closed after writing, and
        whether inotify has lost events because there were too many."""
        reported, closed, lost = set(), set(), False
        for folder, mask, name in events:
            lost = lost or bool(mask & kernel.IN_Q_OVERFLOW)
            path = self.watched.get(folder)
            if mask & kernel.IN_IGNORED:
                self.watched.pop(folder, None)
            elif path is not None:
                reported.add(path)
                if mask & kernel.IN_CLOSE_WRITE and name:
                    closed.add(f"{path}/{name}" if path else name)
        return reported, closed, lost

    def _is_known(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return folder in self.known and name in self.known[folder].files


# --------------------------------------------------------------------------- processes


@dataclass
class Running:
    """A living process: its name, how often it was scheduled, and what it has open."""

    name: str
    switches: tuple
    limits: tuple[str, ...] = ()  # priority, scheduling, limits and pending signals
    nameless: dict[str, tuple] = field(default_factory=dict)  # open files without a name
    open: dict[str, tuple] = field(default_factory=dict)  # file -> its inode and ctime
    mapped: tuple[str, ...] = ()  # files that it may write through memory


class Processes:
    """The processes of a sandbox, as of the last look."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Running] = {}  # process, clock ticks after boot at start

    def look(
        self, spare: tuple[int, ...], changed: bool, queues: Queues
    ) -> tuple[str | None, set[str]]:
        """Return a text about what a process did (None: nothing), and the files that processes may
        write through memory. `changed`: files have changed, so open files of sleeping processes are
        compared, too: process images must fit them. Fill `queues`."""
        found: dict[tuple[str, str], Running] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in spare:
                with contextlib.suppress(OSError):  # ended just now
                    key, running = _process(name)
                    if key is not None:
                        found[key] = running
                        running.nameless = queues.add(name)
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
        """Read the counts of context switches again, because the processes ran for a capture."""
        for key, running in self.known.items():
            with contextlib.suppress(OSError):
                again, now = _process(key[0])
                if again == key:
                    running.switches = now.switches


def _read_text(path: str, errors: str = "replace") -> str:
    with open(path, errors=errors, encoding="utf-8") as file:
        return file.read()


def _process(pid: str) -> tuple[tuple[str, str] | None, Running]:
    """Return a process's key (id, start), None for a zombie, and its state. Raises OSError."""
    before, _, after = _read_text(f"/proc/{pid}/stat").rpartition(")")
    values = after.split()
    running = Running(before.partition("(")[2], ())
    if values[0] in "ZX":
        return None, running
    limits = (_read_text(f"/proc/{pid}/limits"), _read_text(f"/proc/{pid}/oom_score_adj"))
    running.limits = (*values[15:17], *values[37:39], *limits)
    threads = os.listdir(f"/proc/{pid}/task") if values[17] != "1" else [pid]
    for thread in sorted(threads):
        for line in _read_text(f"/proc/{pid}/task/{thread}/status").split("\n"):
            if "ctxt_switches" in line:
                running.switches += (thread, line.split()[1])
            elif line == "State:\tR (running)":
                running.switches += ("R",)
            elif line.startswith(PENDING):
                running.limits += (line,)
    return (pid, values[19]), running


def _open_files(pid: str) -> tuple[dict[str, tuple], tuple[str, ...]]:
    """Return `open` and `mapped` of a process (see `Running`). `open` has the regular files that it
    has open or mapped, except files to which it can only append. Raises OSError."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode) and not _only_appends(_descriptor(pid, fd)):
            found[os.readlink(path)] = (status.st_ino, status.st_ctime_ns)
    mapped = []
    for line in _read_text(f"/proc/{pid}/maps", "surrogateescape").split("\n")[:-1]:
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
    """Pipes, terminals and sockets that processes have open at one look."""

    def __init__(self) -> None:
        # (device, inode) of a pipe, or the name of a terminal's end -> (process, descriptor)
        self.ends: dict[tuple, tuple[int, int]] = {}
        self.sockets: set[int] = set()

    def add(self, pid: str) -> dict[str, tuple]:
        """Add the pipes, terminals and sockets of a process. Return its open files without a name,
        with inode, size and ctime, because no other part compares them. Raises OSError."""
        found = {}
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with contextlib.suppress(FileNotFoundError):  # closed just now
                status, link = os.stat(path), os.readlink(path)
                if stat.S_ISSOCK(status.st_mode):
                    self.sockets.add(status.st_ino)
                elif stat.S_ISFIFO(status.st_mode) and not link.startswith(OWN_PIPES):
                    self.ends[status.st_dev, status.st_ino] = int(pid), int(fd)
                elif link.startswith(TERMINALS):  # a name that all masters share
                    which = (pid, fd) if link.endswith("ptmx") else ()
                    self.ends[link, *which] = int(pid), int(fd)
                elif stat.S_ISREG(status.st_mode) and link.endswith(" (deleted)"):
                    found[link] = (status.st_ino, status.st_size, status.st_ctime_ns)
        return found

    def full(self) -> str | None:
        """Return the kind of an end with unread data, such as "a socket"; None if all are empty."""
        for pid, fd in self.ends.values():
            with contextlib.suppress(ProcessLookupError):
                if unread.waiting(pid, fd):
                    return "a pipe or terminal"
        return "a socket" if self.sockets and self.sockets & unread.sockets() else None


def _descriptor(pid: str, fd: str) -> dict[str, str]:
    """Read /proc/PID/fdinfo/FD: `pos`, `flags` (octal) and the last `lock`, if there is one."""
    lines = _read_text(f"/proc/{pid}/fdinfo/{fd}").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _only_appends(descriptor: dict[str, str]) -> bool:
    flags = int(descriptor["flags"], 8)
    return bool(flags & os.O_APPEND) and flags & os.O_ACCMODE == os.O_WRONLY


# --------------------------------------------------------------------------- the session


def waits_for_command(session: int) -> bool:
    """Wait up to `SETTLE_S` until the session's bash reads its next command. Return whether it
    does. Only then its file descriptors are the same as before the command."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        if _read_text(f"/proc/{session}/syscall").startswith(f"{READ_CALL} 0x0 "):
            return True
        time.sleep(0.0002)
    return False


def session_state(session: int) -> dict[str, str]:
    """Return the kernel's state of the session: name of a part -> its text. Raises OSError."""
    values = _read_text(f"/proc/{session}/stat").rpartition(")")[2].split()
    status = _read_text(f"/proc/{session}/status").splitlines()
    parts = {
        "the shell itself": f"{session} {values[19]}",
        "the shell's priority": " ".join(values[15:17] + values[37:39]),
        "the shell's rights and signals": "\n".join(x for x in status if x.startswith(ATTRIBUTES)),
        "the working directory": os.readlink(f"/proc/{session}/cwd"),
        "System V's shared memory": "".join(map(_read_text, SYSTEM_V)),
    }
    lines = []
    for fd in sorted(os.listdir(f"/proc/{session}/fd"), key=int):
        about, seen = _descriptor(str(session), fd), os.stat(f"/proc/{session}/fd/{fd}")
        line = f"{fd} {os.readlink(f'/proc/{session}/fd/{fd}')} {about['flags']}"
        line += f" {about.get('lock', '')}"
        if stat.S_ISREG(seen.st_mode) and not _only_appends(about):
            line += f" {about['pos']} {seen.st_ino} {seen.st_ctime_ns}"
        lines.append(line)
    return parts | {"the shell's open files": "\n".join(lines)}


class Watch:
    """Compares the sandbox with the last look. `upper`: descriptor of the overlay's upper layer."""

    def __init__(self, upper: int) -> None:
        shared = os.open(f"/{SHARED}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.queue: int | OSError = kernel.event_queue()
        except OSError as error:
            self.queue = error
        self.layers = (Layer(upper, "", self.queue), Layer(shared, SHARED, self.queue))
        self.processes = Processes()
        self.written = Written(self.queue)
        self.events: list[kernel.Event] = []  # events of the queue, for the next look
        self.session: dict[str, str] = {}
        self.full: str | None = None

    def _take_events(self) -> list[kernel.Event]:
        new = kernel.events(self.queue) if isinstance(self.queue, int) else []
        return self.events + new

    def resume(self) -> None:
        """Have the next `look` ignore what a capture did to processes."""
        self.processes.resume()
        self.events = self.written.others(self._take_events())

    def look(self, session: int, spare: tuple[int, ...]) -> dict[str, Any]:
        """Return what changed since the last look: texts `files` and `processes` (null: nothing),
        `unsure` as `Layer.look`, and `blind`, why a change of files may be missed. `session`: id of
        the session's bash; `spare`: ids of processes that are not the agent's. Raises OSError."""
        if session == 0 or not waits_for_command(session):
            raise OSError(errno.EAGAIN, "the shell does not wait for a command")
        changed: str | None = None
        unsure: set[str] | None = set()
        events, self.events = self._take_events(), []
        for layer in self.layers:
            path, doubted = layer.look(events)
            changed = f"{layer.at}/{path}" if changed is None and path is not None else changed
            if doubted is None or unsure is None:
                unsure = None
            else:
                unsure |= {f"{layer.at}/{each}"[1:] for each in doubted}
        queues = Queues()
        queues.add(str(session))
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
