"""Progress reports of a trainer rank within a long step, so that a hanging rank is found.

A collective waits for every rank, for as long as a step may take, and can't say which rank is
missing. So a thread of each rank reports at intervals how many collectives (of all groups) and
micro-batches the rank has begun. From the reports of all ranks rose/launch/beats.py finds ranks
that wait, are behind or are silent. Publishing and saving are not watched, since their only wait is
a barrier at their end. A report doesn't say what the rank is doing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

BEAT_SHARE = 1 / 8  # interval between two reports, as a share of trainer.step_timeout_s
LOOKS = 10  # polls of the clock in each interval
REPORT_S = 5.0  # longest time that a failing rank waits for a report that is being written


class Watch:
    """Thread that calls `report(progress())` every `beat_s` seconds of a step, and `report(None)`
    after a step that had reports."""

    def __init__(
        self, beat_s: float, progress: Callable[[], int], report: Callable[[int | None], None]
    ):
        self._beat_s, self._progress, self._report = beat_s, progress, report
        # time.monotonic() of the last report or the step's begin; None outside of steps
        self._since: float | None = None
        self._lock, self._reporting, self._over = threading.Lock(), threading.Lock(), False
        threading.Thread(target=self._beat, name="watch", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step. A step ends with a collective, so no rank leaves it before all ranks
        arrive. If it raises, there are no more reports, since the rank reports its error itself."""
        with self._lock:
            self._since = time.monotonic()
        try:
            yield
        except BaseException:
            self._over = True
            if self._reporting.acquire(timeout=REPORT_S):
                self._reporting.release()
            raise
        finally:
            with self._lock:
                self._since = None

    def _beat(self) -> None:
        """Report at intervals, in the thread, until a step raises."""
        reported = False
        while not self._over:
            time.sleep(self._beat_s / LOOKS)
            since, now = self._since, time.monotonic()
            if since is None and reported:
                reported = not self._reported(None)
            elif since is not None and now >= since + self._beat_s:
                reported = self._reported(self._progress()) or reported
                with self._lock:
                    self._since = now if self._since is not None else None

    def _reported(self, begun: int | None) -> bool:
        """Report, and return True if that succeeded."""
        with self._reporting:
            if self._over:
                return False
            try:
                self._report(begun)
            except OSError as error:  # the run's folder failed; the next report may succeed
                print(f"this rank's progress can't be written: {error}", flush=True)
                return False
            return True


def collectives() -> int:
    """Count the collectives that this process has begun, in all groups. Uses private torch
    names."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in list(groups))
