"""Interfaces of the five policies, with their optional methods.

Any policy may also define `on_event(event, cluster) -> list[Action] | None`. It is called with the
events in OBSERVED and OBSERVED_BEFORE, and the scheduler carries out the actions that it returns.
"""

from __future__ import annotations

from typing import Any, Protocol

from rose.scheduler import events as ev
from rose.scheduler.events import Action
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

# Events that policies receive after the cluster's state has changed.
OBSERVED = frozenset(
    {
        ev.StepBegun,
        ev.VersionPublished,
        ev.GroupFinished,
        ev.WorkerJoined,
        ev.WorkerCapacity,
        ev.CapacityQueued,
        ev.CapacityGranted,
        ev.CapacityRefused,
        ev.CapacityEnded,
        ev.Tick,
    }
)
# Events that policies receive before the state changes, so that `cluster.turns[event.turn]` and
# `cluster.group_of[event.trajectory]` still exist.
OBSERVED_BEFORE = frozenset({ev.TurnEnded, ev.TurnReturned, ev.TrajectoryEnded, ev.WorkerLost})


class Routing(Protocol):
    """Which worker takes a turn. Optional methods:

    - `chunk(turn, worker) -> int`: number of new tokens after which the attempt ends and the turn
      is queued again; 0 for no limit.
    - `kv_need(turn) -> int`: KV tokens to count for the next attempt, asked when the turn enters
      the queue. By default context + max_new_tokens; a policy that uses chunks can count less.
    - `lane(turn) -> Hashable`: part of the queue in which the turn waits, by default the only one.
      If `choose` returns None for a turn, then for the rest of the round it must also return None
      for every turn of the same lane that needs at least as many KV tokens. A round skips the rest
      of a lane after LOOK_AHEAD of its turns have found no worker.
    - `closed() -> bool`: called after `choose` returned None. True if `choose` would return None
      for every turn of the lane in this round.
    - `label(worker) -> Hashable`: label of the worker with this name, constant while it is joined.
      `fleet.least(turn, label=...)` finds the least loaded worker of a label.
    - `watches(worker) -> bool` and `better(turn, among, at, cluster) -> WorkerState | None`, both
      or none: `better` says where a training turn on a watched worker should continue. It is asked
      at each tick for up to ASKED_AT_TICK turns (`among`: the least loaded worker with room of each
      kind and hardware), and when an unwatched worker gets free for the first turn (`among`: that
      worker). If it returns one of `among`, the turn is aborted and continues there with its
      tokens, MAX_MOVES times at most.
    """

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        """Return a worker that the fleet offered for this turn, or None to let the turn wait. Then,
        for each question of the policy that the fleet answered with no worker, the workers in
        question that could hold the turn are reserved for it until the end of the round."""


class Order(Protocol):
    """Which waiting turn goes first. Optional method: `changed(event, cluster) -> Iterable[str]`,
    the turns whose key the event has changed; turns that don't wait are ignored."""

    def key(self, turn: TurnState, cluster: Cluster) -> Any:
        """Return the sort key, which is computed when the turn enters the queue. The smallest key
        goes first, ties by arrival."""


class Batching(Protocol):
    """Which groups a training step consumes. Optional methods:

    - `published(version) -> list[Action]`: called when the weights of a version are published.
    - `trajectory_ended(trajectory, group) -> list[Action]`: `group` is "" if the trajectory had no
      turn.
    - `certain() -> list[str]`: finished groups that the waiting step will train in any case. They
      are sent to a streaming step's trainer early; without this method all are sent at the end. The
      event that completes a batch must add a group that was not certain before.

    Optional attributes:

    - `waits_for_weights: bool`: each step's rollouts begin with its weights, so that nothing rolls
      out while the trainer trains. False by default.
    - `trainer_waits: bool`: the trainer waits for most of its batch, so that hybrid engines can use
      its devices meanwhile. By default the value of `waits_for_weights`.
    """

    # Most versions from a group's admission to the step that trains it; 0 if on-policy
    staleness: int

    def begin(self, step: int, groups: int) -> list[Action]: ...

    def finished(self, group: str, accepted: bool) -> list[Action]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the `snapshot` of an earlier attempt. Called before any other method."""


class Provisioning(Protocol):
    """Which capacity to request and which workers to use. Optional methods:

    - `joins_resting(kind) -> bool`: True if workers of this kind rest when they join.
    - `rolls_hybrids() -> bool`: True if a hybrid worker that joined now would be used, so that its
      engine is worth starting. True by default.

    Optional attributes:

    - `asks_for_jobs: bool`: the policy requests capacity, one Slurm job each. False by default.
    - `wakes_hybrids: bool`: the policy wakes hybrid workers while the trainer waits. By default
      `joins_resting("hybrid")`.
    """

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        """Return the actions to take now. Called on every tick."""


class Placement(Protocol):
    """Which environment host continues a trajectory."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        """Return `MoveTrajectory`s. Called on every tick once a host has reported its load."""
