"""Events that the scheduler receives and actions that it orders. The journal records both.

Times are seconds of the driver's clock: wall-clock time in a live run, simulated time in a
simulation.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Literal

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    at: float


class Action(msgspec.Struct, frozen=True, tag=True):
    pass


# --------------------------------------------------------------------------- events


Borrowed = Literal["cooperative", "spot", "serverless"]
Kind = Literal["dedicated", "hybrid", Borrowed]


class Shape(msgspec.Struct, frozen=True):
    """GPUs and speed of an engine in a run with engines of several tensor-parallel degrees. Engines
    whose GPUs overlap are never awake at the same time."""

    first: int  # number of its first GPU
    degree: int  # number of GPUs
    step_s: float  # seconds of a decode step without sequences
    sequence_s: float  # seconds that each sequence adds to a decode step
    context_s: float  # seconds that each token of context adds to a decode step
    prefill_s: float  # seconds to prefill a token


class WorkerJoined(Event):
    """A worker joined, perhaps after a restart. It takes turns once it has the current version."""

    worker: str
    kind: Kind  # hybrid: the trainer's own GPUs, which roll out while the trainer would idle
    max_sequences: int
    kv_tokens: int
    version: int
    hardware: str = ""  # such as "H800"
    shape: Shape | None = None  # simulated only


class WorkerLost(Event):
    """The worker is gone. Turns in `ended` had sent all tokens; its other turns are requeued."""

    worker: str
    reason: str
    ended: list[str] = []


class WorkerDraining(Event):
    """The worker takes no new turns and finishes those it has."""

    worker: str


class WorkerLoaded(Event):
    worker: str
    version: int


class WorkerCapacity(Event):
    """Current capacity of a co-serving worker; `protocol.WorkerCapacity` explains the fields."""

    worker: str
    kv_tokens: int
    max_sequences: int
    expected_s: float
    revoked: bool


class CapacityQueued(Event):
    """The queue accepted the request, or still holds it from an earlier attempt of the run."""

    request: str


class CapacityGranted(Event):
    """The requested job runs. Its worker joins by itself (`WorkerJoined`)."""

    request: str


class CapacityRefused(Event):
    """The queue rejected the request, or didn't start its job in time. It has no job any more."""

    request: str
    reason: str


class CapacityEnded(Event):
    """The requested job has ended, for any reason."""

    request: str


class VersionPublished(Event):
    """The trainer published the weights of a version."""

    version: int


class TurnRequested(Event):
    turn: str
    trajectory: str
    group: str
    context_tokens: int
    max_new_tokens: int
    domain: str = ""  # name of the environment; in a mixture, of the member
    outcome: Literal["", "ok", "failed"] = ""  # outcome of the tool call before the turn
    made_tokens: int = 0  # tokens of the turn that an earlier attempt of the run generated
    held_out: bool = False  # True for a turn of an evaluation, which training turns precede


class TurnProgressed(Event):
    turn: str
    attempt: int
    tokens: int  # number of new tokens


class TurnEnded(Event):
    """The turn finished or was cancelled."""

    turn: str
    tokens: int = 0  # tokens generated in the turn


class TurnReturned(Event):
    """A worker returned the turn unfinished. The turn is valid and is queued again."""

    turn: str
    attempt: int
    chunk: bool = False  # True if the attempt reached its `max_tokens`, which is no fault


class TrajectoryEnded(Event):
    """The trajectory ended. If it failed, another takes its place unless its group is dropped."""

    trajectory: str
    tokens: int = 0  # tokens generated in the trajectory; 0 if it failed
    failed: bool = False  # True as well if it was cancelled


class HostLoad(Event):
    """Periodic load report of an environment host, with the fields of `protocol.HostLoad`."""

    host: str
    running: int  # number of trajectories
    cores: float  # cores on which the tasks of `cpu` run
    cpu: float  # mean number of runnable tasks since the last report; above `cores` some wait
    memory: float  # share in use of the memory for sandboxes


class HostLost(Event):
    """The environment host is gone with its sandboxes. Saved snapshots remain."""

    host: str


class TrajectorySaved(Event):
    """A snapshot is complete and readable by every host, so the trajectory can continue on another
    host. The fields are those of `protocol.TrajectorySaved`."""

    trajectory: str
    host: str  # host that runs the trajectory
    turns: int  # number of turns whose commands the snapshot contains
    commands_s: float  # seconds spent in commands so far, including the wait for a core


class StepBegun(Event):
    """A training step begins and wants `groups` groups."""

    step: int
    groups: int
    stream: bool = False  # True: the trainer takes each group once it is certain (`TrainGroup`)
    group_size: int = 0  # trajectories per group; 0 if unknown
    # Share of the last step in which the trainer waited for devices that hybrid workers held
    hybrid_delay: float = 0.0


class GroupFinished(Event):
    """All trajectories of the group have ended. `accepted` is the verdict of the filter."""

    group: str
    accepted: bool


class Tick(Event):
    pass


# --------------------------------------------------------------------------- actions


class AssignTurn(Action):
    """Send the turn to the worker.

    After `max_tokens` new tokens the engine ends the attempt, and the driver feeds `TurnReturned`
    with `chunk`. At 0 only the turn's own limit applies.
    """

    turn: str
    worker: str
    attempt: int
    max_tokens: int = 0


class AbortTurn(Action):
    """Abort the turn on the worker. `why` is one of

    - stalled: the turn got no token for `turn_timeout_s`;
    - slow: it ends sooner on another worker (an `AssignTurn` follows);
    - rest: the worker rests from now on;
    - training: it is an evaluation turn, and a training turn needs its room.
    """

    turn: str
    worker: str
    attempt: int
    why: Literal["stalled", "slow", "rest", "training"]


class LoadWeights(Action):
    worker: str
    version: int


class AdmitGroup(Action):
    """Start the group with this index of the prompt stream (names: `rose.scheduler.groups`).

    `spare` is the share of trajectories to start beyond the group's size, rounded up. The
    trajectories that end first make up the group; the driver cancels the others.
    """

    index: int
    group: str
    spare: float = 0.0


class DropGroup(Action):
    """Cancel the running trajectories of the group, and use none of its results."""

    group: str


class TrainGroup(Action):
    """Compute the gradient of a finished group that is certain to be in the step's batch.
    `StartTraining` names the group again."""

    step: int
    group: str


class StartTraining(Action):
    step: int
    groups: list[str]


class RequestCapacity(Action):
    """Submit one more job that lends a worker. `request` names it in events and actions."""

    request: str


class ReleaseCapacity(Action):
    """Let the worker of the requested job leave, and cancel the job."""

    request: str


class UseWorker(Action):
    """Allow the worker to take turns. The scheduler itself applies it; a driver may ignore it."""

    worker: str


class RestWorker(Action):
    """Send the worker neither turns nor weights from now on. `AbortTurn`s for its turns follow.
    The scheduler itself applies it; a driver may ignore it."""

    worker: str


class MoveTrajectory(Action):
    """Continue the trajectory on another environment host, from a snapshot with all of its turns.

    The move waits until the running command has ended and is saved. An open turn stays on its
    engine. The driver ignores the action if the trajectory or the host is gone by then.
    """

    trajectory: str
    host: str


class GiveUp(Action):
    """Stop the run, because it can't continue for this reason."""

    reason: str


if TYPE_CHECKING:
    AnyEvent = Event
    AnyAction = Action
else:  # unions of all events and actions, which `msgspec` decodes by their tags
    AnyEvent = reduce(or_, Event.__subclasses__())
    AnyAction = reduce(or_, Action.__subclasses__())
