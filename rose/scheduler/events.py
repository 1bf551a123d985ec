"""What the scheduler hears (events) and what it says (actions). Both go into the journal as they are.

Times are seconds of whatever clock the driver has: the wall's in a live run, the simulation's in a
simulated one.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    at: float


class Action(msgspec.Struct, frozen=True, tag=True):
    pass


# --------------------------------------------------------------------------- events


class WorkerJoined(Event):
    """A worker can take turns once it holds the current version. A restart joins anew."""

    worker: str
    kind: Literal["dedicated", "cooperative"]
    max_sequences: int
    kv_tokens: int
    version: int


class WorkerLost(Event):
    """`ended`: turns of it whose every token had arrived; the others go elsewhere."""

    worker: str
    reason: str
    ended: list[str] = []


class WorkerDraining(Event):
    """It finishes the turns that it has and takes no others."""

    worker: str


class WorkerLoaded(Event):
    worker: str
    version: int


class CapacityQueued(Event):
    """The queue has taken it, or still has it from an earlier attempt."""

    request: str


class CapacityGranted(Event):
    """Its job runs; the worker joins by itself."""

    request: str


class CapacityRefused(Event):
    """The queue did not take it, or let it wait for too long: no job of it is left."""

    request: str
    reason: str


class CapacityEnded(Event):
    """The job is over, whoever ended it."""

    request: str


class VersionPublished(Event):
    version: int


class TurnRequested(Event):
    turn: str
    trajectory: str
    group: str
    context_tokens: int
    max_new_tokens: int


class TurnProgressed(Event):
    turn: str
    attempt: int
    tokens: int  # new ones


class TurnEnded(Event):
    """Finished, or no longer wanted."""

    turn: str


class TrajectoryEnded(Event):
    trajectory: str


class StepBegun(Event):
    """A training step wants `groups` groups."""

    step: int
    groups: int


class GroupFinished(Event):
    """All trajectories of the group are in; `accepted` says whether the filter keeps it."""

    group: str
    accepted: bool


class Tick(Event):
    pass


AnyEvent = (
    WorkerJoined | WorkerLost | WorkerDraining | WorkerLoaded | CapacityQueued | CapacityGranted | CapacityRefused
    | CapacityEnded | VersionPublished | TurnRequested | TurnProgressed | TurnEnded | TrajectoryEnded | StepBegun
    | GroupFinished | Tick
)

# --------------------------------------------------------------------------- actions


class AssignTurn(Action):
    turn: str
    worker: str
    attempt: int


class AbortTurn(Action):
    turn: str
    worker: str
    attempt: int


class LoadWeights(Action):
    worker: str
    version: int


class AdmitGroup(Action):
    """Start the group with this index of the prompt stream."""

    index: int
    group: str


class DropGroup(Action):
    """Cancel what still runs of the group; nothing of it is used."""

    group: str


class StartTraining(Action):
    step: int
    groups: list[str]


class RequestCapacity(Action):
    """Ask the cluster for one more job that lends a worker; `request` is its name from here on."""

    request: str


class ReleaseCapacity(Action):
    """Give the job back: let its worker leave, and cancel it."""

    request: str


class GiveUp(Action):
    """The run can't go on; the driver stops it with this cause."""

    reason: str


AnyAction = (AssignTurn | AbortTurn | LoadWeights | AdmitGroup | DropGroup | StartTraining | RequestCapacity
             | ReleaseCapacity | GiveUp)
