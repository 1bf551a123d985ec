"""Decides whether a dead hybrid engine is restarted, where it needs the trainer's device.

A dead hybrid engine can only start while the engines hold the device. If the trainer needs the
device before the engine is up, the start is cancelled: the step gained nothing, and the trainer
waited for the process to end. So a cancelled start is reported as a fault. The engine starts again
only if the engines are predicted to hold the device for longer than
- every start that was cancelled since the last one that succeeded, and
- the last start that succeeded.

The predicted time is the shortest of the last `RECENT` rollout phases, times the share of them for
which engines held the device. The mean would begin a start for every long phase and cancel it in
the next short one. The share is the largest of the last `RECENT`. One move of the scheduler long
before the end of a rollout phase doesn't predict further ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

RECENT = 3  # rollout phases that predict the next one
MARGIN = 1.05  # least ratio of predicted time to a start's time, since rollout phases vary


class HybridStarts:
    """Times the starts of hybrid engines and predicts whether the next ones succeed.

    `names` maps rank -> worker of the hybrid engines, and `up()` returns the ranks whose engine is
    up. `cancels`: starts are cancelled when the trainer needs its devices; on CPUs they go on
    beside the trainer. `on_fault` gets (what, detail). All times are seconds of one clock."""

    def __init__(
        self,
        names: dict[int, str],
        up: Callable[[], Collection[int]],
        cancels: bool,
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._names, self._up, self._cancels = names, up, cancels
        self._on_fault = on_fault
        self._awake: set[int] = set()  # ranks that hold their device
        self._begun: dict[int, float] = {}  # rank whose engine is starting -> time of the start
        # rank whose start was cancelled in this step's rollout phase -> seconds that it had
        self._had_s: dict[int, float] = {}
        self._takes_s: dict[int, float] = {}  # rank -> seconds that a start is known to need
        self._too_long: set[int] = set()  # ranks whose last start was cancelled
        self._rollouts: deque[float] = deque(maxlen=RECENT)  # seconds of each rollout phase
        # share of each rollout phase for which engines held the devices
        self._shares: deque[float] = deque(maxlen=RECENT)
        self._longest_hold_s = 0.0  # longest hold in this step's rollout phase
        self._hold_began = self._hold_ended = 0.0  # times of the last hold
        self._cancelled = 0  # cancelled starts since `take_cancelled`

    def worth(self, rank: int) -> bool:
        """True if the rank is to get the next wake order. If its engine is down, the engine then
        starts."""
        if rank not in self._too_long or rank in self._up():
            return True
        forecast_s = min(self._rollouts, default=0.0) * max(self._shares, default=0.0)
        return forecast_s > MARGIN * self._takes_s[rank]

    @property
    def any_worth(self) -> bool:
        """True if the next order to wake is to start any engine that is down."""
        up = self._up()
        return any(rank not in up and self.worth(rank) for rank in self._names)

    def rolled_out(self, seconds: float) -> None:
        """Note the length of a rollout phase, after which the trainer has its devices again.
        Reports the starts that were cancelled in it."""
        self._rollouts.append(seconds)
        if self._longest_hold_s:
            self._shares.append(min(1.0, self._longest_hold_s / max(seconds, 1e-9)))
            self._longest_hold_s = 0.0
        for rank, had_s in self._had_s.items():
            takes_s = self._takes_s[rank] = max(had_s, self._takes_s.get(rank, 0.0))
            self._too_long.add(rank)
            self._cancelled += 1
            self._on_fault(
                "hybrid engine not started",
                f"{self._names[rank]}: its start was cancelled after {had_s:.1f} s, when the "
                f"trainer needed its device. It is started again when the last {RECENT} rollout "
                f"phases predict more than {takes_s:.1f} s for it, which a start is known to need; "
                "with shorter rollout phases rollout.hybrid gains nothing",
            )
        self._had_s.clear()

    def take_cancelled(self) -> int:
        """Return the number of starts that were cancelled since the last call."""
        found, self._cancelled = self._cancelled, 0
        return found

    # ----------------------------------------------------------------- events of the ranks

    def wake_ordered(self, ranks: Collection[int], since: float) -> None:
        """Note an order to wake. `since` is when the trainer was ordered to release the devices."""
        self._awake, self._hold_began = set(ranks), since
        self._begun = dict.fromkeys(self._awake.difference(self._up()), since)

    def update(self, at: float) -> None:
        """Note which engines have come up or died by `at`."""
        up = self._up()
        for rank in [rank for rank in self._begun if rank in up]:
            self._takes_s[rank] = at - self._begun.pop(rank)
            self._too_long.discard(rank)
        for rank in self._awake.difference(up, self._begun):
            self._begun[rank] = at

    def sleep_ordered(self, at: float) -> None:
        """Note an order to sleep. A start may still succeed before the device is released."""
        if self._awake:
            self._longest_hold_s = max(self._longest_hold_s, at - self._hold_began)
        self._awake, self._hold_ended = set(), at

    def devices_released(self) -> None:
        """Note that the ranks have released their devices, which cancels starts."""
        if self._cancels:
            for rank, since in self._begun.items():
                self._had_s[rank] = max(0.0, self._hold_ended - since)
        self._begun = {}
