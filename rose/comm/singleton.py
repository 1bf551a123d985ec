"""Processes that are an MPI world of their own: started by us, not by srun or mpiexec.

A borrowed rank is one, and so is the porter that talks to it. Imports no MPI.
"""

from __future__ import annotations

import os

from rose.models import REPOSITORY

NO_LAUNCHERS = ("SLURM_JOB_ID", "SLURM_CONF")
LAUNCHERS = ("PMI", "PMIX", "SLURM_", "HYDI", "HYDRA", "MPI_LOCAL", "OMPI_", "PALS_")


def launchers() -> list[str]:
    """Variables of this process by which MPI would look for a launcher."""
    return [name for name in os.environ if name.startswith(LAUNCHERS) and name not in NO_LAUNCHERS]


def environment(mpi: dict[str, str]) -> dict[str, str]:
    """This process's variables without those by which MPI would look for a launcher, and with those
    of cluster.mpi.env."""
    without = launchers()
    kept = {name: value for name, value in os.environ.items() if name not in without}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path} | mpi
