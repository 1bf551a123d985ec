"""MiniGrid (Farama) as a conversation with one tool: find the key, open the door, reach the goal.

All tasks of the package work except the WFC mazes, which need further packages. The policy sees the
whole grid as text, one symbol per cell, instead of MiniGrid's partial view of 7x7 cells. One call
carries out up to `actions_per_turn` actions. Paper: Chevalier-Boisvert et al., arXiv:2306.13831.
"""

from __future__ import annotations

from typing import Annotated

import gymnasium
import minigrid  # noqa: F401  (registers the tasks with gymnasium)
from minigrid.core.constants import COLOR_NAMES
from minigrid.core.world_object import WorldObj
from msgspec import Meta

from rose.agent.envs.base import Action, Start, Step
from rose.config import ConfigError
from rose.config.common import Count, NotNegative

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")  # minigrid's 0..6
# Tasks that give a reward only at `done`. `toggle` would end them without a reward.
ENDED = ("MiniGrid-GoToDoor-", "MiniGrid-GoToObject-")
HEADING = ">v<^"  # agent_dir 0..3
SYMBOL = {"wall": "#", "floor": ".", "goal": "G", "lava": "L", "key": "K", "ball": "B", "box": "X"}
DOOR = {"locked": "D", "closed": "C", "open": "O"}

SYSTEM = (
    "You are the arrow (> v < ^) on a grid, facing where it points. # is a wall, . is free, G the "
    "goal, L deadly lava, K a key, B a ball, X a box; doors: D locked, C closed, O open. A small "
    f"letter after a thing is the first of its colour ({', '.join(sorted(COLOR_NAMES))}; grey is "
    "e). left and right turn you on the spot, forward moves one cell; "
)
TOGGLE = (
    "pickup, drop and toggle act on the cell before you. toggle opens a door; a locked one needs "
    "the key of its colour, carried."
)
DONE = (
    "pickup and drop act on the cell before you. The task ends when you call done: do so beside "
    "what the mission names."
)


def tasks() -> list[str]:
    """Return the ids of the tasks that work here."""
    return [
        name for name in gymnasium.registry if name.startswith("MiniGrid-") and "-WFC-" not in name
    ]


class Minigrid:
    """The MiniGrid task with the id `task`. The episode also ends after `max_steps` actions (null:
    the task's own limit).

    The reward is 1 - 0.9 * actions / max_steps on success, else 0, as MiniGrid defines it. The
    first carried object and the first opened door earn `shaping` each. Raises `ConfigError`.
    """

    requires_tool = True

    def __init__(
        self,
        task: str = "MiniGrid-DoorKey-5x5-v0",
        actions_per_turn: Annotated[int, Meta(ge=1, le=50)] = 4,
        max_steps: Count | None = None,
        shaping: NotNegative = 0.0,
    ):
        if task not in tasks():
            raise ConfigError(
                f"env.args.task={task!r}: no such task; there are {', '.join(tasks())}"
            )
        self.task, self.actions_per_turn, self.max_steps = task, actions_per_turn, max_steps
        ended = task.startswith(ENDED)
        useless = "toggle" if ended else "done"
        self._actions = tuple(action for action in ACTIONS if action != useless)
        self._system = SYSTEM + (DONE if ended else TOGGLE)
        self.shaping, self.rewards_turns = float(shaping), shaping > 0
        self._reached: set[str] = set()
        self._grid: gymnasium.Env | None = None

    async def reset(self, seed: int) -> Start:
        limit = {} if self.max_steps is None else {"max_steps": self.max_steps}
        self._grid = gymnasium.make(self.task, disable_env_checker=True, **limit).unwrapped
        self._grid.reset(seed=seed)
        self._reached = self._milestones()
        return Start(
            messages=[
                {"role": "system", "content": self._system},
                {"role": "user", "content": self.render()},
            ],
            tools=[self._tool()],
        )

    async def step(self, action: Action) -> Step:
        problem = self._problem(action)
        if problem:
            return Step(observation=f"{problem}\n{self.render()}", invalid=True)
        paid = 0.0
        for name in action.call.arguments["actions"]:
            _, reward, terminated, truncated, _ = self._grid.step(ACTIONS.index(name))
            paid += self.shaping * len(self._milestones() - self._reached)
            self._reached |= self._milestones()
            if terminated or truncated:
                return Step(self.render(), paid + float(reward), done=True, success=reward > 0)
        return Step(observation=self.render(), reward=paid)

    async def close(self) -> None:
        if self._grid is not None:
            self._grid.close()
            self._grid = None

    def _milestones(self) -> set[str]:
        """Return the milestones reached at present: an object is carried, a door is open."""
        opened = any(cell and cell.type == "door" and cell.is_open for cell in self._grid.grid.grid)
        return {
            name for name, done in (("carried", self._grid.carrying), ("opened", opened)) if done
        }

    def render(self) -> str:
        """Return mission, carried object and grid: one row a line, cells separated by spaces."""
        state = self._grid
        cells = [_symbol(cell) for cell in state.grid.grid]
        x, y = (int(i) for i in state.agent_pos)
        cells[y * state.width + x] = HEADING[state.agent_dir]
        rows = [" ".join(cells[i : i + state.width]) for i in range(0, len(cells), state.width)]
        carried = f"{state.carrying.color} {state.carrying.type}" if state.carrying else "nothing"
        return "\n".join([f"Mission: {state.mission}.", f"You carry {carried}.", *rows])

    def _tool(self) -> dict:
        actions = {
            "type": "array",
            "items": {"type": "string", "enum": list(self._actions)},
            "minItems": 1,
            "maxItems": self.actions_per_turn,
        }
        parameters = {"type": "object", "properties": {"actions": actions}, "required": ["actions"]}
        return {
            "type": "function",
            "function": {
                "name": "act",
                "description": "Carry out actions in this order.",
                "parameters": parameters,
            },
        }

    def _problem(self, action: Action) -> str | None:
        """Return why this action can't be carried out, as a text for the policy; None if it can."""
        call = action.call
        if call is None:
            return "Call act with a list of actions."
        if call.name != "act":
            return f"There is no tool {call.name[:40]!r}, only act."
        actions = call.arguments.get("actions")
        if (
            not isinstance(actions, list)
            or len(call.arguments) != 1
            or not 1 <= len(actions) <= self.actions_per_turn
            or any(name not in self._actions for name in actions)
        ):
            return (
                f"act takes one argument, actions: a list of 1 to {self.actions_per_turn} of "
                f"{', '.join(self._actions)}."
            )
        return None


def _symbol(cell: WorldObj | None) -> str:
    if cell is None:
        return "."
    if cell.type == "door":
        state = "locked" if cell.is_locked else "open" if cell.is_open else "closed"
        symbol = DOOR[state]
    else:
        symbol = SYMBOL[cell.type]
    coloured = cell.type in ("door", "key", "ball", "box")
    return symbol + ("e" if cell.color == "grey" else cell.color[0]) if coloured else symbol
