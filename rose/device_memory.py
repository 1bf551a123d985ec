"""How much memory a process's device has: the GPU's, or on a CPU the machine's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

GIB = 2**30


class DeviceMemory(NamedTuple):
    """GiB."""

    free: float
    total: float
    own: float | None  # of this process; null on a GPU, where nobody tells

    def given_since(self, before: DeviceMemory) -> float:
        """GiB that this process gave back since `before`; negative if it took some. On a GPU what
        others gave or took meanwhile counts too."""
        return self.free - before.free if self.own is None else before.own - self.own


def look(device) -> DeviceMemory:
    """Of a torch device, now."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free / GIB, total / GIB, None)
    machine = _kib(Path("/proc/meminfo"))
    own = _kib(Path("/proc/self/smaps_rollup"))["Rss"]
    return DeviceMemory(machine["MemAvailable"] / 2**20, machine["MemTotal"] / 2**20, own / 2**20)


def _kib(path: Path) -> dict[str, int]:
    """The lines `name: n kB` of a file of /proc."""
    found = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in found if words[-1] == "kB"}
