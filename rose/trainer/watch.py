"""A trainer rank that makes no progress says so: it waits for another one, or hangs itself.

Collectives wait for every rank, for as long as a step may take, and none of them can tell who is
missing. So a thread counts what the rank has begun, collectives of all groups and micro-batches;
when that stands still for long within a step, the count is reported, and whoever reads the reports
of all ranks (rose/launch/supervise.py) sees who is behind. Left out: publishing and saving, whose
only wait is a barrier at their end; and what the rank that is behind is doing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PATIENCE_SHARE = 1 / 2  # of trainer.step_timeout_s: before a collective's own deadline, and after
LOOKS = 20  # within that time; a look costs microseconds


class Watch:
    """`progress()` counts; `report(count)` is called in a thread when it has been the same for
    `patience_s` seconds within a step, and `report(None)` when it goes on."""

    def __init__(
        self, patience_s: float, progress: Callable[[], int], report: Callable[[int | None], None]
    ):
        self._patience_s, self._progress, self._report = patience_s, progress, report
        self._steps = False
        self._since, self._last = time.monotonic(), 0
        self._reported = False
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """It begins and ends with collectives: no rank leaves it before all have come."""
        self._since, self._steps = time.monotonic(), True
        try:
            yield
        finally:
            self._steps = False

    def _look(self) -> None:
        while True:
            time.sleep(self._patience_s / LOOKS)
            count, now = self._progress(), time.monotonic()
            if count != self._last or not self._steps:
                self._last, self._since = count, now
            stuck = now - self._since >= self._patience_s
            if stuck != self._reported:
                self._report(count if stuck else None)
                self._reported = stuck


def collectives() -> int:
    """That this process has begun, in all groups. There is no public call for any of them."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in list(groups))
