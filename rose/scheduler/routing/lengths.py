"""How long turns and trajectories are, as seen: what routing policies that look ahead share."""

from __future__ import annotations

from rose.scheduler.events import Event, TrajectoryEnded, TurnEnded
from rose.scheduler.state import Cluster, TurnState

RECENT = 200  # turns of a domain, or trajectories, over which a mean is taken
# of a domain: mean output, and turns that it was taken over; all domains together
UNKNOWN, ALL = ((0.0, 0), None)


class Lengths:
    """`final`: mean context of a trajectory at its end, tokens; 0: none has ended."""

    def __init__(self) -> None:
        self.final = 0.0
        self._context: dict[str, int] = {}  # trajectory -> its context so far, tokens
        self._output: dict[
            str | None, tuple[float, int]
        ] = {}  # domain -> mean output of a turn, and their number

    def heard(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name, tokens=tokens) if tokens:
                turn = cluster.turns[name]
                self._context[turn.trajectory] = turn.context_tokens + tokens
                for domain in (turn.domain, ALL):
                    mean, count = self._output.get(domain, UNKNOWN)
                    self._output[domain] = (
                        mean + (tokens - mean) / min(count + 1, RECENT),
                        count + 1,
                    )
            case TrajectoryEnded(trajectory=trajectory, tokens=tokens):
                final = self._context.pop(trajectory, 0)
                if tokens and final:
                    self.final += (final - self.final) / (RECENT if self.final else 1)

    def of_domain(self, turn: TurnState) -> float:
        """Mean output of its domain's turns, tokens; 0 before one has ended."""
        return self._output.get(turn.domain, UNKNOWN)[0]

    def of_any(self, turn: TurnState) -> float:
        """The same, or that of all domains before one of its own has ended."""
        return (self._output.get(turn.domain) or self._output.get(ALL, UNKNOWN))[0]
