"""Short live runs on this machine whose engines are confined to a CPU quota each.

Shared by simulator/validate_sim.py and lending/. Not a command.

A quota is a cgroup of the cpu controller (version 1 or 2, whichever this machine has). Its periods
are as short as the kernel allows, so that a step of a few milliseconds is stretched and not
stopped. Its weight is the greatest, because other load on the CPUs would not slow a GPU down. It
holds the computing threads of vLLM's engines, which stand for GPUs, and what they start later. An
engine's other threads (its sockets, its board's beats), and the ranks and servers in front of it
are outside, because on a GPU machine they run on cores of the host. It is set once the engines have
started. Without a writable controller there are no quotas: the scripts refuse to run, unless
`--quota 0` says that none is wanted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from rose.coordinator import journal
from rose.parts.lending.profile import stolen_s
from rose.parts.lending.vllm.steps import STEPS
from rose.protocol import Role
from rose.scheduler import events as ev
from scripts.harness import PATHS, REPOSITORY, each_thread, family, stop
from scripts.runs import MEASURED, Run, launch

ENGINE = "VLLM::EngineCore"  # vLLM's name for the process that computes
PERIOD_US, LEAST_US = 10_000, 1_000  # shortest period, and Linux's least quota of a period
FAVOURED = -20  # the nice value of servers in front of engines, and of their clients
LOOK_S = 0.5  # seconds between two polls of all processes, which take 10 ms
# Seconds that the measurement of a serving device may take, and between two looks at it.
PROFILE_LIMIT_S, PROFILE_POLL_S = 600.0, 0.1
CORES = os.cpu_count() or 1
CALM = 0.05
# Seconds for which the machine must be calm before a run, and longest wait for that.
WATCH_S, PATIENCE_S = (5.0, 600.0)
V2, V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")
# Like vLLM's own scheduler where no device is shared, but able to log its steps.
SCHEDULER = "rose.parts.lending.vllm.rollout.scheduler"
ALIKE = (
    *MEASURED,
    "trainer.checkpoint_every=1000000",
    "algorithm=decoupled_ppo",
    "trainer.optimizer.lr=1e-9",  # negligible, so that the policy and its lengths stay the same
    f"+rollout.engine_args.scheduler_cls={SCHEDULER}",
    # vLLM's default on a CPU is 128. On average half a block of a turn's context is computed again.
    "+rollout.engine_args.block_size=32",
)


def engines_of(pid: int) -> list[psutil.Process]:
    """Return the processes below this one that vLLM has named as engines."""
    found = []
    for one in family(pid)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [one] if one.cmdline()[:1] == [ENGINE] else []
    return found


class Quota:
    """A cgroup for the computing thread of an engine, or of the two engines of a serving device.

    With one computing thread (rollout.threads=1) this is the main thread of the engine's process.
    With `cores` 0 there is no cgroup. `core` is the one core on which the computing threads run. A
    serving device needs it: Linux ranks threads by priority on each core alone, so that on two
    cores a rollout step and an online step run side by side and share the quota in halves.
    """

    def __init__(self, name: str, cores: float, core: int | None = None) -> None:
        self._cores, self._folder, self._core = cores, None, core
        if not cores:
            return
        self._v2 = (V2 / "cgroup.controllers").exists()
        self._folder = (V2 if self._v2 else V1) / f"rose-{os.getpid()}-{name}"
        # The cgroup of the computing threads. Version 2 divides a process's threads only among
        # threaded cgroups below one that holds the whole process.
        self._computing = self._folder / "computing" if self._v2 else self._folder
        self._threads = self._computing / ("cgroup.threads" if self._v2 else "tasks")
        try:
            if self._v2:
                _write(V2 / "cgroup.subtree_control", "+cpu")
            self._computing.mkdir(parents=True)
            if self._v2:
                _write(self._computing / "cgroup.type", "threaded")
                _write(self._folder / "cgroup.subtree_control", "+cpu")
            file = "cpu.max" if self._v2 else "cpu.cfs_quota_us"
            (self._computing / file).read_text(encoding="utf-8")
        except OSError as error:
            self.close()
            raise SystemExit(
                f"no CPU quota can be set here ({error}): run as root with a writable cgroup "
                "controller cpu, or give --quota 0 for engines without one"
            ) from None

    def add(self, pid: int, everybody: bool = False) -> None:
        """Put the engines below this process into the quota. `everybody`: all processes below it,
        for one that starts several engines, of which only the first is named ENGINE."""
        if self._folder is None:
            return
        for one in family(pid)[1:] if everybody else engines_of(pid):
            with contextlib.suppress(ProcessLookupError):
                if self._v2:
                    _write(self._folder / "cgroup.procs", one.pid)
                # A process's id is also its main thread's.
                _write(self._threads, one.pid)
                if self._core is not None:
                    os.sched_setaffinity(one.pid, {self._core})

    @staticmethod
    def favour(pid: int) -> None:
        """Give the servers in front of an engine, and the engine's threads that don't compute,
        priority over other work, because they have cores of their own where the engine is a GPU.
        A rollout engine on a shared device lowers its threads again when it begins to compute."""
        computing = {engine.pid for engine in engines_of(pid)}

        def favour(thread: int) -> None:
            if thread not in computing:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, FAVOURED)

        for one in family(pid):
            each_thread(one, favour)

    def limit(self) -> None:
        """Set the limit. Raises `SystemExit` if there is no engine in the quota."""
        if self._folder is None:
            return
        if not self._threads.read_text(encoding="utf-8"):
            raise SystemExit(
                f"no process called {ENGINE} came up to be confined; vLLM calls its engines "
                "otherwise now"
            )
        period = max(PERIOD_US, int(LEAST_US / self._cores))
        quota = int(self._cores * period)
        if self._v2:
            values = {"cpu.weight": 10_000, "cpu.max": f"{quota} {period}"}
        else:
            values = {"cpu.shares": 262_144, "cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
        for name, value in values.items():
            _write(self._computing / name, value)
        if self._v2:
            _write(self._folder / "cpu.weight", values["cpu.weight"])

    def close(self) -> None:
        """Remove the cgroup once its processes have ended."""
        if self._folder is None:
            return
        end = time.monotonic() + 30
        while self._folder.exists() and time.monotonic() < end:
            try:
                if self._computing.exists():
                    self._computing.rmdir()
                self._folder.rmdir()
            except OSError:
                time.sleep(0.1)  # retried until the last process is gone


def _write(file: Path, value: object) -> None:
    file.write_text(str(value), encoding="utf-8")


def profile(out: Path, quota: Quota, words: Sequence[str], prefix: Sequence[str] = ()) -> None:
    """Measure a serving device, whose engines are put into `quota`. Raises `SystemExit` with the
    last lines of the measurement if it fails or takes over `PROFILE_LIMIT_S`."""
    command = [*prefix, sys.executable, "-m", "rose.parts.lending.profile", f"out={out}", *words]
    log, end, confined = out.with_suffix(".log"), time.monotonic() + PROFILE_LIMIT_S, 0
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | PATHS, stdout=file, stderr=file
        )
    try:
        while process.poll() is None and time.monotonic() < end:
            # It prints "measuring" once an engine has started, and again for the second engine.
            engines = log.read_text(encoding="utf-8", errors="replace").count("measuring")
            if engines > confined:
                confined = engines
                quota.add(process.pid, everybody=True)
                quota.limit()
            time.sleep(PROFILE_POLL_S)
        code = process.poll()
    finally:
        stop(process)
    if code != 0:
        why = f"took over {PROFILE_LIMIT_S:g} s" if code is None else f"ended with {code}"
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        raise SystemExit("\n".join([f"the profile {why}:", *said]))


class Stolen(NamedTuple):
    """The processor time that the hypervisor has taken from this machine so far."""

    at: float  # wall-clock time
    seconds: float  # seconds of all cores together

    @staticmethod
    def now() -> Stolen:
        return Stolen(time.time(), stolen_s())

    def share_since(self, before: Stolen) -> float:
        """Return the share of the machine's time that was taken since `before`."""
        return (self.seconds - before.seconds) / (self.at - before.at) / CORES


