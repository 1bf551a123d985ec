"""Takes away the names of MPICH's shared memory in /dev/shm once every rank has its own.

MPICH makes some even for a rank that shares it with nobody. It derives the name from the
launcher's, which under Slurm is JOB.STEP, or from the process id, and removes it only in
MPI_Finalize, which our ranks can't wait for when a peer is dead. A requeued job (same id, step 0
again) would find the memory of its last attempt and take it for its own; and every end would leave
some MiB on the node. Without a name the kernel frees it with the last process that maps it.
"""

from __future__ import annotations

from pathlib import Path

from mpi4py import MPI

PREFIX = "/dev/shm/mpich_"


def unname(world: MPI.Comm) -> list[str]:
    """Collective over `world`, right after MPI's start. The names that this rank found, gone
    now."""
    world.Barrier()  # all have opened it
    names = {
        line.split(maxsplit=5)[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if PREFIX in line
    }
    found = sorted(
        name for name in names if name.startswith(PREFIX) and not name.endswith(" (deleted)")
    )
    for name in found:
        # another rank of the node may be first, where they share
        Path(name).unlink(missing_ok=True)
    return found
