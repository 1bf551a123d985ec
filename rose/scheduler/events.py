"""What the scheduler receives (events) and what it orders (actions). Both go into the journal
unchanged.

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


Borrowed = Literal["cooperative", "spot", "serverless"]
Kind = Literal["dedicated", "hybrid", Borrowed]


class Shape(msgspec.Struct, frozen=True):
    """Of an engine, where a run has engines of several tensor-parallel degrees. It runs on `degree`
    GPUs from number `first` on; engines whose GPUs overlap are never awake at once. The seconds
    are those of a decode step (at least, for each sequence in it, and for each token that these
    attend to) and of a token of prefill."""

    first: int
    degree: int
    step_s: float
    sequence_s: float
    context_s: float
    prefill_s: float


class WorkerJoined(Event):
    """A worker can take turns once it holds the current version. A restart joins anew."""

    worker: str
    kind: Kind  # hybrid: the trainer's own GPUs, which roll out between its phases
    max_sequences: int
    kv_tokens: int
    version: int
    hardware: str = ""  # such as "H800"
    shape: Shape | None = None  # simulated only


class WorkerLost(Event):
    """`ended`: turns of it whose every token had arrived; the others go elsewhere."""

    worker: str
    reason: str
    ended: list[str] = []


class WorkerDraining(Event):
    """The worker finishes the turns that it has and takes no others."""

    worker: str


class WorkerLoaded(Event):
    worker: str
    version: int


class WorkerCapacity(Event):
    """What a co-serving worker can take now; `protocol.WorkerCapacity` has the meanings."""

    worker: str
    kv_tokens: int
    max_sequences: int
    expected_s: float
    revoked: bool


class ReplicaReady(Event):
    """The trainer has a replica beside this dedicated worker, which can compute a part of each
    gradient while the worker rests. Told where rollouts go on during training."""

    worker: str


class ReplicaLost(Event):
    """It died, or was given up; another one may come."""

    worker: str


class CapacityQueued(Event):
    """The queue has taken it, or still has it from an earlier attempt."""

    request: str


class CapacityGranted(Event):
    """The requested job runs; the worker joins by itself."""

    request: str


class CapacityRefused(Event):
    """The queue did not take it, or let it wait for too long: no job of it is left."""

    request: str
    reason: str


class CapacityEnded(Event):
    """The job is over, whoever ended it."""

    request: str


class VersionPublished(Event):
    """`tokens`: of the batch that was trained for it, contexts included; 0: unknown."""

    version: int
    tokens: int = 0


class TurnRequested(Event):
    turn: str
    trajectory: str
    group: str
    context_tokens: int
    max_new_tokens: int
    domain: str = ""  # the environment's name, in a mixture the member's
    outcome: Literal["", "ok", "failed"] = ""  # of the tool call that the turn follows
    made_tokens: int = 0  # of the turn, by an earlier attempt of the run
    held_out: bool = False  # of an evaluation: training turns come first


class TurnProgressed(Event):
    turn: str
    attempt: int
    tokens: int  # new ones


class TurnEnded(Event):
    """Finished, or no longer wanted."""

    turn: str
    tokens: int = 0  # made in the turn


class TurnReturned(Event):
    """A worker gave the turn back before its end: nothing is wrong with it, and it goes elsewhere.
    `chunk`: it has made the `max_tokens` of its attempt, and nothing is wrong with the worker
    either."""

    turn: str
    attempt: int
    chunk: bool = False


class TrajectoryEnded(Event):
    """`failed`: or it was cancelled; another takes its place, unless its group is dropped."""

    trajectory: str
    tokens: int = 0  # made in it; 0 if it failed
    failed: bool = False


class HostLoad(Event):
    """What an environment host carries, told now and then; `protocol.HostLoad` has these fields."""

    host: str
    running: int  # trajectories
    cores: float  # that its commands may use
    cpu: float  # tasks that run or could run, mean since the last report: beyond `cores` all wait
    memory: float  # share in use of the memory for sandboxes


class HostLost(Event):
    """The environment host is gone, with its sandboxes; what is saved of them is not."""

    host: str


class TrajectorySaved(Event):
    """A snapshot is whole and lies where every host can read it: the trajectory can go on elsewhere
    without its host. `protocol.TrajectorySaved` has these fields."""

    trajectory: str
    host: str  # that runs it
    turns: int  # whose commands the snapshot holds
    commands_s: float  # that its commands have taken so far, waiting for a core included


class StepBegun(Event):
    """A training step wants `groups` groups. `stream`: and takes each as soon as it is certain to
    be among them (`TrainGroup`). `group_size`: trajectories of each; 0: unknown. `hybrid_delay`: of
    the step before, the share for which the trainer waited for devices that hybrid workers had.
    `trainers`: ranks of the trainer, each of which trains as fast as a replica; 0: no replica can
    have a part in the step."""

    step: int
    groups: int
    stream: bool = False
    group_size: int = 0
    hybrid_delay: float = 0.0
    trainers: int = 0


class GroupFinished(Event):
    """All trajectories of the group are in; `accepted`: whether the filter keeps it."""

    group: str
    accepted: bool


class Tick(Event):
    pass


AnyEvent = (
    WorkerJoined
    | WorkerLost
    | WorkerDraining
    | WorkerLoaded
    | WorkerCapacity
    | ReplicaReady
    | ReplicaLost
    | CapacityQueued
    | CapacityGranted
    | CapacityRefused
    | CapacityEnded
    | VersionPublished
    | TurnRequested
    | TurnProgressed
    | TurnEnded
    | TurnReturned
    | TrajectoryEnded
    | HostLoad
    | HostLost
    | TrajectorySaved
    | StepBegun
    | GroupFinished
    | Tick
)

# --------------------------------------------------------------------------- actions


class AssignTurn(Action):
    """Send the turn to the worker. With `max_tokens` the engine ends the attempt after so many new
    tokens, and the driver feeds `TurnReturned` with `chunk`; 0: the turn's own limit."""

    turn: str
    worker: str
    attempt: int
    max_tokens: int = 0


