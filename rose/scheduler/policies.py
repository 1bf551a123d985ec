"""What the five policies must offer, and what they may.

Any policy may also define `on_event(event, cluster) -> list[Action] | None`: it is
called with the events in OBSERVED and OBSERVED_BEFORE, and the actions that it returns are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rose.scheduler import events as ev
from rose.scheduler.events import Action
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

# Delivered when the cluster shows the change already. The other four are delivered while it still
# shows what ends, so that the group of `cluster.turns[event.turn]` or of
# `cluster.group_of[event.trajectory]` can be found.
OBSERVED = frozenset(
    {
        ev.StepBegun,
        ev.VersionPublished,
        ev.GroupFinished,
        ev.WorkerJoined,
        ev.WorkerCapacity,
        ev.ReplicaLost,
        ev.CapacityQueued,
        ev.CapacityGranted,
        ev.CapacityRefused,
        ev.CapacityEnded,
        ev.Tick,
    }
)
OBSERVED_BEFORE = frozenset({ev.TurnEnded, ev.TurnReturned, ev.TrajectoryEnded, ev.WorkerLost})


def optional(policy: Any, method: str, otherwise: Callable) -> Callable:
    """The policy's method if it has it."""
    return getattr(policy, method, otherwise)


class Routing(Protocol):
    """Optional, too:

    `chunk(turn, worker) -> int`: new tokens of this attempt, then the turn goes back to the queue;
    0: all. `kv_need(turn) -> int`: KV tokens to count for the next attempt, asked when the turn
    enters the queue; without it context + max_new_tokens. A policy that cuts turns into chunks
    counts less. `lane(turn) -> Hashable`: where `choose` returns None for a turn, it would for
    those of the same lane that need no less. One lane by default, in which LOOK_AHEAD waiting turns
    hold up the rest: with lanes they hold up their own. `closed() -> bool`: after `choose` returned
    None, whether it would in this round for all of the lane, whatever they need. `label(worker) ->
    Hashable`: of a worker's name, from when it joined and as long as it is there; the least loaded
    of a label is what `fleet.least(turn, label=...)` finds. `watches(worker) -> bool` and
    `better(turn, among, at, cluster) -> WorkerState | None`, both or none: turns that run on
    workers it watches are asked about, a few at each tick and the first whenever another worker
    gets free; where it names one of the workers `among`, the turn is aborted and goes there from
    the tokens that it has (MAX_MOVES times).
    """

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        """A worker that the fleet gave for this turn, or None: it waits, and what it asked the
        fleet for in vain is kept for it."""


class Order(Protocol):
    """Optional, too: `changed(event, cluster) -> Iterable[str]`: turns whose key this event has
    changed; those that don't wait are ignored."""

    def key(self, turn: TurnState, cluster: Cluster) -> Any:
        """Sort key: the smallest goes first; computed when the turn enters the queue. Ties go by
        arrival."""


class Batching(Protocol):
    """Optional, too: `published(version) -> list[Action]`: weights of the version are out;
    `trajectory_ended(trajectory, group) -> list[Action]`; the group is "" if the trajectory had no
    turn; and `certain() -> list[str]`: finished groups that the step which waits for its batch will
    train in any case, without which a step that streams gets them all at its end. The event that
    completes the batch adds a group that was not certain before it: no batch was sent whole."""

    # the most versions from a group's admission to the step that trains it; 0: groups are on-policy
    staleness: int

    def begin(self, step: int, groups: int) -> list[Action]: ...

    def finished(self, group: str, accepted: bool) -> list[Action]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Provisioning(Protocol):
    """Optional, too: `joins_resting(kind) -> bool`: a worker of this kind begins as resting;
    `rolls_hybrids() -> bool`: whether a hybrid worker would be used now if it joined, so that it is
    worth a start; true by default; `training_begins(cluster) -> list[Action]`: a step's batch is
    complete; those of `cluster.replicas` that rest then may have a part in its training;
    `snapshot() -> dict` and `restore(state)`, both or none: as those of `Batching`."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        """Called on every tick."""


class Placement(Protocol):
    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        """Called on every tick once an environment host has told its load: `MoveTrajectory`s."""
