"""Check Slurm: its commands and settings, then jobs of one task that do what a run does on its
nodes."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rose.config import Config
from rose.launch import container, local
from rose.parts.doctor import devices, join, machine, rank
from rose.parts.doctor.finding import GPUS_S, QUEUE_S, Finding, gpu_task, run, srun, task


def examine(c: Config, folder: Path | None) -> list[Finding]:
    """Return the findings about Slurm. `folder`: where runs are written; None if nothing can be
    written."""
    found = settings(c)
    if any(finding.state == "failed" for finding in found):
        return found

    def in_turn() -> list[Finding]:
        """Run the small jobs of a join first. The job over two components may wait for nodes and
        would delay them."""
        last = join.over_nodes(c, folder)
        return [*over_components(c, folder), last]

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(in_turn), *([pool.submit(gpus, c)] if c.cluster.gpus else [])]
        return found + [finding for job in jobs for finding in job.result()]


def settings(c: Config) -> list[Finding]:
    """Check Slurm's commands, its settings, and its kinds of MPI."""
    commands = ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel")
    if missing := [program for program in commands if shutil.which(program) is None]:
        words = f"no {', '.join(missing)} on PATH"
        return [Finding("failed", "Slurm's commands", words, "run this on a login node")]
    config = run(["scontrol", "show", "config"])
    if config.code:
        return [Finding("failed", "Slurm", config.last, _why_silent(config.err))]
    pairs = (line.split("=", 1) for line in config.out.splitlines() if "=" in line)
    has = {key.strip(): value.strip() for key, value in pairs}
    found = [Finding("ok", "Slurm", has.get("SLURM_VERSION", "unknown version"))]
    part, kind = "heterogeneous jobs", has.get("SchedulerType")
    if kind == "sched/backfill":
        found.append(Finding("ok", part, f"{kind} starts them"))
    else:
        words = f"SchedulerType={kind} starts none"
        found.append(Finding("failed", part, words, "ask your site for sched/backfill"))
    part = "accounting"
    if run(["sacct", "--noheader", "--allocations", "--jobs", "1"]).code == 0:
        found.append(Finding("ok", part, "sacct answers"))
    else:
        remedy = "states of ended jobs are then known only while squeue remembers them"
        found.append(Finding("warning", part, "sacct doesn't answer", remedy))
    if "preempt_send_user_signal" not in has.get("SlurmctldParameters", ""):
        words = "SlurmctldParameters lacks preempt_send_user_signal"
        mode = has.get("PreemptMode", "unknown")
        remedy = (
            "a preempted job gets no warning; it continues from its last checkpoint, by itself "
            f"only where Slurm requeues it (PreemptMode={mode}; partitions and QOS may differ)"
        )
        found.append(Finding("warning", "preemption", words, remedy))
    return [*found, *_kinds_of_mpi(c)]


def _why_silent(words: str) -> str:
    """Return the remedy for a message of scontrol."""
    if "munge" in words.lower() or "auth" in words.lower():
        return (
            "munge: is munged up, with the cluster's key and clock? `munge -n | unmunge` tries it"
        )
    return "is SLURM_CONF right, and slurmctld up?"


def _kinds_of_mpi(c: Config) -> list[Finding]:
    """Return a failure if srun lacks the kind of MPI that cluster.mpi.srun names; [] otherwise."""
    kinds = run(["srun", "--mpi=list"])
    listed = (kinds.out + kinds.err).replace(",", " ").split()
    options = c.cluster.mpi.srun
    wanted = [option.removeprefix("--mpi=") for option in options if option.startswith("--mpi=")]
    absent = [kind for kind in wanted if kind not in listed]
    if not absent:
        return []
    have = ", ".join(word for word in listed if word.startswith(("pmi", "cray", "none")))
    remedy = "choose another cluster/mpi=, or set cluster.mpi.srun"
    return [Finding("failed", "srun --mpi", f"no {absent[0]} here, only {have}", remedy)]


def over_components(c: Config, folder: Path | None) -> list[Finding]:
    """Run a heterogeneous job with a task in each component, which checks files between nodes and
    one MPI world."""
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
                "rose.parts.doctor.rank",
                *([shared, str(side)] if folder else []),
            ]
        done = run(argv, local.environment(c))
    found = [rank.files(done, folder)] if folder else []
    remedy = "if two nodes are not free now, try again; else another cluster/mpi="
    return [*found, machine.world(done, "srun over two components", remedy)]


def gpus(c: Config) -> list[Finding]:
    """Check the GPUs of one node of the trainer's component, as many as a run has, and NCCL between
    them."""
    count = min(c.cluster.gpus, c.cluster.slurm.trainer.gpus_per_node)
    starter = [
        *srun("--mpi=none", work_s=GPUS_S),
        *gpu_task(c, c.cluster.slurm.trainer, count),
        *container.command(c, []),
    ]
    asked = [*starter, "-m", "rose.parts.doctor.devices", str(count), "0"]
    found = devices.findings(run(asked, local.environment(c), QUEUE_S + GPUS_S))
    return [*found, machine.nccl(count, c, starter, QUEUE_S + GPUS_S)] if count > 1 else found
