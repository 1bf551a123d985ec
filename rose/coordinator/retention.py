"""Removes files of all but the last observe.keep_steps steps: trajectories, events and the journals
of earlier attempts.

A run that starts again needs none of these. It resumes from checkpoints/, turns/ and snapshots/,
which other modules keep short. The journal of the current attempt stays, because it replays only
from its beginning.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from pathlib import Path

from rose.observe.metrics import read_metrics, rows_of
from rose.observe.recorder import SEGMENT

STEP_NAME = re.compile(r"step-(\d+)\.msgpack")


class Retention:
    """Removes old files when a step ends. `keep` is the number of newest steps whose files stay,
    None for all; `attempt` is the number of the current attempt."""

    def __init__(self, run_dir: Path, keep: int | None, attempt: int) -> None:
        self._run_dir, self._keep, self._attempt = Path(run_dir), keep, attempt
        # Step -> when it ended, in wall-clock seconds. Earlier attempts are separate, because the
        # clock may have been set between the attempts.
        self._earlier: dict[int, float] = {}
        self._own: dict[int, float] = {}
        if keep is not None:
            rows = rows_of(read_metrics(run_dir), "step")
            self._earlier = {row["step"]: row["time"] for row in rows if "time" in row}

    def step_ended(self, step: int) -> None:
        """Remove the files that are too old after `step`. A file that can't be removed stays."""
        if self._keep is None:
            return
        self._own[step] = time.time()
        newest = step - self._keep  # newest step whose files are removed
        rollouts = self._run_dir.glob("rollouts/*")
        old = [path for path in rollouts if (number := _step_of(path)) and number <= newest]
        if (until := self._own.get(newest)) is not None:
            old += self._older(f"events/{self._attempt}", f"*.{SEGMENT}", until)
        until = self._own.get(newest, self._earlier.get(newest, -math.inf))
        for folder in (self._run_dir / "events").glob("*"):
            if folder.name != str(self._attempt):
                old += self._older(f"events/{folder.name}", "*.jsonl", until)
        own = f"attempt-{self._attempt:03d}.jsonl"
        old += [path for path in self._older("journal", "*.jsonl", until) if path.name != own]
        for path in old:
            with suppress(OSError):
                path.unlink()
        self._own = {step: at for step, at in self._own.items() if step >= newest}

    def _older(self, folder: str, pattern: str, until: float) -> list[Path]:
        """Return files that were last written before `until`."""
        return [p for p in (self._run_dir / folder).glob(pattern) if _modified(p) < until]


def _step_of(path: Path) -> int:
    """Return the step of a file of trajectories; 0 for a file that is not the run's."""
    found = STEP_NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def _modified(path: Path) -> float:
    """Return the time of the last write, in wall-clock seconds; infinity if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf
