r"""Prompts from a file, one answer each, and a reward from the user's function.

The function is `file.py:function` or `package.module:function`, as in docs/environments.md. `math`
compares with the row's answer by math-verify; with null each reward is 0. A plain function runs in
a worker process, an async one in the environment host. If it raises, or takes longer than
env.step_timeout_s, the trajectory fails and is replaced; it doesn't get reward 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rose.agent.envs.base import Action, Start, Step
from rose.parts.tasks.envs import _prompts
from rose.reward.episode import Score


class Prompts:
    """An environment with the prompts of `data` and, for evaluation, `held_out`: a file, or the
    share of `data` that is held out. `prompt_field` has a text or chat messages. A reward of at
    least `success_at` is a success. Raises `ConfigError`."""

    requires_tool = False
    paths = ("data", "held_out", "reward")

    def __init__(
        self,
        data: str,
        held_out: str | float = 0.1,
        reward: str | None = "math",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        system: str | None = None,
        success_at: float = 1.0,
    ):
        self.source = _prompts.Prompts(data, held_out, prompt_field, answer_field, system, reward)
        self.success_at, self.doubt = success_at, self.source.doubt
        self._row: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []

    async def reset(self, seed: int) -> Start:
        self._seed, self._row = seed, self.source.row(seed)
        start = self.source.start(self._row)
        self._messages = list(start.messages)
        return start

    def task_name(self, seed: int) -> str:
        return self.source.task_name(seed)

    def starts(self) -> Iterator[tuple[str, Start]]:
        return self.source.starts()

    async def step(self, action: Action) -> Step:
        text = action.text.encode("utf-8", "replace").decode()
        messages = [*self._messages, {"role": "assistant", "content": text}]
        score = await self.source.score(self._row, self._seed, messages, action)
        return last_step(score, self.success_at)

    async def close(self) -> None:
        """Do nothing, as nothing is held."""


def last_step(score: Score, success_at: float) -> Step:
    """Return an episode's last step. If the score has no `success`, its reward decides by
    `success_at`."""
    success = score.reward >= success_at if score.success is None else score.success
    return Step(f"Reward {score.reward:g}.", reward=score.reward, done=True, success=success)
