"""Environments that come with other packages: the real packages, as a run uses them."""

import asyncio
import json
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from rose.agent import envs
from rose.agent.envs.base import Action, ToolCall
from rose.config import ConfigError
from tests import processes
from tests.made import environment as env_of

from .conftest import DEADLINE_S, play, question, served

REPOSITORY = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).parent / "servers" / "mcp_server.py"
STDIO = {"command": [sys.executable, str(SERVER)]}


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    for name, package in (("reasoning_gym", "reasoning-gym"), ("textarena", "textarena")):
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.delitem(sys.modules, f"rose.parts.adapters.envs.{name}", raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=f"env.name='{name}': .*pip install '{package}>="):
            envs.check(env_of(name))


def test_the_extras_are_what_the_messages_name():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {r for e in ("reasoning_gym", "textarena", "math", "mcp", "prompts") for r in extras[e]}
    assert named == set(envs.PACKAGES.values())


def test_a_question_of_reasoning_gym_is_the_librarys_and_so_is_the_score():
    import reasoning_gym

    env = env_of("reasoning_gym", tasks=[{"task": "chain_sum", "min_terms": 3, "max_terms": 3}])
    made = reasoning_gym.create_dataset("chain_sum", size=1, seed=8, min_terms=3, max_terms=3)[0]
    right = Action(f"<think><answer>0</answer></think> so <answer>{made['answer']}</answer>")
    start, wrong, done = play(env, 8, Action("<answer>\ud800</answer>"), right)
    assert question(start) == made["question"]
    assert (wrong.reward, wrong.done, wrong.success) == (0.0, True, False)
    assert (done.reward, done.success) == (1.0, True)


LISTS_AND_TIMES = [
    {"task": "basic_arithmetic", "level": 0},
    {"task": "basic_arithmetic", "operators": ["+"]},
    {"task": "time_intervals", "level": 1},
]


def test_all_of_its_tasks_ask_and_score_and_none_raises():
    """Those that take seconds to make are left to the users; prime_factorization's scorer raises,
    isomorphic_strings depends on the order of a set. Arguments may be lists or times."""
    from rose.parts.adapters.envs import reasoning_gym as ours

    assert len(ours.ReasoningGym(tasks=["all"]).tasks) == 105
    names = ["prime_factorization", "isomorphic_strings", "graph_color", "rubiks_cube"]
    for task in names + LISTS_AND_TIMES:
        env = env_of("reasoning_gym", tasks=[task])
        first, step = play(env, 4, Action("<answer>none of it</answer>"))
        assert question(first) and step.done and step.reward < 0.5
        assert play(env, 4)[0] == first != play(env, 6)[0]


def test_tasks_are_mixed_by_their_weights_and_levels_make_them_harder():
    env = env_of("reasoning_gym", tasks=[{"task": "chain_sum", "weight": 3}, "letter_counting"])
    sums = sum(question(play(env, 2 * n)[0]).startswith("State") for n in range(40))
    assert 20 < sums < 40

    def terms(level):
        env = env_of("reasoning_gym", tasks=[{"task": "chain_sum", "level": level}])
        return max(question(play(env, 2 * n)[0]).count(" ") for n in range(6))

    assert terms(0) < terms(8) and terms(0) < terms([0, 8])


def test_every_task_with_levels_is_asked_at_its_lowest():
    from rose.parts.adapters.envs import reasoning_gym as ours

    for name in sorted(ours.CURRICULA.keys() - {*ours.EXCEPT}):
        made, usual = ours._arguments_of_level(name, 0), vars(ours.DATASETS[name][1]())
        assert not {f for f, value in made.items() if value == usual[f]}, name
        json.dumps(made)


def test_a_game_alone_is_played_to_its_end():
    async def bisect():
        env = envs.build(env_of("textarena", game="GuessTheNumber-v0"))
        start, low, high = await env.reset(4), 1, 20
        while True:
            guess = (low + high) // 2
            step = await env.step(Action(f"<think>[1]</think>[{guess}]"))
            if step.done:
                return start, step
            low, high = (low, guess - 1) if "lower" in step.observation else (guess + 1, high)

    start, step = asyncio.run(bisect())
    assert "between 1 and 20" in question(start)
    assert (step.reward, step.success, step.invalid) == (1.0, True, False)


def test_against_the_random_opponent_both_seats_are_played_and_seeds_repeat():
    async def game(seed, **args):
        env, told = envs.build(env_of("textarena", **args)), []
        start = await env.reset(seed)
        text = question(start)
        while True:
            moves = [m for m in "012345678" if f"'[{m}]'" in text.rpartition("Moves")[2]]
            step = await env.step(Action(f"[{moves[0]}]"))
            told.append(step.observation)
            assert not step.invalid
            if step.done:
                return env.seat, start, told, step.reward
            text = step.observation

    async def both():
        one, other = game(6), game(6)  # at the same time: neither draws from the other's generator
        return await asyncio.gather(one, other, *[game(2 * n) for n in range(10)])

    first, again, *games = asyncio.run(both())
    assert first == again
    assert {seat for seat, *_ in games} == {0, 1}
    assert {reward for *_, reward in games} <= {-1.0, 0.0, 1.0} and len(games) == 10
    assert asyncio.run(game(6, seat=1))[0] == 1


