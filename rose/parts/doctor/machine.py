"""Check this machine: packages, the file system where runs are written, NCCL between its GPUs, and
one MPI world of two ranks, here or over two components of a Slurm job."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rose import extensions
from rose.agent.envs import build
from rose.config import Config, ConfigError
from rose.files import lock_now
from rose.launch import gpus as launcher
from rose.launch import local
from rose.parts.doctor import devices
from rose.parts.doctor.finding import IMPORT_S, Ended, Finding, run

FILE_MIB = 64  # size of the file that is written to measure the file system
SLOW_MIB_PER_S = 100  # slower file systems get a warning
PACKAGES = ("mpi4py.MPI", "torch", "deepspeed", "vllm", "h5py", "submitit")


def package(name: str) -> Finding:
    """Try to import a package here."""
    top = name.split(".")[0]
    program = f"import {name}; print({top}.__version__)"
    done = run([sys.executable, "-c", program], deadline_s=IMPORT_S)
    part = f"import {top}"
    if done.code == 0:
        return Finding("ok", part, done.out.strip().splitlines()[-1])
    remedy = "make gpu (or make train, without GPUs) sets up an environment that has it"
    if done.code == 124:
        remedy = f"{sys.prefix} is slow to read: put it on a faster file system, or in a "
        remedy += "container's image (docs/install.md), or ask again when the machine is less busy"
    return Finding("failed", part, done.last, remedy)


def file_system(folder: Path) -> Finding:
    """Try rename, fsync, lock and speed where runs are written."""
    part = f"file system of {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            path = Path(scratch) / "a"
            block = os.urandom(2**20)
            began = time.monotonic()
            with path.open("wb") as file:
                for _ in range(FILE_MIB):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                lock_now(file)
            rate = FILE_MIB / (time.monotonic() - began)
            path.replace(path.with_name("b"))
    except OSError as error:
        remedy = "give a folder that you may write, on a file system with rename, fsync and flock"
        return Finding("failed", part, f"{error.strerror}: {error.filename or folder}", remedy)
    words = f"rename, fsync and locks work; {rate:.0f} MiB/s written"
    if rate >= SLOW_MIB_PER_S:
        return Finding("ok", part, words)
    return Finding("warning", part, words, "weights and checkpoints will take their time")


def parts() -> list[Finding]:
    """Return the findings of ROSE's parts (rose/parts) about this machine."""
    return [each for part in extensions.modules("doctor").values() for each in part.findings()]


def tasks(c: Config) -> list[Finding]:
    """Run the tests of every task once, in each environment that has a method `trial`. A test that
    hangs takes its whole time limit."""
    findings = []
    for key, member in c.environments.values():
        try:
            made = build(member)
        except ConfigError as error:
            findings.append(Finding("failed", key, str(error)))
            continue
        count, wrong = asyncio.run(made.trial()) if hasattr(made, "trial") else (0, [])
        part, more = f"{key}, {count} tasks", f"; and {len(wrong) - 8} more" if wrong[8:] else ""
        if wrong:
            findings.append(Finding("failed", part, "; ".join(wrong[:8]) + more))
        elif count:
            findings.append(Finding("ok", part, "all tests end, and fail before any work is done"))
    return findings


def gpus(c: Config) -> list[Finding]:
    """Return the findings about this machine's GPUs, and about NCCL between those that this process
    may use. MIG slices are left out, since NCCL connects none."""
    found = devices.examine(c)
    try:
        names = launcher.given(launcher.installed(), os.environ.get(launcher.VARIABLE))
    except ConfigError as error:
        return [*found, Finding("failed", launcher.VARIABLE, str(error))]
    whole = [name for name in names if not name.startswith("MIG-")]
    return [*found, nccl(len(whole), c)] if len(whole) > 1 else found


def nccl(
    count: int, c: Config, python: Sequence[str] = (sys.executable,), deadline_s: float = IMPORT_S
) -> Finding:
    """Try an all-reduce over `count` GPUs, as ranks do it: on this machine, or on another node if
    `python` is a command with srun."""
    argv = [*python, "-m", "rose.parts.doctor.all_reduce", "nccl", str(count)]
    return reduced(run(argv, local.environment(c), deadline_s), count)


def reduced(done: Ended, count: int) -> Finding:
    """Return the finding from the output of rose.parts.doctor.all_reduce."""
    part = f"NCCL between {count} GPUs"
    for event in done.events():
        if event["what"] == "all-reduce" and done.code == 0:
            speed = f"at {event['gib_per_s']:.1f} GiB/s bus bandwidth"
            return Finding("ok", part, f"all-reduce on {event['node']} {speed}")
    remedy = (
        "NCCL_DEBUG=INFO says more; `nvidia-smi topo -m` shows the links, and NCCL_P2P_DISABLE=1 "
        "in cluster.env goes around a broken one"
    )
    return Finding("failed", part, done.last, remedy)


def local_world(c: Config) -> Finding:
    """Try two ranks in one MPI world on this machine."""
    argv = [*local.MPIEXEC, "-n", "2", sys.executable, "-m", "rose.parts.doctor.rank"]
    remedy = "pip install mpich mpi4py: on one machine MPICH connects the ranks"
    return world(run(argv, local.environment(c)), "mpiexec", remedy)


def world(done: Ended, how: str, remedy: str) -> Finding:
    """Return the finding from two ranks' events about their MPI world."""
    part = f"one MPI world, {how}"
    events = [event for event in done.events() if event["what"] == "world"]
    if done.code or not events:
        return Finding("failed", part, done.last, remedy)
    if len(events) == 2 and all(event["size"] == 2 for event in events):
        return Finding("ok", part, " ".join(events[0]["library"].split()))
    words = (
        f"{len(events)} ranks, each in a world of {events[0]['size']}: mpi4py's MPI is not the one "
    )
    return Finding("failed", part, f"{words}whose launcher this is", remedy)
