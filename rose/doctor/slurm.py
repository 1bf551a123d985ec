"""Slurm: its commands and settings, then jobs of one task that do what a run does on its nodes."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rose.config import Config
from rose.doctor import devices, join, machine, rank
from rose.doctor.finding import Finding, run
from rose.doctor.jobs import GPUS_S, QUEUE_S, gpu_task, srun, task
from rose.doctor.world import world
from rose.launch import container, local


def examine(c: Config, folder: Path | None) -> list[Finding]:
    """`folder`: where runs are written; None if nothing can be."""
    found = settings(c)
    if any(finding.state == "failed" for finding in found):
        return found

    def in_turn() -> list[Finding]:
        """The small jobs first: one over two components may wait for nodes, and then holds up what
        comes after it."""
        last = join.over_nodes(c, folder)
        return [*over_components(c, folder), last]

    jobs = [in_turn]
    if c.cluster.gpus:
        jobs.append(lambda: gpus(c))
    with ThreadPoolExecutor(len(jobs)) as pool:
        return found + [
            finding for job in [pool.submit(job) for job in jobs] for finding in job.result()
        ]


def settings(c: Config) -> list[Finding]:
    """Commands, settings, and kinds of MPI."""
    missing = [
        program
        for program in ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel")
        if shutil.which(program) is None
    ]
    if missing:
        return [
            Finding(
                "failed",
                "Slurm's commands",
                f"no {', '.join(missing)} on PATH",
                "run this on a login node",
            )
        ]
    config = run(["scontrol", "show", "config"])
    if config.code:
        return [Finding("failed", "Slurm", config.last, "is SLURM_CONF right, and slurmctld up?")]
    pairs = (line.split("=", 1) for line in config.out.splitlines() if "=" in line)
    has = {key.strip(): value.strip() for key, value in pairs}
    found = [Finding("ok", "Slurm", has.get("SLURM_VERSION", "unknown version"))]
    backfill = has.get("SchedulerType", "") == "sched/backfill"
    found.append(
        Finding("ok", "heterogeneous jobs", "sched/backfill starts them")
        if backfill
        else Finding(
            "failed",
            "heterogeneous jobs",
            f"SchedulerType={has.get('SchedulerType')} starts none",
            "ask your site for sched/backfill",
        )
    )
    if run(["sacct", "--noheader", "--allocations", "--jobs", "1"]).code == 0:
        found.append(Finding("ok", "accounting", "sacct answers"))
    else:
        found.append(
            Finding(
                "warning",
                "accounting",
                "sacct doesn't answer",
                "states of ended jobs are then known only while squeue remembers them",
            )
        )
    if "preempt_send_user_signal" not in has.get("SlurmctldParameters", ""):
        found.append(
            Finding(
                "warning",
                "preemption",
                "SlurmctldParameters lacks preempt_send_user_signal",
                "a preempted job gets no warning and continues from its last checkpoint",
            )
        )
    return [*found, *_kinds_of_mpi(c)]


def _kinds_of_mpi(c: Config) -> list[Finding]:
    """A failure when srun lacks the kind that cluster.mpi.srun names."""
    kinds = run(["srun", "--mpi=list"])
    listed = (kinds.out + kinds.err).replace(",", " ").split()
    wanted = [
        option.removeprefix("--mpi=")
        for option in c.cluster.mpi.srun
        if option.startswith("--mpi=")
    ]
    absent = [kind for kind in wanted if kind not in listed]
    if not absent:
        return []
    have = ", ".join(word for word in listed if word.startswith(("pmi", "cray", "none")))
    return [
        Finding(
            "failed",
            "srun --mpi",
            f"no {absent[0]} here, only {have}",
            "choose another cluster/mpi=, or set cluster.mpi.srun",
        )
    ]


def over_components(c: Config, folder: Path | None) -> list[Finding]:
    """One heterogeneous job of a task in each component: files between its nodes, and one MPI
    world."""
    argv = srun(*c.cluster.mpi.srun)
    with tempfile.TemporaryDirectory(
        prefix=".doctor-", dir=folder, ignore_cleanup_errors=True
    ) as shared:
        for side, component in enumerate((c.cluster.slurm.trainer, c.cluster.slurm.rollout)):
            argv += [":"] if side else []
            argv += [
                *task(c, component),
                *(["--exclusive"] if component.exclusive else []),
                *container.command(c, [Path(shared)]),
                "-m",
                "rose.doctor.rank",
                *([shared, str(side)] if folder else []),
            ]
        done = run(argv, local.environment(c))
    found = [rank.files(done, folder)] if folder else []
    return [
        *found,
        world(
            done,
            "srun over two components",
            "if two nodes are not free now, try again; else another cluster/mpi=",
        ),
    ]


def gpus(c: Config) -> list[Finding]:
    """Those of one node of the trainer's component, as many as the run may have there, and NCCL
    between them."""
    count = min(c.cluster.gpus, c.cluster.slurm.trainer.gpus_per_node)
    starter = [
        *srun("--mpi=none", work_s=GPUS_S),
        *gpu_task(c, c.cluster.slurm.trainer, count),
        *container.command(c, []),
    ]
    asked = [*starter, "-m", "rose.doctor.devices", str(count), "0"]
    found = devices.said(run(asked, local.environment(c), QUEUE_S + GPUS_S))
    return [*found, machine.nccl(count, c, starter, QUEUE_S + GPUS_S)] if count > 1 else found
