"""Whatever an environment gives, it costs its trajectory at most, and the error names it."""

import asyncio
import enum
import sys

import numpy as np
import pytest

from rose.agent import returned
from rose.agent.envs import FLAGS
from rose.agent.envs.base import Start, Step
from rose.agent.guard import EnvironmentFailure
from rose.agent.loop import run_trajectory
from rose.comm.wire import encode
from rose.coordinator import step_metrics
from rose.protocol import Sampling, TrajectoryFinished, unpack_tokens
from tests.agent.scripted import START, limits
from tests.made import result

ASK = {"role": "user", "content": "say"}
PARTS = [{"type": "text", "text": "x"}]
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}


class Odd:
    """Gives what a test says, of one method or of all."""

    requires_tool = False

    def __init__(self, reset=None, step=None, end=None, stats=None):
        self._reset = reset or (lambda: Start([ASK]))
        self._step = step or (lambda: Step("well", done=end is None))
        if end is not None:
            self.end = lambda: self._give(end)
        self.make_stats = stats or dict

    @property
    def stats(self):
        return self.make_stats()

    async def _give(self, make):
        return make()

    async def reset(self, seed):
        return self._reset()

    async def step(self, action):
        return self._step()

    async def close(self):
        pass


def play(chats, env):
    chat = chats["tiny"]

    async def turn(request):
        tokens = [*chat._encode("up"), min(chat.eos_ids)]
        return result(request.turn, tokens, -0.5)

    within = limits(max_turns=2, max_new_tokens=8, step_timeout_s=5.0)
    rest = (within, "env", 500, Sampling(max_new_tokens=1), lambda: 1.0)
    return asyncio.run(run_trajectory(START, env, chat, turn, *rest))


def raises(error):
    raise error


class Unreadable:
    def __getattr__(self, name):
        raise OSError(f"no {name} here")


NO_SCHEMA = {"name": "go", "parameters": "none"}
# (a method or an attribute, what it gives, words of the error)
WRONG = [
    ("reset", lambda: None, "Odd.reset returned None, not a Start"),
    ("reset", lambda: Start(None), "Odd.reset gave messages None, not a list"),
    ("reset", lambda: Start([]), "Odd.reset gave no messages"),
    ("reset", lambda: Start("say"), "Odd.reset gave messages 'say'"),
    ("reset", lambda: Start(["say"]), r"Odd.reset gave messages\[0\] 'say', not a dict"),
    ("reset", lambda: Start([{"content": "x"}]), r"messages\[0\] the role None"),
    ("reset", lambda: Start([ASK, {"role": "human", "content": "x"}]), r"\[1\] the role 'human'"),
    ("reset", lambda: Start([{"role": "user"}]), r"messages\[0\] the content None, not text"),
    ("reset", lambda: Start([{"role": "user", "content": 3}]), "the content 3, not text"),
    ("reset", lambda: Start([ASK | {"content": PARTS}]), r"\[0\] the content \[.*parts can't be"),
    ("reset", lambda: Start([{"role": "assistant", "content": None}]), "the content None"),
    ("reset", lambda: Start([ASK | {"extra": object()}]), "messages with more than plain JSON"),
    ("reset", lambda: Start([ASK], None), "tools None, not a list"),
    ("reset", lambda: Start([ASK], ["go"]), r"tools\[0\] 'go', not an OpenAI function schema"),
    ("reset", lambda: Start([ASK], [{"name": "go"}]), r"tools\[0\] {'name': 'go'}"),
    ("reset", lambda: Start([ASK], [{"function": NO_SCHEMA}]), r"tools\[0\] the parameters 'none'"),
    ("reset", lambda: Start([ASK], [], None), "the task None, not a dict"),
    ("reset", lambda: Start([ASK], [], {"a": object()}), "a task with more than plain JSON"),
    ("step", lambda: None, "Odd.step returned None, not a Step"),
    ("step", lambda: {"reward": 1}, "Odd.step returned {'reward': 1}, not a Step"),
    ("step", lambda: Step(None), "Odd.step gave the observation None, not text"),
    ("step", lambda: Step(b"x"), "Odd.step gave the observation b'x', not text"),
    ("step", lambda: Step({"a": 1}, done=True), "the observation {'a': 1}, not text"),
    ("step", lambda: Step("x", reward=float("nan")), "the reward nan, which is not finite"),
    ("step", lambda: Step("x", reward=1e300), r"the reward 1e\+300; rewards lie between"),
    ("step", lambda: Step("x", reward=None), "the reward None, which is no number"),
    ("step", lambda: Step("x", success=None), "success None, not true or false"),
    ("step", lambda: Step("x", done=0.5), "done 0.5, not true or false"),
    ("step", lambda: Step("x", invalid=[]), r"invalid \[\], not true or false"),
    ("step", lambda: Step("x", observations="ab"), "observations 'ab', not a list"),
    ("step", lambda: Step("x", observations=("a", 2)), r"observations\[1\] 2, not text"),
    ("step", lambda: Step("x", reward=Unreadable()), "Odd.step gave a value that can't be read"),
    ("step", lambda: sys.exit(3), "Odd.step raised .*SystemExit"),
    ("step", lambda: raises(ValueError("\ud800" * 10**5)), "Odd.step raised ValueError"),
    ("end", lambda: Step("x", reward=float("nan")), "Odd.end gave the reward nan"),
    ("end", lambda: 1.0, "Odd.end returned 1.0, not a Step"),
    ("stats", lambda: None, "Odd.stats gave None, not a dict"),
    ("stats", lambda: {"a": "b"}, "Odd.stats gave 'a': 'b', not a text with a finite number"),
    ("stats", lambda: {1: 2.0}, "Odd.stats gave 1: 2.0, not a text"),
    ("stats", lambda: {"a": float("inf")}, "Odd.stats gave 'a': inf"),
    ("stats", lambda: raises(RuntimeError("no")), r"Odd.stats raised RuntimeError\('no'\)"),
    ("stats", lambda: sys.exit(2), r"Odd.stats raised SystemExit\(2\)"),
    ("requires_tool", lambda self: False, "requires_tool gave <bound method .*not true or false"),
    ("rewards_turns", property(lambda self: raises(KeyError("x"))), "Odd.rewards_turns raised Key"),
]


