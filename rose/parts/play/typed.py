"""Read a line that a person types, and turn it into an action for the environment.

A tool's schema describes its arguments, so that "left" or "l" is enough for the call
`move(direction="left")`. If there are several tools, the line begins with the tool's name. A line
that begins with "say " is text without a call.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import msgspec

from rose.agent.envs.base import Action, ToolCall

TYPES: dict[str, Any] = {"integer": int, "number": int | float, "boolean": bool}
SAY = "say"  # text without a call, in environments with tools


def ask(prompt: str) -> str | None:
    """Return the line that the user types; None at the end of the input.

    A line from a file or a pipe is printed after the prompt.
    """
    terminal = sys.stdin.isatty()
    # input() would write the prompt to standard error, which goes to the engine's log.
    if terminal:
        print(prompt, end="", flush=True)
    try:
        line = input()
    except EOFError:
        print(end="\n" * terminal)
        return None
    if not terminal:
        print(f"{prompt}{line}")
    return line


def help_of(tools: list[dict[str, Any]], most: int, requires_tool: bool) -> str:
    """Return one line of help for the user's input."""
    turns = f"at most {most} turns; Ctrl-D leaves"
    if not tools:
        return f"Type your answer ({turns})."
    forms = [_form(tool["function"], named=len(tools) > 1) for tool in tools]
    forms += [] if requires_tool else [f"{SAY} TEXT without a call"]
    return f"Type {', or '.join(forms)} ({turns})."


def action(line: str, tools: list[dict[str, Any]]) -> Action | str:
    """Return the action that the line stands for, or a text on why it can't be understood."""
    if not tools:
        return Action(line)
    word, _, rest = line.strip().partition(" ")
    if word == SAY:
        return Action(rest)
    functions = [tool["function"] for tool in tools]
    names = [each["name"] for each in functions]
    named = _one_of(word, names)
    if len(functions) > 1 and named is None:
        return f"{word!r}: begin with one of {', '.join(names)}, or with {SAY}"
    function = functions[names.index(named)] if named else functions[0]
    # The name of the only tool may be left out.
    text = rest if word in names or len(functions) > 1 else line
    try:
        arguments = _arguments(text.strip(), function.get("parameters") or {})
    except ValueError as error:
        return f"{error}; type {_form(function, named=len(functions) > 1)}"
    call = ToolCall(function["name"], arguments)
    return Action(show_call(call), call)


def show_call(call: ToolCall) -> str:
    """Return the call in Python's notation: move(direction="left")."""
    given = (f"{name}={json.dumps(v, ensure_ascii=False)}" for name, v in call.arguments.items())
    return f"{call.name}({', '.join(given)})"


def _form(function: dict[str, Any], named: bool) -> str:
    """Return how a call is typed, such as "left|right". `named`: with the tool's name first."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    words = [function["name"]] if named else []
    for name, schema in properties.items():
        choices = schema.get("enum") or (schema.get("items") or {}).get("enum")
        word = "|".join(map(str, choices)) if choices else name.upper()
        word += " ..." * (schema.get("type") == "array")
        words.append(word if name in parameters.get("required", ()) else f"[{word}]")
    return " ".join(words) or function["name"]


def _arguments(text: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return name -> value of the arguments in the text. Raises `ValueError`."""
    properties = parameters.get("properties") or {}
    if text.startswith("{"):
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(f"no JSON object: {error}") from None
    required = [name for name in properties if name in parameters.get("required", ())]
    if len(properties) == 1:
        [(name, schema)] = properties.items()
        if not text and name not in required:
            return {}
        return {name: _value(text, schema)}
    words = shlex.split(text)
    if not len(required) <= len(words) <= len(properties):
        raise ValueError(f"{len(words)} words where {len(required)} are needed")
    return {
        name: _value(word, properties[name]) for name, word in zip(properties, words, strict=False)
    }


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Return the text as a value of the schema's type. Raises `ValueError`."""
    kinds = schema.get("type", "string")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "array":
        items = schema.get("items") or {}
        return [_value(word, items) for word in text.replace(",", " ").split()]
    if choices := schema.get("enum"):
        found = _one_of(text, choices)
        if found is None:
            raise ValueError(f"{text!r} is none of {', '.join(map(str, choices))}")
        return found
    if kind in TYPES:
        try:
            return msgspec.json.decode(text, type=TYPES[kind])
        except msgspec.DecodeError:
            raise ValueError(f"{text!r} is no {kind}") from None
    return text


def _one_of(word: str, choices: list[Any]) -> Any:
    """Return the choice that equals `word`, or else the only choice that begins with it; None if
    there is none."""
    if word in choices:
        return word
    found = [each for each in choices if word and str(each).startswith(word)]
    return found[0] if len(found) == 1 else None
