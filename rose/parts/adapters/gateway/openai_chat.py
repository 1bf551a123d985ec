"""OpenAI's chat completions: POST /v1/chat/completions.

A streamed answer is sent as the API's events once the turn is complete. No schema constrains the
decoding, because the policy must sample every token by itself. `FIELDS` lists the refused fields.
"""

from __future__ import annotations

import json
import time
from typing import Any

from rose.parts.adapters.gateway import fields
from rose.parts.adapters.gateway.fields import bad, take
from rose.parts.adapters.gateway.history import Call, Message
from rose.parts.adapters.gateway.session import Answer, ApiError, Query

FIELDS = {
    "model": "returned in the answer; every name is the policy's",
    "messages": "used: texts and text parts; the last one must not be the assistant's",
    "tools": "used: functions",
    "tool_choice": fields.CHOICE,
    "parallel_tool_calls": "false: the turn ends with its first call",
    "max_completion_tokens": fields.USED,
    "max_tokens": fields.USED,
    "stop": "used: at most 16 strings",
    "stream": "used: the turn comes in one piece when it is complete",
    "stream_options": "`include_usage` is used",
    "response_format": "only `text`",
    "n": "only 1",
    "temperature": fields.SAMPLING,
    "top_p": fields.SAMPLING,
    "frequency_penalty": fields.SAMPLING,
    "presence_penalty": fields.SAMPLING,
    "logit_bias": fields.SAMPLING,
    "seed": fields.SEED,
    "reasoning_effort": fields.EFFORT,
    "chat_template_kwargs": fields.TEMPLATE,
    "verbosity": fields.APART,
    "prediction": fields.IGNORED,
    **fields.ABOUT,
    "logprobs": fields.REFUSED,
    **fields.CONSTRAINTS,
    **fields.PROMPTS,
    "add_generation_prompt": "only true",
    "top_logprobs": fields.REFUSED,
    "functions": fields.REFUSED,
    "function_call": fields.REFUSED,
    "audio": fields.REFUSED,
    "web_search_options": fields.REFUSED,
    "modalities": "only `text`",
}
ROLES = ("developer", "system", "user", "assistant")
DONE = b"data: [DONE]\n\n"


def read(body: dict[str, Any]) -> Query:
    """Read the body of a chat completions request. Raises `ApiError`."""
    if take(body, "n", int, 1) != 1:
        raise bad(f"n: {body['n']}; only 1 is supported: a trajectory is one conversation")
    fields.free_text(body.get("response_format"), "response_format")
    take(take(body, "stream_options", dict, {}), "include_usage", bool, False)
    if others := [kind for kind in take(body, "modalities", list, []) if kind != "text"]:
        raise bad(f"modalities: {json.dumps(others)[:80]}; only text is supported")
    fields.refuse(body, FIELDS)
    if not take(body, "add_generation_prompt", bool, True):
        raise bad("add_generation_prompt: false; the policy's turn follows each prompt")
    listed = fields.items(take(body, "messages", list), "messages")
    messages = [_message(each, f"messages[{i}]") for i, each in enumerate(listed)]
    fields.ends_with_question(messages)
    choice = take(body, "tool_choice", (str, dict), "auto")
    return Query(
        tuple(messages),
        [_tool_schema(tool) for tool in fields.items(take(body, "tools", list, []), "tools")],
        fields.count(body, "max_completion_tokens", "max_tokens"),
        fields.stops(body, "stop"),
        fields.rest(body, FIELDS),
        calls_tools=choice != "none",
        parallel=take(body, "parallel_tool_calls", bool, True),
        template_args=fields.template_args(body, take(body, "reasoning_effort", str, None)),
    )


def _message(raw: dict[str, Any], where: str) -> Message:
    role = take(raw, "role", str)
    parts = fields.texts(raw.get("content"), ("text", "refusal"), f"{where}.content")
    name = take(raw, "name", str, "")
    if role == "tool":
        given = take(raw, "tool_call_id", str, "")
        return Message.of("tool", parts, call_id=given, name=name)
    if role not in ROLES:
        raise bad(f"{where}.role: {role!r} is none of {', '.join(ROLES)}, tool")
    if role == "system":
        parts = fields.system_texts(parts)
    if role != "assistant":
        return Message.of(role, parts, name=name)
    calls = []
    for call in fields.items(take(raw, "tool_calls", list, []), f"{where}.tool_calls"):
        function = take(call, "function", dict)
        arguments = fields.arguments(function.get("arguments"), f"{where}.tool_calls")
        calls.append(Call(take(call, "id", str, ""), take(function, "name", str), arguments))
    thought = raw.get("reasoning") or raw.get("reasoning_content") or ""
    thought = thought if isinstance(thought, str) else ""
    return Message.of("assistant", parts, calls=tuple(calls), thought=thought, name=name)


def _tool_schema(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("type", "function") != "function":
        raise bad(f"tools: of type {raw['type']!r}; only functions are supported")
    return fields.function(take(raw, "function", dict), "tools")


def write(answer: Answer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the response."""
    message = {"role": "assistant", "content": _content(answer), "refusal": None}
    if answer.message.thought:
        message["reasoning_content"] = answer.message.thought
    if answer.message.calls:
        message["tool_calls"] = _calls(answer)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
    return _head(answer, model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def stream(answer: Answer, model: str, body: dict[str, Any]) -> list[bytes]:
    """Return the events of a streamed response."""
    head = _head(answer, model, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.message.thought:
        deltas.append({"reasoning_content": answer.message.thought})
    if content := _content(answer):
        deltas.append({"content": content})
    for index, call in enumerate(_calls(answer)):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    ends = [None] * len(deltas) + [answer.finish]
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": _usage(answer)})
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [DONE]


def refuse(error: ApiError) -> dict[str, Any]:
    """Return the body of the response to a refused call."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def _content(answer: Answer) -> str | None:
    return answer.message.text or (None if answer.message.calls else "")


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in answer.message.calls
    ]


def _head(answer: Answer, model: str, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": created, "model": model}


def _usage(answer: Answer) -> dict[str, int]:
    made = len(answer.tokens)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": answer.prompt_tokens + made,
    }
