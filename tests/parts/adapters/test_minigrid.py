"""MiniGrid as text: the picture shows the real state, calls move the real agent."""

import asyncio
from collections import deque

import gymnasium
import pytest

from rose.agent.envs.base import Action, ToolCall
from rose.parts.adapters.envs.minigrid import ACTIONS, HEADING, Minigrid, tasks


def act(env, *actions):
    return asyncio.run(env.step(Action("", ToolCall("act", {"actions": list(actions)}))))


def started(task, seed=1, **args):
    env = Minigrid(task, **args)
    return env, asyncio.run(env.reset(seed))


def grid(picture):
    return [line.split(" ") for line in picture.split("\n")[2:]]


def test_the_start_shows_mission_and_grid_and_actions_move_the_agent_in_their_order():
    env, start = started("MiniGrid-Empty-5x5-v0")
    assert start.messages[1]["content"] == (
        "Mission: get to the green goal square.\nYou carry nothing.\n"
        "# # # # #\n# > . . #\n# . . . #\n# . . G #\n# # # # #"
    )
    step = act(env, "forward", "right")
    assert grid(step.observation)[1] == ["#", ".", "v", ".", "#"]
    assert (step.reward, step.done, step.invalid) == (0.0, False, False)


def test_the_goal_pays_what_minigrid_pays_and_later_actions_are_dropped():
    env, _ = started("MiniGrid-Empty-5x5-v0", max_steps=50, actions_per_turn=8)
    step = act(env, "forward", "forward", "right", "forward", "forward", "left", "left")
    assert (step.done, step.success) == (True, True)
    assert step.reward == pytest.approx(1 - 0.9 * 5 / 50)


def test_lava_and_the_step_limit_end_without_success():
    env, _ = started("MiniGrid-Empty-5x5-v0", max_steps=3)
    step = act(env, "left", "left", "left")
    assert (step.reward, step.done, step.success) == (0.0, True, False)
    env, start = started("MiniGrid-LavaGapS5-v0", seed=0, actions_per_turn=6)
    rows = grid(start.messages[1]["content"])
    row, column = next((r, c) for r in range(5) for c in range(5) if rows[r][c] == "L")
    step = act(env, *["right"] + ["forward"] * (row - 1) + ["left"] + ["forward"] * (column - 1))
    assert (step.reward, step.done, step.success) == (0.0, True, False)


def test_key_and_door_are_seen_carried_and_opened_and_shaping_pays_each_once():
    def played(**args):
        """Play each part of the plan, and twice what can be done twice; return texts and rewards."""
        env, start = started("MiniGrid-DoorKey-5x5-v0", seed=3, actions_per_turn=50, **args)
        steps = [act(env, *part) for part in parts]
        return [start.messages[1]["content"], *(s.observation for s in steps)], steps

    plan = solve("MiniGrid-DoorKey-5x5-v0", 3)
    pickup, toggle = plan.index("pickup") + 1, plan.index("toggle") + 1
    parts = [plan[:pickup], ["drop", "pickup"], plan[pickup:toggle], ["toggle"] * 2, plan[toggle:]]
    (first, carried, _, opened, *_), plain = played()
    assert {"Dy", "Ky"} <= set(sum(grid(first), [])) and "Oy" in sum(grid(opened), [])
    assert "You carry yellow key." in carried and "Ky" not in sum(grid(carried), [])
    pays = [step.reward for step in plain]
    assert pays[:4] == [0.0] * 4 and pays[4] > 0.5 and plain[4].success
    shaped = [step.reward for step in played(shaping=0.25)[1]]
    assert shaped == pytest.approx([0.25, 0, 0.25, 0, pays[4]])


@pytest.mark.parametrize("actions", [[], ["fly"], ["left"] * 5, "left", [["left"]], None])
def test_what_is_no_list_of_actions_is_refused_and_changes_nothing(actions):
    env, start = started("MiniGrid-Empty-5x5-v0", actions_per_turn=4)
    step = asyncio.run(env.step(Action("", ToolCall("act", {"actions": actions}))))
    assert step.invalid and "list of 1 to 4" in step.observation
    assert step.observation.endswith(start.messages[1]["content"])


@pytest.mark.parametrize("task", ["MiniGrid-GoToDoor-5x5-v0", "MiniGrid-GoToObject-6x6-N2-v0"])
def test_a_task_that_pays_at_done_is_won_by_it_and_others_have_no_such_action(task):
    env, start = started(task, actions_per_turn=50)
    actions = start.tools[0]["function"]["parameters"]["properties"]["actions"]
    assert actions["items"]["enum"] == ["left", "right", "forward", "pickup", "drop", "done"]
    assert "toggle" not in str(start) and act(env, "toggle").invalid
    assert "call done" in start.messages[0]["content"]
    assert act(env, *solve(task, 1)).success
    env, start = started("MiniGrid-Empty-5x5-v0")
    assert "done" not in str(start) and act(env, "done").invalid


def test_every_task_can_be_shown():
    """One of each kind; all the package's symbols have a letter."""
    kinds = {name.split("-")[1]: name for name in tasks()}
    assert len(kinds) > 15
    for name in kinds.values():
        env, start = started(name)
        cells = sum(grid(start.messages[1]["content"]), [])
        assert sum(cell in HEADING for cell in cells) == 1
        asyncio.run(env.close())


def solve(task, seed):
    """Shortest plan by breadth-first search, each replayed in the package's own environment."""

    queue, seen = deque([()]), set()
    while queue:
        plan = queue.popleft()
        env = gymnasium.make(task, disable_env_checker=True).unwrapped
        env.reset(seed=seed)
        ends = [env.step(action)[1:3] for action in plan]
        if plan and ends[-1][1] and ends[-1][0] > 0:
            return [ACTIONS[action] for action in plan]
        state = (env.pprint_grid(), env.carrying is None)
        if state not in seen and not (plan and ends[-1][1]):
            seen.add(state)
            queue.extend((*plan, action) for action in (0, 1, 2, 3, 5, 6))
    raise AssertionError("no plan")
