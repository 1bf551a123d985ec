"""The same things are rewards by every way that leads to one, and the same are refused."""

import asyncio
import json
import math
import re
from decimal import Decimal

import numpy as np
import pytest

from rose.agent.envs import _workers
from rose.agent.envs.base import Action, Step
from rose.agent.guard import EnvironmentFailure, Guard
from rose.parts.adapters.gateway import call
from rose.parts.adapters.gateway.server import reward_of
from rose.parts.rewards.scorers import Function
from rose.reward import values
from rose.reward.episode import Score, ScoringFailed, score_of
from tests.made import episode

DEADLINE_S = 60.0

# (what a function returns, the reward, the success; None: no word on it)
TAKEN = [
    ("1", 1.0, None),
    ("-0.5", -0.5, None),
    ("True", 1.0, None),
    ("False", 0.0, None),
    ("numpy.float32(0.25)", 0.25, None),
    ("numpy.int64(3)", 3.0, None),
    ("numpy.bool_(True)", 1.0, None),
    ("numpy.array(0.5)", 0.5, None),
    ("numpy.array([0.5])", 0.5, None),
    ("torch.tensor(0.5)", 0.5, None),
    ("Decimal('0.5')", 0.5, None),
    ("(1, True)", 1.0, True),
    ("(numpy.float32(1), numpy.bool_(False))", 1.0, False),
    ("[0.5, 1]", 0.5, True),
    ("{'reward': numpy.float64(2), 'success': numpy.bool_(True)}", 2.0, True),
    ("{'reward': True}", 1.0, None),
    ("Score(reward=numpy.float32(0.5), success=numpy.bool_(True))", 0.5, True),
    ("1e15", 1e15, None),
    ("(later((numpy.float32(0.5), True)))", 0.5, True),  # an async function behind a plain one
]
REFUSED = """
'1' | '' | numpy.str_('1') | math.nan | -math.inf | numpy.float32('inf') | 1e16 | 10**400 | 1j
numpy.float64(1e300) | numpy.ma.masked_array([1.0], True).mean() | numpy.array([1.0, 1.0])
[1] | (1, 0.5) | (1, 'yes') | (True, True, True) | Score(reward=math.nan)
{'reward': '1'} | {'score': 1} | {'reward': 1, 'success': 'no'}
"""
REFUSED = re.split(r" \| |\n", REFUSED.strip())
SOURCE = """
import math
from decimal import Decimal
import numpy
from rose.reward.episode import Score
try:
    import torch
except ModuleNotFoundError:
    torch = None

def of(text):
    return eval(text)

def of_agent(task):
    return eval(task["text"])

def of_episode(episode):
    return eval(episode.task["text"])

async def later(value):
    return value
"""


def value_of(text):
    torch = pytest.importorskip("torch") if "torch" in text else None
    names = {"numpy": np, "math": math, "Decimal": Decimal, "Score": Score, "torch": torch}
    names["later"] = lambda value: value
    return eval(text, names)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "rewards.py"
    path.write_text(SOURCE)
    return path


def by_function(text, functions, monkeypatch, tmp_path):
    """reward=function, and a reward worker's own check."""
    scorer = Function(f"{functions}:of_episode")
    return score_of(asyncio.run(scorer.score(episode(task={"text": text}), DEADLINE_S)), "it")


def by_worker(text, functions, monkeypatch, tmp_path):
    """env.args.reward of prompts."""
    return score_of(asyncio.run(_workers.call(f"{functions}:of", text=text)), "it")


def by_agent(text, functions, monkeypatch, tmp_path):
    """An agent's function, or its reward's, and the file that holds what it returned."""
    task, reward = tmp_path / "task.json", tmp_path / "reward.json"
    task.write_text(json.dumps({"text": text}))
    monkeypatch.setenv("ROSE_TASK", str(task))
    monkeypatch.setenv("ROSE_REWARD", str(reward))
    call.call(f"{functions}:of_agent", [])
    return score_of(json.loads(reward.read_text()), "it")


def by_step(text, functions, monkeypatch, tmp_path):
    """An environment's step, whose success is not part of its reward."""

    class Pays:
        async def step(self, action):
            return Step("well", reward=value_of(text), done=np.bool_(True), success=1)

    step = asyncio.run(Guard(Pays(), "g0.0", 5.0, "env").step(Action("")))
    assert step == Step("well", reward=step.reward, done=True, success=True)
    assert type(step.done) is bool and type(step.success) is bool
    return Score(reward=step.reward)


def through(rows):
    """(door, *row) for each door that a row's value fits through."""
    doors = [by_function, by_worker, by_agent, by_step]
    return [(d, *row) for d in doors for row in rows if d is not by_step or row[0][0] not in "([{S"]


@pytest.mark.parametrize("door, text, reward, success", through(TAKEN))
def test_the_same_things_are_rewards_everywhere(
    door, text, reward, success, functions, monkeypatch, tmp_path
):
    value_of(text)  # which may need torch
    score = door(text, functions, monkeypatch, tmp_path)
    assert (score.reward, score.success) == (reward, success)
    assert type(score.reward) is float and type(score.success) in (bool, type(None))


WRONG = (ScoringFailed, _workers.FunctionFailed, TypeError, EnvironmentFailure)


@pytest.mark.parametrize("door, text", through([[text] for text in REFUSED]))
def test_what_is_no_reward_is_refused_everywhere(door, text, functions, monkeypatch, tmp_path):
    value_of(text)
    with pytest.raises(WRONG) as refused:
        door(text, functions, monkeypatch, tmp_path)
    assert door is not by_step or "g0.0: Pays.step gave the reward" in str(refused.value)


def test_a_refusal_names_the_function_and_the_value():
    for given, words in (
        (1e300, "rewards.py:of returned 1e+300: the reward 1e+300; rewards lie between -1e+15"),
        (math.nan, "the reward nan, which is not finite"),
        ("1", "the reward '1', which is no number"),
        ((1, "yes"), "returned (1, 'yes'): a success"),
    ):
        with pytest.raises(ScoringFailed) as refused:
            score_of(given, "rewards.py:of")
        assert words in str(refused.value)


def test_an_agent_s_success_is_a_reward_of_one_where_it_says_nothing():
    assert reward_of(True, "the agent") == (1.0, True)
    assert reward_of(0.5, "the agent") == (0.5, False)
    assert reward_of([0.5, True], "the agent") == (0.5, True)
    with pytest.raises(ValueError, match="the agent returned '1'"):
        reward_of("1", "the agent")


def test_a_value_whose_repr_raises_or_is_endless_is_shown_all_the_same():
    class Bad:
        def __repr__(self):
            raise RuntimeError("no")

    assert "Bad" in values.shown(Bad())
    assert len(values.shown("x" * 10**7)) < 100
    assert len(values.shown(list(range(10**6)))) < 200
