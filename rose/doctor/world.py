"""One MPI world of two ranks: on this machine, or over two components of a Slurm job."""

from __future__ import annotations

import sys

from rose.config import Config, ConfigError
from rose.doctor.finding import Ended, Finding, run
from rose.launch import local as launcher


def local(c: Config) -> Finding:
    """Two ranks in one world on this machine."""
    try:
        mpiexec = launcher.find_mpiexec()
    except ConfigError as error:
        return Finding("failed", "MPI world", str(error))
    done = run(
        [mpiexec, *launcher.MPIEXEC_OPTIONS, "-n", "2", sys.executable, "-m", "rose.doctor.rank"],
        launcher.environment(c),
    )
    return world(
        done, "mpiexec", "pip install mpich: on one machine MPICH's mpiexec starts the ranks"
    )


def world(done: Ended, how: str, remedy: str) -> Finding:
    """What the words of two ranks tell."""
    part = f"one MPI world, {how}"
    said = [event for event in done.events() if event["what"] == "world"]
    if done.code == 0 and len(said) == 2 and all(event["size"] == 2 for event in said):
        return Finding("ok", part, said[0]["library"])
    if done.code == 0 and said:
        return Finding(
            "failed",
            part,
            f"{len(said)} ranks, each in a world of {said[0]['size']}: mpi4py's MPI is not "
            "the one whose launcher this is",
            remedy,
        )
    return Finding("failed", part, done.last, remedy)
