"""Run a membership of a borrowed rank: apply to the run, start the engine, join, serve, leave.

`rose serve` forks a process for each membership. The process is its own MPI world, a singleton. It
needs no launcher, and its death affects no other rank. After a run has vanished, the next
membership initializes MPI from the start. Exit codes are `Ended`.
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rose import protocol as p
from rose.comm import mpi_process
from rose.comm.join import Answer, Application, JoinError, endpoint
from rose.config import ConfigError
from rose.engine import plugin
from rose.engine.start import EngineError
from rose.models import resolve
from rose.observe.recorder import NullRecorder, Recorder
from rose.parts.lending import board, settings
from rose.parts.lending.config import Config
from rose.parts.lending.vllm import priority

# Seconds to wait for the coordinator's answer. It takes 0.2 s, unless the coordinator writes a
# checkpoint, its file system is slow, or many ranks join at once.
ANSWER_S = 60.0
FIRST_RANK = 10000  # number of the first borrowed rank in the trace


class Ended(enum.IntEnum):
    """Exit codes of a membership."""

    LEFT = 0  # left because of a signal
    RUN_OVER = 10  # the run has ended, vanished, or dismissed this rank
    REFUSED = 11  # the run doesn't accept this rank, now or later
    NOT_NOW = 12  # the run doesn't accept this rank now, but may later
    FAILED = 1


def main(run_dir: Path, overrides: list[str], on_join: Callable[[], object]) -> NoReturn:
    """Run one membership in a process that was just forked for it."""
    # A terminal sends SIGINT to the whole process group; the parent reacts with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Until the worker handles these signals, they end the process.
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(Ended.LEFT))
    for name in mpi_process.launchers():
        del os.environ[name]
    try:
        code = run(run_dir, settings.of_run(run_dir, overrides), on_join)
    except JoinError as error:
        log(str(error))
        code = Ended.NOT_NOW if error.temporary else Ended.REFUSED
    except (ConfigError, EngineError) as error:
        log(str(error))
        code = Ended.REFUSED if isinstance(error, ConfigError) else Ended.FAILED
    except Exception:
        traceback.print_exc()
        code = Ended.FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips MPI's finalization, which can abort after a peer's death


def run(run_dir: Path, config: Config, on_join: Callable[[], object]) -> Ended:
    """Run one membership. Raises `JoinError`, `EngineError`, `ConfigError`."""
    _check_profile(config)
    mpi = config.cluster.mpi
    # MPI reads these variables when it is initialized.
    os.environ.update(config.cluster.interface_env | mpi.env | mpi.join_env)
    lends, idle = plugin.FOLDER in os.environ, config.serving.lending.priority == "idle"
    if lends and idle and not config.cluster.gpus:
        # The online server's front end sends tokens on the same cores and must have priority.
        os.nice(priority.NICE)
    found = endpoint(run_dir)
    if found is None:
        raise JoinError(f"{run_dir}: the run has just ended", temporary=True)
    application = Application(run_dir)

    def leave(*_) -> None:
        application.withdraw()
        os._exit(Ended.LEFT)

    for number in (signal.SIGUSR2, signal.SIGTERM):  # The worker replaces these handlers.
        signal.signal(number, leave)
    answer = application.ask(ANSWER_S)
    log(f"admitted as {answer.worker} (attempt {found.attempt}); starting the engine")
    recorder = _recorder(config, run_dir, answer.worker, found.attempt)
    try:
        return asyncio.run(_take_part(config, application, answer, recorder, on_join))
    finally:
        application.withdraw()
        recorder.close()


def _check_profile(config: Config) -> None:
    """Check that the profile of a shared device was measured with the engines that will run."""
    path = config.serving.lending.profile
    if plugin.FOLDER in os.environ and path is not None:
        from rose.parts.lending import device_profile

        device_profile.check(device_profile.load(path), path, config, resolve(config.model))


async def _take_part(
    config: Config,
    application: Application,
    answer: Answer,
    recorder: NullRecorder,
    on_join: Callable[[], object],
) -> Ended:
    """Start the engine, join the run, and serve until this rank leaves or the run is over."""
    name = answer.worker
    # Importing these modules initializes MPI, so they are imported after its variables are set.
    from rose.comm.link import Link, LinkError
    from rose.comm.wire import COORDINATOR
    from rose.parts.lending.rank.worker import BorrowedWorker, Wire

    worker = BorrowedWorker(config, name, recorder, *_boards())
    await worker.start_engine()
    worker.mailbox = Wire(Link(application.connect(answer.port)))
    worker.mailbox.send(COORDINATOR, p.JoinHello(application.token, name))
    for number in (signal.SIGTERM, signal.SIGUSR2):
        asyncio.get_running_loop().add_signal_handler(number, worker.ask_to_leave, number)
    on_join()
    log(f"{name}: joined")
    try:
        await worker.run()
    except LinkError as error:
        worker.over = str(error)
    if worker.asked_to_leave:
        log(f"{name}: left")
        return Ended.LEFT
    log(f"{name}: {worker.over or 'the run reported: ' + worker.dismissed}")
    return Ended.RUN_OVER


def _boards() -> tuple[Path | None, Callable[[int], None]]:
    """Return the path of the engine's board, and a function that publishes a new policy version to
    the operator. Without a shared device, the path is None and the function does nothing."""
    folder = os.environ.get(plugin.FOLDER)
    if folder is None:
        return None, lambda version: None
    writer = board.Writer(Path(folder) / "epoch", board.Epoch)

    def on_version(version: int) -> None:
        writer.state.epoch = version
        writer.write()

    on_version(-1)
    return Path(folder) / "rollout", on_version


def _recorder(config: Config, run_dir: Path, name: str, attempt: int) -> NullRecorder:
    """Return the recorder of this rank's trace, or one that records nothing."""
    if not config.observe.trace:
        return NullRecorder()
    try:
        return Recorder(
            run_dir, FIRST_RANK + int(name.rpartition("-")[2]), p.Role.ROLLOUT.value, name, attempt
        )
    except OSError as error:
        log(f"no trace of this rank: {error}")
        return NullRecorder()


def log(text: str) -> None:
    print(f"rose serve[{os.getpid()}] {time.strftime('%H:%M:%S')} {text}", flush=True)
