"""Removes what a run has written of steps before the last observe.keep_steps: trajectories, events
and the journals of earlier attempts.

A run that starts again needs none of these: what it goes on with is in checkpoints/, turns/ and
snapshots/, which keep themselves short. Left out: the journal of this attempt, which replays only
from its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rose.observe.metrics import read_metrics
from rose.observe.recorder import SEGMENT
from rose.observe.trajectories import STEP_FILES


class Retention:
    """`keep`: steps of which all is kept; None: of every step. `attempt`: the run's present one."""

    def __init__(self, run_dir: Path, keep: int | None, attempt: int) -> None:
        self._run_dir, self._keep, self._attempt = Path(run_dir), keep, attempt
        # step -> when it ended, in seconds of the wall clock
        self._ended: dict[int, float] = {}
        if keep is not None:
            rows = read_metrics(run_dir)
            self._ended = {row["step"]: row["time"] for row in rows if row["kind"] == "step"}

    def step_ended(self, step: int) -> None:
        """Remove what is too old now that `step` has ended. What can't be removed stays."""
        if self._keep is None:
            return
        self._ended[step] = time.time()
        newest = step - self._keep  # of the steps that go
        old = [path for path in self._run_dir.glob(STEP_FILES) if _step_of(path) <= newest]
        if newest in self._ended:
            until = self._ended[newest]
            old += [path for path in self._closed() if _modified(path) < until]
        for path in old:
            with suppress(OSError):
                path.unlink()
        self._ended = {step: at for step, at in self._ended.items() if step >= newest}

    def _closed(self) -> Iterator[Path]:
        """Files of events and journals that nobody writes any more."""
        for folder in (self._run_dir / "events").glob("*"):
            yield from folder.glob(
                f"*.{SEGMENT}" if folder.name == str(self._attempt) else "*.jsonl"
            )
        own = f"attempt-{self._attempt:03d}.jsonl"
        yield from (p for p in (self._run_dir / "journal").glob("*.jsonl") if p.name != own)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _modified(path: Path) -> float:
    """Seconds of the wall clock; of a file that is gone the end of time."""
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")
