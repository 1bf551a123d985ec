"""Limit a sandbox's memory, processes and CPU by control groups (v2 or v1).

This works where this process may create groups; `lacking` names the limits that can't be set. A
group is called rose-PID-START-NAMESPACE-N. The first three parts identify the sandbox's keeper, the
process that creates sandboxes, and N is the sandbox's number. So a later keeper finds the groups of
keepers that have ended, and removes them with their processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from rose.parts.sandbox.backend import MIB, Limits

PERIOD_US = 100_000  # microseconds of a CPU quota's period, the kernel's default
# A keeper's process id, its start (clock ticks after boot), its PID namespace; the sandbox's number
NAME = re.compile(r"rose-(\d+)-(\d+)-(\d+)-\d+")
END_S = 5.0  # seconds for a group's processes to end after SIGKILL
REMEDY = (
    "a delegated group helps, with COMMAND in a subgroup (systemd 254 or later): "
    "systemd-run --user --pipe --wait -p Delegate=yes -p DelegateSubgroup=host COMMAND"
)
CONTROLLERS = ("memory", "pids", "cpu")
FILES = {  # controller -> file of its limit in v1 and in v2
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}


def start_ticks(pid: int | str) -> int | None:
    """Return a process's start in clock ticks after boot; None if it has ended or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def own_name() -> str:
    """Return the prefix of the names of this process's groups. It contains the PID namespace,
    because containers can share control groups although their process ids mean other processes."""
    return f"rose-{os.getpid()}-{start_ticks(os.getpid())}-{_pid_namespace()}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


class Groups:
    """Creates a sandbox's groups, one per hierarchy, below this process's group or its parent."""

    def __init__(self, own: str = "/proc/self/cgroup", mounts: str = "/proc/self/mountinfo"):
        self.parents: dict[Path, tuple[str, ...]] = {}  # folder -> its controllers
        self.v2: set[Path] = set()  # folders in `parents` that are of version 2
        self.why: dict[str, str] = {}  # controller -> why a folder for it can't be used
        self._find(own, mounts)

    def _find(self, own: str, mounts: str) -> None:
        """Find folders where this process may create groups, and note why others can't be used."""
        mounted = {}
        for line in Path(mounts).read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if kind in ("cgroup", "cgroup2"):
                root, at = before.split()[3:5]
                mounted[kind, frozenset(options.split(","))] = (root, at)
        for line in Path(own).read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            for (kind, options), (root, at) in mounted.items():
                if (kind == "cgroup2") != (names == ""):
                    continue
                if names and not set(names.split(",")) <= options:
                    continue
                inside = path.removeprefix(root) if root != "/" else path
                self._try(Path(at + inside), names, kind == "cgroup2")
        for name in CONTROLLERS:
            if not any(name in has for has in self.parents.values()):
                self.why.setdefault(name, "this kernel or container has no such control group")

    def _try(self, folder: Path, names: str, v2: bool) -> None:
        """Add `folder` to `parents`, or note why not. `names`: its controllers in version 1."""
        controllers = tuple(n for n in names.split(",") if n in CONTROLLERS)
        if not v2:
            if controllers and os.access(folder, os.W_OK):
                self.parents[folder] = controllers
            else:
                self.why.update(dict.fromkeys(controllers, f"{folder} is not writable"))
            return
        # In version 2, a group that contains processes can't enable controllers for its children.
        # So this process's group can't, but its parent can if it is a delegated group.
        for place in (folder, folder.parent):
            file = place / "cgroup.controllers"
            there = file.read_text(encoding="utf-8").split() if file.is_file() else []
            controllers = tuple(n for n in CONTROLLERS if n in there)
            if not controllers:
                continue
            try:
                (place / "cgroup.subtree_control").write_text(
                    " ".join(f"+{name}" for name in controllers), encoding="utf-8"
                )
            except OSError as error:
                refused = f"{place}/cgroup.subtree_control: {error.strerror}; {REMEDY}"
                self.why = dict.fromkeys(controllers, refused) | self.why
            else:
                if os.access(place, os.W_OK):
                    self.parents[place] = controllers
                    self.v2.add(place)
                    return

    @property
    def lacking(self) -> dict[str, str]:
        """Controllers that can't be used, each with the reason."""
        has = {name for names in self.parents.values() for name in names}
        return {name: why for name, why in self.why.items() if name not in has}

    def make(self, name: str, limits: Limits, pid: int) -> None:
        """Create a group with these limits and move `pid` into it. Raises OSError."""
        values = {
            "memory": str(limits.memory_mib * MIB),
            "pids": str(limits.processes + 8),  # 8 for process 1 and checks (check.py)
            "cpu": str(int(limits.cpus * PERIOD_US)),
        }
        for parent, controllers in self.parents.items():
            folder, v2 = parent / name, parent in self.v2
            folder.mkdir(exist_ok=True)
            for controller in controllers:
                value = values[controller]
                if v2 and controller == "cpu":
                    value = f"{value} {PERIOD_US}"
                (folder / FILES[controller][v2]).write_text(value, encoding="utf-8")
        self.join(name, pid)

    def join(self, name: str, pid: int) -> None:
        for parent in self.parents:
            (parent / name / "cgroup.procs").write_text(str(pid), encoding="utf-8")

    def remove(self, name: str) -> None:
        """Kill the group's processes and remove the group. Give up after `END_S` (per hierarchy),
        without an error."""
        for parent in self.parents:
            _remove_group(parent / name)

    def remove_stale(self) -> list[str]:
        """Remove the groups of keepers that have ended, and return the groups' names. Groups of
        other PID namespaces stay, because their keepers can't be seen from here."""
        found = set()
        for parent in self.parents:
            for folder in parent.glob("rose-*"):
                name = NAME.fullmatch(folder.name)
                here = name is not None and int(name[3]) == _pid_namespace()
                if name and here and start_ticks(name[1]) != int(name[2]):
                    _remove_group(folder)
                    found.add(folder.name)
        return sorted(found)


def _remove_group(folder: Path) -> None:
    until = time.monotonic() + END_S
    while folder.exists():
        for pid in _process_ids(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # busy while a process is in it
            folder.rmdir()
            return
        if time.monotonic() > until:
            return
        time.sleep(0.002)


def _process_ids(folder: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from map(int, (folder / "cgroup.procs").read_text(encoding="utf-8").split())
