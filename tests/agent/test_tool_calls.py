"""What a model writes becomes one action, or a message that tells it what was wrong."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.agent.envs.base import Action, ToolCall
from rose.agent.tool_calls import BadCall, read, split_thought

MOVE = '{"name": "move", "arguments": {"direction": "left"}}'
LEFT = ToolCall("move", {"direction": "left"})


def parse(text):
    """Return the action in a turn's text, or its malformed call."""
    return read(*split_thought(text)).action(text)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{MOVE}\n</tool_call>",
        f"<tool_call>{MOVE}</tool_call>",
        f"<tool_call>[{MOVE}]</tool_call>",  # SmolLM2
        f"I go left.\n<tool_call>{MOVE}</tool_call> so there",
        f"<think>perhaps <tool_call>nonsense</think><tool_call>{MOVE}</tool_call>",
    ],
)
def test_a_call_is_read_in_either_form(text):
    assert parse(text) == Action(text=text, call=LEFT)


TWICE = [f"<tool_call>{MOVE}</tool_call>\n" * 2, f"<tool_call>[{MOVE}, {MOVE}]</tool_call>"]


@pytest.mark.parametrize("text", TWICE)
def test_several_calls_are_all_read_in_order(text):
    action = parse(text)
    assert action.calls == (LEFT, LEFT) and action.call == LEFT


@pytest.mark.parametrize(
    "text", ["the answer is 4", f"<think><tool_call>{MOVE}</tool_call></think>done"]
)
def test_text_without_a_call_is_plain_text(text):
    assert parse(text) == Action(text), "a call that was only thought of does not count"


# Texts, with @ and # for the marks of a call, and what is said of each.
BAD = [
    ("@move left#", "not valid JSON"),
    ("@#", "not valid JSON"),
    (f"@{MOVE}", "must stand between"),
    (f"{MOVE}#", "must stand between"),
    (f"#{MOVE}@", "must stand between"),
    (f"@{MOVE}#@left#", "not valid JSON"),
    (f"@{MOVE}##", "must stand between"),
    *((f"@{each}#", "one object") for each in ("[]", "3", '{"name": "move"}')),
    *((f'@{{"name": {name}, "arguments": {{}}}}#', "one object") for name in ('""', 3)),
    ('@{"name": "move", "arguments": "left"}#', "one object"),
    *((f'@{{"name": "move", "arguments": {{"x": {x}}}}}#', "not valid") for x in ("NaN", "1e999")),
    *((f"@{each}#", "not valid JSON") for each in ("9" * 5000, "[" * 100_000)),
]


@pytest.mark.parametrize("text, problem", BAD)
def test_a_bad_call_is_explained(text, problem):
    result = parse(text.replace("@", "<tool_call>").replace("#", "</tool_call>"))
    assert isinstance(result, BadCall)
    assert problem in result.message
    assert len(result.message) < 200, "the message costs context"


@pytest.mark.parametrize(
    "said", ["ends with </tool_call>", "<tool_call>{}</tool_call>", "a </think> tag", "<think>\\"]
)
@pytest.mark.parametrize("thought", ["", "<think>perhaps <tool_call>{</think>\n"])
def test_marks_in_an_argument_are_text(said, thought):
    calls = [ToolCall("write", {"text": said}), ToolCall("write", {"text": "x", said: said})]
    written = [json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls]
    action = parse(thought + "".join(f"<tool_call>\n{each}\n</tool_call>" for each in written))
    assert action.calls == tuple(calls)


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "}}", "[", "]", "1"]
pieces = st.sampled_from([*MARKS, '{"name": "a", "arguments": {'])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(pieces, st.text())).map("".join))
def test_no_text_raises(text):
    assert isinstance(parse(text), Action | BadCall)


@settings(max_examples=60, deadline=None)
@given(
    st.text(min_size=1),
    st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.none(), st.booleans())),
)
def test_every_well_formed_call_arrives_as_it_was_written(name, arguments):
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    assert parse(f"<tool_call>{written}</tool_call>").call == ToolCall(name, arguments)
