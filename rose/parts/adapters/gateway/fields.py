"""Readers for the fields of a request's body.

A missing, wrong or unsupported field raises `ApiError`. `FIELDS` of each API's module describes the
use of each field, and scripts/tabulate_code.py writes these lists into docs/agents.md.
"""

from __future__ import annotations

import json
from typing import Any

from rose.agent.template import CONVERSATION, served_tool
from rose.parts.adapters.gateway.session import ApiError

# The use of a field of a request. A field that is not in the API's `FIELDS` counts as `APART`.
USED = "used"
APART = "no effect, but a call that differs in it is no retry"
IGNORED = "no effect"
REFUSED = "refused"
SAMPLING = "the run's own is used; a call that differs in it is no retry"
CHOICE = (
    "`none`: a tool call in the answer is returned as text; every other value, also `required`, is "
    "`auto`"
)
TEMPLATE = "used: arguments of the chat template, before the run's own"
EFFORT = (
    "used: as the template's arguments `reasoning_effort` and `enable_thinking`, which is false "
    "for `none`"
)
# vLLM's options with which a prompt would differ from the chat template's prompt for the turn.
PROMPTS = dict.fromkeys(
    ("chat_template", "documents", "continue_final_message", "truncate_prompt_tokens"), REFUSED
)
BILLING = "x-anthropic-billing-header"
SEED = "does not seed the sampling; a call repeated with another `seed` gets a new answer"
# OpenAI's fields that identify the caller or control what OpenAI stores.
ABOUT = dict.fromkeys(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"), IGNORED
)
# vLLM's options that constrain decoding. The policy must sample every token by itself.
CONSTRAINTS = dict.fromkeys(
    (
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "logits_processors",
    ),
    REFUSED,
)


def bad(message: str) -> ApiError:
    """Return the error for a request that can't be used."""
    return ApiError(400, message)


def take(body: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return `body[name]`, or `default` if it is absent or null. Raises `ApiError`."""
    value = body.get(name)
    if value is None:
        if default is ...:
            raise bad(f"{name}: missing")
        return default
    if not isinstance(value, kind) or isinstance(value, bool) and kind is int:
        raise bad(f"{name}: {json.dumps(value)[:80]} is not what this API takes")
    return value


def count(body: dict[str, Any], *names: str) -> int | None:
    """Return the first given field of `names`, an integer of at least 1; None if none is given."""
    for name in names:
        value = take(body, name, int, None)
        if value is not None:
            if value < 1:
                raise bad(f"{name}: {value}; an integer from 1 is needed")
            return value
    return None


def stops(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings: the field is one string or a list of at most 16."""
    value = take(body, name, (str, list), ())
    found = (value,) if isinstance(value, str) else tuple(value)
    if len(found) > 16 or not all(isinstance(each, str) and each for each in found):
        raise bad(f"{name}: a string or at most 16 strings are needed, none of them empty")
    return found


def texts(content: Any, kinds: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the texts of a string, null, or parts of the types `kinds`. Raises `ApiError`."""
    if content is None or isinstance(content, str):
        return () if content is None else (content,)
    if not isinstance(content, list):
        raise bad(f"{where}: a string or a list of parts is needed")
    found = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad(f"{where}: parts of type {kind!r} are not supported, only text")
        found.append(take(part, "refusal" if part["type"] == "refusal" else "text", str))
    return tuple(found)


def system_texts(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return a system message's texts without Claude Code's billing line, which differs in each
    call and would make each prompt a new one. vLLM drops it, too."""
    kept = (t.partition("\n")[2] if t.startswith(BILLING) else t for t in parts)
    return tuple(text for text, given in zip(kept, parts, strict=True) if text or not given)


def arguments(written: Any, where: str) -> dict[str, Any]:
    """Return a tool call's arguments, which are an object or its JSON text."""
    try:
        value = json.loads(written or "{}") if isinstance(written, str | None) else written
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad(f"{where}: arguments must be a JSON object")
    return value


def items(value: list[Any], where: str) -> list[dict[str, Any]]:
    """Return `value`, a list of objects. Raises `ApiError`."""
    if not all(isinstance(each, dict) for each in value):
        raise bad(f"{where}: a list of objects is needed")
    return value


def function(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in the form of OpenAI's chat API, from {name, description, parameters}."""
    take(schema, "name", str)
    take(schema, "description", str, None)
    take(schema, "parameters", dict, None)
    take(schema, "strict", bool, None)
    return served_tool({"function": schema})


def free_text(form: Any, name: str) -> None:
    """Raise `ApiError` if the output format `form` isn't text: others need constrained decoding."""
    kind = form.get("type", "text") if isinstance(form, dict) else form
    if kind not in (None, "text"):
        raise bad(f"{name}: {json.dumps(kind)[:80]}; only text is supported")


def template_args(body: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """Return a request's arguments for the chat template, by the rules of `vllm serve`. `effort`:
    the reasoning effort; None if the request has none."""
    found = dict(take(body, "chat_template_kwargs", dict, {}))
    if reserved := sorted(found.keys() & CONVERSATION):
        raise bad(f"chat_template_kwargs: {reserved[0]} is the conversation's own")
    if effort is not None:
        found.setdefault("enable_thinking", effort != "none")
        found["reasoning_effort"] = effort
    return {name: value for name, value in found.items() if value not in (None, "auto")}


def refuse(body: dict[str, Any], known: dict[str, str]) -> None:
    """Raise `ApiError` for a `REFUSED` field, unless its value is null, false, empty or 0."""
    for name, becomes in known.items():
        if becomes == REFUSED and body.get(name):
            raise bad(f"{name}: not supported")


def rest(body: dict[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """Return the fields that distinguish two calls although they have no effect on the answer.
    Fields about the caller, and about sending the answer, are left out."""
    return {
        name: value
        for name, value in body.items()
        if known.get(name, APART).endswith((APART, SAMPLING, SEED)) and value is not None
    }


def ends_with_question(messages: list[Any]) -> None:
    """Raise `ApiError` unless the policy's turn is next."""
    if not messages or messages[-1].role == "assistant":
        raise bad("messages: at least one is needed, the last one not an assistant's")
