"""The environment protocol: everything an agentic task must offer, and nothing of how it is run.

One environment is one file here and one file in conf/env. The agent loop
(`rose.agent.loop`) puts a deadline around every call, so an environment may simply await
whatever it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """A parsed call: the name and JSON arguments as the model wrote them, not yet checked."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Action:
    """What the policy said in one turn: its text, and the calls in it. `call` is the first of
    `calls`, None for plain text; either may be given. `truncated`: a token limit ended the turn,
    not the policy. `said`: the text outside of thoughts, where the marks in `text` don't tell it,
    because the prompt opened a thought or the model has marks of its own."""

    text: str
    call: ToolCall | None = None
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    said: str | None = None

    @property
    def answer(self) -> str:
        """The text outside of thoughts. A thought that never ended has no answer behind it."""
        return outside_thoughts(self.text) if self.said is None else self.said

    def __post_init__(self) -> None:
        if self.calls:
            object.__setattr__(self, "call", self.calls[0])
        elif self.call is not None:
            object.__setattr__(self, "calls", (self.call,))


def outside_thoughts(text: str) -> str:
    """Return what stands behind the last ``</think>`` and before a ``<think>`` that has no end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


@dataclass(frozen=True)
class Start:
    """First state: chat messages (system, user) and the tools, as OpenAI function schemas. `task`:
    what scorers of the episode need to know of it (`reward=`), such as the right answer: plain
    JSON."""

    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Result of an action. `observation` goes back to the policy unless `done`.

    `reward` is this step's; the turn's, and the trajectory's, is the sum. `invalid` marks an action
    that the environment could not carry out (unknown tool, bad argument): counted, never raised.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    success: bool = False
    invalid: bool = False
    # of an environment that takes several calls at once: the result of each of them, in order
    observations: tuple[str, ...] = ()


class Environment(Protocol):
    """Seedable and single-use: reset once, step until done, close always.

    A turn may hold several calls. Each is a `step` of its own, one after the other until one is
    done, unless the class has `several_calls = True`: then one `step` gets them all, in
    `action.calls`, and returns `observations`.

    `rewards_turns = True`, of the class or an instance, says that steps' rewards rank
    good turns above bad ones, instead of only how the episode ended: algorithms of turns need it.
    """

    requires_tool: bool  # a turn without a call is answered by the loop with a reminder

    async def reset(self, seed: int) -> Start:
        """Begin the episode that `seed` determines completely.

        Training seeds are even and held-out seeds odd. An environment with so few tasks that
        different seeds often give the same one should split its tasks by that parity, or "held-out"
        means little.
        """

    async def step(self, action: Action) -> Step:
        """Act. Raises only when the environment itself is broken."""

    # Optional, where the same seed and actions don't lead to the same state, or take long:
    # `async def checkpoint(self) -> bytes`, after a step, what `resume` needs. It runs while the
    # model thinks; the next step waits for it. Small: big state lies in the host's own store and is
    # named in it, and may be written later.
    # `async def resume(self, saved: bytes) -> None`, in place of `reset`, also after another
    # `resume` that raised; several environments may resume from one saved state.

    # Optional: `async def end(self) -> Step`, a last step when the turns or the context are used up
    # before one is done, such as a verdict on the final state; its reward and success count.

    # Optional: `doubt`, a text for the plan's warnings, such as held-out tasks that are trained.

    # Optional: `def task_name(self, seed: int) -> str`, what people call the seed's task, such as
    # its row in a file; failures name it, and the report counts successes by it.
    # `def starts(self) -> Iterable[tuple[str, Start]]`, the name and the first state of every task,
    # where these are known beforehand: the launcher then counts which don't fit the model's
    # context.

    async def close(self) -> None:
        """Free everything; safe after a failed reset and when called twice."""
