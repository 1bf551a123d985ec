"""FrozenLake as a conversation: each turn shows the map, the agent answers with one call of `move`.

The lake is gymnasium's FrozenLake-v1 on a random solvable map, which the seed determines. The text
is short because the default run generates on two CPU cores. Each cell is a word of its own, so that
any tokenizer sees the grid cell by cell. Each observation shows the full state.
"""

from __future__ import annotations

from typing import Annotated, Any

import gymnasium
import xxhash
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from msgspec import Meta

from rose.agent.envs.base import Action, Start, Step
from rose.config.common import NotNegative

MOST_DRAWS = 100  # most maps drawn per seed; with hole_probability 0 all maps are the same
DIRECTIONS = ("left", "down", "right", "up")  # gymnasium's actions 0..3

SYSTEM = (
    "You are P on a frozen lake. F is ice, H is a hole. Reach G without falling into a hole: "
    "call move each turn. The last line tells what is beside you."
)
SLIPPERY = " The ice is slippery: you may slide to a side."

MOVE_TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move one cell.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": list(DIRECTIONS)}},
            "required": ["direction"],
        },
    },
}


class FrozenLake:
    """A lake of `size` x `size` cells. Each cell except the corners S and G is a hole with
    `hole_probability`; maps without a path are drawn again. With `slippery`, two of three moves
    slide to a side. Reaching the goal is success, with reward 1. A move also earns `shaping` times
    its progress: the share of the shortest way from start to goal that it gains or loses. Falling
    into a hole loses all progress. Raises `ConfigError`."""

    requires_tool = True

    def __init__(
        self,
        size: Annotated[int, Meta(ge=2, le=16)] = 4,
        # beyond 0.5 hardly any map has a path
        hole_probability: Annotated[float, Meta(ge=0, le=0.5)] = 0.2,
        slippery: bool = False,
        shaping: NotNegative = 0.0,
    ):
        self.size, self.hole_probability, self.slippery = size, float(hole_probability), slippery
        self.shaping, self.rewards_turns = float(shaping), shaping > 0
        self._lake: gymnasium.Env | None = None
        self._rows: list[str] = []
        self._cell = 0  # row * size + column
        self._moves: dict[int, int] = {}  # cell -> fewest moves to the goal

    async def reset(self, seed: int) -> Start:
        self._rows = self._draw_map(seed)
        self._lake = gymnasium.make(
            "FrozenLake-v1",
            desc=self._rows,
            is_slippery=self.slippery,
            max_episode_steps=-1,
            disable_env_checker=True,
        )
        self._cell = int(self._lake.reset(seed=seed)[0])
        self._moves = self._count_moves()
        system = SYSTEM + (SLIPPERY if self.slippery else "")
        return Start(
            messages=[
                {"role": "system", "content": system},
                {"role": "user", "content": self.render()},
            ],
            tools=[MOVE_TOOL],
        )

    def _draw_map(self, seed: int) -> list[str]:
        """Return a random solvable map whose hash has the seed's parity, so that no training map is
        held out. Without this rule, 44% of 128 held-out 4x4 maps were among 240 training maps."""
        for draw in range(MOST_DRAWS):
            rows = generate_random_map(self.size, 1 - self.hole_probability, seed + 2**32 * draw)
            if xxhash.xxh3_64_intdigest("".join(rows).encode()) % 2 == seed % 2:
                break
        return rows

    async def step(self, action: Action) -> Step:
        problem = _problem(action)
        if problem:
            return Step(observation=f"{problem}\n{self.render()}", invalid=True)
        direction = DIRECTIONS.index(action.call.arguments["direction"])
        before = self._progress()
        cell, reward, done, _, _ = self._lake.step(direction)
        self._cell = int(cell)
        return Step(
            observation=self.render(),
            reward=float(reward) + self.shaping * (self._progress() - before),
            done=bool(done),
            success=reward > 0,
        )

    async def close(self) -> None:
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    def _progress(self) -> float:
        """Covered share of the shortest way from start to goal; 0 at the start and in a hole."""
        return 1 - self._moves.get(self._cell, self._moves[0]) / self._moves[0]

    def _count_moves(self) -> dict[int, int]:
        """Return the fewest moves to the goal, for each cell from which it can be reached."""
        cells, size = "".join(self._rows), self.size
        moves = {len(cells) - 1: 0}
        for cell in (queue := list(moves)):
            beside = [cell - size, cell + size]
            beside += [cell - 1] * (cell % size > 0) + [cell + 1] * ((cell + 1) % size > 0)
            for other in beside:
                if 0 <= other < len(cells) and cells[other] != "H" and other not in moves:
                    moves[other] = moves[cell] + 1
                    queue.append(other)
        return moves

    def render(self) -> str:
        """Return the map, one line per row, cells separated by spaces: P agent, G goal, H hole, F
        ice. The last line has the agent's neighbours: `left wall down F right H up wall`."""
        grid = [list(row.replace("S", "F")) for row in self._rows]
        row, column = divmod(self._cell, self.size)
        grid[row][column] = "P"
        beside = dict(
            zip(
                DIRECTIONS,
                ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column)),
                strict=False,
            )
        )
        inside = range(self.size)
        words = [
            f"{d} {grid[r][c] if r in inside and c in inside else 'wall'}"
            for d, (r, c) in beside.items()
        ]
        return "\n".join([*map(" ".join, grid), " ".join(words)])


def _problem(action: Action) -> str | None:
    """Return why this action can't be carried out, as a text for the policy; None if it can."""
    call: Any = action.call
    if call is None:
        return "Call move with a direction."
    if call.name != "move":
        return f"There is no tool {call.name[:40]!r}, only move."
    direction = call.arguments.get("direction")
    if direction not in DIRECTIONS or len(call.arguments) != 1:
        return "move takes one argument, direction: left, down, right or up."
    return None
