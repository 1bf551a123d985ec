"""Find a number from 1 to `largest` by guessing; each guess is answered with higher or lower."""

from __future__ import annotations

import random

from rose.agent.envs.base import Action, Start, Step
from rose.config import ConfigError

GUESS_TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
}


class GuessNumber:
    """Reward 1 on finding the number, else 0. Raises `ConfigError`."""

    requires_tool = True

    def __init__(self, largest: int = 100):
        if type(largest) is not int or largest < 2:
            raise ConfigError(f"env.args.largest={largest!r}: an integer from 2")
        self.largest = largest
        self._number = 0

    async def reset(self, seed: int) -> Start:
        self._number = random.Random(seed).randint(1, self.largest)
        question = f"Find the number from 1 to {self.largest}: call guess each turn."
        return Start(messages=[{"role": "user", "content": question}], tools=[GUESS_TOOL])

    async def step(self, action: Action) -> Step:
        call = action.call
        if call is None or call.name != "guess" or type(call.arguments.get("number")) is not int:
            return Step(observation="Call guess with an integer, number.", invalid=True)
        number = call.arguments["number"]
        if number == self._number:
            return Step(observation="Found.", reward=1.0, done=True, success=True)
        return Step(observation="higher" if number < self._number else "lower")

    async def close(self) -> None:
        """Nothing is held."""
