"""System calls of Linux that Python's library lacks: namespaces, mounts, capabilities, seccomp.

System call numbers are those of x86-64 and arm64, which agree from 424 on (asm-generic/unistd.h).
Other machines are not supported. Functions raise `OSError`, where it is a call of libc's with its
name. The seccomp filter is built with libseccomp, which every distribution with systemd has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Iterator

LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork()
try:
    SECCOMP = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    SECCOMP.seccomp_init.restype = ctypes.c_void_p
except OSError:
    SECCOMP = None

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2

OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR, PIDFD_GETFD = 428, 429, 442, 438
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 1, 2, 4, 0x00100000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER = 28, 36
SECBIT_NO_SETUID_FIXUP = 4
CAP_LAST = 63
CAP_VERSION_3 = 0x20080522
# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID NET_BIND_SERVICE SYS_CHROOT. Installing and
# running programs needs them. They are valid only in the sandbox's user namespace.
KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10, 18)

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_Q_OVERFLOW, IN_IGNORED, IN_ONLYDIR = 0x4000, 0x8000, 0x01000000
EVENTS_BYTES = 64 * 1024  # most bytes of one read
Event = tuple[int, int, str]  # the folder's watch number, an IN_ mask, the file's name

# (limit of a user namespace, the machine's limit for each user)
SHARED = (
    ("max_inotify_instances", "inotify/max_user_instances"),
    ("max_inotify_watches", "inotify/max_user_watches"),
    ("max_fanotify_groups", "fanotify/max_user_groups"),
    ("max_fanotify_marks", "fanotify/max_user_marks"),
)
# Each sandbox gets 1 / SHARE of its host user's limits. Without root, all sandboxes have one user.
SHARE = 8

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

# System calls that an agent's programs don't need and in which kernels have had security holes,
# from the lists of Docker and Flatpak. They return EPERM. clone3 returns ENOSYS, so that libc uses
# clone: filters can read its flags.
REFUSED = [
    "acct",
    "add_key",
    "bpf",
    "create_module",
    "delete_module",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "init_module",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioperm",
    "iopl",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "mount",
    "mount_setattr",
    "move_mount",
    "move_pages",
    "mq_open",  # POSIX message queues, which CRIU does not restore
    "name_to_handle_at",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "pidfd_getfd",  # access to open files of a sleeping process, not seen by watch.py
    "pivot_root",
    "process_vm_writev",  # change of a sleeping process, not seen by watch.py
    "quotactl",
    "reboot",
    "request_key",
    "setns",
    "settimeofday",
    "swapoff",
    "swapon",
    "syslog",
    "umount",
    "umount2",
    "unshare",
    "userfaultfd",
    "vhangup",
]
ACT_ALLOW, ACT_ERRNO = 0x7FFF0000, 0x00050000
CMP_EQ, CMP_GT, CMP_MASKED_EQ = 4, 6, 7
# Permitted families of sockets: those that a network namespace confines. AF_VSOCK, for example,
# would connect a virtual machine to its hypervisor, and AF_ALG is a seldom used part of the kernel.
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # ioctls that insert input into a terminal


def _check(result: int, what: str) -> int:
    """Return `result`; if it is negative, raise the OSError of the call `what`."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _check(LIBC.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def join(namespace: int) -> None:
    """Join the namespace of a file descriptor."""
    _check(LIBC.setns(namespace, 0), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    done = LIBC.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode(),
        ctypes.c_ulong(flags),
        options.encode(),
    )
    _check(done, f"mount {kind or 'bind'} {source} on {target} ({options})")


