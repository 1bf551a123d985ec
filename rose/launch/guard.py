"""Prepare a rank's process: its log, its status file, and a guard that reports how it ends.

`run` forks. The child is the rank. The parent, a few MB, is the guard: it waits for the rank to end
and writes into the status file how it ended. No other process could report this of a killed rank:
mpiexec reports only the first such rank, and doesn't name it. The guard kills a rank that has been
stopped (SIGSTOP) for a minute. Each of the two dies with its parent. Left out: what a rank does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from rose import config as configuration
from rose import processes
from rose.config import Config
from rose.launch import caches, gpus, logs, rank_status
from rose.launch.layout import Rank, layout
from rose.protocol import Role

POLL_S = 1.0  # seconds between two polls of whether the rank is stopped
# After this many polls in a row (a minute) that find the rank stopped, the guard kills it, because
# its peers wait for it. If Slurm suspends the job, the guard is stopped as well and doesn't count.
STOPPED_POLLS = 60
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "SLURM_PROCID")  # MPICH's mpiexec, PMIx, srun


def world_rank() -> int:
    """Return this process's rank in MPI_COMM_WORLD, known before MPI starts. Raises RuntimeError
    outside an MPI launch."""
    for name in RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(
        f"not started by mpiexec or srun: none of {', '.join(RANK_VARIABLES)} is set"
    )


def run(run_dir: Path, attempt: int, body: Callable[[Rank], None]) -> NoReturn:
    """Run `body(rank)` as this rank of the plan and end the process, with code 0 if `body` returns
    and 1 if it raises.

    Call this before any thread starts, because it forks. MPI is not finalised, since Finalize can
    abort after a peer's death. So `body` must have saved everything when it returns.
    """
    number = world_rank()
    config = configuration.load(Path(run_dir) / "config.json")
    me = layout(config)[number]
    logs.redirect(run_dir, attempt, me.role, number)
    processes.die_with_parent()
    guard = os.getpid()
    child = os.fork()
    if child:
        os._exit(_watch(run_dir, attempt, number, child))
    processes.die_with_parent(guard)
    os._exit(_run_rank(run_dir, attempt, me, config, body))


def _set_environment(me: Rank, config: Config, own_logs: Path) -> None:
    """Set the environment variables that differ between ranks. mpiexec has set the rank's GPUs
    already. srun gives all ranks of a node the same list, so the rank's own GPUs are set here."""
    cluster = config.cluster
    os.environ.update(me.environment)
    if me.gpus:
        os.environ.update(caches.variables(cluster, os.environ))
    if me.gpus and me.role is Role.TRAINER:
        limit_s = config.trainer.step_timeout_s
        os.environ.update(watchdog(limit_s, own_logs, os.environ))
    if me.gpus and cluster.kind == "slurm":
        who = (
            f"rank {me.rank} ({me.role.value} {me.index}, component {me.component}, node {me.node})"
        )
        os.environ[gpus.VARIABLE] = gpus.of_step(me.gpus, os.environ.get(gpus.VARIABLE), who)


def watchdog(step_timeout_s: float, own_logs: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch's NCCL watchdog in a trainer rank, without those in `given`.
    If a step hangs, trainer.step_timeout_s passes in three stages:
    1. In its first half the launcher names a silent rank that the others wait for, and ends the
       attempt (rose/launch/beats.py). The watchdog's own thread may hang in the driver for as long.
    2. In its second half the launcher names a rank that still reports but lags behind.
    3. At its end, the deadline of a collective (`join_world`), the watchdog ends the process. It
       leaves each rank's last collectives beside the logs, for torch's flight recorder."""
    ours = {
        # 3 ends the process without aborting NCCL first, which may hang.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, int(step_timeout_s / 2))),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",  # recorded collectives, some 100 bytes each
        "TORCH_FR_DUMP_TEMP_FILE": str(own_logs / "nccl-"),  # torch appends the trainer's index
    }
    return {name: value for name, value in ours.items() if name not in given}


def _watch(run_dir: Path, attempt: int, rank: int, child: int) -> int:
    """Wait for the rank to end, write its end into its status, and return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a signal for the rank alone
    code, why = _wait(child)
    path = rank_status.folder(run_dir, attempt) / f"rank-{rank}.json"
    # A rank that died within its first instructions has no file, and the launcher reports that.
    if path.exists():
        last = rank_status.read(run_dir, attempt, rank)
        state, error = "done" if code == 0 else "failed", why or last.error
        ended = msgspec.structs.replace(last, state=state, exit_code=code, error=error)
        _write_status(run_dir, attempt, ended)
    return code if code >= 0 else 128 - code


def _wait(child: int) -> tuple[int, str]:
    """Wait for the rank to end; kill it if it is stopped for too long. Return its exit code
    (negative: minus the signal) and, if it was killed here, the reason."""
    stopped = 0

    def poll(*_) -> None:
        nonlocal stopped
        if stopped < STOPPED_POLLS:
            stopped = stopped + 1 if _is_stopped(child) else 0
            if stopped == STOPPED_POLLS:
                os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, poll)
    signal.setitimer(signal.ITIMER_REAL, POLL_S, POLL_S)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    if stopped < STOPPED_POLLS:
        return code, ""
    return code, f"its process had been stopped (SIGSTOP) for {STOPPED_POLLS * POLL_S:g} s"


def _is_stopped(pid: int) -> bool:
    """True if a signal has stopped the process. A debugger's stop is another state and doesn't
    count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _run_rank(
    run_dir: Path, attempt: int, me: Rank, config: Config, body: Callable[[Rank], None]
) -> int:
    """Run the rank in this process and return its exit code. Errors go to its log and status."""
    status = rank_status.RankStatus(
        rank=me.rank,
        role=me.role,
        index=me.index,
        pid=os.getpid(),
        guard_pid=os.getppid(),
        host=socket.gethostname(),
        state="running",
    )
    code = 0
    try:
        rank_status.write(run_dir, attempt, status)
        _set_environment(me, config, logs.attempt_folder(run_dir, attempt))
        body(me)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # any error, since the process ends here
        traceback.print_exc()
        # The state stays "running": the guard reports the end, together with the exit code.
        text = f"{type(error).__name__}: {error}"
        _write_status(run_dir, attempt, msgspec.structs.replace(status, error=text))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _write_status(run_dir: Path, attempt: int, status: rank_status.RankStatus) -> None:
    """Write the status of a rank that ends. If it can't be written (a full disk), only print the
    error: the launcher finds the process gone and checks the disk itself."""
    try:
        rank_status.write(run_dir, attempt, status)
    except OSError as error:
        print(
            f"rank {status.rank}: how it ended could not be written: {error}",
            file=sys.stderr,
            flush=True,
        )
