"""The operator's switch, which writes the Control board.

At each beat the switch decides whether anything is lent. Four things can prevent lending: a
permanent reason (no profile), a manual stop (by signal or HTTP, until a manual start), the stop
file, and the hour of the day. Setting the clock does no harm, because no wall-clock time is stored.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path

from rose import processes
from rose.parts.lending import board
from rose.parts.lending.config import Lending, hours_of

BEAT_S = 0.05  # seconds between two writes of the board
POLL_S = 0.2  # seconds between two checks of the stop file
# Seconds after which lending stops because the stop file's file system doesn't answer.
LOST_S = 2.0


class Switch:
    """The state of the switch. Pure. `never` is the permanent reason to lend nothing, or ""."""

    def __init__(self, lending: Lending, never: str) -> None:
        self.never = never
        self.by_hand = ""  # text of a manual stop, with its source; "" without one
        self.by_file = ""  # reason of a stop by file; "" without one
        self._shares = {
            hour: share for span, share in lending.hours.items() for hour in hours_of(span)
        }

    @property
    def stopped(self) -> str:
        """The reason why nothing is lent, or ""."""
        return self.never or self.by_hand or self.by_file

    def share(self, hour: int) -> float:
        """The share of the lendable memory that is lent at this hour of the day (0 to 23)."""
        return self._shares.get(hour, 1.0)


class ControlBoard:
    """Writes the Control board at each beat and change. `log` receives a text for each change."""

    def __init__(
        self, folder: Path, lending: Lending, never: str, log: Callable[[str], object]
    ) -> None:
        self.switch, self.folder, self._log = Switch(lending, never), folder, log
        self._stop_file = Path(lending.stop_file) if lending.stop_file else None
        self._writer = board.Writer(folder / "control", board.Control)
        # The rank that lends the rollout engine writes this board.
        self._progress = board.Peer(folder / "epoch", board.Epoch)
        self._share = self.switch.share(time.localtime().tm_hour)
        self.state.stops = float(lending.stops == "layer")
        self.write()

    @property
    def state(self) -> board.Control:
        return self._writer.state

    def stop(self, source: str) -> None:
        """Stop lending at once, until `start`."""
        if not self.switch.by_hand:
            self._log(f"lending stopped by {source}")
        self.switch.by_hand = f"stopped by {source}"
        self.write()

    def start(self, source: str) -> None:
        """Revoke `stop`. A stop file and a permanent reason still prevent lending."""
        if self.switch.by_hand:
            self.switch.by_hand = ""
            but = f", but: {self.switch.stopped}" if self.switch.stopped else ""
            self._log(f"lending started by {source}{but}")
        self.write()

    def write(self) -> None:
        """Decide whether and how much is lent now, and publish it."""
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
        """Poll the stop file for ever; stop lending while it exists."""
        if self._stop_file is None:
            return
        while True:
            check = functools.partial(_exists, self._stop_file)
            checking = asyncio.create_task(processes.in_daemon(check))
            done, _ = await asyncio.wait({checking}, timeout=LOST_S)
            key = "(serving.lending.stop_file)"
            if not done:
                self._by_file(f"{self._stop_file}: its file system does not answer {key}")
            self._by_file(f"{self._stop_file} exists {key}" if await checking else "")
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Stop lending for good, and close the board."""
        self._writer.state.lend = 0.0
        self._writer.write()
        self._writer.close()

    def _by_file(self, why: str) -> None:
        """Stop lending because of the stop file, with the reason `why`; "" revokes this stop."""
        if why != self.switch.by_file:
            self.switch.by_file = why
            other = self.switch.never or self.switch.by_hand
            again = f", but: {other}" if other else ": lending again"
            self._log(f"lending stopped: {why}" if why else f"{self._stop_file} is gone{again}")
            self.write()

    def _epoch(self, before: float) -> float:
        """Return the training run's progress; `before` if it can't be read."""
        found = self._progress.read()
        return before if found is None else found.epoch


def _exists(path: Path) -> bool:
    """Return True if the stop file exists, or can't be checked, as in an unreadable folder."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
