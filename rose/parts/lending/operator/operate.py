"""Operate one lent device: run the online server and the lender beside it, and switch lending.

    operate process (this one)      owner of the Control board, HTTP, report; imports no vLLM
      |- online server S            vLLM's API server (rose/parts/lending/operator/server.py)
      '- lender                     rose serve without a server
                                    (rose/parts/lending/rank/lender.py), with the boards' folder
                                    in its environment: the rollout engine R of its memberships
                                    joins runs

S serves before, during and after the run, with R or without, and is restarted when it dies. The
lender is restarted when it was killed or found no run, because a finished run may be continued. If
the lender fails or a run refuses it, lending ends. Both children die with this process.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from rose import processes
from rose.comm.tasks import Tasks
from rose.config import ConfigError
from rose.files import lock_now, own_folder, write_whole
from rose.launch import gpus
from rose.parts.lending import board
from rose.parts.lending.config import Serving
from rose.parts.lending.operator import metrics, report
from rose.parts.lending.operator.control import BEAT_S, ControlBoard
from rose.parts.lending.operator.history import EVERY_S, History
from rose.parts.lending.operator.server import FREE_SHARE, OnlineServer, ServerError, begin_child
from rose.parts.lending.operator.web import Web
from rose.parts.lending.rank.member import log
from rose.parts.lending.rules.predictor import Predictor
from rose.parts.lending.rules.slo import why_not_alone
from rose.parts.lending.run_report import LENT
from rose.parts.lending.settings import of_run, parse
from rose.parts.lending.vllm import device

SCHEDULER = "rose.parts.lending.vllm.rollout.scheduler"
SHORT = 256  # prompt tokens of the request for which the device must be able to meet all targets
DEVICES = 64  # most lent devices of one run on a node
SCRAPE_S = 2.0  # timeout of reading the online server's own metrics, for the report
REPORT_EVERY_S = 15.0  # seconds between two reports
LAST_REPORT_S = 4.0  # seconds for the last report, including SCRAPE_S for the metrics
MOST_EVENTS = 200  # number of events in the report; older ones are dropped
MISSES = "misses its targets with nothing lent (serving.online.slo): it lends nothing"
LENDS_AGAIN = "lends again: it meets its targets alone, or has had no request for minutes"
LOCK = "lock"
DRIVER = Path("/dev/nvidiactl")
STOP_TASKS_S = 1.0  # seconds for this process's tasks to end
BACK_OFF_S = (1.0, 60.0)  # least and most seconds before a killed lender is started again
AGAIN_S = 60.0  # seconds before a lender that had no run is started again
# Seconds for the lender to end, beyond serving.drain_s. The lender's own limit is shorter.
LEAVE_S = 30.0
READ_S = 2.0  # seconds for reading the run's serving.drain_s

# Signals to this process.
NOW = signal.SIGTERM  # leave now
WHEN_DONE = signal.SIGUSR2  # leave after the turns that run
STOP = signal.SIGUSR1  # stop lending
LEND = signal.SIGRTMIN  # start lending again


def has_gpus(run_dir: Path, arguments: list[str]) -> bool:
    """True if this device is a GPU: by cluster.gpus in `arguments`, or else in the run's
    configuration, or else (the run has not begun) if NVIDIA's driver is present."""
    gpus = parse(arguments).get("cluster.gpus")
    if gpus is None:
        with contextlib.suppress(ConfigError):
            gpus = of_run(run_dir, []).cluster.gpus
    return DRIVER.exists() if gpus is None else gpus != 0


def take_gpus(run_dir: Path, overrides: list[str], serving: Serving) -> None:
    """Narrow CUDA_VISIBLE_DEVICES of this process and its children to the GPUs of this task. Their
    number is the larger tensor-parallel size of the two engines. Other tasks on the node may see
    the same GPUs, but use other ones. Raises `ConfigError` when this task sees too few."""
    if not has_gpus(run_dir, overrides):
        return
    options = {key.replace("-", "_"): value for key, value in serving.online.engine_args.items()}
    degree = options.get("tensor_parallel_size", 1)
    wanted = {"serving.online.engine_args.tensor_parallel_size": degree}
    rollouts = parse(overrides).get("rollout.tensor_parallel")
    # Before the run has begun, only the command line can set the rollout engine's size.
    with contextlib.suppress(ConfigError):
        rollouts = of_run(run_dir, overrides).rollout.tensor_parallel
    if isinstance(rollouts, int):
        wanted["rollout.tensor_parallel"] = rollouts
    key = max(wanted, key=wanted.__getitem__)
    os.environ.update(gpus.of_task(wanted[key], f"{key}={wanted[key]}"))


