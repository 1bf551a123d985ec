"""A frozen lake at night: one sees the four cells beside one, and no more."""

from __future__ import annotations

import random

from rose.api import Action, ConfigError, Start, Step

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
SYSTEM = "You are on a dark lake. F is ice, H is a hole. Find G: call move each turn."
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move one cell.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": list(MOVES)}},
            "required": ["direction"],
        },
    },
}


class DarkLake:
    """Reward 1 on reaching G, else 0; a hole ends the episode. Raises `ConfigError`."""

    requires_tool = True

    def __init__(self, size: int = 4, holes: int = 3):
        if type(size) is not int or type(holes) is not int or not 2 <= 2 + holes <= size**2:
            raise ConfigError(f"env.args.size={size!r}, holes={holes!r}: too few cells")
        self.cells = [(row, column) for row in range(size) for column in range(size)]
        self.holes = holes

    async def reset(self, seed: int) -> Start:
        drawn = random.Random(seed).sample(self.cells, 2 + self.holes)
        self.at, self.goal, self.wet = drawn[0], drawn[1], drawn[2:]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.show()}]
        return Start(messages=messages, tools=[TOOL])

    async def step(self, action: Action) -> Step:
        call = action.call
        direction = call.arguments.get("direction") if call and call.name == "move" else None
        if direction not in list(MOVES):
            return Step(observation=f"Call move with a direction.\n{self.show()}", invalid=True)
        cell, kind = self.beside(direction)
        if kind in "GH":
            found = kind == "G"
            return Step(observation=kind, reward=float(found), done=True, success=found)
        self.at = self.at if kind == "wall" else cell
        return Step(observation=self.show())

    async def close(self) -> None:
        """Nothing is held."""

    def beside(self, direction: str) -> tuple[tuple[int, int], str]:
        cell = (self.at[0] + MOVES[direction][0], self.at[1] + MOVES[direction][1])
        if cell not in self.cells:
            return cell, "wall"
        return cell, "G" if cell == self.goal else "H" if cell in self.wet else "F"

    def show(self) -> str:
        return " ".join(f"{direction} {self.beside(direction)[1]}" for direction in MOVES)
