"""Set the environment of an MPI process, and remove its shared memory. Imports no MPI.

A borrowed rank and its porter are MPI worlds of their own. Their processes must not inherit the
variables of the launcher (srun or mpiexec) that started the rest of the job.

MPICH creates shared memory even for a rank that shares it with no other. Its name derives from the
launcher's name for the world, which under Slurm is JOB.STEP, or from the process id. Only
MPI_Finalize removes it, and our ranks can't wait for that when a peer is dead. So each run would
leave some MiB on the node. A requeued job (same id, step 0 again) would attach to the memory of its
last attempt. Therefore each rank unlinks the name right after MPI's start, and the kernel frees
the memory with the last process that maps it. A process that ends ranks earlier than that unlinks
their names (`remove_shared`).
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

LAUNCHERS = ("PMI", "PMIX", "SLURM_", "HYDI", "HYDRA", "MPI_LOCAL", "OMPI_", "PALS_")
NO_LAUNCHERS = ("SLURM_JOB_ID", "SLURM_CONF")  # variables that `LAUNCHERS` matches and we keep
SHARED = "/dev/shm/mpich_"
# MPICH 5's names: a hash of the world's name or a single process's id, then the rank on this node.
OF_WORLD = re.compile(r"mpich_shm_[0-9a-f]+_\d+")


def launchers() -> list[str]:
    """Return the names of this process's variables from which MPI would infer a launcher."""
    return [name for name in os.environ if name.startswith(LAUNCHERS) and name not in NO_LAUNCHERS]


def environment(mpi: dict[str, str]) -> dict[str, str]:
    """Return this process's variables without those of launchers, plus `mpi` (cluster.mpi.env)."""
    without = launchers()
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"PYTHONPATH": places.python_path()} | mpi


def unlink_shared(world: MPI.Comm) -> list[str]:
    """Unlink the names of MPICH's shared memory, which stays mapped; return this rank's names.
    Collective over `world`, right after MPI's start."""
    world.Barrier()  # a wait until every rank has opened the memory by its name
    found = shared("self")
    for name in found:
        Path(name).unlink(missing_ok=True)  # missing if another rank of the node was first
    return found


def remove_shared(pid: int) -> None:
    """Unlink the shared memory of a whole MPI world on this node, including that of dead ranks.
    `pid`: a process of this world that still runs. Each rank's memory has its own name, which
    contains the world's name. If names have another format, as in other versions of MPICH, unlink
    only the memory that this process maps."""
    for path in map(Path, shared(pid)):
        found = [path]
        if path.parent == Path(SHARED).parent and OF_WORLD.fullmatch(path.name):
            found = list(path.parent.glob(path.name.rpartition("_")[0] + "_*"))
        for each in found:
            with suppress(OSError):
                each.unlink()


def shared(pid: int | str) -> list[str]:
    """Return the paths of MPICH's shared memory that a process maps. The list is empty for a
    process that is gone or belongs to another user."""
    try:
        # Paths of other mapped files need not be valid text.
        maps = os.fsdecode(Path(f"/proc/{pid}/maps").read_bytes()).split("\n")
    except OSError:
        return []
    names = {line.split(maxsplit=5)[-1] for line in maps if SHARED in line}
    return sorted(n for n in names if n.startswith(SHARED) and not n.endswith(" (deleted)"))
