"""Groups and trajectories in progress: what the environment hosts and rose.coordinator.control do
in a live run."""

from __future__ import annotations

import math

import numpy as np

from rose.scheduler.groups import group_index
from rose.sim import spec
from rose.sim.engine import Sequence


class Trajectory(Sequence):
    """One turn of it is open at a time; the engine's `Sequence` is the open turn's attempt."""

    __slots__ = (
        "members",
        "episode",
        "place",
        "number",
        "turn",
        "open",
        "attempt",
        "worker",
        "base",
        "total",
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
        self.number = 0  # of the turn
        self.turn = f"{key}.t0"
        self.open = False  # the scheduler knows the turn
        self.attempt = 0  # 0: it waits
        self.worker = None  # SimWorker whose engine has it, or will
        self.base = episode.prompt_tokens  # context at the turn's begin
        self.total = 0  # tokens of the turn, by earlier attempts
        self.reported = 0  # tokens of this attempt that the scheduler knows
        self.generated = 0  # tokens, of all turns
        self.dead = False
        self.began = self.asked_at = now
        self.lives = 0  # hosts that it has lost

    def next_turn(self) -> bool:
        """Its turn is over; whether there is another."""
        output = self.total
        self.generated += output
        self.base += output + self.episode.observation_tokens[self.number]
        self.number += 1
        self.turn = f"{self.key}.t{self.number}"
        self.attempt = self.total = self.reported = 0
        return self.number < len(self.episode.output_tokens)

    def rewind(self, turns: int, keep_open: bool) -> int:
        """It lost its host and goes on after so many turns; `keep_open`: with what is known of the
        open turn, if that comes next. Returns the tokens that are lost."""
        had = self.generated + self.total + self.made
        total = self.total + self.reported if keep_open and turns == self.number else 0
        output, observed = self.episode.output_tokens, self.episode.observation_tokens
        self.number, self.generated = turns, sum(output[:turns])
        self.base = self.episode.prompt_tokens + self.generated + sum(observed[:turns])
        self.total, self.made, self.reported, self.attempt = total, 0, 0, 0
        self.lives += 1
        self.turn = f"{self.key}.t{turns}x{self.lives}"
        return had - self.generated - total


class Group:
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
        self.tokens = 0  # generated, of those that are in
        self.context = 0  # prompts, observations and generated tokens of those that are in
        self.pairs = 0.0  # of their tokens that attend to each other
        self.replaced = 0


class Groups:
    """Every trajectory is counted exactly once."""

    def __init__(self, what: spec.Spec, seed: int) -> None:
        self._environment, self._batch, self._seed = what.environment, what.batch, seed
        self._max_failures, self._failures = what.max_failures_in_row, 0
        self.open: dict[str, Group] = {}
        self.finished: dict[str, Group] = {}

    def admit(
        self, name: str, index: int, version: int, now: float, spare: float
    ) -> list[Trajectory]:
        """Begin a group. A second try of a prompt ("g12r1") meets the same task by another draw.
        `spare`: of a group's size, see `AdmitGroup`."""
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
        """The whole group, once all members are in; what still runs of it is to be cancelled."""
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
        """Another takes its place. Raises `RuntimeError` after too many in a row."""
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
        return not self._batch.dynamic_sampling or max(group.rewards) > min(group.rewards)
