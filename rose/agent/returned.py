"""Checks of what comes back from an environment's methods, completely and in one place.

The guard (rose/agent/guard.py) passes every result through here, before the loop, the chat template
or a message sees it. What is fine comes out in Python's own types, NumPy's numbers and bools
converted; anything else is a `ValueError` that says what was given, behind "Class.method gave".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rose.agent.envs.base import Start, Step
from rose.reward import values

ROLES = ("system", "developer", "user", "assistant", "tool")


def start(given: Start) -> Start:
    """Return what `reset` gave, in Python's own types. Raises `ValueError`."""
    messages = _list(given.messages, "messages")
    if not messages:
        raise ValueError("no messages; at least one is needed")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    tools = _list(given.tools, "tools")
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    if not isinstance(given.task, dict):
        raise ValueError(f"the task {values.shown(given.task)}, not a dict")
    return Start(_plain(messages, "messages"), _plain(tools, "tools"), _plain(given.task, "a task"))


def step(given: Step) -> Step:
    """Return what `step` or `end` gave, in Python's own types. Raises `ValueError`."""
    done = _flag(given.done, "done")
    observation = "" if done and given.observation is None else given.observation
    return Step(
        observation=_text(observation, "the observation"),
        reward=values.reward(given.reward),
        done=done,
        success=_flag(given.success, "success"),
        invalid=_flag(given.invalid, "invalid"),
        observations=tuple(
            _text(each, f"observations[{number}]")
            for number, each in enumerate(_list(given.observations, "observations"))
        ),
    )


def stats(given: Any) -> dict[str, float]:
    """Return an environment's `stats`: figures of the episode by name. Raises `ValueError`."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{values.shown(given)}, not a dict")
    found = {}
    for name, value in given.items():
        try:
            found[_text(name, "the name")] = values.number(value)
            if not math.isfinite(found[name]):
                raise ValueError("not finite")
        except ValueError:
            raise ValueError(
                f"{values.shown(name)}: {values.shown(value)}, not a text with a finite number"
            ) from None
    return found


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where} {values.shown(message)}, not a dict with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{where} the role {values.shown(role)}, none of {', '.join(ROLES)}")
    calls = role == "assistant" and message.get("tool_calls")
    if not isinstance(content, str) and not (calls and content is None):
        raise ValueError(
            f"{where} the content {values.shown(content)}, not text (parts can't be given)"
        )


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where} {values.shown(tool)}, not an OpenAI function schema "
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        )
    if not isinstance(function.get("parameters", {}), dict):
        raise ValueError(f"{where} the parameters {values.shown(function['parameters'])}, no dict")


def _list(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{what} {values.shown(given)}, not a list")
    return list(given)


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{what} {values.shown(given)}, not text")
    return str(given)


def _flag(given: Any, what: str) -> bool:
    try:
        return values.flag(given)
    except ValueError:
        raise ValueError(f"{what} {values.shown(given)}, not true or false") from None


def _plain(given: Any, what: str) -> Any:
    """`given` as JSON has it. Scorers, snapshots and templates take nothing else."""
    try:
        return json.loads(json.dumps(given, default=values.to_json))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{what} with more than plain JSON ({error})") from None
