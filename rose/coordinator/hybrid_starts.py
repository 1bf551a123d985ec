"""Whether a hybrid engine that died is worth another start, where it needs the trainer's device.

Such a start begins with the engine's turn, and is broken off when the trainer is to have the device
and the engine isn't up: that step gained nothing, and the trainer waited for the process to end. So
a start that was broken off is said, and another begins only when its turn will be longer than one
is known to need: than those that were had in vain, and than the last that got to its end took. A
turn is foretold by the shortest of the last rollouts (where lengths go up and down, a start would
else begin for each long one, to be broken off in a short one) and by the share of them that turns
have had: the scheduler may end one long before the rollout's end, and once is no rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

RECENT = 3  # rollouts, and turns
LONGER = 1.05  # times what a start needs, as no two rollouts take the same


class HybridStarts:
    """`names`: rank -> worker, of the hybrid engines. `up()`: the ranks whose engine is up.
    `breaks_off`: whether starts are, as on CPUs they go on beside the trainer. `on_fault` gets
    (what, detail). Times are in seconds of one clock."""

    def __init__(
        self,
        names: dict[int, str],
        up: Callable[[], Collection[int]],
        breaks_off: bool,
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._names, self._up, self._breaks_off = names, up, breaks_off
        self._on_fault = on_fault
        self._awake: set[int] = set()  # ranks that have their device
        self._begun: dict[int, float] = {}  # rank whose engine is being started -> since when
        # of ranks whose start was broken off in this step's rollouts -> seconds that it had
        self._had_s: dict[int, float] = {}
        self._takes_s: dict[int, float] = {}  # rank -> what a start is known to take
        self._too_long: set[int] = set()  # ranks whose last start was broken off
        self._rollouts: deque[float] = deque(maxlen=RECENT)  # seconds of each
        self._shares: deque[float] = deque(maxlen=RECENT)  # of its rollouts, that a turn had
        self._turn_s = 0.0  # the longest turn in this step's rollouts
        self._since = self._ends_at = 0.0  # of the last turn
        self._broken_off = 0

    def worth(self, rank: int) -> bool:
        """Whether the rank is to have its turn."""
        if rank not in self._too_long or rank in self._up():
            return True
        forecast_s = min(self._rollouts, default=0.0) * max(self._shares, default=0.0)
        return forecast_s > LONGER * self._takes_s[rank]

    @property
    def any_worth(self) -> bool:
        """Whether any engine is down that is to be started."""
        up = self._up()
        return any(rank not in up and self.worth(rank) for rank in self._names)

    def rolled_out(self, seconds: float) -> None:
        """A step's rollouts took so long; the trainer has its devices again."""
        self._rollouts.append(seconds)
        if self._turn_s:
            self._shares.append(min(1.0, self._turn_s / max(seconds, 1e-9)))
            self._turn_s = 0.0
        for rank, had_s in self._had_s.items():
            takes_s = self._takes_s[rank] = max(had_s, self._takes_s.get(rank, 0.0))
            self._too_long.add(rank)
            self._broken_off += 1
            self._on_fault(
                "hybrid engine not started",
                f"{self._names[rank]}: its start was broken off after {had_s:.1f} s, when the "
                "trainer was to have its device. It is started again when its turns, as of the "
                f"last {RECENT} rollouts, are to have more than {takes_s:.1f} s, which a start is "
                "known to need; with shorter ones rollout.hybrid gains nothing",
            )
        self._had_s.clear()

    def take_broken_off(self) -> int:
        """Starts since this was asked."""
        found, self._broken_off = self._broken_off, 0
        return found

    # ----------------------------------------------------------------- what happens to the ranks

    def wakes(self, ranks: Collection[int], since: float) -> None:
        """They are ordered to take their devices, which the trainer gives up since then."""
        self._awake, self._since = set(ranks), since
        self._begun = dict.fromkeys(self._awake.difference(self._up()), since)

    def look(self, at: float) -> None:
        """An engine has come up, or died."""
        up = self._up()
        for rank in [rank for rank in self._begun if rank in up]:
            self._takes_s[rank] = at - self._begun.pop(rank)
            self._too_long.discard(rank)
        for rank in self._awake.difference(up, self._begun):
            self._begun[rank] = at

    def sleeps(self, at: float) -> None:
        """They are ordered to give their devices back; a start may still get to its end."""
        if self._awake:
            self._turn_s = max(self._turn_s, at - self._since)
        self._awake, self._ends_at = set(), at

    def asleep(self) -> None:
        """They have given them back."""
        if self._breaks_off:
            for rank, since in self._begun.items():
                self._had_s[rank] = max(0.0, self._ends_at - since)
        self._begun = {}
