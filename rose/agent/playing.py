"""Interfaces that optional parts of ROSE implement for an environment host: players of whole
trajectories, and stores of environments' states. An environment names its player and its store in
attributes, which rose/agent/envs/base.py describes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from rose.agent.chat import ChatFormat
from rose.agent.loop import RequestTurn
from rose.agent.scoring import Clock, Scoring
from rose.config import Config, Env
from rose.observe.recorder import NullRecorder
from rose.protocol import Sampling, StartTrajectory, Trajectory


class Player(Protocol):
    """Plays a host's trajectories instead of ROSE's agent loop. Created with the configuration."""

    async def play(
        self,
        start: StartTrajectory,
        environment: Any,
        chat: ChatFormat,
        request_turn: RequestTurn,
        limits: Env,
        key: str,
        max_context: int,
        sampling: Sampling,
        clock: Clock,
        scoring: Scoring | None,
    ) -> Trajectory:
        """Play one trajectory, as `rose.agent.loop.run_trajectory` does. `key` is the dotted key of
        `limits`. Raises `EnvironmentFailure` and `ConfigError`."""

    async def close(self) -> None:
        """Release all resources when the host ends."""


class Store(Protocol):
    """Keeps the states of a host's environments while their trajectories have snapshots."""

    def ended(self, trajectory: str) -> None:
        """Remove the states of a trajectory that has ended."""

    async def sweep(self) -> None:
        """Remove, at intervals and until cancelled, states that no trajectory needs."""

    async def close(self, deadline_s: float) -> None:
        """Store the remaining states, for at most `deadline_s` seconds."""


# (configuration, folder of the trajectories' snapshots, recorder) -> the store, or None if the
# configuration wants no checkpoints. Raises `ConfigError`.
OpenStore = Callable[[Config, Path, NullRecorder], Coroutine[Any, Any, Store | None]]
