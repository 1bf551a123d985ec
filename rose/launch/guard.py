"""The first thing a rank's process does: log, status file, and a guard that sees how it ends.

`run` forks. The parent, a few MB, is the guard: it does nothing but wait, and writes into the
status file how the rank ended, which nobody else could report of a rank that was killed (mpiexec
only reports its first, and without naming it). A rank that somebody has stopped (SIGSTOP) it ends
after a minute. The child is the rank. Both die with their parents.
Left out: what a rank does.
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

LOOK_S = 1.0  # between two looks at whether the rank is stopped
# Looks in a row at a rank that is stopped, after which it is ended: its peers wait for it. As many
# as a minute takes; in a job that Slurm suspends, guards are stopped, too, and count nothing.
STOPPED_LOOKS = 60
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "SLURM_PROCID")  # mpiexec of MPICH, PMIx, srun


def world_rank() -> int:
    """This process's rank in MPI_COMM_WORLD, known before MPI starts. Raises RuntimeError outside
    an MPI launch."""
    for name in RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(
        f"not started by mpiexec or srun: none of {', '.join(RANK_VARIABLES)} is set"
    )


def run(run_dir: Path, attempt: int, body: Callable[[Rank], None]) -> NoReturn:
    """Run `body(rank)` as this rank of the plan and end the process: code 0 when it returns, 1 when
    it raises.

    Call it before anything that starts threads. MPI is not finalised here (after a peer's death
    Finalize can abort): `body` saves what matters and returns.
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
    os._exit(_body(run_dir, attempt, me, config, body))


def _use(me: Rank, config: Config, own_logs: Path) -> None:
    """Take what only this rank has in its environment. mpiexec has given it its GPUs; srun gives
    one list to all ranks of a node."""
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
    """What torch's NCCL watchdog is told in a trainer rank, where it is not `given` otherwise.

    One rule, of trainer.step_timeout_s. Within half of it the launcher names a silent rank for
    which the others wait, and ends the attempt (rose/launch/beats.py); so long the watchdog's
    thread may hang in the driver. Before all of it a rank that still reports is named. All of it is
    a collective's deadline (`join_world`), after which the watchdog ends the process. Each rank's
    last collectives are then beside the logs, for torch's flight recorder.
    """
    ours = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # end the process; aborting NCCL first may hang
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, int(step_timeout_s / 2))),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that are remembered, some 100 bytes each
        "TORCH_FR_DUMP_TEMP_FILE": str(own_logs / "nccl-"),  # and the trainer's index
    }
    return {name: value for name, value in ours.items() if name not in given}


def _watch(run_dir: Path, attempt: int, rank: int, child: int) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank, which gets its own
    code, why = _wait(child)
    path = rank_status.folder(run_dir, attempt) / f"rank-{rank}.json"
    # not if it died within its first instructions; the launcher then misses the file
    if path.exists():
        last = rank_status.read(run_dir, attempt, rank)
        state, error = "done" if code == 0 else "failed", why or last.error
        ended = msgspec.structs.replace(last, state=state, exit_code=code, error=error)
        _write_status(run_dir, attempt, ended)
    return code if code >= 0 else 128 - code


def _wait(child: int) -> tuple[int, str]:
    """How it ended, and why if it had been stopped for too long and was ended here."""
    stopped = 0

    def look(*_) -> None:
        nonlocal stopped
        if stopped < STOPPED_LOOKS:
            stopped = stopped + 1 if _is_stopped(child) else 0
            if stopped == STOPPED_LOOKS:
                os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    if stopped < STOPPED_LOOKS:
        return code, ""
    return code, f"its process had been stopped (SIGSTOP) for {STOPPED_LOOKS * LOOK_S:g} s"


def _is_stopped(pid: int) -> bool:
    """By a signal; a debugger's stop is another one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _body(
    run_dir: Path, attempt: int, me: Rank, config: Config, body: Callable[[Rank], None]
) -> int:
    status = rank_status.RankStatus(
        rank=me.rank,
        role=me.role,
        index=me.index,
        pid=os.getpid(),
        host=socket.gethostname(),
        state="running",
    )
    code = 0
    try:
        rank_status.write(run_dir, attempt, status)
        _use(me, config, logs.attempt_folder(run_dir, attempt))
        body(me)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (
        BaseException
    ) as error:  # the process ends here whatever it was: say so where it will be looked for
        traceback.print_exc()
        # still "running": the guard alone reports that it ended, so that its exit code is there too
        text = f"{type(error).__name__}: {error}"
        _write_status(run_dir, attempt, msgspec.structs.replace(status, error=text))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _write_status(run_dir: Path, attempt: int, status: rank_status.RankStatus) -> None:
    """Write the status of a rank that ends. It ends, in order, on a full disk too: the launcher,
    which finds its process gone, looks at the disk itself."""
    try:
        rank_status.write(run_dir, attempt, status)
    except OSError as error:
        print(
            f"rank {status.rank}: how it ended could not be written: {error}",
            file=sys.stderr,
            flush=True,
        )
