"""A trainer rank says how far it is in a step that takes long, so that one which hangs is found.

Collectives wait for every rank, for as long as a step may take, and none of them can tell who is
missing. So a thread reports what the rank has begun, collectives of all groups and micro-batches,
from time to time within a step. Whoever reads the reports of all ranks (rose/launch/beats.py) sees
who waits, who is behind and who has fallen silent. Left out: publishing and saving, whose only wait
is a barrier at their end; and what the rank that is behind is doing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

BEAT_SHARE = 1 / 8  # of trainer.step_timeout_s, from one report to the next
LOOKS = 10  # within that time, at whether it is over
REPORT_S = 5.0  # that a rank which fails waits for a report under way


class Watch:
    """`report(progress())` is called in a thread every `beat_s` seconds of a step, and
    `report(None)` after one in which it was called."""

    def __init__(
        self, beat_s: float, progress: Callable[[], int], report: Callable[[int | None], None]
    ):
        self._beat_s, self._progress, self._report = beat_s, progress, report
        self._since: float | None = None  # monotonic: the last report, or the step's beginning
        self._lock, self._reporting, self._over = threading.Lock(), threading.Lock(), False
        threading.Thread(target=self._beat, name="watch", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """It begins and ends with collectives: no rank leaves it before all have come. After one
        that raises nothing is reported any more: how the rank ended is."""
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
        reported = False
        while not self._over:
            time.sleep(self._beat_s / LOOKS)
            since, now = self._since, time.monotonic()
            if since is None and reported:
                reported = not self._told(None)
            elif since is not None and now >= since + self._beat_s:
                reported = self._told(self._progress()) or reported
                with self._lock:
                    self._since = now if self._since is not None else None

    def _told(self, begun: int | None) -> bool:
        with self._reporting:
            if self._over:
                return False
            try:
                self._report(begun)
            except OSError as error:  # of the run's folder: the next beat may get through
                print(f"this rank's progress can't be written: {error}", flush=True)
                return False
            return True


def collectives() -> int:
    """That this process has begun, in all groups. There is no public call for any of them."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in list(groups))
