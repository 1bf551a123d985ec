"""Rows that can't begin are found at launch, by their numbers."""

import json

import numpy as np
import pytest

from rose.agent import rows
from rose.agent.envs.base import Start
from rose.config import ConfigError
from tests.refusals import refused

ASK = {"role": "user", "content": "up"}


@pytest.fixture
def checked(make_config, chats, tmp_path):
    """checked(prompts, max_context) -> what is said about them."""

    def check(prompts, max_context):
        path, said = tmp_path / "rows.jsonl", []
        path.write_text("".join(f"{json.dumps({'prompt': p, 'answer': '1'})}\n" for p in prompts))
        data = f"env.args.data={path} env.args.reward=math env.args.held_out=0.5"
        short = f"env.max_new_tokens=8 model.max_context={max_context}"
        rows.check(make_config("env=prompts", data, short), chats["tiny"], said.append)
        return said

    return check


def test_rows_that_do_not_fit_are_named_with_their_lengths(checked):
    prompts = [f"say {number}" for number in range(40)]
    prompts[6] = "up " * 600
    assert checked(prompts, 2000) == [], "all fit"
    [words] = checked(prompts, 400)
    expected = ("env: 1 of 40 tasks", "row 7 of ", "tokens)", "model.max_context=400")
    assert all(each in words for each in expected), words


def test_too_many_of_them_are_refused_with_the_remedy(checked):
    words = ["20 of 40 tasks", "and 12 more", "raise model.max_context", "max_failed_tasks=0.2"]
    with refused(words):
        checked([f"{'up ' * 600 * (number % 2)}up{number}" for number in range(40)], 400)


def test_a_row_just_below_and_one_at_the_limit_are_told_apart(chats):
    """The last token of the context is the answer's."""
    chat = chats["tiny"]
    tasks = [(f"{n} words", Start([ASK | {"content": "up " * n}])) for n in range(1, 80)]
    lengths = {name: len(chat.start(start.messages, [])) for name, start in tasks}
    most = sorted(lengths.values())[40]
    found = dict(rows._tried(tasks, chat, most, print))
    named = {name for name, why in found.items() if why}
    assert named == {name for name, tokens in lengths.items() if tokens >= most}


def test_what_the_template_refuses_is_named(chats, monkeypatch):
    chat = chats["tiny"]
    render = type(chat)._render

    def refuses_systems(self, messages, *more, **others):
        if messages[0]["role"] == "system":
            raise TypeError("no system role here")
        return render(self, messages, *more, **others)

    monkeypatch.setattr(type(chat), "_render", refuses_systems)
    brief = {"role": "system", "content": "be brief"}
    tasks = [("row 1", Start([ASK])), ("row 2", Start([brief, ASK]))]
    found = dict(rows._tried(tasks, chat, 400, print))
    assert not found["row 1"] and "no system role here" in found["row 2"]


def called(text):
    function = {"name": "go", "arguments": {"to": text}}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_what_a_users_starts_gives_is_named_and_ends_no_launch(chats):
    tool = {"type": "function", "function": {"name": "go", "parameters": {"maximum": np.int64(3)}}}
    tasks = {
        "call": (Start([ASK, called("up"), ASK]), ""),
        "long call": (Start([ASK, called("up " * 600), ASK]), "tokens"),
        "numpy": (Start((ASK,), [tool], {"answer": np.int64(4)}), ""),
        "none": (None, "None, not a Start"),
        "of that shape": (Start([ASK | {"content": None}]), "the content None, not text"),
    }
    given = [(name, start) for name, (start, _) in tasks.items()]
    for name, why in rows._tried(given, chats["tiny"], 400, print):
        words = tasks[name][1]
        assert words in why if words else not why, name


def test_starts_that_are_none_are_an_environment_without(make_config, monkeypatch):
    monkeypatch.setattr(rows.envs, "build", lambda member: type("Own", (), {"starts": None})())
    assert rows.known(make_config()) == {}


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
