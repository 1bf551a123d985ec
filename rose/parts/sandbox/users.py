"""Host users of a keeper's sandboxes.

With root, each sandbox has a range of host users that no other sandbox of the machine has. So
sandboxes don't share the resources that the kernel limits per user: file descriptors in flight
(SCM_RIGHTS), instances and watches of inotify, fanotify and epoll, pages of pipes, pending signals.
Without root, all sandboxes run as the user who started them, and share that user's resources. Then
only its part of inotify and fanotify is bounded, by `kernel.limit_watches`.
"""

from __future__ import annotations

import errno
import os
import socket

from rose.parts.sandbox import kernel

FIRST = 1_593_835_520  # within systemd's range for containers, 524288 to 1879048191
COUNT = 65_536  # users in a range
RANGES = 4_352  # ranges up to user 1879048191


class Ranges:
    """The ranges of one keeper, each claimed by an abstract socket that ends with the keeper."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._claims: list[socket.socket] = []
        self._spaces: dict[int, int] = {}  # first user -> a user namespace with its map

    def take(self) -> int:
        """Claim a free range and return its first user. Raises OSError if all are taken."""
        if self._free:
            return self._free.pop(0)
        start = int.from_bytes(os.urandom(4))
        for i in range(RANGES):
            first = FIRST + (start + i) % RANGES * COUNT
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0rose-users-{first}")
            except OSError:
                claim.close()
            else:
                self._claims.append(claim)
                return first
        raise OSError(errno.EUSERS, f"all {RANGES} ranges of host users have sandboxes")

    def release(self, first: int) -> None:
        self._free.append(first)

    def space(self, first: int) -> int:
        """Return the file descriptor of a user namespace that maps the range. It stays open."""
        if first not in self._spaces:
            self._spaces[first] = user_namespace(mapping(first))
        return self._spaces[first]


def mapping(first: int) -> str:
    """Return the line of uid_map and gid_map of a sandbox with this range."""
    return f"0 {first} {COUNT}"


def has_ranges() -> bool:
    """Return whether this user namespace has the users of all ranges. Containers may lack them."""
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        maps = [tuple(map(int, line.split())) for line in file]
    last = FIRST + RANGES * COUNT
    return any(inside <= FIRST and last <= inside + count for inside, _, count in maps)


def write_maps(process: str, users: str, groups_map: str, groups: bool) -> None:
    """Write a process's user and group maps (user_namespaces(7)). `groups`: permit setgroups(2)."""
    if not groups:
        with open(f"/proc/{process}/setgroups", "w", encoding="utf-8") as file:
            file.write("deny")
    for name, text in (("uid_map", users), ("gid_map", groups_map)):
        with open(f"/proc/{process}/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def user_namespace(users: str) -> int:
    """Return a file descriptor of a user namespace with the map `users` and no process in it."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kernel.unshare(kernel.NEWUSER)
            os.write(ready[1], b"r")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    write_maps(str(pid), users, users, groups=True)
    made = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.write(go[1], b"g")
    os.waitpid(pid, 0)
    for fd in (*ready, *go):
        os.close(fd)
    return made
