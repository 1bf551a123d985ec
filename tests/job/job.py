"""Starts the main job as a user does, on a small size, and reads what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rose.coordinator import replay
from rose.coordinator.control import first_name, train_task
from rose.observe.metrics import read_metrics
from scripts.runs import Run, launch
from tests import processes

DEADLINE_S = 900.0  # a machine with other guests has been five times slower
SMALL = (
    "trainer.steps=3 trainer.batch_size=16 rollout.group_size=4 eval.episodes=0 "
    "observe.terminal=false observe.report=false trainer.checkpoint_every=1 "
    "rollout.kv_cache_gib=0.05 rollout.threads=1 trainer.threads=1 rollout.workers=1"
).split()


def trained_on(run: Path, steps: int) -> list[str]:
    """Ids of the trajectories of each step, members by their first name."""
    return [
        first_name(t.id)
        for step in range(1, steps + 1)
        for group in replay.load(run, step)
        for t in group
    ]


class Held:
    """Runs of FrozenLake, some of whose groups wait at their first move in each step until the test
    lets them go on: then it knows where the run is, however slow or fast."""

    def __init__(
        self, folder: Path, steps: int, groups: int = 4, waiting: int = 1, size: int = 4
    ) -> None:
        """Of the `groups` of `size` trajectories of each of `steps` steps the last `waiting` ones
        wait."""
        self.folder, self.finished = folder / "released", (groups - waiting) * size
        self.folder.mkdir(parents=True)
        self._seeds = {
            step: [
                train_task(1, groups * step - 1 - n, {"frozen_lake": 1.0}).seed
                for n in range(waiting)
            ]
            for step in range(1, steps + 1)
        }
        held = sorted(seed for seeds in self._seeds.values() for seed in seeds)
        self.overrides = (
            "env.name=tests.job.held:HeldLake",
            "env.step_timeout_s=1000",
            f"+env.args.folder={self.folder}",
            f"+env.args.held={held}",
            f"trainer.batch_size={size * groups}",
            f"rollout.group_size={size}",
        )

    def release(self, *steps: int) -> None:
        for seed in (seed for step in steps for seed in self._seeds[step]):
            (self.folder / str(seed)).touch()

    def hold(self, *steps: int) -> None:
        """What was released waits again, in runs to come."""
        for seed in (seed for step in steps for seed in self._seeds[step]):
            (self.folder / str(seed)).unlink()

    def until(self, job: Job, step: int) -> None:
        """Until all groups of the step are in but those that wait."""

        def waits() -> bool:
            live = job.live()
            there = live.get("phase"), live.get("step"), live.get("finished")
            return there == ("rollout", step, self.finished)

        job.until(waits, f"all groups of step {step} but those that wait")


class Gated:
    """Runs of FrozenLake, all of whose episodes wait at their first move (`GatedLake`) until the
    test lets those of their step go on."""

    def __init__(self, folder: Path, steps: int, groups: int, size: int) -> None:
        """Of `steps` steps, of `groups` groups of `size` episodes each."""
        self.folder, self.episodes = folder / "gates", groups * size
        self.folder.mkdir(parents=True)
        held = [
            [train_task(1, groups * step + k, {"frozen_lake": 1.0}).seed for k in range(groups)]
            for step in range(steps)
        ]
        self.overrides = (
            "env.name=tests.job.held:GatedLake",
            "env.step_timeout_s=1000",
            "rollout.turn_timeout_s=1000",  # so that no turn is stalled for want of time
            f"+env.args.folder={self.folder}",
            f"+env.args.held={held}",
            f"trainer.batch_size={self.episodes}",
            f"rollout.group_size={size}",
        )

    def opens(self, step: int, gate: str = "open") -> None:
        (self.folder / f"{gate}-{step}").touch()

    def until(self, job: Job, what: str, step: int, count: int | None = None) -> None:
        """Until as many episodes of the step, or all, have said so."""
        count = self.episodes if count is None else count
        job.until(
            lambda: len(list(self.folder.glob(f"{what}-{step}-*"))) == count,
            f"{count} episodes of step {step}: {what}",
        )


class Job(Run):
    started: list[Job] = []  # of this test
    deadline_s, error = DEADLINE_S, AssertionError

    def __init__(self, folder: Path, *overrides: str) -> None:
        super().__init__(Path(folder) / "run")
        self._started_at = time.time()
        self.process = subprocess.Popen(
            launch(folder, "run", *SMALL, *overrides),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        Job.started.append(self)

    @property
    def over(self) -> str:
        """The output of an ended job; empty while it runs."""
        return "" if self.process.poll() is None else f"\n{self.process.communicate()[0]}"

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code; `self.said` is what it printed. Ends the job when the deadline passes."""
        try:
            self.said, _ = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.said, _ = self.process.communicate(timeout=30)
            raise AssertionError(
                f"the job did not end within {deadline_s:.0f} s:\n{self.said}\n{self.logs()}"
            ) from None
        return self.process.returncode

    def faults(self) -> list[dict]:
        return [row for row in read_metrics(self.run) if row["kind"] == "fault"]

    def rank(self, role: str) -> dict:
        """Status of the first rank of a role: pid, state, ..."""
        found = [
            json.loads(p.read_text())
            for p in sorted((self.run / "status").glob("attempt-*/rank-*.json"))
        ]
        return [s for s in found if s["role"] == role][-1]

    def engine(self, rank: int | None = None) -> psutil.Process:
        """The engine process of a rollout rank's process; of the last one's."""
        rank = rank or self.rank("rollout")["pid"]
        found = self.until(
            lambda: [
                each
                for each in processes.children(rank)
                if processes.words(each)[:1] == ["VLLM::EngineCore"]
            ],
            "the engine's process",
        )
        return found[0]

    def turns_at(self, worker: str) -> int:
        """How many its rank has for its engine, as it last told, which it does each second."""
        last = self.live().get("workers", {}).get(worker, {})
        return last.get("running", 0) + last.get("waiting", 0)

    def until_idle(self, worker: str) -> None:
        """Until it has no turn, where none can be asked for and all that were are answered: each
        that it is then said to have, it got later."""
        now = time.time()
        self.until(
            lambda: self.live().get("time", 0.0) > now and self.turns_at(worker) == 0,
            f"{worker} to have no turn",
        )

    @contextlib.contextmanager
    def trainer_stopped(self) -> Iterator[None]:
        """Meanwhile the trainer does nothing, so that no step ends."""
        trainer = psutil.Process(self.rank("trainer")["pid"])
        suspend(trainer)
        try:
            yield
        finally:
            resume(trainer)

    def live(self) -> dict:
        """The status that this job tells; {} while there is none, or that of an attempt before."""
        found = super().live()
        return found if found.get("started", 0.0) >= self._started_at else {}

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill_everything(self) -> None:
        """SIGKILL to the launcher and all that it started, as when a node loses power."""
        processes.kill_family(self.process.pid)
        self.process.communicate(timeout=DEADLINE_S)

    def orphans(self) -> list[psutil.Process]:
        """Processes of this run that outlive it."""
        return processes.left(lambda: processes.bearing(str(self.run)))


def suspend(rank: psutil.Process) -> None:
    """Until `resume`, however long that is: its guard, which would end it after a minute
    (rose/launch/guard.py), is stopped before it, as in a job that Slurm suspends."""
    psutil.Process(rank.ppid()).suspend()
    rank.suspend()


def resume(rank: psutil.Process) -> None:
    rank.resume()
    psutil.Process(rank.ppid()).resume()