async def test_a_game_that_computes_leaves_the_loop_to_others():
    computes, free = threading.Event(), threading.Event()
    env = envs.build(env_of("textarena", game="GuessTheNumber-v0"))
    await env.reset(4)
    step = env._game.step
    env._game.step = lambda move: (computes.set(), free.wait(DEADLINE_S))[1] and step(move)
    playing = asyncio.create_task(env.step(Action("[1]")))
    while not computes.is_set():
        await asyncio.sleep(0.001)
    assert not playing.done()
    free.set()
    assert (await playing).observation


def test_a_move_against_the_rules_is_told_and_then_loses():
    start, first, second = play(env_of("textarena"), 6, Action("no move"), Action("[99]"))
    assert first.invalid and "invalid move" in first.observation and not first.done
    assert (second.done, second.invalid, second.reward) == (True, True, -1.0)


def test_the_opponent_may_be_a_function_of_the_users(tmp_path):
    last = "return re.findall(r\"'(\\[\\d\\])'\", observation)[-1]"
    (tmp_path / "first.py").write_text(f"import re\ndef move(observation, player, seed): {last}\n")
    env = env_of("textarena", opponent=f"{tmp_path}/first.py:move", seat=0)
    start, step = play(env, 2, Action("[0]"))
    assert "cell 8" in step.observation


@pytest.fixture
def http_server():
    """The URL of an MCP server that runs."""
    with served(sys.executable, SERVER) as port:
        yield f"http://127.0.0.1:{port}/mcp"


def mcp(reward="length", **args):
    return env_of("mcp", data="sums.jsonl", reward=f"rewards.py:{reward}", **args)


ADDS = [ToolCall("add", {"number": number}) for number in (3, 4, "\ud800", 1)]
FLY = ToolCall("fly", {})
CALLS = [Action("", call) for call in (*ADDS[:3], ToolCall("divide", {"by": 0}), FLY)]
CALLS += [Action("7")]


@pytest.mark.slow
@pytest.mark.parametrize("http", [False, True])
def test_tools_of_a_server_are_called_and_their_errors_told(folder, request, http):
    place = {"url": request.getfixturevalue("http_server")} if http else STDIO
    start, *steps = play(mcp(**place, tools=["add", "divide"]), 2, *CALLS)
    assert [tool["function"]["name"] for tool in start.tools] == ["add", "divide"]
    assert start.tools[0]["function"]["parameters"]["required"] == ["number"]
    assert [step.observation for step in steps[:2]] == ["3", "7"]
    assert [step.invalid for step in steps] == [False, False, True, True, True, False]
    assert "there are add, divide" in steps[4].observation
    assert steps[5].done and steps[5].reward > 1 and not steps[4].done
    assert http or not processes.left(
        lambda: [p for p in processes.children() if str(SERVER) in processes.words(p)]
    )


@pytest.mark.slow
def test_several_calls_of_a_turn_are_one_message_of_the_conversation(folder):
    two, bad = Action("", calls=tuple(ADDS[:2])), Action("", calls=(FLY, ADDS[3]))
    _, first, second, last = play(mcp("roles", **STDIO), 2, two, bad, Action("8"))
    assert first.observations == ("3", "7") and not first.invalid
    assert second.observations[1] == "8" and second.invalid
    assert last.reward == 1221221


@pytest.mark.slow
async def test_closing_does_not_fail_while_the_server_still_ends(folder, monkeypatch):
    from rose.parts.adapters.envs import mcp as ours

    made = envs.build(mcp(**STDIO))
    await made.reset(2)
    monkeypatch.setattr(ours, "CLOSE_S", 0.0)
    await made.close()
    await asyncio.wait({made._session})


@pytest.mark.slow
async def test_every_trajectory_has_a_server_of_its_own(folder):
    made = [envs.build(mcp(**STDIO)) for _ in range(2)]
    try:
        await asyncio.gather(*[env.reset(2) for env in made])
        found = [(await env.step(CALLS[0])).observation for env in made]
    finally:
        await asyncio.gather(*[env.close() for env in made])
    assert found == ["3", "3"]


@pytest.mark.slow
def test_a_server_that_ends_fails_the_trajectory_and_not_the_host(folder):
    with pytest.raises(Exception, match="[Cc]onnection|ended"):
        play(mcp(**STDIO), 2, Action("", ToolCall("crash", {})))
    with pytest.raises(Exception, match="ended|[Cc]onnection"):
        play(mcp(command=[sys.executable, "-c", "raise SystemExit(3)"]), 2)
    with pytest.raises(Exception, match="has no fly; it has add, divide, crash"):
        play(mcp(**STDIO, tools=["fly"]), 2)
