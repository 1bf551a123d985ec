"""Messages between the coordinator and trainer ranks."""

from __future__ import annotations

import msgspec

from rose.protocol.common import Message, Record, Trajectory


class BatchSummary(Record):
    """Facts about all N trajectories of the batch. Every trainer rank receives all of them."""

    rewards: list[float]
    groups: list[int]  # (N,): index of the group within the batch
    response_tokens: list[int]
    truncated: list[bool]  # True: ended by a limit of tokens; False also for the turn limit
    turn_rewards: list[list[float]] = []  # (N,): `Trajectory.turn_rewards`
    # (N,): for each turn the number of its segment. A segment is a run of turns that the same
    # trajectories share; its number is unique in the batch. [] in a batch without forks.
    segments: list[list[int]] = []
    # (N,): (generated tokens, allowed tokens) of the limit that the trajectory came closest to
    limits: list[tuple[int, int]] = []


class TrainStep(Message):
    """Coordinator -> every trainer rank: the step begins. The batch's rows are the samples of its
    trajectories, one for each leaf. The rank's own rows follow in `parts` messages `TrainPart`. In
    each optimizer update all ranks have the same number of micro-batches, because ZeRO's
    collectives need that."""

    step: int
    summary: BatchSummary
    micro_batches: list[list[list[int]]]  # [update][micro-batch][row], the rank's own rows
    trees: bool  # True: each micro-batch is computed as one prefix tree
    parts: int
    # (rows,): each row's index among the N trajectories of `summary`; []: row i has trajectory i
    owners: list[int] = []
    # True, with `trainer.stream`: further `TrainStep`s add to this batch. `summary` and `owners`
    # cover all groups so far, `micro_batches` only the new ones. The rank accumulates the gradient
    # and does not apply it yet.
    more: bool = False


class TrainPart(Message):
    """Coordinator -> trainer rank: some of its own rows, and their `indices` in the batch."""

    step: int
    part: int
    indices: list[int]
    trajectories: list[Trajectory]


class TrainedAhead(Message):
    """Every trainer rank -> coordinator: it computed the gradient of a `TrainStep` with `more`."""

    step: int
    index: int


class TrainDone(Message):
    """Every trainer rank -> coordinator: the step is done and `version` is published. Only trainer
    0's `metrics` are used; they are already reduced over all ranks."""

    step: int
    index: int
    version: int
    metrics: dict[str, float]
    store: str
    energy_j: dict[str, float] = {}  # rose.energy.counters


class SaveCheckpoint(Message):
    """Coordinator -> every trainer rank: save the training state to `folder`."""

    step: int
    folder: str


class Costs(msgspec.Struct, frozen=True):
    """Costs of forward and backward in one layer, all in the same arbitrary unit."""

    token: float  # cost of a token without attention
    # Cost of a pair of tokens of one row. A causal kernel computes half of the pairs.
    causal: float
    # Cost of a pair under a prefix tree's mask. If `dense` is true, all pairs of the micro-batch's
    # tokens count; otherwise only pairs in which one token attends to the other.
    tree: float
    dense: bool


class TrainerReady(Message):
    """Trainer rank -> coordinator: the model is loaded, or resumed at `step`, and the version is
    published."""

    index: int
    step: int
    version: int
    store: str
    no_trees: str  # why this model can't compute prefix trees; "" if it can
    costs: Costs | None = None  # costs on this rank's device; None: unknown
    energy_j: dict[str, float] = {}  # rose.energy.counters
