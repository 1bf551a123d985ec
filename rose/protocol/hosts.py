"""Messages between the coordinator, environment hosts and reward ranks."""

from __future__ import annotations

from typing import Literal

from rose.protocol.common import FinishReason, Message, Phase, Sampling, Trajectory


class StartTrajectory(Message):
    """Coordinator -> environment host: run this trajectory to its end."""

    id: str
    group: str
    phase: Phase
    domain: str  # the environment's name, or the member's in a mixture
    env_seed: int  # the same for all members of a group
    sampling_seed: int | None  # seed of its turns; see `Sampling.seed`
    # For a fork: the trajectory of the same host that it forks off before turn `fork`. If that
    # trajectory ends earlier, the fork starts from the prompt. "": no fork.
    follows: str = ""
    fork: int = 0
    # Turns of an earlier attempt of the run are kept if their policy versions are in this range.
    oldest_version: int = 0
    newest_version: int = -1


class TurnRequest(Message):
    """Environment host -> coordinator: generate one turn."""

    turn: str
    trajectory: str
    group: str
    phase: Phase
    tokens: bytes  # int32: the whole context so far
    sampling: Sampling
    domain: str = ""  # the environment's name, or the member's in a mixture
    # outcome of the tool call before the turn; "" if there was none
    outcome: Literal["", "ok", "failed"] = ""
    routed: int = 0  # number of leading `tokens` whose experts the host has


class TurnResult(Message):
    """Coordinator -> environment host: the whole turn, even if several engines generated parts."""

    turn: str
    tokens: bytes  # int32 (n,): new tokens, the end-of-turn token included
    logprobs: bytes  # float32 (n,)
    versions: bytes  # int32 (n,)
    finish: FinishReason
    migrations: int = 0
    # Experts, as in `Trajectory`, of `routed` tokens of context and turn. The first of these tokens
    # is the first whose experts the host lacks (`TurnRequest.routed`).
    experts: bytes = b""
    routed: int = 0


class TrajectoryFinished(Message):
    """Environment host -> coordinator: the whole trajectory."""

    trajectory: Trajectory


class TrajectoryFailed(Message):
    """Environment host -> coordinator: the environment raised an error or hung. With `scoring` the
    episode got no score instead. Nothing of the trajectory is used."""

    id: str
    group: str
    domain: str
    error: str
    scoring: bool = False
    certain: bool = False  # True: every trajectory of its task would fail


class ScoreTrajectory(Message):
    """Environment host -> reward rank: score this episode."""

    id: str
    prompt: str  # the same for all answers to one prompt
    episode: bytes  # JSON of a rose.reward.episode.Episode


class TrajectoryScored(Message):
    """Reward rank -> environment host: the score, or the `error` that prevented it."""

    id: str
    reward: float = 0.0
    success: bool | None = None  # None: the scorer reports no success
    timed_out: bool = False
    queue_s: float = 0.0  # seconds until a worker took it
    score_s: float = 0.0  # seconds from then to the score
    by_job: bool = False  # True: scored by a worker of a Slurm job
    error: str = ""


class CancelScore(Message):
    """Environment host -> reward rank: drop the episode, because its score is no longer needed."""

    id: str


class RewardDemand(Message):
    """Reward rank -> coordinator, which may submit Slurm jobs with further workers: the episodes
    that wait for a score although all workers of the rank itself are up."""

    index: int  # number among the reward ranks
    waiting: int  # episodes; 0 if own workers are still to start
    waited_s: float  # wait of the oldest episode, seconds
    joined: int  # workers of Slurm jobs that have joined the rank


class CancelTrajectory(Message):
    """Coordinator -> environment host: end the trajectory without a result."""

    id: str


class TrajectoryResumed(Message):
    """Environment host -> coordinator: the trajectory resumes from a snapshot."""

    id: str
    turns: int
    tokens: int  # tokens in the snapshot that the policy generated
    earlier: bool  # True: an earlier attempt of the run took the snapshot; False: this one


class HostReady(Message):
    """Environment host -> coordinator: its process is up, at the start or after a restart."""

    rank: int
    machine: str = ""  # environments' remarks about the machine, for the run's report


class HostBeat(Message):
    """Environment host's process -> the rank that started it: the process's event loop runs."""


class HostBlocked(Message):
    """Environment host -> coordinator: its event loop is blocked. `what` names the code that blocks
    it, and for how long so far."""

    rank: int
    what: str


class HostLost(Message):
    """Environment host's rank -> coordinator: the host's process died, and the rank starts another.
    The rank sent all messages of the dead process before this one. It drops the coordinator's
    messages until `HostForgotten` arrives, because they were for the dead process."""

    rank: int
    error: str


class HostLoad(Message):
    """Environment host -> coordinator, regularly in a run that moves trajectories between hosts.
    `scheduler.events.HostLoad` explains the fields."""

    rank: int
    running: int
    cores: float
    cpu: float
    memory: float


class TrajectorySaved(Message):
    """Environment host -> coordinator: a snapshot is stored where other hosts can read it.
    `scheduler.events.TrajectorySaved` explains the fields."""

    rank: int
    id: str
    turns: int
    commands_s: float


class ReleaseTrajectory(Message):
    """Coordinator -> environment host: release the trajectory as soon as it is saved, so that
    another host can resume it."""

    id: str


class TrajectoryReleased(Message):
    """Environment host -> coordinator, the answer to `ReleaseTrajectory`: the environment is closed
    and the snapshots are stored. The host sends no further message about the trajectory."""

    rank: int
    id: str


class HostForgotten(Message):
    """Coordinator -> environment host's rank, the answer to `HostLost`: the coordinator's later
    messages are for the new process."""
