"""A person's line becomes a call by the tool's schema."""

import pytest

from rose.agent.envs.base import Action, ToolCall
from rose.agent.envs.frozen_lake import MOVE_TOOL
from rose.parts.adapters.envs.minigrid import Minigrid
from rose.parts.play import typed
from rose.parts.sandbox.envs.terminal import BASH, EDIT, UNDO
from rose.parts.tasks.envs.calculator import TOOLS

SHELL = [BASH, EDIT, UNDO]


@pytest.mark.parametrize(
    ("line", "tools", "name", "arguments"),
    [
        ("l", [MOVE_TOOL], "move", {"direction": "left"}),
        ("move down", [MOVE_TOOL], "move", {"direction": "down"}),
        ('{"direction": "up"}', [MOVE_TOOL], "move", {"direction": "up"}),
        ("calculate 3 + 4", TOOLS, "calculate", {"expression": "3 + 4"}),
        ("a -7.5", TOOLS, "answer", {"value": -7.5}),
        ("f, left", [Minigrid()._tool()], "act", {"actions": ["forward", "left"]}),
        ("ls -l | wc", [BASH], "bash", {"command": "ls -l | wc"}),
        ("edit a.txt 'x y' z", SHELL, "edit_file", {"path": "a.txt", "old": "x y", "new": "z"}),
        ("undo", SHELL, "undo", {}),
        ("stop", [{"type": "function", "function": {"name": "stop"}}], "stop", {}),
        ("undo 2", SHELL, "undo", {"commands": 2}),
    ],
)
def test_a_line_is_a_call(line, tools, name, arguments):
    found = typed.action(line, tools)
    assert isinstance(found, Action), found
    assert found.call == ToolCall(name, arguments)


@pytest.mark.parametrize(
    ("line", "tools", "words"),
    [
        ("north", [MOVE_TOOL], "'north' is none of left, down, right, up; type left|down|right|up"),
        ("", [MOVE_TOOL], "none of left"),
        ("multiply 2 3", TOOLS, "'multiply': begin with one of calculate, answer, or with say"),
        ("answer seven", TOOLS, "'seven' is no number; type answer VALUE"),
        ("answer null", TOOLS, "'null' is no number"),
        ("undo true", SHELL, "'true' is no integer"),
        ("edit a.txt", [BASH, EDIT], "1 words where 3 are needed; type edit_file PATH OLD NEW"),
        ("edit 'a", [BASH, EDIT], "No closing quotation"),
        ("{left", [MOVE_TOOL], "no JSON object"),
    ],
)
def test_a_line_that_means_nothing_says_what_would(line, tools, words):
    found = typed.action(line, tools)
    assert isinstance(found, str) and words in found


def test_text_is_said_without_tools_and_after_say():
    assert typed.action("left of it", []) == Action("left of it")
    assert typed.action("say it is done", [BASH]) == Action("it is done")
