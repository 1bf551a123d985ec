"""A turn's text -> the action that it asks for, in the Hermes form that Qwen models write.

    <tool_call>
    {"name": "move", "arguments": {"direction": "left"}}
    </tool_call>

SmolLM2's form, a list of one such object, is read too. One call a turn: environments act on one at
a time. Whether the tool exists and its arguments make sense is for the environment to say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn

from rose.agent.envs.base import Action, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'{OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'


@dataclass(frozen=True)
class BadCall:
    """Something that was meant as a call and is none; `message` tells the model why."""

    message: str


def parse(text: str) -> Action | BadCall:
    """Text without a call is an `Action` without one. Never raises, whatever the text.

    What stands before ``</think>`` is thought, not said: a call in it does not count.
    """
    said = text.rpartition("</think>")[2]
    if OPEN not in said and CLOSE not in said:
        return Action(text=text)
    if said.count(OPEN) > 1:
        return BadCall(f"Bad tool call: only one call a turn, as {FORM}")
    _, opened, rest = said.partition(OPEN)
    body, closed, _ = rest.partition(CLOSE)
    if not opened or not closed:
        return BadCall(f"Bad tool call: it must stand between {OPEN} and {CLOSE}")
    call = _call(body)
    return (
        BadCall(f"Bad tool call: {call}") if isinstance(call, str) else Action(text=text, call=call)
    )


def _call(body: str) -> ToolCall | str:
    """JSON -> call, or what is wrong with it."""
    try:
        value = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):  # ValueError: also an integer of too many digits
        return f"not valid JSON; write {FORM}"
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    match value:
        case {"name": str(name), "arguments": dict(arguments)} if name and len(value) == 2:
            return ToolCall(name, arguments)
    return f'a call is one object with "name", a string, and "arguments", an object; write {FORM}'


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