def unmount(target: str) -> None:
    _check(LIBC.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Bind-mount recursively. `read_only` applies to mounts below `source`, too (Linux 5.12)."""
    mount(source, target, "", MS_BIND | MS_REC)
    if read_only:
        set_attributes(AT_FDCWD, target, ATTR_RDONLY | ATTR_NOSUID, recursive=True)


def set_attributes(
    at: int, path: str, attributes: int, user_namespace: int = 0, recursive: bool = False
) -> None:
    """Set mount attributes of `path` below the folder `at`; if `path` is "", of the mount `at`."""
    value = struct.pack("QQQQ", attributes, 0, 0, user_namespace)
    flags = (AT_RECURSIVE if recursive else 0) | (0 if path else AT_EMPTY_PATH)
    done = LIBC.syscall(
        ctypes.c_long(MOUNT_SETATTR),
        at,
        os.fsencode(path),
        flags,
        value,
        ctypes.c_size_t(len(value)),
    )
    _check(done, f"mount_setattr({path}, {attributes:#x})")


def mount_idmapped(source: str, target: str, user_namespace: int) -> None:
    """Mount `source` on `target` read-only, with owners mapped by `user_namespace` (a file
    descriptor): an idmapped mount, Linux 5.12."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = LIBC.syscall(ctypes.c_long(OPEN_TREE), AT_FDCWD, os.fsencode(source), flags)
    _check(tree, f"open_tree({source})")
    try:
        attributes = ATTR_IDMAP | ATTR_RDONLY | ATTR_NODEV
        set_attributes(tree, "", attributes, user_namespace)
        moved = LIBC.syscall(
            ctypes.c_long(MOVE_MOUNT),
            tree,
            b"",
            AT_FDCWD,
            os.fsencode(target),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
        _check(moved, f"move_mount to {target}")
    finally:
        os.close(tree)


def change_root(folder: str) -> None:
    """Make the mount point `folder` the root, and detach the old root from this mount namespace."""
    os.chdir(folder)
    _check(LIBC.syscall(ctypes.c_long(PIVOT_ROOT), b".", b"."), f"pivot_root({folder})")
    unmount(".")
    os.chdir("/")


def become(user: int) -> None:
    """Change this process's user and group to `user`, and keep its capabilities."""
    prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def prctl(option: int, value: int) -> None:
    _check(LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option}, {value})")


def event_queue() -> int:
    """Return a non-blocking file descriptor of inotify(7)."""
    return _check(LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")


def watch_folder(queue: int, path: str) -> int:
    """Have `queue` report changes of content and attributes of the files in the folder `path`.
    Return the folder's number in `events`, which stays the same if the folder is watched again."""
    mask = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_ONLYDIR
    return _check(LIBC.inotify_add_watch(queue, os.fsencode(path), mask), f"watch {path!r}")


def unwatch(queue: int, number: int) -> None:
    """End a watch of `watch_folder`, unless it has ended already."""
    LIBC.inotify_rm_watch(queue, number)


def duplicate(pid: int, number: int) -> int:
    """Return a duplicate of another process's descriptor `number`, to be closed separately."""
    process = os.pidfd_open(pid)
    try:
        return _check(LIBC.syscall(PIDFD_GETFD, process, number, 0), "pidfd_getfd")
    finally:
        os.close(process)


def events(queue: int) -> list[Event]:
    """Take all events from the queue: (number of a folder, IN_ mask, name of the file)."""
    found = []
    while True:
        try:
            data = os.read(queue, EVENTS_BYTES)
        except BlockingIOError:
            return found
        at = 0
        while at < len(data):
            folder, mask, _, length = struct.unpack_from("iIII", data, at)
            name = data[at + 16 : at + 16 + length].rstrip(b"\0")
            found.append((folder, mask, os.fsdecode(name)))
            at += 16 + length


def limit_watches(proc: str) -> None:
    """Limit this user namespace to 1 / `SHARE` of the host user's limits of inotify and fanotify
    (`SHARED`). `proc`: mount point of a proc file system."""
    for bound, machine in SHARED:
        with (
            contextlib.suppress(OSError, ValueError),  # a kernel without this limit
            open(f"{proc}/sys/fs/{machine}", encoding="utf-8") as file,
            open(f"{proc}/sys/user/{bound}", "w", encoding="utf-8") as mine,
        ):
            mine.write(str(max(1, int(file.read()) // SHARE)))


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        flags = struct.unpack_from("h", request, 16)[0] | IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags))


def confine(filter_calls: bool) -> None:
    """Drop all capabilities but `KEPT_CAPABILITIES` for good, in this process and its children.
    Programs that they execute can't gain any. `filter_calls`: also load the filter (`_filter`)."""
    for capability in range(CAP_LAST):
        if capability not in KEPT_CAPABILITIES and LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # no further capability in this kernel
    kept = sum(1 << capability for capability in KEPT_CAPABILITIES)
    header = struct.pack("Ii", CAP_VERSION_3, 0)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    data = struct.pack("6I", low, low, 0, high, high, 0)
    _check(LIBC.capset(header, data), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if filter_calls and SECCOMP is not None:
        with _filter() as context:
            done = SECCOMP.seccomp_load(context)
            if done < 0:
                raise OSError(-done, "seccomp_load failed")


def filter_program() -> bytes:
    """Return the filter that `confine` loads, as `sock_filter`s of 8 bytes (linux/filter.h)."""
    with _filter() as context, tempfile.TemporaryFile() as file:
        done = SECCOMP.seccomp_export_bpf(context, file.fileno())
        if done < 0:
            raise OSError(-done, "seccomp_export_bpf failed")
        file.seek(0)
        return file.read()


class _Compare(ctypes.Structure):
    """A condition on one argument of a system call (libseccomp's `scmp_arg_cmp`)."""

    _fields_ = [
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    ]


@contextlib.contextmanager
def _filter() -> Iterator[ctypes.c_void_p]:
    """Yield libseccomp's filter that refuses the system calls in `REFUSED`, new user namespaces,
    input into terminals, and families of sockets other than `FAMILIES`."""
    context = ctypes.c_void_p(SECCOMP.seccomp_init(ctypes.c_uint32(ACT_ALLOW)))
    if not context:
        raise OSError(errno.ENOMEM, "seccomp_init failed")

    def refuse(name: str, code: int = errno.EPERM, *compare: tuple[int, int, int]) -> None:
        number = SECCOMP.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # no such call on this machine
            return
        rules = (_Compare * len(compare))(
            *(_Compare(arg, how, value, value) for arg, how, value in compare)
        )
        done = SECCOMP.seccomp_rule_add_array(
            context, ctypes.c_uint32(ACT_ERRNO | code), number, len(compare), rules
        )
        if done < 0:
            raise OSError(-done, f"seccomp rule for {name}")

    for name in REFUSED:
        refuse(name)
    refuse("clone", errno.EPERM, (0, CMP_MASKED_EQ, NEWUSER))
    refuse("clone3", errno.ENOSYS)
    for request in (TIOCSTI, TIOCLINUX):
        refuse("ioctl", errno.EPERM, (1, CMP_MASKED_EQ, request))
    for name in ("socket", "socketpair"):
        for family in set(range(max(FAMILIES))) - set(FAMILIES):
            refuse(name, errno.EAFNOSUPPORT, (0, CMP_EQ, family))
        refuse(name, errno.EAFNOSUPPORT, (0, CMP_GT, max(FAMILIES)))
    try:
        yield context
    finally:
        SECCOMP.seccomp_release(context)
