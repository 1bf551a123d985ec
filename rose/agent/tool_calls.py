"""A turn's text -> the calls that it makes, in the Hermes form that Qwen models write.

    <tool_call>
    {"name": "move", "arguments": {"direction": "left"}}
    </tool_call>

SmolLM2's form, a list of such objects, is read too. Whether the tool exists and its arguments make
sense is for the environment to say. Other models' forms: rose/agent/tool_formats.py.
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
    """Something that was meant as a call and is none; `message` tells the model why."""

    message: str


@dataclass(frozen=True)
class Reading:
    """What a turn's text consists of. `problem`: why what looks like a call is none; then there are
    no calls, and `content` is all that was said."""

    thought: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""

    def action(self, text: str) -> Action | BadCall:
        """`text`: the whole turn's."""
        return BadCall(self.problem) if self.problem else Action(text, calls=self.calls)


def parse(text: str) -> Action | BadCall:
    """Text without a call is an `Action` without one. Never raises, whatever the text.

    What stands before ``</think>`` is thought, not said: a call in it does not count.
    """
    return read(*split_thought(text)).action(text)


def split_thought(text: str) -> tuple[str, str]:
    """Return (thought, said). The last mark that ends a thought counts, but not one in a call."""
    at = text.rfind(END)
    spans = list(_values(text)) if at >= 0 else []
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


def _values(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of the JSON of each call."""
    at = 0
    while (at := text.find(OPEN, at)) >= 0:
        start = at = at + len(OPEN)
        if (end := _closed_at(text, start)) is not None:
            yield start, end
            at = end


def _closed_at(text: str, start: int) -> int | None:
    """Return where the mark stands that closes the call whose JSON begins at `start`; None if that
    is no JSON, or no such mark follows it. Marks in its strings are text."""
    try:
        _, end = JSON.raw_decode(text, SPACE.match(text, start).end())
    except (ValueError, RecursionError):
        return None
    end = SPACE.match(text, end).end()
    return end if text.startswith(CLOSE, end) else None


def read(thought: str, answer: str) -> Reading:
    """Every call of `answer`, or none."""
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
    """JSON -> calls, or what is wrong with it."""
    try:
        value = loads(body)
    except (ValueError, RecursionError):  # ValueError: also an integer of too many digits
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
    """Return the value of JSON. NaN, Infinity and numbers that Python makes infinite (1e999) would
    be written again as what is no JSON. Raises `ValueError`."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
