"""The process that creates an environment host's sandboxes and cleans up after them.

    python -m rose.parts.sandbox.keeper SOCKET        (a file descriptor, from `namespaces.Keeper`)

It is small and has one thread, so that it can fork a sandbox in a millisecond. All mounts are in
mount namespaces of the keeper and the sandboxes, so they vanish with these processes. When the host
ends, its socket closes, and the keeper ends the sandboxes. When the keeper is killed, the
parent-death signal kills the sandboxes. Only control groups can remain, and the next keeper removes
them. With root, each sandbox's users are a range of the machine's users that no other sandbox has
(users.py). Without root, all sandboxes run as the keeper's user.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
from typing import Any

from rose.parts.sandbox import check, kernel, users, within
from rose.parts.sandbox.backend import HOST_FOLDERS, Limits
from rose.parts.sandbox.cgroups import Groups, own_name
from rose.parts.sandbox.init import WORK, receive, run, send

PLACES = ("/media", "/mnt", "/srv", "/opt")  # candidates for the mount point of the keeper's tmpfs
NEW_NAMESPACES = (
    kernel.NEWUSER
    | kernel.NEWNS
    | kernel.NEWPID
    | kernel.NEWNET
    | kernel.NEWUTS
    | kernel.NEWIPC
    | kernel.NEWCGROUP
)
# Entries of the host's /etc that programs in a sandbox need. None of them describes the site.
ETC = [
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "profile",
    "protocols",
    "python3",
    "python3.*",
    "redhat-release",
    "services",
    "shells",
    "ssl",
    "terminfo",
]
MADE = {  # file of a sandbox's /etc -> its content
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
FORBIDDING = {  # setting -> value that forbids user namespaces
    "/proc/sys/user/max_user_namespaces": "0",
    "/proc/sys/kernel/unprivileged_userns_clone": "0",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
}


class Keeper:
    """Creates sandboxes, serves the host's orders, and removes the remains of ended sandboxes."""

    def __init__(self, host: socket.socket) -> None:
        self.host = host
        self.groups = Groups()
        self.removed = self.groups.remove_stale()
        self.root = self._enter_namespaces()
        self.ranges = users.Ranges()
        self.base = self._mount_own_files()
        self.name = own_name()
        self.made = 0
        # Process 1's id on the host -> the sandbox's number, its namespaces (file descriptors), its
        # spec, and the host user of its root (0 without root).
        self.sandboxes: dict[int, tuple[int, list[int], dict[str, Any], int]] = {}
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)

    def _enter_namespaces(self) -> bool:
        """Enter a new mount namespace, with root's rights or in a new user namespace. Return
        whether each sandbox can have a range of host users."""
        try:
            kernel.unshare(kernel.NEWNS)
            root = users.has_ranges()
        except PermissionError:
            user, group = os.geteuid(), os.getegid()
            kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
            users.write_maps("self", f"0 {user} 1", f"0 {group} 1", groups=False)
            root = False
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        return root

    def _mount_own_files(self) -> str:
        """Mount the keeper's tmpfs, with the lower layer of sandboxes without an image. Return its
        path."""
        place = next((p for p in PLACES if os.path.isdir(p) and not os.listdir(p)), "/tmp")
        kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
        for name in (WORK, "image", "criu", "host", "host/etc"):
            os.mkdir(f"{place}/{name}", 0o755)
        host = f"{place}/host"
        for name in HOST_FOLDERS:
            # Where the host has a link, a sandbox gets a folder, because agents can replace links.
            if os.path.isdir(f"/{name}"):
                os.mkdir(f"{host}/{name}")
                os.mkdir(f"{host}/{name}/.rose-bound")
        for pattern in ETC:
            for path in glob.glob(f"/etc/{pattern}"):
                target = f"{host}{path}"
                with contextlib.suppress(OSError, shutil.Error):  # such as unreadable files
                    if os.path.isdir(path):
                        shutil.copytree(path, target, symlinks=True, ignore=_private)
                    else:
                        shutil.copyfile(path, target)
        for name, text in MADE.items():
            with open(f"{host}/etc/{name}", "w", encoding="utf-8") as file:
                file.write(text)
        return place

    def serve(self) -> None:
        """Carry out the host's orders until it closes the socket, then end all sandboxes."""
        send(
            self.host, {"root": self.root, "lacking": self.groups.lacking, "removed": self.removed}
        )
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self.host, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                self.reap()
            if self.host.fileno() in ready:
                order, fds = receive(self.host)
                if order is None:
                    break
                self.handle(order, fds)
        for pid in self.sandboxes:
            os.kill(pid, signal.SIGKILL)
        for number, *_ in self.sandboxes.values():
            self.groups.remove(f"{self.name}-{number}")

    def handle(self, order: dict[str, Any], fds: list[int]) -> None:
        """Carry out an order, and close its descriptors `fds`. An order without "do" creates a
        sandbox, and the answer goes to the first of `fds`. With "do" it begins a check, a capture
        or a restore in a sandbox."""
        if "do" in order:
            self.begin_beside(order, fds)
        else:
            control = socket.socket(fileno=fds.pop(0))
            order["lacking"] = list(self.groups.lacking)
            user = 0
            try:
                user = self.ranges.take() if self.root else 0
                said = {"pid": self.begin(order, control, fds, user), "user": user}
            except (OSError, ValueError, TypeError) as error:
                if user:
                    self.ranges.release(user)
                hint = forbidding_setting() if "unshare" in str(error) else ""
                said = {"failed": f"{error}{hint}"}
            with contextlib.suppress(OSError):  # the host may have closed its end
                send(control, said)
            control.close()
        for fd in fds:
            os.close(fd)

    def begin(
        self, spec: dict[str, Any], control: socket.socket, saved: list[int], user: int
    ) -> int:
        """Fork process 1 of a new sandbox and return its id. It waits until it is in its control
        group and is the keeper's child. `saved`: file descriptors of a listing and its contents, if
        the sandbox begins with such files. `user`: the first of its host users, 0 without root."""
        lower, go, mapped = self.lower(spec["image"], user), os.pipe(), os.pipe()
        ours, said = socket.socketpair()
        first = os.fork()
        if first == 0:
            try:
                reset_signals()
                os.close(mapped[1])  # the keeper's end, whose closing shows its error
                if user:  # because a namespace's resources count for its creator, too
                    kernel.become(user)
                kernel.unshare(NEW_NAMESPACES)
                spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in check.JOINED]
                socket.send_fds(said, [b"u"], spaces)
                if os.read(mapped[0], 1) != b"m":
                    os._exit(1)
                with contextlib.suppress(PermissionError):  # groups stay unmapped without root
                    os.setgroups([])
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
                second = os.fork()
                if second == 0:
                    close_but(go[0], control.fileno(), *saved)
                    if os.read(go[0], 1) != b"g":
                        os._exit(1)
                    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
                    run(spec, self.base, lower, control, saved)
                said.send(str(second).encode())
            except OSError as error:
                said.send(str(error).encode())
            finally:
                os._exit(0)
        said.close()
        words, spaces = b"", []
        try:
            words, spaces, _, _ = socket.recv_fds(ours, 4096, len(check.JOINED))
            if words == b"u":
                mapped_users = users.mapping(user) if user else "0 0 1"
                users.write_maps(str(first), mapped_users, mapped_users, groups=self.root)
                os.write(mapped[1], b"m")
                words = ours.recv(4096)
            # After this, the keeper is the parent of process 1, which dies with its parent.
            os.waitpid(first, 0)
            if not words.isdigit():
                raise OSError(words.decode() or "its first process ended")
            return self.admit(int(words), spaces, spec, go[1], user)
        except (OSError, ValueError, TypeError):
            for fd in spaces:
                os.close(fd)
            raise
        finally:
            ours.close()
            for fd in (*go, *mapped):
                os.close(fd)
            if user and spec["image"] is not None:  # a mount that the sandbox has copied
                kernel.unmount(lower)

    def admit(self, pid: int, spaces: list[int], spec: dict[str, Any], go: int, user: int) -> int:
        """Put a new process 1 into its control group, record its sandbox and let it continue."""
        self.made += 1
        try:
            spaces += [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("pid", "cgroup")]
            self.groups.make(f"{self.name}-{self.made}", Limits(**spec["limits"]), pid)
        except (OSError, ValueError, TypeError):
            os.kill(pid, signal.SIGKILL)
            self.groups.remove(f"{self.name}-{self.made}")
            raise
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/oom_score_adj", "w", encoding="utf-8") as file,
        ):
            # Have the kernel kill the agent's processes first. Without root this fails.
            file.write("-900")
        self.sandboxes[pid] = (self.made, spaces, spec, user)
        os.write(go, b"g")
        return pid

    def lower(self, image: str | None, user: int) -> str:
        """Return the lower layer's folder. With root, the files of an image seem to belong to the
        sandbox's users; without an image, the layer's files keep their owners."""
        if image is None:
            return f"{self.base}/host"
        if not user:
            return image
        kernel.mount_idmapped(image, f"{self.base}/image", self.ranges.space(user))
        return f"{self.base}/image"

    def criu_cache(self, user: int) -> str:
        """Return the folder of CRIU's cache of kernel features. CRIU's user must own it."""
        own, known = f"{self.base}/criu/{user}", glob.glob(f"{self.base}/criu/*/*")
        if not os.path.isdir(own):
            os.mkdir(own, 0o700)
            made = [shutil.copy(path, own) for path in known[:1]]
            for path in (own, *made):
                os.chown(path, user, user)
        return own

    def begin_beside(self, order: dict[str, Any], fds: list[int]) -> None:
        """Run a check, capture or restore in a child. It writes its result to the last of `fds`."""
        number, spaces, spec, user = self.sandboxes.get(order["sandbox"], (0, [], {}, 0))
        if number == 0:
            with contextlib.suppress(OSError):
                os.write(fds[-1], json.dumps({"failed": "the sandbox is gone"}).encode())
            return
        held, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                reset_signals()
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
                close_but(held, *spaces, *fds)
                os.read(held, 1)
                if order["do"] == "check":
                    image = spec["image"] or f"{self.base}/host"
                    check.run(spec, order, image, spaces[: len(check.JOINED)], fds)
                (within.capture if order["do"] == "capture" else within.revive)(
                    order, self.criu_cache(user), spaces, fds
                )
            finally:
                os._exit(1)
        try:
            # A capture may need more memory than the sandbox has left.
            if order["do"] != "capture":
                self.groups.join(f"{self.name}-{number}", pid)
            os.write(go, b"g")
        except OSError as error:  # such as a sandbox that has just ended
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.write(fds[-1], json.dumps({"failed": str(error)}).encode())
        os.close(held)
        os.close(go)

    def reap(self) -> None:
        """Collect ended children, and release the groups and users of ended sandboxes."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.sandboxes:
                number, spaces, _, user = self.sandboxes.pop(pid)
                for fd in spaces:
                    os.close(fd)
                self.groups.remove(f"{self.name}-{number}")
                if user:
                    self.ranges.release(user)


def reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def close_but(*kept: int) -> None:
    """Close descriptors except `kept`, so that ended sandboxes' namespaces don't stay alive."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor, which is closed
                os.close(int(name))


def _private(folder: str, names: list[str]) -> list[str]:
    """Return the entries of a folder in /etc that must not be copied, such as private keys."""
    return [n for n in names if n == "private" or not os.access(f"{folder}/{n}", os.R_OK)]


def forbidding_setting() -> str:
    """Return a text with the setting of this machine that forbids user namespaces, else ""."""
    for path, value in FORBIDDING.items():
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            if file.read().strip() == value:
                name = path.removeprefix("/proc/sys/").replace("/", ".")
                return f"; {name}={value} is in the way of user namespaces"
    return ""


def main() -> None:
    host = socket.socket(fileno=int(sys.argv[1]))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # eight descriptors per sandbox
    try:
        keeper = Keeper(host)
    except OSError as error:
        send(host, {"failed": f"{error}{forbidding_setting()}"})
        return
    keeper.serve()


if __name__ == "__main__":
    main()
