"""An arithmetic question, a calculator to work it out with, and one chance to answer.

Small pretrained models learn tool use on this task: copy the expression into a call, then copy the
result into the answer. It has no word problems, so that a run needs no data set.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Annotated

from msgspec import Meta

from rose.agent.envs.base import Action, Start, Step
from rose.config import ConfigError
from rose.parts.tasks.envs import _arithmetic

EXAMPLES_SEED = 7  # the same examples in every episode, so that engines cache them as a prefix
OPERATORS = "+-*"  # operators in questions, all with integer results

SYSTEM = "Work out the question with the tool calculate, then give the result with the tool answer."


def _tool(name: str, description: str, argument: str, kind: str) -> dict:
    """Return the schema of a tool with one argument."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": kind}},
        "required": [argument],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool("calculate", "Evaluate an arithmetic expression.", "expression", "string"),
    _tool("answer", "Give the final answer. This ends the task.", "value", "number"),
]
ARGUMENT = {"calculate": "expression", "answer": "value"}


class Calculator:
    """A question of `operations` binary operations drawn from `operators` on integers 1..`largest`.

    The right answer is success, with a total reward of 1. Of that 1, `shaping` is paid at the first
    call of calculate that shows the right value, even if the answer is wrong later. `examples`
    solved questions of the same kind precede the question as earlier turns, for models that were
    never trained to call tools. Raises `ConfigError`.
    """

    requires_tool = True

    def __init__(
        self,
        operations: Annotated[int, Meta(ge=1, le=12)] = 2,
        largest: Annotated[int, Meta(ge=1, le=10**6)] = 99,
        operators: str = OPERATORS,
        shaping: Annotated[float, Meta(ge=0, lt=1)] = 0.0,
        examples: Annotated[int, Meta(ge=0, le=8)] = 0,
    ):
        if not operators or set(operators) - set(OPERATORS):
            raise ConfigError(
                f"env.args.operators={operators!r}: some of the characters {OPERATORS}"
            )
        self.operations, self.largest, self.operators = operations, largest, operators
        self.shaping = float(shaping)
        self.rewards_turns = shaping > 0
        rng = random.Random(EXAMPLES_SEED)
        solved = [example(expression(rng, operations, largest, operators)) for _ in range(examples)]
        self._opening = [
            {"role": "system", "content": SYSTEM},
            *(message for turns in solved for message in turns),
        ]
        self._answer = Fraction(0)
        self._paid = 0.0

    async def reset(self, seed: int) -> Start:
        rng = random.Random(seed)
        question = expression(rng, self.operations, self.largest, self.operators)
        self._answer, self._paid = _arithmetic.evaluate(question), 0.0
        return Start(messages=[*self._opening, ask(question)], tools=TOOLS)

    async def step(self, action: Action) -> Step:
        call = action.call
        if call is None or call.name not in ARGUMENT:
            named = "Call a tool" if call is None else f"There is no tool {call.name[:40]!r}"
            return Step(observation=f"{named}: calculate or answer.", invalid=True)
        key = ARGUMENT[call.name]
        given = call.arguments.get(key)
        if (
            isinstance(given, bool)
            or not isinstance(given, str | int | float)
            or len(call.arguments) != 1
        ):
            return Step(observation=f"{call.name} takes one argument, {key}.", invalid=True)
        try:  # str() of a very long int raises ValueError, too
            read = _arithmetic.evaluate if call.name == "calculate" else _arithmetic.number
            value = read(str(given))
        except ValueError as error:
            return Step(observation=f"Error: {error}.", invalid=True)
        return self._calculated(value) if call.name == "calculate" else self._answered(value)

    async def close(self) -> None:
        """Do nothing, as nothing is held."""

    def _calculated(self, value: Fraction) -> Step:
        """Return the step after a call of calculate."""
        reward = self.shaping - self._paid if value == self._answer else 0.0
        self._paid += reward
        return Step(observation=_arithmetic.format_number(value), reward=reward)

    def _answered(self, value: Fraction) -> Step:
        """Return the last step, after a call of answer."""
        right = value == self._answer
        return Step(
            observation="Right." if right else "Wrong.",
            reward=1.0 - self._paid if right else 0.0,
            done=True,
            success=right,
        )


def ask(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is {question}?"}


def example(question: str) -> list[dict[str, str]]:
    """Return the four messages of a solved question. Calls and responses are text, as chat
    templates with tools write them."""
    value = _arithmetic.format_number(_arithmetic.evaluate(question))
    texts = [
        f'<tool_call>{{"name": "calculate", "arguments": {{"expression": '
        f'"{question}"}}}}</tool_call>',
        f"<tool_response>\n{value}\n</tool_response>",
        f'<tool_call>{{"name": "answer", "arguments": {{"value": {value}}}}}</tool_call>',
    ]
    said = zip(("assistant", "user", "assistant"), texts, strict=True)
    return [ask(question), *({"role": role, "content": text} for role, text in said)]


def expression(rng: random.Random, operations: int, largest: int, operators: str) -> str:
    """Return a random expression on integers 1..`largest`, with parentheses as (7 + 12) * 3 has."""
    if operations == 0:
        return str(rng.randint(1, largest))
    left = rng.randrange(operations)
    parts = [expression(rng, count, largest, operators) for count in (left, operations - 1 - left)]
    a, b = (f"({part})" if " " in part else part for part in parts)
    return f"{a} {rng.choice(operators)} {b}"