@pytest.mark.parametrize("name, given, words", WRONG)
def test_what_is_wrong_fails_the_trajectory_and_is_named(chats, name, given, words):
    own, made = ({name: given}, {}) if name in FLAGS else ({}, {name: given})
    odd = type("Odd", (Odd,), own)(**made)
    with pytest.raises(EnvironmentFailure, match=words) as failure:
        play(chats, odd)
    str(failure.value).encode()  # a message carries it
    assert len(str(failure.value)) < 5000


def test_numpy_s_values_are_taken_and_become_python_s(chats):
    def step():
        flags = {"done": np.bool_(True), "success": np.bool_(True), "invalid": np.bool_(False)}
        return Step(np.str_("well"), reward=np.float32(0.5), **flags)

    def reset():
        return Start((ASK,), [TOOL], {"answer": np.int64(4), "parts": [np.float64(0.5)]})

    made = play(chats, Odd(reset, step, stats=lambda: {"moves": np.int64(3)}))
    assert made.reward == 0.5 and type(made.reward) is float and made.success is True
    assert made.stats["moves"] == 3.0
    task = returned.start(reset()).task
    assert task == {"answer": 4, "parts": [0.5]} and type(task["answer"]) is int


def test_an_observation_that_nobody_reads_and_what_close_returns_cost_nothing(chats):
    class Closed(Odd):
        async def close(self):
            return True

    assert play(chats, Closed(step=lambda: Step(None, done=True, reward=1))).reward == 1.0


def test_a_method_that_is_not_async_is_named_with_the_remedy(chats):
    class Plain(Odd):
        def step(self, action):
            return Step("well", done=True)

    with pytest.raises(EnvironmentFailure, match=r"Plain\.step raised .*write `async def`"):
        play(chats, Plain())


def test_a_class_of_texts_is_the_text_and_a_half_of_a_character_a_question_mark(chats):
    class Word(str, enum.Enum):  # noqa: UP042 as users' classes do
        WON = "won"

    def reset():
        return Start([{"role": "user", "content": Word.WON}], [], {"row": "\ud83d", "of": Word.WON})

    made = play(chats, Odd(reset, lambda: Step(Word.WON), stats=lambda: {"\ud83d": 1.0}))
    said = chats["tiny"].decode(unpack_tokens(made.tokens))
    assert said.count("user\nwon") == 2 and "Word" not in said
    assert made.stats["?"] == 1.0
    assert returned.start(reset()).task == {"row": "?", "of": "won"}
    encode(TrajectoryFinished(made))


def test_figures_that_are_called_as_rose_s_own_change_none_of_its(chats):
    odd = {"migrations": 7.0, "checkpoint_seconds": 1.0, "reward_wait_s": 2.0}
    made = play(chats, Odd(stats=lambda: odd))
    assert made.stats == odd | {"migrations": 0.0}
    assert step_metrics.checkpoint_row([[made]])["checkpoint_files"] == 0
    times = {"rollout": 1.0, "idle": 0.0}
    assert step_metrics.reward_row([[made]], times, 0)["reward_score_s_mean"] == 0.0


def test_messages_that_the_template_refuses_are_the_environment_s_failure(chats, monkeypatch):
    refuse = lambda *_, **__: raises(AttributeError("roles must alternate"))  # noqa: E731
    monkeypatch.setattr(type(chats["tiny"]), "_render", refuse)
    odd = Odd(reset=lambda: Start([ASK | {"content": "refused by this test"}]))
    with pytest.raises(EnvironmentFailure, match=r"Odd\.reset gave .*roles must alternate"):
        play(chats, odd)