class AbortTurn(Action):
    """`why`: it made no token for `turn_timeout_s`; it ends sooner elsewhere (the `AssignTurn` that
    follows); its worker rests from now on; or, of an evaluation, a training turn needs its
    room."""

    turn: str
    worker: str
    attempt: int
    why: Literal["stalled", "slow", "rest", "training"]


class LoadWeights(Action):
    worker: str
    version: int


class AdmitGroup(Action):
    """Start the group with this index of the prompt stream. `rose.scheduler.groups` makes the
    names.

    `spare`: trajectories started beyond the group's size, as a share of it, rounded up. The first
    of all that are in make the group; the driver cancels the others."""

    index: int
    group: str
    spare: float = 0.0


class DropGroup(Action):
    """Cancel what still runs of the group; nothing of it is used."""

    group: str


class TrainGroup(Action):
    """The finished group will be one of the step's, whatever else comes: its gradient may be
    computed now. `StartTraining` names it again."""

    step: int
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


class UseWorker(Action):
    """The worker may take turns. Carried out inside the scheduler; a driver may ignore it."""

    worker: str


class RestWorker(Action):
    """The worker takes neither turns nor weights, and its turns go elsewhere (the `AbortTurn`s that
    follow). Carried out inside the scheduler; a driver may ignore it."""

    worker: str


class PlanReplicas(Action):
    """How many replicas train from this step on, and what the planner expects of it, in seconds of
    a step; `step_s`, `rollout_s` and `training_s` are those of the steps since the plan before,
    which expected `expected_s` (0: there was none). Carried out inside the scheduler, by
    `RestWorker` as a step's training begins; a driver may ignore it."""

    step: int
    replicas: int
    before: int
    forecast_s: float
    step_s: float
    rollout_s: float
    training_s: float
    expected_s: float


class MoveTrajectory(Action):
    """Let the trajectory go on, on another environment host, from a snapshot that holds all of its
    turns: once the command that runs has ended and is saved. The open turn stays with its engine. A
    driver passes it over when trajectory or host is gone by then."""

    trajectory: str
    host: str


class GiveUp(Action):
    """The run can't go on; the driver stops it with this cause."""

    reason: str


AnyAction = (
    AssignTurn
    | AbortTurn
    | LoadWeights
    | AdmitGroup
    | DropGroup
    | TrainGroup
    | StartTraining
    | RequestCapacity
    | ReleaseCapacity
    | UseWorker
    | RestWorker
    | PlanReplicas
    | MoveTrajectory
    | GiveUp
)
