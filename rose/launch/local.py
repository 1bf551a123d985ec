"""Run a plan on this machine: run folder, lock, and one mpiexec for all ranks.

The command has several programs (MPMD), so that all ranks are in one MPI_COMM_WORLD and each gets
its own variables:
    mpiexec -n 2 -env OMP_NUM_THREADS 1 python -m rose.main --run DIR --attempt N : -n 1 -env
    OMP_NUM_THREADS 2 ...

Left out: other machines (Slurm) and what ranks do (rose/main.py).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import IO

import yaml

from rose import config as configuration
from rose import files, hub, inputs, places, processes
from rose.config import Config, ConfigError
from rose.launch import gpus, logs
from rose.launch.layout import Rank

RANK_COMMAND = (sys.executable, "-m", "rose.main")
MPIEXEC = (sys.executable, "-I", str(Path(__file__).with_name("mpiexec.py")))


def mpiexec_argv(
    ranks: Sequence[Rank],
    run_dir: Path,
    attempt: int,
    rank_command: Sequence[str] = RANK_COMMAND,
    given: Sequence[str] = (),
) -> list[str]:
    """Return mpiexec's command line: one block for consecutive ranks with the same environment.
    `given` names the GPUs to hand out. With -keep, mpiexec doesn't end the other ranks when one
    dies: supervise.py does."""

    def own(rank: Rank) -> dict[str, str]:
        mine = {gpus.VARIABLE: gpus.own(rank.gpus, given)} if rank.gpus else {}
        return rank.environment | mine

    argv = [*MPIEXEC, "-keep"]
    for number, (env, block) in enumerate(groupby(ranks, own)):
        argv += [":"] if number else []
        argv += ["-n", str(len(list(block)))]
        for name, value in env.items():
            argv += ["-env", name, value]
        argv += [*rank_command, "--run", str(run_dir), "--attempt", str(attempt)]
    return argv


def environment(c: Config) -> dict[str, str]:
    """Return the variables that all ranks have: this process's, then cluster.env and
    cluster.mpi.env, which take precedence."""
    # One thread, since NumPy starts them before a rank knows its share of the cores.
    threads = {"OPENBLAS_NUM_THREADS": "1"}
    utf8 = {"PYTHONUTF8": "1"}  # UTF-8 whatever the locale, in users' code too
    # Ranks of one machine connect over loopback, which no other machine reaches.
    loopback = {"FI_TCP_IFACE": "lo"} if c.cluster.kind == "local" else {}
    return (
        loopback
        | os.environ
        | {"PYTHONPATH": places.python_path()}
        | threads
        | utf8
        | hub.OFFLINE
        | c.cluster.interface_env
        | c.cluster.env
        | c.cluster.mpi.env
    )


class InUse(ConfigError):
    """Another launch holds the run's folder."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock the run's folder, which is made if absent. Raises `InUse` if another launch holds it,
    and `ConfigError` if it can't be made, locked or written. Folders made here are removed at the
    end if nothing was written into them."""
    made = [path for path in (run_dir, *run_dir.parents) if not os.path.exists(path)]
    unused = False
    try:
        with _open_lock_file(run_dir) as file:
            _lock(run_dir, file)
            try:
                if refused := files.refusal(run_dir):
                    raise _unusable(run_dir, refused)
                file.truncate(0)
                file.write(f"{os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                yield
            finally:
                unused = _remove_unused(run_dir, file)
    finally:
        # Only after the lock file is closed, since NFS keeps an open file under another name.
        with suppress(OSError):  # a file of another launch
            for folder in made if unused else ():
                folder.rmdir()  # the deepest first


def _lock(run_dir: Path, file: IO[str]) -> None:
    try:
        files.lock_now(file)
        held = _is_in_place(run_dir, file)
    except BlockingIOError:
        held = False
    except OSError as error:  # a file system without locks
        raise _unusable(run_dir, error) from None
    # Another launch holds the lock, or held it until now and removed it with its unused folder.
    if not held:
        file.seek(0)
        raise InUse(
            f"name={run_dir.name!r}: {run_dir} is in use by another launch (process "
            f"{file.read().strip()}); wait for it, stop it, or give another name"
        )


def _is_in_place(run_dir: Path, file: IO[str]) -> bool:
    """True if the open file is still the folder's lock file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(run_dir / "lock"))
    except FileNotFoundError:
        return False


def _remove_unused(run_dir: Path, file: IO[str]) -> bool:
    """Remove our lock file if the folder has nothing else; return True if it was removed. If the
    run's folder was moved aside, a lock file in its place may be another launch's, and stays."""
    with suppress(OSError):  # a folder without write permission
        if os.listdir(run_dir) == ["lock"] and _is_in_place(run_dir, file):
            (run_dir / "lock").unlink()
            return True
    return False


def _open_lock_file(run_dir: Path) -> IO[str]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return open(run_dir / "lock", "a+", encoding="utf-8")
    except OSError as error:
        raise _unusable(run_dir, error) from None


def _unusable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"output_dir={str(run_dir.parent)!r}: {run_dir} can't be made, locked or written "
        f"({error.strerror}); give a folder that you may write, with room, on a file system with "
        "locks"
    )


def check_sandbox_folders(c: Config) -> None:
    """Raise `ConfigError` unless the folders of sandbox checkpoints take files and locks. These are
    sandbox.store and, with cluster=local, sandbox.local, since it is on this machine then."""
    modes = {"store": 0o777, "local": 0o700} if c.cluster.kind == "local" else {"store": 0o777}
    for key, mode in modes.items():
        folder = getattr(c.sandbox, key)
        if folder is None or c.sandbox.checkpoints == "none":
            continue
        try:
            Path(folder).mkdir(mode, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                files.lock_now(probe)
            refused = files.refusal(folder)
        except OSError as error:
            refused = error
        if refused:
            raise ConfigError(
                f"sandbox.{key}={folder!r}: can't be made, locked or written ({refused.strerror}); "
                "give a folder that you may write, with room, on a file system with locks"
            )


def write_config(c: Config, run_dir: Path) -> None:
    """Write the configuration, and the digests of the files that it names, into the folder."""
    inputs.record(c, run_dir)
    configuration.save(c, run_dir / "config.json")
    files.write_whole(
        run_dir / "config.yaml", yaml.safe_dump(configuration.to_dict(c), sort_keys=False).encode()
    )


def start(
    c: Config,
    ranks: Sequence[Rank],
    run_dir: Path,
    attempt: int,
    rank_command: Sequence[str] = RANK_COMMAND,
) -> subprocess.Popen:
    """Start mpiexec, in a session of its own so that the terminal's Ctrl-C reaches the launcher
    alone. mpiexec dies with this process. Its output goes to mpiexec.log beside the ranks' logs."""
    argv = mpiexec_argv(ranks, run_dir, attempt, rank_command, gpus.for_launcher(c))
    launcher = os.getpid()
    with open(logs.attempt_folder(run_dir, attempt) / "mpiexec.log", "wb") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(c),
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(launcher),
        )
