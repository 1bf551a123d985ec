"""What MPI finds around a process of ours, and what it leaves in the node's memory. Imports no MPI.

A borrowed rank, and the porter that talks to it, is an MPI world of its own: started by us and not
by srun or mpiexec, so that it must not see the variables of a launcher.

MPICH makes shared memory even for a rank that shares it with nobody. Its name comes from the
launcher's, which under Slurm is JOB.STEP, or from the process id, and it is removed only in
MPI_Finalize, which our ranks can't wait for when a peer is dead. A requeued job (same id, step 0
again) would find the memory of its last attempt and take it for its own; and every end would leave
some MiB on the node. Without a name the kernel frees it with the last process that maps it. Ranks
that are ended before they all have come so far have theirs removed by who ends them.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rose import places

if TYPE_CHECKING:
    from mpi4py import MPI

NO_LAUNCHERS = ("SLURM_JOB_ID", "SLURM_CONF")
LAUNCHERS = ("PMI", "PMIX", "SLURM_", "HYDI", "HYDRA", "MPI_LOCAL", "OMPI_", "PALS_")
SHARED = "/dev/shm/mpich_"
# of MPICH 5: a hash of the world's name, or a single process's id, then the rank on this node
OF_WORLD = re.compile(r"mpich_shm_[0-9a-f]+_\d+")


def launchers() -> list[str]:
    """Variables of this process by which MPI would look for a launcher."""
    return [name for name in os.environ if name.startswith(LAUNCHERS) and name not in NO_LAUNCHERS]


def environment(mpi: dict[str, str]) -> dict[str, str]:
    """This process's variables without those of a launcher, and with those of cluster.mpi.env."""
    without = launchers()
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"PYTHONPATH": places.python_path()} | mpi


def unname(world: MPI.Comm) -> list[str]:
    """Unlink MPICH's shared memory, which every rank keeps. Collective over `world`, right after
    MPI's start. Returns the names that this rank found."""
    world.Barrier()  # all have opened it
    found = shared("self")
    for name in found:
        Path(name).unlink(missing_ok=True)  # another rank of the node may be first
    return found


def remove_shared(pid: int) -> None:
    """Unlink the shared memory of a whole MPI world on this node, dead ranks' too, before this one
    of its processes is ended: names differ by world, and within one by rank, each its own. Of names
    that say no world, as other MPICHs give them, only those that the process has."""
    for path in map(Path, shared(pid)):
        found = [path]
        if path.parent == Path(SHARED).parent and OF_WORLD.fullmatch(path.name):
            found = list(path.parent.glob(path.name.rpartition("_")[0] + "_*"))
        for each in found:
            with suppress(OSError):
                each.unlink()


def shared(pid: int | str) -> list[str]:
    """The names under which this process has MPICH's shared memory; none of a process that is
    gone, or another user's. What it maps else may have any name, of no text."""
    try:
        maps = os.fsdecode(Path(f"/proc/{pid}/maps").read_bytes()).split("\n")
    except OSError:
        return []
    names = {line.split(maxsplit=5)[-1] for line in maps if SHARED in line}
    return sorted(n for n in names if n.startswith(SHARED) and not n.endswith(" (deleted)"))
