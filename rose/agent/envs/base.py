"""The environment protocol, which the class of an agentic task must implement.

An environment is one file here and one file in conf/env. The agent loop (`rose.agent.loop`) puts a
deadline around every call, so an environment needs no timeouts of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """A parsed tool call: name and JSON arguments as the model wrote them, not yet checked."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Action:
    """The policy's answer in one turn: its text, and the tool calls in it. `call` is the first of
    `calls`, or None without calls; a caller passes one of the two arguments. `truncated`: a token
    limit ended the turn, not the policy. `said`: the text outside of thoughts, if the prompt opened
    a thought or the model doesn't mark thoughts with <think> and </think>; otherwise None."""

    text: str
    call: ToolCall | None = None
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    said: str | None = None

    @property
    def answer(self) -> str:
        """The text outside of thoughts. A thought that never ended reaches to the text's end."""
        return outside_thoughts(self.text) if self.said is None else self.said

    def __post_init__(self) -> None:
        if self.calls:
            object.__setattr__(self, "call", self.calls[0])
        elif self.call is not None:
            object.__setattr__(self, "calls", (self.call,))


def outside_thoughts(text: str) -> str:
    """Return the text after the last ``</think>``, up to the next ``<think>``."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


@dataclass(frozen=True)
class Start:
    """The first state: chat messages (system, user), and the tools as OpenAI function schemas.
    `task`: JSON that scorers of the episode (`reward=`) need, such as the right answer."""

    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """The result of an action. The policy gets `observation` unless the episode is `done`.

    `reward` is this step's. A turn's and a trajectory's reward is the sum over its steps. `invalid`
    marks an action that can't be carried out (unknown tool, bad argument), instead of an exception.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    success: bool = False
    invalid: bool = False
    # Each call's result, in order, for an environment that takes several calls in one step.
    observations: tuple[str, ...] = ()


class Environment(Protocol):
    """A task for one episode: reset it once, step until done, and always close it.

    A turn may have several calls. Each is a `step` of its own, in order, until a step is done. If
    the class has `several_calls = True`, one `step` gets them all and returns `observations`.

    `rewards_turns = True`, on the class or an instance, means that the rewards of steps rank good
    turns above bad turns. They don't only show how the episode ended. Algorithms that assign credit
    to turns need it.
    """

    requires_tool: bool  # if True, the loop answers a turn without a call with a reminder

    async def reset(self, seed: int) -> Start:
        """Begin the episode of `seed`, which determines it completely.

        Training seeds are even and held-out seeds odd. If an environment has so few tasks that
        different seeds often give the same task, it should split its tasks by the seed's parity.
        Otherwise the policy would also train on held-out tasks."""

    async def step(self, action: Action) -> Step:
        """Carry out the action. Raises only if the environment itself is broken."""

    # Optional, for environments in which repeating the actions of a seed takes long, or doesn't
    # lead to the same state:
    # `async def checkpoint(self) -> bytes` is called after a step and returns what `resume` needs.
    # It runs while the model generates, and the next step waits for it. Its result should be small.
    # An environment with a large state returns a name, under which it keeps the state in the host's
    # own store (`store_of`).
    # `async def resume(self, saved: bytes) -> None` is called in place of `reset`. It may be called
    # again if it raised. Several environments may resume from one saved state.

    # Optional: `doubt` is a warning for the plan, for example that held-out tasks are trained too.
    # Optional, as docs/environments.md says: `async def end(self) -> Step`,
    # `def task_name(self, seed: int) -> str`, `def starts(self) -> Iterable[tuple[str, Start]]`.

    async def close(self) -> None:
        """Release all resources. This must be safe after a failed reset and when called twice."""


def player_of(environment: Any) -> str | None:
    """Return the environment's attribute `trajectory_player`; None without it, when ROSE's agent
    loop plays. An environment whose agent is a program has the attribute: module:Class of a
    `rose.agent.playing.Player`, which plays its trajectories. A host creates one such object."""
    return getattr(environment, "trajectory_player", None)


def store_of(environment: Any) -> Any:
    """Return the environment's attribute `checkpoint_store`, the function that opens the store of
    its states (`rose.agent.playing.OpenStore`); None without it. Each host opens one store and
    passes it, with the trajectory's id, to `keep_checkpoints` before `reset`."""
    return getattr(environment, "checkpoint_store", None)
