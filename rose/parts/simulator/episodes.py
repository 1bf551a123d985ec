"""Groups and trajectories in progress (live: environment hosts, rose.coordinator.control)."""

from __future__ import annotations

import math

import numpy as np

from rose.parts.simulator import spec
from rose.parts.simulator.engine import Sequence
from rose.scheduler.groups import group_index


class Trajectory(Sequence):
    """A trajectory. At most one turn is open at a time. To an engine, the object is the `Sequence`
    of the current attempt at this turn."""

    __slots__ = (
        "members",
        "episode",
        "place",
        "number",
        "turn",
        "attempt",
        "worker",
        "base",
        "turn_tokens",
        "reported",
        "generated",
        "dead",
        "began",
        "asked_at",
        "lives",
    )

    def __init__(
        self, key: str, members: Group, place: int, episode: spec.Episode, now: float
    ) -> None:
        super().__init__(key, members.name, episode.prompt_tokens)
        self.members, self.place, self.episode = members, place, episode
        self.number = 0  # index of the open turn, or of the next one
        self.turn = f"{key}.t0"  # name of that turn
        self.attempt = 0  # number of the current attempt; 0: the turn waits
        self.worker = None  # SimWorker of the last attempt that the scheduler assigned
        self.base = episode.prompt_tokens  # tokens of context at the turn's begin
        self.turn_tokens = 0  # tokens that earlier attempts at the turn generated
        self.reported = 0  # tokens of this attempt that were reported to the scheduler
        self.generated = 0  # tokens of all turns that have ended
        self.dead = False  # cancelled, or its environment crashed
        self.began = self.asked_at = now
        self.lives = 0  # number of hosts lost

    def next_turn(self) -> bool:
        """End the open turn. Return whether another turn follows."""
        output = self.turn_tokens
        self.generated += output
        self.base += output + self.episode.observation_tokens[self.number]
        self.number += 1
        self.turn = f"{self.key}.t{self.number}"
        self.attempt = self.turn_tokens = self.reported = 0
        return self.number < len(self.episode.output_tokens)

    def rewind(self, turns: int, keep_open: bool) -> int:
        """Set the trajectory back to its state after `turns` turns, since its host was lost. Return
        the number of lost tokens. `keep_open`: keep the reported tokens of the open turn, if no
        turn before it is lost."""
        had = self.generated + self.turn_tokens + self.attempt_tokens
        kept = self.turn_tokens + self.reported if keep_open and turns == self.number else 0
        output, observed = self.episode.output_tokens, self.episode.observation_tokens
        self.number, self.generated = turns, sum(output[:turns])
        self.base = self.episode.prompt_tokens + self.generated + sum(observed[:turns])
        self.turn_tokens, self.attempt_tokens, self.reported, self.attempt = kept, 0, 0, 0
        self.lives += 1
        self.turn = f"{self.key}.t{turns}x{self.lives}"
        return had - self.generated - kept


class Group:
    """A group of trajectories, open or finished."""

    __slots__ = (
        "name",
        "version",
        "running",
        "rewards",
        "tokens",
        "context",
        "pairs",
        "draw",
        "index",
        "replaced",
    )

    def __init__(self, name: str, version: int, draw: np.random.Generator) -> None:
        self.name, self.version, self.draw = name, version, draw
        self.index = group_index(name)
        self.running: dict[str, Trajectory] = {}
        self.rewards: list[float] = []
        # Sums over the members that have ended:
        self.tokens = 0  # generated tokens
        self.context = 0  # tokens of prompts, observations and outputs
        self.pairs = 0.0  # pairs of a token and an earlier one that it attends to
        self.replaced = 0  # members replaced after a crash


class Groups:
    """The open and the finished groups of a run."""

    def __init__(self, what: spec.Spec, seed: int) -> None:
        self._environment, self._batch, self._seed = what.environment, what.batch, seed
        self._max_failures, self._failures = what.max_failures_in_row, 0
        self.open: dict[str, Group] = {}
        self.finished: dict[str, Group] = {}

    def admit(
        self, name: str, index: int, version: int, now: float, spare: float
    ) -> list[Trajectory]:
        """Begin a group and return its trajectories. A retry ("g12r1") has the same prompt with
        other draws. `spare` is the share of additional members (`AdmitGroup`)."""
        retry = int(name.partition("r")[2] or 0)
        draw = np.random.Generator(np.random.PCG64([self._seed, index, retry]))
        group = self.open[name] = Group(name, version, draw)
        size = math.ceil((1 + spare) * self._batch.group_size)
        episodes = self._environment.group(index, size, version, draw)
        for place, episode in enumerate(episodes):
            trajectory = Trajectory(f"{name}.{place}", group, place, episode, now)
            group.running[trajectory.key] = trajectory
        return list(group.running.values())

    def ended(self, trajectory: Trajectory) -> Group | None:
        """Count an ended trajectory. Return its group if it is complete now; the caller then
        cancels the members that still run."""
        group = trajectory.members
        del group.running[trajectory.key]
        self._failures = 0
        group.rewards.append(trajectory.episode.reward)
        group.tokens += trajectory.generated
        group.context += trajectory.base
        group.pairs += trajectory.base**2 / 2
        if len(group.rewards) < self._batch.group_size:
            return None
        self.finished[group.name] = self.open.pop(group.name)
        return group

    def crashed(self, trajectory: Trajectory, now: float) -> Trajectory:
        """Replace a trajectory whose environment crashed and return the replacement. Raises
        `RuntimeError` after too many crashes in a row."""
        self._failures += 1
        if self._failures >= self._max_failures:
            raise RuntimeError(
                f"{self._failures} simulated environments failed in a row (max_failures_in_row); "
                f"the last: {trajectory.key}"
            )
        group = trajectory.members
        del group.running[trajectory.key]
        group.replaced += 1
        [episode] = self._environment.group(group.index, 1, group.version, group.draw)
        other = Trajectory(
            f"{group.name}.{trajectory.place}r{group.replaced}",
            group,
            trajectory.place,
            episode,
            now,
        )
        group.running[other.key] = other
        return other

    def accepted(self, group: Group) -> bool:
        """Return False if dynamic sampling rejects the group because all its rewards are equal."""
        return not self._batch.dynamic_sampling or max(group.rewards) > min(group.rewards)
