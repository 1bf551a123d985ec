"""What of ROSE will work on this machine or cluster, in under a minute: a line per part, ok, warning or failed with
the remedy.

    python -m rose.doctor [--folder SHARED_FOLDER] [HYDRA OVERRIDES, such as cluster=slurm cluster/mpi=...]

Starts a few processes and, with cluster=slurm, one short heterogeneous job step of two ranks; leaves nothing behind.
Exit code 0 if nothing failed. Left out: whether an experiment fits (launch.py with cluster.dry_run=true) and joining a
running job.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from rose.config import Config, ConfigError, from_dict
from rose.launch import errors, front, local
from rose.models import REPOSITORY

CONF = REPOSITORY / "conf"
DEADLINE_S = 50.0  # of one check
FILE_MIB = 64
PACKAGES = ("mpi4py.MPI", "torch", "deepspeed", "vllm", "h5py", "submitit")
WORLD = ("import sys; from mpi4py import MPI; c = MPI.COMM_WORLD; "
         "c.Barrier(); print('ranks', c.Get_size(), MPI.Get_library_version().split(chr(10))[0], flush=True); "
         "c.Barrier(); import os; os._exit(0)")


class Finding(NamedTuple):
    state: str  # ok, warning, failed
    part: str
    words: str
    remedy: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where runs will be written; default: output_dir")
    args, overrides = parser.parse_known_args()
    console = Console(soft_wrap=True, highlight=False)
    try:
        trees = front.compose(CONF, overrides)
        if len(trees) != 1:
            raise ConfigError(f"{' '.join(overrides)}: the doctor takes one configuration, no sweep")
        c = from_dict(trees[0])
    except errors.COMPLAINTS as error:
        return _refuse(errors.explain(error, CONF, overrides))
    except ConfigError as error:
        return _refuse(str(error))
    failed = 0
    for finding in examine(c, args.folder or Path(c.output_dir)):
        colour = {"ok": "green", "warning": "yellow", "failed": "red"}[finding.state]
        console.print(f"[{colour}]{finding.state:8}[/] {finding.part}: ", end="")
        console.print(finding.words + (f". {finding.remedy}" if finding.remedy else ""), markup=False)
        failed += finding.state == "failed"
    return int(failed > 0)


def _refuse(words: str) -> int:
    Console(stderr=True, soft_wrap=True).print(f"bad configuration: {words}", markup=False, highlight=False)
    return 2


def examine(c: Config, folder: Path) -> Iterator[Finding]:
    """Every finding, as it is made; the checks run side by side."""
    checks: list[Callable[[], list[Finding]]] = [*(lambda name=name: [package(name)] for name in PACKAGES),
                                                 lambda: [file_system(folder)], lambda: [gpus(c)]]
    checks += [lambda: slurm(c)] if c.cluster.kind == "slurm" else [lambda: [local_world(c)]]
    with ThreadPoolExecutor(len(checks)) as pool:
        for found in [pool.submit(check) for check in checks]:
            yield from found.result()


def package(name: str) -> Finding:
    """Does it import here?"""
    top = name.split(".")[0]
    done = _run([sys.executable, "-c", f"import {name}; print({top}.__version__)"])
    part = f"import {top}"
    if done.returncode == 0:
        return Finding("ok", part, done.stdout.strip().splitlines()[-1])
    return Finding("failed", part, _last(done), "pip install -e .[gpu] (or .[cpu]) into this environment")


def gpus(c: Config) -> Finding:
    smi = shutil.which("nvidia-smi")
    listed = [line for line in _run([smi, "-L"]).stdout.splitlines() if line.startswith("GPU ")] if smi else []
    if listed:
        return Finding("ok", "GPUs here", f"{len(listed)}; `python scripts/gpu_check.py` tries them")
    if c.cluster.gpus and c.cluster.kind == "local":
        return Finding("failed", "GPUs here", f"none, and cluster.gpus={c.cluster.gpus}", "use cluster=local")
    return Finding("ok", "GPUs here", "none, and none needed on this machine")


def file_system(folder: Path) -> Finding:
    """Rename, fsync, lock and speed where runs are written."""
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
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rate = FILE_MIB / (time.monotonic() - began)
            path.replace(path.with_name("b"))
    except OSError as error:
        return Finding("failed", part, f"{error.strerror}: {error.filename or folder}",
                       "give a folder that you may write, on a file system with rename, fsync and flock")
    return Finding("ok" if rate > 100 else "warning", part, f"rename, fsync and locks work; {rate:.0f} MiB/s written",
                   "" if rate > 100 else "weights and checkpoints will take their time")


def local_world(c: Config) -> Finding:
    """Two ranks in one world on this machine."""
    try:
        mpiexec = local.find_mpiexec()
    except ConfigError as error:
        return Finding("failed", "MPI world", str(error))
    return _world(_run([mpiexec, *local.MPIEXEC_OPTIONS, "-n", "2", sys.executable, "-c", WORLD],
                       env=local.environment(c)), "mpiexec", "pip install mpich")


def slurm(c: Config) -> list[Finding]:
    """Commands, settings, kinds of MPI, and one world over two components."""
    missing = [program for program in ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel")
               if shutil.which(program) is None]
    if missing:
        return [Finding("failed", "Slurm's commands", f"no {', '.join(missing)} on PATH", "run this on a login node")]
    config = _run(["scontrol", "show", "config"])
    if config.returncode:
        return [Finding("failed", "Slurm", _last(config), "is SLURM_CONF right, and slurmctld up?")]
    settings = dict(line.split("=", 1) for line in config.stdout.splitlines() if "=" in line)
    settings = {key.strip(): value.strip() for key, value in settings.items()}
    found = [Finding("ok", "Slurm", settings.get("SLURM_VERSION", "unknown version"))]
    backfill = settings.get("SchedulerType", "") == "sched/backfill"
    found.append(Finding("ok", "heterogeneous jobs", "sched/backfill starts them") if backfill else Finding(
        "failed", "heterogeneous jobs", f"SchedulerType={settings.get('SchedulerType')} starts none",
        "ask your site for sched/backfill"))
    if _run(["sacct", "--noheader", "--allocations", "--jobs", "1"]).returncode == 0:
        found.append(Finding("ok", "accounting", "sacct answers"))
    else:
        found.append(Finding("warning", "accounting", "sacct doesn't answer",
                             "states of ended jobs are then known only while squeue remembers them"))
    if "preempt_send_user_signal" not in settings.get("SlurmctldParameters", ""):
        found.append(Finding("warning", "preemption", "SlurmctldParameters lacks preempt_send_user_signal",
                             "a preempted job gets no warning and continues from its last checkpoint"))
    kinds = _run(["srun", "--mpi=list"])
    listed = kinds.stdout + kinds.stderr
    wanted = [option.removeprefix("--mpi=") for option in c.cluster.mpi.srun if option.startswith("--mpi=")]
    absent = [kind for kind in wanted if kind not in listed.split()]
    if absent:
        have = ", ".join(word for word in listed.split() if word.startswith(("pmi", "cray", "none")))
        return [*found, Finding("failed", "srun --mpi", f"no {absent[0]} here, only {have}",
                                "choose another cluster/mpi=, or set cluster.mpi.srun")]
    return [*found, _slurm_world(c)]


def _slurm_world(c: Config) -> Finding:
    """srun makes its own heterogeneous allocation of one task and one task."""
    argv = ["srun", "--immediate=30", "--time=1", *c.cluster.mpi.srun]
    for number, component in enumerate((c.cluster.slurm.trainer, c.cluster.slurm.rollout)):
        named = {name: getattr(component, name) for name in ("partition", "account", "qos", "constraint")}
        argv += [":"] if number else []
        argv += ["--ntasks=1", *(f"--{name}={value}" for name, value in named.items() if value is not None),
                 sys.executable, "-c", WORLD]
    return _world(_run(argv, env=local.environment(c)), "srun over two components",
                  "if the queue is full try again; else another cluster/mpi=")


def _world(done: subprocess.CompletedProcess, how: str, remedy: str) -> Finding:
    words = [line for line in done.stdout.splitlines() if line.startswith("ranks ")]
    if done.returncode == 0 and len(words) == 2 and all(line.split()[1] == "2" for line in words):
        return Finding("ok", f"one MPI world, {how}", words[0].split(" ", 2)[2])
    if done.returncode == 0 and words:
        return Finding("failed", f"one MPI world, {how}", f"{len(words)} ranks, each in a world of "
                       f"{words[0].split()[1]}: mpi4py's MPI is not the one whose launcher this is", remedy)
    return Finding("failed", f"one MPI world, {how}", _last(done), remedy)


def _run(argv: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, env=env, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {DEADLINE_S:g} s")


def _last(done: subprocess.CompletedProcess) -> str:
    lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    return lines[-1].strip()


if __name__ == "__main__":
    sys.exit(main())
