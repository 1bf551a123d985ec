"""The operator's switch: the owner of the Control board.

Whether anything is lent is asked anew at each beat, from four sources: a standing reason not to (no
profile), a stop by hand (signal or HTTP, until one of them starts it), the stop file, and the hour
of the day. Nothing is remembered of the clock, so one that is set does no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from rose.config import Lending, hours_of
from rose.lending import board

BEAT_S = 0.05
LOOK_S = 0.2  # between two looks at the stop file
LOST_S = 2.0  # a file system that does not answer for so long may hold a stop file


class Switch:
    """Pure. `never`: why nothing can be lent at all, "" if something can."""

    def __init__(self, lending: Lending, never: str) -> None:
        self.never = never
        self.by_hand = ""  # who stopped it
        self.by_file = ""
        self._shares = {
            hour: share for span, share in lending.hours.items() for hour in hours_of(span)
        }

    @property
    def stopped(self) -> str:
        """Why nothing is lent; "" while something may be."""
        return self.never or self.by_hand or self.by_file

    def share(self, hour: int) -> float:
        """Of what could be lent, at this hour of the day (0 to 23)."""
        return self._shares.get(hour, 1.0)


class ControlBoard:
    """Writes the board at each beat and at each change. `log`: of changes, in words."""

    def __init__(
        self, folder: Path, lending: Lending, never: str, log: Callable[[str], object]
    ) -> None:
        self.switch, self.folder, self._log = Switch(lending, never), folder, log
        self._stop_file = Path(lending.stop_file) if lending.stop_file else None
        self._writer = board.Writer(folder / "control", board.Control)
        # of the rank that lends the rollout engine
        self._progress = board.Peer(folder / "epoch", board.Epoch)
        self._share = self.switch.share(time.localtime().tm_hour)
        self.write()

    @property
    def state(self) -> board.Control:
        return self._writer.state

    def stop(self, who: str) -> None:
        """At once, until `start`."""
        if not self.switch.by_hand:
            self._log(f"lending stopped by {who}")
        self.switch.by_hand = f"stopped by {who}"
        self.write()

    def start(self, who: str) -> None:
        """Takes back `stop`; a stop file and a standing reason hold."""
        if self.switch.by_hand:
            self.switch.by_hand = ""
            but = f", but: {self.switch.stopped}" if self.switch.stopped else ""
            self._log(f"lending started by {who}{but}")
        self.write()

    def write(self) -> None:
        state = self._writer.state
        state.lend = float(not self.switch.stopped)
        state.share = self.switch.share(time.localtime().tm_hour)
        state.epoch = self._epoch(state.epoch)
        if state.share != self._share:
            self._log(f"{state.share:g} of what could be lent is lent now (serving.lending.hours)")
            self._share = state.share
        self._writer.write()

    async def beat(self) -> None:
        while True:
            self.write()
            await asyncio.sleep(BEAT_S)

    async def watch_file(self) -> None:
        if self._stop_file is None:
            return
        while True:
            looking = asyncio.create_task(asyncio.to_thread(_exists, self._stop_file))
            done, _ = await asyncio.wait({looking}, timeout=LOST_S)
            key = "(serving.lending.stop_file)"
            if not done:
                self._by_file(f"{self._stop_file}: its file system does not answer {key}")
            self._by_file(f"{self._stop_file} exists {key}" if await looking else "")
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """The last word: nothing is lent."""
        self._writer.state.lend = 0.0
        self._writer.write()
        self._writer.close()

    def _by_file(self, why: str) -> None:
        if why != self.switch.by_file:
            self.switch.by_file = why
            other = self.switch.never or self.switch.by_hand
            again = f", but: {other}" if other else ": lending again"
            self._log(f"lending stopped: {why}" if why else f"{self._stop_file} is gone{again}")
            self.write()

    def _epoch(self, before: float) -> float:
        found = self._progress.read()
        return before if found is None else found.epoch


def _exists(path: Path) -> bool:
    """A stop file that can't be looked at, as in a folder that we may not read, counts as one."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
