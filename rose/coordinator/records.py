"""Records a run: its progress, its metrics, its cost, and the live display."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose import extensions
from rose import protocol as p
from rose.config import Config, Mixture
from rose.coordinator import replay
from rose.coordinator.groups import Rollouts
from rose.coordinator.journal import Journal
from rose.coordinator.retention import Retention
from rose.coordinator.step_metrics import by_member, checkpoint_row, step_row
from rose.coordinator.turns import TurnHub
from rose.files import close_all, printable
from rose.observe import cost
from rose.observe.metrics import MetricsWriter
from rose.observe.recorder import NullRecorder
from rose.observe.status import LiveStatus, WorkerStatus

# Seconds between two ticks of the scheduler's clock and the live display; well under any deadline.
TICK_S = 0.5


@dataclass
class Progress:
    """The run's last finished step, and whether the trainer is beyond it."""

    step: int  # last finished step
    boundary: dict[str, Any] = field(default_factory=dict)  # state at its end, for a checkpoint
    at_boundary: bool = True  # True while the trainer's weights are those of `step`
    stopped_early: str = ""  # why eval.stop ends the run before its last step


class StepTimes:
    """Wall-clock seconds at which a step began, was rolled out, trained and synchronised."""

    def __init__(self) -> None:
        self.began = self.rolled_out = self.trained = self.synced = time.time()
        self._idle_s = 0.0  # seconds of the rollout phase in which an average engine had no turn

    def rollout_ended(self, hub: TurnHub) -> float:
        """Return the seconds of the rollout phase, which ends now."""
        self.rolled_out = time.time()
        seconds = self.rolled_out - self.began
        if hub.workers.of("dedicated"):
            self._idle_s = max(0.0, seconds - hub.workers.busy_s(self.rolled_out))
        return seconds

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase. The engines' idle time isn't part of the rollout."""
        return {
            "rollout": self.rolled_out - self.began - self._idle_s,
            "train": self.trained - self.rolled_out,
            "sync": self.synced - self.trained,
            "idle": self._idle_s,
        }


class Records:
    """Writes the run's files except those of the trainer. `recorder` receives the trace. If
    `resumed`, rows of later steps are removed."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        recorder: NullRecorder,
        progress: Progress,
        journal: Journal,
        resumed: bool,
    ) -> None:
        self._config, self._run_dir, self.recorder = config, run_dir, recorder
        self._progress, self._journal = progress, journal
        part = extensions.only("trackers")
        watching = part.start(config, run_dir) if part else ()
        self.metrics = MetricsWriter(run_dir, config.observe.tensorboard, watching)
        self.metrics.truncate(after_step=progress.step if resumed else -1)
        self.live = LiveStatus(run_dir)
        self.cost = cost.Meter(config, run_dir, attempt, time.monotonic())
        self._retention = Retention(run_dir, config.observe.keep_steps, attempt)
        self._members = list(config.env.members) if isinstance(config.env, Mixture) else []
        self._tokens: dict[str, int] = {}  # worker -> its total tokens at the last tick

    def row(self, kind: str, what: str, detail: str) -> None:
        row = {"kind": kind, "what": what, "detail": detail}
        self.metrics.write(self._progress.step, row)

    def change(self, what: str, detail: str) -> None:
        """Report that a borrowed rank or a job has joined, or left in order."""
        self.recorder.instant(what, detail=detail)
        self.row("worker", what, detail)
        print(f"{what}: {detail}", flush=True)

    def fault(self, what: str, detail: str) -> None:
        """Report a fault that the run survives."""
        detail = printable(detail)  # It may quote the output of an agent's program.
        self.recorder.instant("fault", what=what, detail=detail)
        self.row("fault", what, detail)
        print(f"{what}: {detail}", flush=True)

    def tick(self, hub: TurnHub, rollouts: Rollouts) -> None:
        """Update the cost and the live display, `TICK_S` after the last call."""
        self._count_cost(hub)
        workers = {
            name: WorkerStatus(
                tokens_per_s=(w.total_tokens - self._tokens.get(name, 0)) / TICK_S,
                running=w.running,
                waiting=w.waiting,
                version=w.version,
            )
            for name, w in hub.workers.items()
        }
        self._tokens = {name: w.total_tokens for name, w in hub.workers.items()}
        finished, total = rollouts.progress
        self.live.update(workers=workers, finished=finished, total=total)

    def step(
        self,
        groups: list[list[p.Trajectory]],
        trained: dict[str, float],
        times: StepTimes,
        hub: TurnHub,
        rollouts: Rollouts,
        more: dict[str, Any],
    ) -> None:
        """Write the row and the files of the step that has ended. `trained` are the trainer's
        values and `more` other parts' values for the row."""
        step = self._progress.step
        if self._config.observe.save_trajectories and self._config.rollout.replay is None:
            replay.save(self._run_dir, step, groups)
        self.cost.trained(trained.get("tokens", 0))
        self.metrics.write(
            step,
            step_row(groups, trained, times.phases(), hub, rollouts, times.synced)
            | more
            | checkpoint_row(groups)
            | by_member(self._members, [t for group in groups for t in group]),
        )
        self._retention.step_ended(step)
        self._journal.flush()
        self.recorder.span("step", times.began, times.synced, step=step)

    def finish(self, hub: TurnHub) -> None:
        """Record open turns and the cost as the run ends. Raises OSError."""
        hub.record_open_turns()
        self._count_cost(hub)
        self.cost.write()

    def _count_cost(self, hub: TurnHub) -> None:
        borrowed = len(hub.workers.of("borrowed"))
        self.cost.tick(time.monotonic(), borrowed, hub.workers.generated)

    def close(self) -> None:
        close_all(self._journal, self.live, self.metrics)
