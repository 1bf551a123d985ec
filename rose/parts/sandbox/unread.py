"""Find unread data in the pipes, terminals and sockets of a sandbox, from its process 1.

Such data belongs to no file and to no process's memory, so only a process image contains it. Only
unix, TCP and UDP sockets matter: others can't be created in a sandbox, or hold no data.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import socket
import struct
import termios

from rose.parts.sandbox import kernel

NETLINK_SOCK_DIAG, BY_FAMILY, REQUEST, DUMP = 4, 20, 1, 0x300
SHOW_QUEUES, QUEUES = 0x10, 4  # linux/unix_diag.h
DONE, ERROR = 3, 2
WAIT_S = 1.0  # seconds for the kernel's answer
# Most unread bytes of a terminal that can be captured. CRIU writes them to the other end, and waits
# for ever if the terminal is full. It holds 4096 bytes, the echo included.
TERMINAL_BYTES = 1024
TERMINALS = ("/dev/pts/", "/dev/ptmx")
TIOCGPTN = 0x80045430  # number of a master's terminal
SYSTEM_V = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")
INTERNET = ("tcp", "tcp6", "udp", "udp6")


def waiting(pid: int, number: int) -> int:
    """Return the number of unread bytes in a process's pipe or terminal `number`. Opening the pipe
    again would wake processes that wait for it, so the descriptor is duplicated. Raises OSError."""
    fd = kernel.duplicate(pid, number)
    try:
        return bytes_in(fd)
    finally:
        os.close(fd)


def bytes_in(fd: int) -> int:
    """Return the number of unread bytes in the pipe or terminal `fd`. Raises OSError."""
    return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]


def terminal_too_full(spare: set[int]) -> bool:
    """Return whether a terminal of a process not in `spare` has over `TERMINAL_BYTES` unread."""
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        _, _, pid, _, fd = path.split("/")
        with contextlib.suppress(OSError):  # a process that has just ended, a terminal just closed
            terminal = int(pid) not in spare and os.readlink(path).startswith(TERMINALS)
            if terminal and waiting(int(pid), int(fd)) > TERMINAL_BYTES:
                return True
    return False


def not_captured() -> list[str]:
    """Return descriptions of the objects in this sandbox that no capture contains."""
    found = []
    for path in SYSTEM_V:
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            if len(file.readlines()) > 1:  # more than the line of titles
                found = ["System V's shared memory, semaphores and queues"]
    found += ["unread datagrams"] * bool(_internet(("udp", "udp6")))
    return found + ["unread output of a closed terminal"] * _closed_terminal_has_output()


def _closed_terminal_has_output() -> bool:
    """Return whether a terminal has unread output although only its master is still open."""
    masters, others = [], set()
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if (link := os.readlink(path)).endswith("ptmx"):
                masters.append((int(path.split("/")[2]), int(path.split("/")[4])))
            elif link.startswith(TERMINALS):
                others.add(link)
    for pid, number in masters:
        with contextlib.suppress(OSError):
            fd = kernel.duplicate(pid, number)
            try:
                which = struct.unpack("i", fcntl.ioctl(fd, TIOCGPTN, bytes(4)))[0]
                if bytes_in(fd) and f"/dev/pts/{which}" not in others:
                    return True
            finally:
                os.close(fd)
    return False


def sockets() -> set[int]:
    """Return inodes of sockets with unread data or with connections that wait to be accepted.
    Raises OSError if the kernel doesn't report them."""
    return _unix() | _internet(INTERNET)


def _internet(kinds: tuple[str, ...]) -> set[int]:
    """Return inodes of internet sockets with unread data or waiting connections. `kinds`: their
    files in /proc/net."""
    found = set()
    for kind in kinds:
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"/proc/net/{kind}", encoding="utf-8") as file,
        ):
            next(file, None)
            for line in file:
                values = line.split()
                if int(values[4].partition(":")[2], 16):
                    found.add(int(values[9]))
    return found


def _unix() -> set[int]:
    """Return inodes of unix sockets with unread data or waiting connections, by sock_diag(7)."""
    everything = 0xFFFFFFFF
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG
    ) as asked:
        asked.settimeout(WAIT_S)
        wanted = (socket.AF_UNIX, 0, 0, everything, 0, SHOW_QUEUES, everything, everything)
        request = struct.pack("=BBHIIIII", *wanted)
        header = struct.pack("=IHHII", 16 + len(request), BY_FAMILY, REQUEST | DUMP, 1, 0)
        asked.send(header + request)
        found: set[int] = set()
        while True:
            data, at = asked.recv(1 << 16), 0
            while at < len(data):
                size, kind = struct.unpack_from("=IH", data, at)
                if kind == DONE:
                    return found
                if kind == ERROR:
                    code = -struct.unpack_from("=i", data, at + 16)[0]
                    raise OSError(code, f"sock_diag: {os.strerror(code)}")
                if _reports_queue(data[at : at + size]):
                    found.add(struct.unpack_from("=I", data, at + 20)[0])
                at += (size + 3) & ~3


def _reports_queue(message: bytes) -> bool:
    """Return whether a message of sock_diag reports a queue that isn't empty."""
    at = 32  # behind netlink's header and struct unix_diag_msg
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == QUEUES:
            return struct.unpack_from("=I", message, at + 4)[0] > 0
        at += max(4, (size + 3) & ~3)
    return False
