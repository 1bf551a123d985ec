"""Process 1 of a sandbox: builds the root, starts the session, opens files, reaps processes.

The keeper (keeper.py) forks it. It exchanges messages with the host over one socket. No other
process in the sandbox has its capabilities, so no program of the agent can trace it, read its
memory or open its files. The session (the agent's bash) is a child of process 1, because a
checkpoint contains the session without process 1. A restored session gets a new process 1.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import time
from typing import Any, NoReturn

from rose.parts.sandbox import kernel, layer, unread
from rose.parts.sandbox.backend import GUARDED, MIB, SESSION
from rose.parts.sandbox.watch import OWN_PIPES, READ_CALL, Watch

MESSAGE_BYTES = 128 * 1024  # most bytes of a message
WORK = "work"  # mount point of a sandbox's own tmpfs, in the keeper's file system
SESSION_FILES = "/run/rose"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
KILL_ROUNDS = 200  # most rounds of 5 ms each; a fork bomb takes several
LOW_NUMBERS = 300  # RESERVED_PIDS of the kernel
# Most open files of an agent's program. The kernel refuses to pass descriptors (SCM_RIGHTS) if the
# user has more of them in flight than the sender may have open. Process 1 and the host may have at
# least twice as many open, so they can still pass descriptors when an agent can't.
MOST_FILES = 16_384
BEGAN_FIELD = 19  # start in clock ticks after boot: index in /proc/PID/stat, behind the name


def send(to: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send a message with file descriptors. Raises OSError."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    data = json.dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise OSError(errno.EMSGSIZE, f"{len(data)} bytes; at most {MESSAGE_BYTES}")
    to.sendmsg([data], rights)


def receive(source: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a message and its file descriptors; None if the other side has closed."""
    data, fds, _, _ = socket.recv_fds(source, MESSAGE_BYTES, 8)
    return (json.loads(data) if data else None), list(fds)


