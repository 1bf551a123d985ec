"""Parses the tool calls in a turn's text, in the Hermes form that Qwen models write:

    <tool_call>
    {"name": "move", "arguments": {"direction": "left"}}
    </tool_call>

SmolLM2's form, a list of such objects, is parsed too. The environment checks that the tool exists
and that its arguments are valid. Other models' forms: rose/agent/tool_formats.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from rose.agent.envs.base import Action, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'{OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'
END = "</think>"
THOUGHT = re.compile(r"^\s*<think>|\s*$")
SPACE = re.compile(r"\s*")
JSON = json.JSONDecoder()


@dataclass(frozen=True)
class BadCall:
    """A malformed call. `message` explains the fault to the model."""

    message: str


@dataclass(frozen=True)
class Reading:
    """The parts of a turn's text. `problem`: why a call is malformed, "" if none is. With a problem
    there are no calls, and `content` is the whole text after the thought."""

    thought: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""

    def action(self, text: str) -> Action | BadCall:
        """Return the turn's action, or its malformed call. `text`: the whole turn's text."""
        return BadCall(self.problem) if self.problem else Action(text, calls=self.calls)


def split_thought(text: str) -> tuple[str, str]:
    """Split a text into (thought, answer) at its last ``</think>`` outside calls. Never raises."""
    at = text.rfind(END)
    spans = list(_call_spans(text)) if at >= 0 else []
    while spans and at >= 0:
        start, end = spans[-1]
        if at >= end:
            break
        if at >= start:
            at = text.rfind(END, 0, start)
        spans.pop()
    if at < 0:
        return "", text
    return THOUGHT.sub("", text[:at]), text[at + len(END) :].lstrip("\n")


def _call_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the JSON of each well-formed call."""
    at = 0
    while (at := text.find(OPEN, at)) >= 0:
        start = at = at + len(OPEN)
        if (end := _closed_at(text, start)) is not None:
            yield start, end
            at = end


def _closed_at(text: str, start: int) -> int | None:
    """Return the index of `CLOSE` after the JSON that begins at `start`; None if there is no valid
    JSON, or no `CLOSE` right after it. `CLOSE` in a string of the JSON is text."""
    try:
        _, end = JSON.raw_decode(text, SPACE.match(text, start).end())
    except (ValueError, RecursionError):
        return None
    end = SPACE.match(text, end).end()
    return end if text.startswith(CLOSE, end) else None


def read(thought: str, answer: str) -> Reading:
    """Parse all calls of `answer`. If one is malformed, return none. Never raises."""
    if OPEN not in answer and CLOSE not in answer:
        return Reading(thought, answer)
    content, opened, _ = answer.partition(OPEN)
    calls: list[ToolCall] = []
    problem = "" if opened and CLOSE not in content else _unpaired()
    at = len(content)
    while opened:
        start = at + len(OPEN)
        end = _closed_at(answer, start)
        following = answer.find(OPEN, start if end is None else end)
        at = len(answer) if following < 0 else following
        opened = following >= 0
        end = answer.find(CLOSE, start, at) if end is None else end
        paired = end >= 0 and CLOSE not in answer[end + len(CLOSE) : at]
        found = _calls(answer[start:end]) if paired else _unpaired()
        if isinstance(found, str):
            problem = problem or found
        else:
            calls += found
    if problem:
        return Reading(thought, answer, problem=f"Bad tool call: {problem}")
    return Reading(thought, content.strip(), tuple(calls))


def _unpaired() -> str:
    return f"it must stand between {OPEN} and {CLOSE}"


def _calls(body: str) -> list[ToolCall] | str:
    """Parse one call or a list of calls from JSON. If malformed, return the fault, a str."""
    try:
        value = loads(body)
    except (ValueError, RecursionError):  # ValueError: also for an integer with too many digits
        return f"not valid JSON; write {FORM}"
    calls: list[ToolCall] = []
    for each in value if isinstance(value, list) and value else [value]:
        match each:
            case {"name": str(name), "arguments": dict(arguments)} if name and len(each) == 2:
                calls.append(ToolCall(name, arguments))
            case _:
                return (
                    'a call is one object with "name", a string, and "arguments", an object; '
                    f"write {FORM}"
                )
    return calls


def loads(text: str) -> Any:
    """Parse JSON. Raises `ValueError`, also for NaN, Infinity and numbers too large for a float
    (1e999), because Python would write these as invalid JSON."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
