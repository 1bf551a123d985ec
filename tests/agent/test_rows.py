"""Rows that can't begin are found at launch, by their numbers."""

import json

import numpy as np
import pytest

from rose.agent import rows
from rose.agent.envs.base import Start
from rose.config import ConfigError


@pytest.fixture
def config_of(make_config, tmp_path):
    def make(lines, *more):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(line | {"answer": "1"}) for line in lines) + "\n")
        data = [f"env.args.data={path}", "env.args.reward=math", "env.args.held_out=0.5"]
        short = "env.max_new_tokens=8"
        return make_config("env=prompts", *data, short, *more)

    return make


def test_rows_that_do_not_fit_are_named_with_their_lengths(config_of, chats):
    lines = [{"prompt": f"say {number}"} for number in range(40)]
    lines[6] = {"prompt": "up " * 600}
    said = []
    rows.check(config_of(lines, "model.max_context=2000"), chats["tiny"], said.append)
    assert said == [], "all fit"
    rows.check(config_of(lines, "model.max_context=400"), chats["tiny"], said.append)
    [words] = said
    assert "env: 1 of 40 tasks" in words and "row 7 of " in words and "tokens)" in words
    assert "model.max_context=400" in words


def test_too_many_of_them_are_refused_with_the_remedy(config_of, chats):
    lines = [
        {"prompt": ("up " * 600 if number % 2 else "up") + str(number)} for number in range(40)
    ]
    with pytest.raises(ConfigError) as refused:
        rows.check(config_of(lines, "model.max_context=400"), chats["tiny"], print)
    words = str(refused.value)
    assert "20 of 40 tasks" in words and "and 12 more" in words
    assert "raise model.max_context" in words and "max_failed_tasks=0.2" in words


def test_a_row_just_below_and_one_at_the_limit_are_told_apart(chats):
    """The last token of the context is the answer's."""
    chat = chats["tiny"]
    tasks = [(f"{n} words", Start([{"role": "user", "content": "up " * n}])) for n in range(1, 80)]
    lengths = {name: len(chat.start(start.messages, [])) for name, start in tasks}
    most = sorted(lengths.values())[40]
    found = dict(rows._tried(tasks, chat, most, print))
    assert {name for name, why in found.items() if why} == {
        name for name, tokens in lengths.items() if tokens >= most
    }


def test_what_the_template_refuses_is_named(chats, monkeypatch):
    chat = chats["tiny"]
    render = type(chat)._render

    def refuses_systems(self, messages, *more, **others):
        if messages[0]["role"] == "system":
            raise TypeError("no system role here")
        return render(self, messages, *more, **others)

    monkeypatch.setattr(type(chat), "_render", refuses_systems)
    ask = {"role": "user", "content": "up"}
    tasks = [
        ("row 1", Start([ask])),
        ("row 2", Start([{"role": "system", "content": "be brief"}, ask])),
        ("row 3", Start([{"role": "human", "content": "up"}])),
    ]
    found = dict(rows._tried(tasks, chat, 400, print))
    assert not found["row 1"] and "no system role here" in found["row 2"]
    assert "the role 'human'" in found["row 3"]


def test_what_a_users_starts_gives_is_named_and_ends_no_launch(chats):
    ask = {"role": "user", "content": "up"}
    call = {"role": "assistant", "content": None, "tool_calls": [called("up")]}
    long = call | {"tool_calls": [called("up " * 600)]}
    parts = {"role": "user", "content": [{"type": "text", "text": "up"}]}
    tool = {"type": "function", "function": {"name": "go", "parameters": {"maximum": np.int64(3)}}}
    tasks = {
        "call": (Start([ask, call, ask]), ""),
        "long call": (Start([ask, long, ask]), "tokens"),
        "numpy": (Start((ask,), [tool], {"answer": np.int64(4)}), ""),
        "parts": (Start([parts]), "parts can't be given"),
        "none": (None, "None, not a Start"),
        "fine": (Start([ask]), ""),
        "of that shape": (Start([ask | {"content": None}]), "the content None, not text"),
    }
    given = [(name, start) for name, (start, _) in tasks.items()]
    for name, why in rows._tried(given, chats["tiny"], 400, print):
        words = tasks[name][1]
        assert words in why if words else not why, name


def test_starts_that_are_none_are_an_environment_without(make_config, monkeypatch):
    monkeypatch.setattr(rows.envs, "build", lambda member: type("Own", (), {"starts": None})())
    assert rows.known(make_config()) == {}


def called(text):
    return {"id": "1", "type": "function", "function": {"name": "go", "arguments": {"to": text}}}


@pytest.mark.parametrize(
    "starts, words",
    [
        (lambda: [Start([])], r"env\.name: Own\.starts gave Start\(.*, not \(name, Start\)"),
        (lambda: open("/nowhere"), r"env\.name: Own\.starts raised FileNotFoundError"),
        (lambda: None, r"env\.name: Own\.starts raised TypeError"),
    ],
)
def test_starts_that_raise_or_give_no_pairs_are_refused(starts, words):
    own = type("Own", (), {"starts": staticmethod(starts)})()
    with pytest.raises(ConfigError, match=words):
        list(rows._given("env", own))
