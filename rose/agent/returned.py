"""Checks all results of an environment's methods.

The guard (rose/agent/guard.py) calls these functions on each result, before any other code gets it.
A valid result is returned in Python's own types: NumPy's numbers and bools are converted. An
invalid result raises `ValueError`, whose text continues "Class.method gave".
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
    """Return the result of `reset` in Python's own types. Raises `ValueError`."""
    messages = start_messages(given)
    tools = _checked_list(given.tools, "tools")
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    if not isinstance(given.task, dict):
        raise ValueError(f"the task {values.shown(given.task)}, not a dict")
    return Start(_plain(messages, "messages"), _plain(tools, "tools"), _plain(given.task, "a task"))


def start_messages(given: Start) -> list[dict[str, Any]]:
    """Return a start's messages, checked but not converted. Raises `ValueError`."""
    if not isinstance(given, Start):
        raise ValueError(f"{values.shown(given)}, not a Start")
    messages = _checked_list(given.messages, "messages")
    if not messages:
        raise ValueError("no messages; at least one is needed")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    return messages


def step(given: Step) -> Step:
    """Return the result of `step` or `end` in Python's own types. Raises `ValueError`."""
    done = _checked_flag(given.done, "done")
    observation = "" if done and given.observation is None else given.observation
    return Step(
        observation=_checked_text(observation, "the observation"),
        reward=values.reward(given.reward),
        done=done,
        success=_checked_flag(given.success, "success"),
        invalid=_checked_flag(given.invalid, "invalid"),
        observations=tuple(
            _checked_text(each, f"observations[{number}]")
            for number, each in enumerate(_checked_list(given.observations, "observations"))
        ),
    )


def stats(given: Any) -> dict[str, float]:
    """Return an environment's `stats`, finite numbers by name. Raises `ValueError`."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{values.shown(given)}, not a dict")
    found = {}
    for name, value in given.items():
        try:
            found[_checked_text(name, "the name")] = number = values.number(value)
            if not math.isfinite(number):
                raise ValueError("not finite")
        except ValueError:
            raise ValueError(
                f"{values.shown(name)}: {values.shown(value)}, not a text with a finite number"
            ) from None
    return found


def flag(given: Any) -> bool:
    """Return an attribute as a bool; None, for a missing attribute, is False. Raises `ValueError`
    for other types, such as a method, which would count as true in an `if`."""
    return given is not None and _checked_flag(given)


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


def _checked_list(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{what} {values.shown(given)}, not a list")
    return list(given)


def _checked_text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{what} {values.shown(given)}, not text")
    # `str.__str__` ignores the `__str__` of a subclass. A lone surrogate, which UTF-8 can't encode,
    # becomes a question mark, as it does in the tokens.
    return str.__str__(given).encode("utf-8", "replace").decode()


def _checked_flag(given: Any, what: str = "") -> bool:
    try:
        return values.flag(given)
    except ValueError:
        raise ValueError(f"{what} {values.shown(given)}, not true or false".strip()) from None


def _plain(given: Any, what: str) -> Any:
    """Convert `given` to plain JSON values, which scorers, snapshots and templates require."""
    try:
        written = json.dumps(given, ensure_ascii=False, default=values.to_json)
        return json.loads(written.encode("utf-8", "replace"))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{what} with more than plain JSON ({error})") from None