def wait_for_calm(log: Callable[[str], None]) -> None:
    """Wait until the hypervisor leaves this machine its cores for WATCH_S, at most PATIENCE_S."""
    end, logged = time.monotonic() + PATIENCE_S, False
    while time.monotonic() < end:
        before = Stolen.now()
        busy = [
            subprocess.Popen(["timeout", str(WATCH_S), "sh", "-c", "while :; do :; done"])
            for _ in range(CORES)
        ]
        for one in busy:
            one.wait()
        share = Stolen.now().share_since(before)
        if share < CALM:
            return
        if not logged:
            words = f"waiting for a calm, {PATIENCE_S:g} s at most"
            log(f"the hypervisor takes {share:.0%} of this machine; {words}")
            logged = True


class Ran(Run):
    """The measurements of a run of launch.py."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / name)
        self._stolen_file = folder / f"{name}.stolen"

    @property
    def finished(self) -> bool:
        return (self.run / "status" / "finished.json").exists()

    def calm_steps(self, skip: int) -> list[dict]:
        """Return the rows during which the hypervisor took less than CALM of the machine."""
        rows = self.steps(skip)
        return [
            row
            for row, taken in zip(rows, self._taken(rows), strict=False)
            if taken < CALM * row["time_step"] * CORES
        ]

    def _taken(self, rows: list[dict]) -> np.ndarray:
        """Return the core-seconds that the hypervisor took in each step."""
        lines = self._stolen_file.read_text(encoding="utf-8").splitlines()
        at, lost = zip(*map(json.loads, lines), strict=True)
        ends = np.array([row["time"] for row in rows])
        begins = ends - [row["time_step"] for row in rows]
        return np.interp(ends, at, lost) - np.interp(begins, at, lost)

    def entries(self) -> list[tuple[ev.Event, list[ev.Action]]]:
        [path] = (self.run / "journal").glob("attempt-*.jsonl")
        found = journal.read(path)
        next(found)
        return [(entry.event, entry.actions) for entry in found]


class Confined(Run):
    """A run that is under way, of which each dedicated engine gets a quota of its own."""

    _cores: float
    _quotas: dict[int, Quota]  # pid of an engine's rank -> its quota

    def confine(self) -> None:
        """Confine the engines that have started. Call this often."""
        if self.phase()[0] in ("", "starting"):
            return
        for rank in self.ranks(Role.ROLLOUT):
            if rank.pid not in self._quotas and engines_of(rank.pid):
                quota = self._quotas[rank.pid] = Quota(f"engine-{rank.pid}", self._cores)
                quota.add(rank.pid)
                quota.limit()


class Live(Ran, Confined):
    """A run of launch.py that starts at once."""

    def __init__(
        self, folder: Path, name: str, words: list[str], quota: float, steps_log: Path | None = None
    ) -> None:
        super().__init__(folder, name)
        self._log = (folder / f"{name}.log").open("wb")
        env = os.environ | ({STEPS: str(steps_log)} if steps_log else {})
        log = {"stdout": self._log, "stderr": self._log}
        command = launch(folder, name, *ALIKE, *words)
        self._process = subprocess.Popen(command, env=env, start_new_session=True, **log)
        self._cores, self._quotas = quota, {}
        self._stolen = self._stolen_file.open("w", buffering=1, encoding="utf-8")

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def wait(self, deadline_s: float) -> None:
        """Wait until the run ends. Raises `SystemExit` naming its log if it fails or is late."""
        end = time.monotonic() + deadline_s
        try:
            while not self.over:
                self._stolen.write(json.dumps(Stolen.now()) + "\n")
                self.confine()
                if time.monotonic() > end:
                    raise SystemExit(f"{self.run} took over {deadline_s:g} s; see {self._log.name}")
                time.sleep(LOOK_S)
        finally:
            self.close()
        if code := self._process.returncode:
            raise SystemExit(f"{self.run} ended with {code}; see {self._log.name}")

    def close(self) -> None:
        if not self.over:
            stop(self._process)
        self._log.close()
        self._stolen.close()
        for quota in self._quotas.values():
            quota.close()


def end_in_order() -> None:
    """Make SIGTERM and Ctrl-C exit this script with 143 and 130, so that it ends the processes that
    it started. A second signal, which `timeout` may send beside a terminal's, is ignored, so that
    it does not interrupt that."""
    asked = (signal.SIGTERM, signal.SIGINT)

    def leave(number: int, _frame: object) -> None:
        for each in asked:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in asked:
        signal.signal(each, leave)


class Durations:
    """A journal that collects the seconds from a group's admission to the end of each of its
    training trajectories, from step `from_step` on. A simulator or a journal's reader fills it."""

    def __init__(self, from_step: int) -> None:
        self._from, self._step = from_step, 0
        self._admitted: dict[str, tuple[float, int]] = {}
        self._group_of: dict[str, str] = {}
        # Seconds of each trajectory, by the step in which its group was admitted.
        self._seconds: dict[int, list[float]] = {}

    def write(self, event: ev.Event, actions: list[ev.Action]) -> None:
        match event:
            case ev.StepBegun(step=step):
                self._step = step
            case ev.TurnRequested(trajectory=trajectory, group=group):
                self._group_of[trajectory] = group
            case ev.TrajectoryEnded(trajectory=trajectory, tokens=tokens) if tokens:
                at, step = self._admitted.get(self._group_of.pop(trajectory, ""), (0.0, -1))
                if step >= self._from:
                    self._seconds.setdefault(step, []).append(event.at - at)
        for action in actions:
            if isinstance(action, ev.AdmitGroup):
                self._admitted[action.group] = event.at, self._step

    @property
    def p95(self) -> dict[int, float]:
        """The 95th percentile of seconds, by the step in which the groups were admitted."""
        return {step: float(np.percentile(of, 95)) for step, of in self._seconds.items()}