def run(
    spec: dict[str, Any], base: str, lower: str, control: socket.socket, saved: list[int]
) -> NoReturn:
    """Build the sandbox (see `build`) and serve the host until it closes `control`. The other
    processes of the PID namespace end with this one."""
    try:
        # The kernel drops signals for which process 1 has no handler, so SIGINT can't end it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        upper = build(spec, base, lower, saved)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        init = Init(spec, control, upper)
    except (OSError, ValueError, TypeError, KeyError) as error:
        send(control, {"failed": str(error)})
        os._exit(1)
    try:
        init.serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(control, {"broken": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


# --------------------------------------------------------------------------- the root file system


def build(spec: dict[str, Any], base: str, lower: str, saved: list[int]) -> int:
    """Mount an overlay over the folder `lower` and make it the root. Return a file descriptor of
    its upper layer, a bounded tmpfs with the files of `saved` (a listing and its contents)."""
    limits, work = spec["limits"], f"{base}/{WORK}"
    size = f"mode=755,size={limits['disk_mib']}m,nr_inodes={limits['files']}"
    kernel.mount("tmpfs", work, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    for name in ("upper", "changes", "root"):
        os.mkdir(f"{work}/{name}", 0o755)
    filler = None
    if saved:
        filler = layer.Filler(saved[0], saved[1])
        filler.fill(f"{work}/upper", ".")
    root = f"{work}/root"
    layers = f"lowerdir={lower},upperdir={work}/upper,workdir={work}/changes,userxattr,xino=on"
    kernel.mount("overlay", root, "overlay", kernel.MS_NODEV, layers)
    if spec["image"] is None:
        for name in os.listdir(f"{base}/host"):
            if os.path.exists(f"{base}/host/{name}/.rose-bound"):
                kernel.bind(f"/{name}", f"{root}/{name}", read_only=True)
        kernel.bind(f"{base}/host/etc", f"{root}/etc", read_only=True)
    for each in spec["mounts"]:
        if saved and os.path.realpath(root + each["target"]) != os.path.normpath(
            root + each["target"]
        ):
            raise ValueError(f"on the way to {each['target']} there is a link of the agent's")
        os.makedirs(root + each["target"], exist_ok=True)
        kernel.bind(each["source"], root + each["target"], read_only=True)
    for name in ("dev", "proc", "run", "tmp", "root"):
        # A link that the agent made would move the mount elsewhere.
        if name in ("dev", "proc", "run") and os.path.islink(f"{root}/{name}"):
            os.unlink(f"{root}/{name}")
        if not os.path.lexists(f"{root}/{name}"):
            os.mkdir(f"{root}/{name}")
    if not saved:
        os.chmod(f"{root}/tmp", 0o1777)
    mount_devices(f"{root}/dev")
    if filler is not None:
        filler.fill(f"{root}/{layer.SHARED}", layer.SHARED)
        os.close(saved[1])
    for name in GUARDED:
        guard(f"{root}/{name}")
    kernel.mount("proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    kernel.limit_watches(f"{root}/proc")
    create_session_pipes(root + SESSION_FILES)
    kernel.bring_up_loopback()
    socket.sethostname("sandbox")
    upper = os.open(f"{work}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.change_root(root)
    # This must follow the change of root, because a link in an image may lead outside of the root.
    os.makedirs(spec["workdir"], exist_ok=True)
    return upper


def guard(folder: str) -> None:
    """Mount an empty, read-only file system on `folder`, because a mount point can't be removed. If
    the agent removed the folder, the kernel would also detach what a check has mounted on it."""
    if os.path.islink(folder) or os.path.isfile(folder):
        os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    options = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_RDONLY
    kernel.mount("tmpfs", folder, "tmpfs", options, "mode=755,size=4k")


def mount_devices(folder: str) -> None:
    """Mount /dev on `folder`, read-only except /dev/shm. Captures include no other files of /dev,
    so an agent must not be able to write any."""
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        with open(f"{folder}/{name}", "w", encoding="utf-8"):
            pass
        kernel.bind(f"/dev/{name}", f"{folder}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{folder}/{name}")
    kernel.mount("devpts", f"{folder}/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", f"{folder}/ptmx")
    options = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", f"{folder}/shm", "tmpfs", options, "mode=1777,size=64m")
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{i}", f"{folder}/{name}")
    os.symlink("/proc/self/fd", f"{folder}/fd")
    kernel.set_attributes(kernel.AT_FDCWD, folder, kernel.ATTR_RDONLY)


def create_session_pipes(folder: str) -> None:
    """Create the session's pipes and script in `folder`, on a file system that the agent can't
    change. The pipes have names, because a checkpoint can't contain descriptors from outside."""
    if os.path.islink(folder):
        os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=64k")
    for name in ("commands", "output", "codes"):
        os.mkfifo(f"{folder}/{name}", 0o600)
    with open(f"{folder}/session", "w", encoding="utf-8") as file:
        file.write(SESSION)
    kernel.set_attributes(kernel.AT_FDCWD, folder, kernel.ATTR_RDONLY)


# --------------------------------------------------------------------------- process 1


class Init:
    """Serves the host's orders as process 1 of a sandbox."""

    def __init__(self, spec: dict[str, Any], control: socket.socket, upper: int) -> None:
        self.spec, self.control, self.upper = spec, control, upper
        self.watch: Watch | None = None  # None before the first look
        self.session = 0  # process id of the session's bash, 0 if there is none
        self.opening: set[int] = set()  # children that open files for the host
        names = ("commands", "output", "codes")
        self.pipes = tuple(os.open(f"{SESSION_FILES}/{n}", os.O_RDWR) for n in names)
        wake, self.woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.wake = wake
        signal.set_wakeup_fd(self.woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Send the session's pipes to the host, and carry out orders until it disconnects."""
        ends = tuple(
            os.open(f"{SESSION_FILES}/{n}", os.O_RDWR | os.O_NONBLOCK)
            for n in ("commands", "output", "codes")
        )
        send(self.control, {"ready": True}, ends)
        for fd in ends:
            os.close(fd)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self.wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake, 4096)
                self.reap()
            if self.control.fileno() in ready:
                order, _ = receive(self.control)
                if order is None:
                    return
                self.handle(order)

    def handle(self, order: dict[str, Any]) -> None:
        """Carry out an order and send its answer or an error."""
        if order["do"] == "open":
            self.open(order["path"], order["write"])
            return  # the child sends the answer
        fds = (self.upper,) if order["do"] == "upper" else ()
        try:
            answer = self.obey(order)
        except OSError as error:
            answer, fds = {"error": error.errno, "words": str(error)}, ()
        try:
            send(self.control, {"answer": answer}, fds)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise  # the host is gone
            send(self.control, {"answer": {"error": error.errno, "words": error.strerror}})

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order and return its answer. Raises OSError."""
        match order["do"]:
            case "end":
                end_others(0)
                self.reap()
            case "session":
                self.session = self.begin_session(order["cwd"])
                return {"pid": self.session}
            case "stop":
                end_others(order["since"], spare=(self.session,))
            case "cwd":
                return {"cwd": os.readlink(f"/proc/{self.session}/cwd")}
            case "idle":
                return {"idle": idle(self.session, unread.bytes_in(self.pipes[0]))}
            case "look":
                self.watch = self.watch or Watch(self.upper)
                return self.watch.look(self.session, tuple(self.opening))
            case "resume":
                if self.watch is not None:
                    self.watch.resume()
            case "adopt":  # a restored session, whose parent is now process 1
                os.kill(order["pid"], 0)
                self.session = order["pid"]
                leave_low_numbers()
            case "number":
                leave_low_numbers(order["last"])
            case "upper":
                pass  # the answer is a descriptor (see `handle`)
            case other:
                raise ValueError(f"process 1 of a sandbox has no use for {other}")
        return {}

    def reap(self) -> None:
        """Collect ended children. Report an ended session, and children that gave no answer."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.opening:
                self.opening.discard(pid)
                # A status other than 0 means that the child was killed before it answered, for
                # example by the kernel because the sandbox's memory was full.
                if status:
                    words = os.strerror(errno.ENOMEM)
                    send(self.control, {"answer": {"error": errno.ENOMEM, "words": words}})
            if pid == self.session:
                self.session = 0
                code = os.waitstatus_to_exitcode(status)
                send(self.control, {"ended": code})

    def fork_child(self) -> int:
        """Fork. The child has default signal handlers, and is killed first when memory is full."""
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Process 1 isn't dumpable, so it can't write its files in /proc. The child has to be.
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            with (
                contextlib.suppress(OSError),
                open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file,
            ):
                file.write("500")
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # undone by the program's execve
        return pid

    def begin_session(self, cwd: str | None) -> int:
        """Start the session's bash in the folder `cwd`. Return its process id."""
        leave_low_numbers()
        pid = self.fork_child()
        if pid:
            return pid
        try:
            # Orphans of its programs become children of bash, so that a capture finds them.
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            for fd, pipe in enumerate(self.pipes):
                os.dup2(pipe, fd)
            begin_program(
                ["/bin/bash", "--norc", "--noprofile", f"{SESSION_FILES}/session"],
                self.spec,
                cwd or self.spec["workdir"],
            )
        finally:
            os._exit(127)

    def open(self, path: str, write: bool) -> None:
        """Open a file for the host in a child that has no more rights than the session."""
        if pid := self.fork_child():
            self.opening.add(pid)
            return
        answered = False
        try:
            kernel.confine(False)
            flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            if write:
                os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
                fd = os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            else:
                fd = os.open(path, flags | os.O_RDONLY)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_dev == os.stat("/proc").st_dev:
                raise OSError(22, f"not a regular file: {path!r}")
            send(self.control, {"answer": {}}, (fd,))
            answered = True
        except Exception as error:  # such as RecursionError, for a path of a thousand folders
            code = getattr(error, "errno", None) or 22
            words = getattr(error, "strerror", None) or str(error)
            send(self.control, {"answer": {"error": code, "words": words}})
            answered = True
        finally:
            os._exit(not answered)


def leave_low_numbers(last: int = LOW_NUMBERS) -> None:
    """Give new processes ids above `last`. Lower ids are left to the processes that carry out a
    restore, so that restored processes find their own ids free. Linux never reuses low ids."""
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/kernel/ns_last_pid", "r+", encoding="utf-8") as file,
    ):
        if int(file.read()) < last:
            file.seek(0)
            file.write(str(last))


def begin_program(argv: list[str], spec: dict[str, Any], cwd: str) -> NoReturn:
    """Execute `argv` in this process, with the sandbox's limits and without process 1's rights."""
    # Python, nohup and a script's `&` have some signals ignored. The program must ignore none.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # signals that the C library reserves
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")
    os.umask(0o022)
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, files), files))
    processes = spec["limits"]["processes"]
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "memory" in spec["lacking"]:  # bound of each process, as the sandbox has none
        data = spec["limits"]["memory_mib"] * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    kernel.confine(True)
    os.execve(argv[0], argv, spec["variables"])


def idle(session: int, unread_bytes: int) -> bool:
    """Return whether the session's bash has read all commands and waits for the next one.

    `unread_bytes`: bytes in the pipe of commands, counted before this call. Raises OSError."""
    if unread_bytes or os.readlink(f"/proc/{session}/fd/0") != f"{OWN_PIPES}commands":
        return False
    with open(f"/proc/{session}/syscall", encoding="utf-8") as file:
        return file.read().startswith(f"{READ_CALL} 0x0 ")


def end_others(since: int, spare: tuple[int, ...] = ()) -> None:
    """Kill every process of the namespace that was started at `since` (clock ticks after boot) or
    later, except this one and `spare`. Returns when they are gone, or after `KILL_ROUNDS`."""
    for _ in range(KILL_ROUNDS):
        if since == 0 and not spare:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        found = [pid for pid, began in started() if began >= since and pid not in spare]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def started() -> list[tuple[int, int]]:
    """Return (process id, start in clock ticks after boot) of each living process but process 1."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in b"ZX":
                    found.append((int(name), int(fields[BEGAN_FIELD])))
    return found
