"""FrozenLake: the seed decides the map, moves act as in gymnasium, bad calls are answered."""

import asyncio

import pytest

from rose.agent.envs.base import Action, ToolCall
from rose.agent.envs.frozen_lake import FrozenLake


def start(seed=7, **args):
    env = FrozenLake(**args)
    return env, asyncio.run(env.reset(seed))


def call(env, name="move", **arguments):
    return asyncio.run(env.step(Action(text="", call=ToolCall(name, arguments))))


def test_no_map_of_an_even_seed_is_one_of_an_odd_seed():
    def maps(seeds):
        return {start(seed)[1].messages[1]["content"] for seed in seeds}

    even, odd = maps(range(0, 300, 2)), maps(range(1, 301, 2))
    assert len(even) > 50 and len(odd) > 50 and not even & odd
    assert not maps([1]) & maps([2**63 + 1]), "which demonstrations use, and int64 doesn't hold"


def test_the_map_shows_every_cell_and_what_is_beside_the_agent():
    env, first = start(size=3, hole_probability=0.0)
    assert first.messages[1]["content"] == "P F F\nF F F\nF F G\nleft wall down F right F up wall"
    expected = "F P F\nF F F\nF F G\nleft F down F right F up wall"
    assert call(env, direction="right").observation == expected


def test_the_goal_pays_1_and_shaping_the_way_that_a_move_gains_or_loses():
    """The third move is against a wall."""
    moves = ("right", "left", "left", "right", "down", "down", "down", "right", "right")
    plain, _ = start(hole_probability=0.0)
    shaped, _ = start(hole_probability=0.0, shaping=0.6)
    pays = [call(shaped, direction=move).reward for move in moves]
    assert pays == pytest.approx([0.1, -0.1, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 1.1])
    steps = [call(plain, direction=move) for move in moves]
    found = [(step.reward, step.done, step.success) for step in steps]
    assert found == [(0.0, False, False)] * 8 + [(1.0, True, True)] and not steps[2].invalid
    assert shaped.rewards_turns and not plain.rewards_turns
    assert call(shaped, direction="north").reward == 0.0


def test_the_way_leads_round_holes_and_falling_into_one_gives_it_all_back():
    env, _ = start(size=3, hole_probability=0.0, shaping=1.0)
    env._draw_map = lambda seed: ["SFF", "FHF", "HFG"]
    asyncio.run(env.reset(1))
    assert [call(env, direction="right").reward for _ in range(2)] == [0.25, 0.25]
    assert call(env, direction="left").reward == -0.25
    fallen = call(env, direction="down")
    assert (fallen.reward, fallen.done, fallen.success) == (-0.25, True, False)
    assert not fallen.invalid


@pytest.mark.parametrize(
    "action, word",
    [
        (Action("north!"), "Call move"),
        (Action("", ToolCall("jump", {"direction": "left"})), "jump"),
        (Action("", ToolCall("move", {"direction": "north"})), "direction"),
        (Action("", ToolCall("move", {})), "direction"),
        (Action("", ToolCall("move", {"direction": ["left"]})), "direction"),
        (Action("", ToolCall("move", {"direction": "down", "speed": 2})), "one argument"),
    ],
)
def test_what_it_cannot_do_is_explained_counted_and_changes_nothing(action, word):
    env, first = start()
    step = asyncio.run(env.step(action))
    assert step.invalid and not step.done and step.reward == 0
    assert word in step.observation
    assert step.observation.endswith(first.messages[1]["content"])


def test_slippery_ice_sometimes_goes_astray_and_says_so():
    env, first = start(size=8, hole_probability=0.0, slippery=True)
    assert "slippery" in first.messages[0]["content"]
    seen = [call(env, direction="right").observation for _ in range(12)]
    rows = {next(i for i, line in enumerate(text.split("\n")) if "P" in line) for text in seen}
    assert rows != {0}
