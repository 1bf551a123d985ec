r"""Reasoning in plain text: a question, one written answer, and a rule that checks it.

The seed draws a question of one of two families: `arithmetic` (the answer is an integer), or
`countdown` (reach a target using each given number once; any correct expression counts). The answer
is the content of the last ``\boxed{}``. Without a box it is the last number, or for countdown the
last line. Thoughts are ignored. There is no partial credit and no reward for format.
"""

from __future__ import annotations

import random
import re
from typing import Annotated

from msgspec import Meta

from rose.agent.envs.base import Action, Start, Step, outside_thoughts
from rose.config import ConfigError
from rose.parts.tasks.envs import _arithmetic
from rose.parts.tasks.envs.calculator import OPERATORS, expression

TASKS = ("arithmetic", "countdown")
SYSTEM = r"Think step by step. Then give the final answer in \boxed{}."
# Braces that LaTeX pairs, or that a backslash makes text.
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\\\|\\[{}]|[{}]")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Reasoning:
    """A question of the family `task`, on integers 1..`largest`. `size` is the number of operations
    for arithmetic, and of given numbers for countdown.

    A right answer is success with reward 1, else the reward is 0. Raises `ConfigError`.
    """

    requires_tool = False

    def __init__(
        self,
        task: str = "countdown",
        size: Annotated[int, Meta(ge=2, le=8)] = 3,
        largest: Annotated[int, Meta(ge=2, le=10**6)] = 20,
    ):
        if task not in TASKS:
            raise ConfigError(f"env.args.task={task!r}: one of {', '.join(TASKS)}")
        self.task, self.size, self.largest = task, size, largest
        self._solution = ""  # the expression in question, or one that reaches the target

    async def reset(self, seed: int) -> Start:
        rng = random.Random(seed)
        operations = self.size if self.task == "arithmetic" else self.size - 1
        self._solution = expression(rng, operations, self.largest, OPERATORS)
        return Start(
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": self._question(rng)},
            ]
        )

    async def step(self, action: Action) -> Step:
        right = self.verify(action.answer)
        return Step(
            observation="Right." if right else "Wrong.",
            reward=float(right),
            done=True,
            success=right,
        )

    async def close(self) -> None:
        """Do nothing, as nothing is held."""

    def verify(self, text: str) -> bool:
        """True if the text's final answer is right."""
        answer = final_answer(
            text, NUMBER if self.task == "arithmetic" else re.compile(r"(?m)^.*\S.*$")
        )
        try:
            target = _arithmetic.evaluate(self._solution)
            if self.task == "arithmetic":
                return _arithmetic.number(answer.replace(",", "")) == target
            answer = answer.split("=")[0]
            return (
                _arithmetic.numbers(answer) == _arithmetic.numbers(self._solution)
                and _arithmetic.evaluate(answer) == target
            )
        except _arithmetic.ArithmeticRefused:
            return False

    def _question(self, rng: random.Random) -> str:
        if self.task == "arithmetic":
            return f"What is {self._solution}?"
        given = [str(number) for number in _arithmetic.numbers(self._solution)]
        rng.shuffle(given)
        return (
            f"Using each of the numbers {', '.join(given)} exactly once, and + - * / and "
            f"parentheses, write an expression that equals {_arithmetic.evaluate(self._solution)}."
        )


def final_answer(text: str, fallback: re.Pattern[str]) -> str:
    r"""Return the content of the last ``\boxed{}``, else the last match of `fallback`, else "".
    Thoughts are ignored."""
    text = outside_thoughts(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip().strip("$")
    found = fallback.findall(text)
    return found[-1] if found else ""


def last_boxed(text: str) -> str | None:
    """Return the content of the last box that is complete and not empty; None without one."""
    begun: list[int | None] = []  # start of each open box's content; None for other braces
    last, found = 0, None
    for brace in BRACES.finditer(text):
        if brace[0] == "{" or len(brace[0]) > 2:
            begun.append(None if brace[0] == "{" else brace.end())
        elif brace[0] == "}" and begun:
            start = begun.pop() or 0
            content = text[start : brace.start()].strip()
            if start > last and content:
                last, found = start, content
    return found