def beside_online(serving: Serving, on_gpu: bool, overrides: list[str]) -> list[str]:
    """Return the overrides for a rollout engine beside an online engine on the same device. Keys
    that the command line, `overrides`, sets are left out."""
    # All KV memory that can ever be lent.
    own = {"rollout.kv_cache_gib": serving.lending.kv_gib or serving.online.kv_cache_gib}
    if on_gpu:
        own["rollout.gpu_memory_utilization"] = FREE_SHARE
    given = parse(overrides)
    return [f"{key}={value}" for key, value in own.items() if key not in given]


def why_never(serving: Serving, profile: dict[str, Any] | None) -> str:
    """Return why nothing can ever be lent with these settings; "" if something can."""
    if profile is None:
        return (
            "nothing is lent: serving.lending.profile is null, and the default refuses to lend "
            "until a profile of this device and these models exists; python -m "
            "rose.parts.lending.profile writes it"
        )
    if serving.online.slo is None:
        return (
            "nothing is lent: serving.online.slo is null, so the latency targets of online "
            "requests are unknown"
        )
    online = serving.online
    short = min(SHORT, online.max_context // 4)
    predictor = Predictor.from_dict(profile["online"]["predictor"])
    alone = why_not_alone(predictor, online.slo, short, online.max_batched_tokens)
    return f"nothing is lent: {alone}" if alone else ""


class Operator:
    """Operates one lent device. `overrides`: the command line, with keys of server and run."""

    def __init__(
        self, run_dir: Path, overrides: list[str], serving: Serving, profile: dict[str, Any] | None
    ) -> None:
        self.run_dir = run_dir
        self.overrides = overrides
        self.serving = serving
        self.profile = profile
        self.folder, self._lock = claim(run_dir.name)
        number = self.folder.name.rpartition("-")[2]
        self.home = run_dir.parent / "serving" / f"{run_dir.name}-{socket.gethostname()}-{number}"
        threads = parse(overrides).get("rollout.threads")
        on_gpu = has_gpus(run_dir, overrides)
        self.server = OnlineServer(serving, self.folder, self.home / "online.log", on_gpu, threads)
        self.events: collections.deque[report.Event] = collections.deque(maxlen=MOST_EVENTS)
        self.history = History()
        self._scraped = ""  # the online server's metrics when last scraped
        self._write_lock = threading.Lock()
        self._lender: asyncio.subprocess.Process | None = None
        self._lends = True  # the last noted state of S
        self._leaving = False

    def run(self) -> int:
        """Operate until a signal; return the exit code. Raises `ConfigError`, and `OSError` if a
        folder can't be written: that of the boards, or that of report, log and token."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            take_gpus(self.run_dir, self.overrides, self.serving)
            self.server.check()
            return asyncio.run(self._run())
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()

    async def _run(self) -> int:
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._variables = device.describe(self.folder, self.serving, self.profile)
        never = why_never(self.serving, self.profile)
        self.control = ControlBoard(self.folder, self.serving.lending, never, self._note)
        self.web = Web(self.folder, self.home, self.serving, self.control, self._page, self._status)
        await self.web.open()
        self._handle_signals()
        file = self.serving.lending.stop_file
        log(
            f"operator's page {self._url}/report; stop lending: kill -USR1 {os.getpid()}, or POST "
            f"{self._url}/lending/stop (token: {self.web.token_file})"
            + (f", or make {file}" if file else "")
        )
        if self.control.switch.never:
            self._note(self.control.switch.never)
        tasks = Tasks()
        for work in (
            self.control.beat(),
            self.control.watch_file(),
            self._observe(),
            self._write_reports(),
            self.server.run(self._note),
            self._lend(),
        ):
            tasks.spawn(work)
        try:
            await tasks.run_until(self._leave())
            return 0
        except ServerError as error:
            log(str(error))
            return 1
        finally:
            await self._close(tasks)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        loop.add_signal_handler(STOP, self.control.stop, "SIGUSR1")
        loop.add_signal_handler(LEND, self.control.start, "SIGRTMIN")

    # ----------------------------------------------------------------- the two children

    async def _lend(self) -> None:
        """Once the online server has served, run the lender, and restart it until it fails."""
        if self.control.switch.never:
            return
        while not self.server.up:
            await asyncio.sleep(BEAT_S)
        pause, code, no_run = BACK_OFF_S[0], 0, False
        while code <= 0:
            began = time.monotonic()
            self._lender = await asyncio.create_subprocess_exec(
                *self.lender_command(),
                env=os.environ | self._variables,
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=begin_child(os.getpid(), (STOP, LEND)),
            )
            code = await self._lender.wait()
            if self._leaving:
                return
            if code < 0:
                pause = BACK_OFF_S[0] if time.monotonic() - began > BACK_OFF_S[1] else pause
                self._note(
                    f"the lender was killed by {processes.signal_name(-code)}; another one is "
                    f"started in {pause:g} s"
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, BACK_OFF_S[1])
            elif code == 0:
                if not no_run:
                    self._note(f"no run to lend to now; the lender looks again every {AGAIN_S:g} s")
                no_run = True
                await asyncio.sleep(AGAIN_S)
        self.control.switch.never = (
            f"nothing is lent any more: the lender ended with code {code}; its last lines in the "
            "output of rose serve say why; start that again without this cause"
        )
        self._note(f"{self.control.switch.never}; the online server serves on")

    def lender_command(self) -> list[str]:
        return [
            sys.executable,
            "-u",
            "-m",
            "rose",
            "serve",
            f"name={self.run_dir.name}",
            f"output_dir={self.run_dir.parent}",
            *self.overrides,
            *beside_online(self.serving, self.server.gpus, self.overrides),
            f"rollout.engine_args.scheduler_cls={SCHEDULER}",
        ]

    async def _leave(self) -> None:
        """Wait for a signal to leave, pass it on, and wait until the lender has left. After SIGUSR2
        the lender first finishes its turns; after other signals it leaves at once."""
        number = await self._signals.get()
        self._leaving = self.server.leaving = True
        self._note(f"leaving, at {signal.Signals(number).name}")
        lender = self._lender
        if lender is None or lender.returncode is not None:
            return
        lender.send_signal(WHEN_DONE if number == WHEN_DONE else NOW)
        leave_s = LEAVE_S + (await self._drain_s() if number == WHEN_DONE else 0.0)
        deadline = time.monotonic() + leave_s
        while lender.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(BEAT_S)
            if not self._signals.empty() and self._signals.get_nowait() != WHEN_DONE:
                lender.send_signal(NOW)
        if lender.returncode is None:
            log(f"the lender did not leave within {leave_s:g} s and is killed")
            lender.kill()

    async def _drain_s(self) -> float:
        """Return serving.drain_s as the lender has it: from the run, overridden by the command
        line. Before the run has begun, or if its folder doesn't answer: as this process has it."""
        read = functools.partial(of_run, self.run_dir, self.overrides)
        with contextlib.suppress(ConfigError, TimeoutError):
            async with asyncio.timeout(READ_S):
                return (await processes.in_daemon(read)).serving.drain_s
        return self.serving.drain_s

    async def _close(self, tasks: Tasks) -> None:
        """End the lender, write the last report, and then end the server, whose metrics the report
        reads. A mount that doesn't answer delays this by LAST_REPORT_S."""
        if self._lender is not None and self._lender.returncode is None:
            self._lender.kill()
        # The last states of engines count, even of engines that have ended.
        self.history.add(metrics.read(self.folder, living=False))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPORT_S):
                await self._write_report()
        await tasks.close(STOP_TASKS_S)
        self.control.close()
        await self.server.stop()
        await self.web.close()

    # ----------------------------------------------------------------- report and status

    @property
    def _url(self) -> str:
        return f"{self.server.url.rpartition(':')[0]}:{self.web.port}"

    def _note(self, text: str) -> None:
        """Log a text, and add it to the report's events."""
        log(text)
        self.events.append(report.Event(time.time(), text))

    async def _observe(self) -> None:
        """Record the boards, and note when the online server stops or resumes lending."""
        while True:
            boards = metrics.read(self.folder)
            self.history.add(boards)
            lends = boards.online is None or bool(boards.online.lends)
            if lends != self._lends:
                self._lends = lends
                self._note(f"the online server {LENDS_AGAIN if lends else MISSES}")
            await asyncio.sleep(EVERY_S)

    async def _write_reports(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self._write_report()

    async def _write_report(self) -> None:
        """Write the operator's page and the numbers for the run's report, in a thread: the run's
        file system may not answer."""
        measured, stopped = report.quantiles(await self._scrape()), self.control.switch.stopped
        slo = self.serving.online.slo
        summary = report.summary(self._title, measured, slo, self.history, stopped)
        summary["run"] = self.run_dir.name
        page, numbers = self._html(measured).encode(), json.dumps(summary).encode()

        def write() -> None:
            with self._write_lock:  # The last report may begin while another is written.
                write_whole(self.home / "report.html", page)
                write_whole(self.home / LENT, numbers)

        try:
            await processes.in_daemon(write)
        except OSError as error:
            log(f"no report: {error}")

    @property
    def _title(self) -> str:
        return f"{self.run_dir.name} on {socket.gethostname()}"

    async def _page(self) -> str:
        return self._html(report.quantiles(await self._scrape()))

    def _html(self, measured: dict[str, float]) -> str:
        """Create the operator's page. `measured`: the online server's latencies, in seconds."""
        stopped = self.control.switch.stopped
        return report.page(
            self._title, self.serving, self.history, measured, stopped, list(self.events)
        )

    async def _scrape(self) -> str:
        """Return the online server's metrics; if it doesn't answer, the last known, or ""."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_S)) as client,
                client.get(f"{self.server.url}/metrics") as answer,
            ):
                if answer.status == 200:
                    self._scraped = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            pass
        return self._scraped

    def _why_not(self, lender_lives: bool, lends: bool) -> str:
        """Return why nothing is lent now, or "" if something may be."""
        reasons = {
            self.control.switch.stopped: True,
            "nothing is lent at this hour (serving.lending.hours)": not self.control.state.share,
            "the online server does not serve now": not self.server.up,
            f"the online server {MISSES}": not lends,
            f"no lender runs; unless it fails, it starts within {AGAIN_S:g} s": not lender_lives,
        }
        return next((reason for reason, holds in reasons.items() if reason and holds), "")

    def _status(self) -> dict[str, Any]:
        state, boards = self.control.state, metrics.read(self.folder)
        alive = self._lender is not None and self._lender.returncode is None
        lends = boards.online is not None and bool(boards.online.lends)
        return {
            "lend": bool(state.lend),
            "why_not": self._why_not(alive, boards.online is None or lends),
            "share": state.share,
            "epoch": state.epoch,
            "online": {
                "url": self.server.url,
                "up": self.server.up,
                "starts": self.server.starts,
                "lends": lends,
            },
            "rollout": {
                "lender": self._lender.pid if alive else None,
                "engine": int(boards.rollout.pid) if boards.rollout else None,
            },
            "report": f"{self._url}/report",
            "home": str(self.home),
            "boards": str(self.folder),
        }


def claim(name: str) -> tuple[Path, TextIO]:
    """Claim a folder for boards; return it and its lock. Raises `ConfigError` if all are taken."""
    for number in range(DEVICES):
        folder = board.folder(f"{name}-{number}")
        try:
            own_folder(folder)
        except OSError:  # another user's folder, in which the lock may be a link to a file of ours
            continue
        try:
            lock = open(folder / LOCK, "w", encoding="utf-8")  # noqa: SIM115 (held while the process lives)
        except FileNotFoundError:  # The last owner is removing the folder.
            continue
        try:
            lock_now(lock)
            if os.stat(folder / LOCK).st_ino != os.fstat(lock.fileno()).st_ino:
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):  # taken, or the last owner is removing it
            lock.close()
            continue
        for left in folder.iterdir():  # files that a killed process left
            if left.name != LOCK:
                left.unlink(missing_ok=True)
        return folder, lock
    raise ConfigError(
        f"name={name!r}: {DEVICES} devices of this node serve a run of this name already, or "
        f"{board.folder(name)}-* belong to another user"
    )
