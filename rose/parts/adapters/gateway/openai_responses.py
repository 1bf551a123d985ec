"""OpenAI's responses: POST /v1/responses, with the whole history in `input`.

Not supported: histories stored by the server, OpenAI's own tools, images, and every field that
`FIELDS` marks as refused.
"""

from __future__ import annotations

import json
import time
from typing import Any

from rose.parts.adapters.gateway import fields
from rose.parts.adapters.gateway.fields import bad, take
from rose.parts.adapters.gateway.history import Call, Message
from rose.parts.adapters.gateway.openai_chat import ROLES, refuse
from rose.parts.adapters.gateway.session import Answer, Query

__all__ = ["read", "refuse", "stream", "write"]
FIELDS = {
    "model": "returned in the answer; every name is the policy's",
    "instructions": fields.USED,
    "input": "used: the whole history, texts and text parts; the last item must not be the "
    "assistant's",
    "tools": "used: functions",
    "tool_choice": fields.CHOICE,
    "parallel_tool_calls": "false: the turn ends with its first call",
    "max_output_tokens": fields.USED,
    "stream": "used: the turn comes in one piece when it is complete",
    "stream_options": fields.IGNORED,
    "text": "`format`: only `text`",
    "temperature": fields.SAMPLING,
    "top_p": fields.SAMPLING,
    "reasoning": f"`effort`: {fields.EFFORT}; else {fields.APART}",
    "chat_template_kwargs": fields.TEMPLATE,
    "truncation": fields.APART,
    "max_tool_calls": fields.APART,
    "include": fields.IGNORED,
    **fields.ABOUT,
    "top_logprobs": fields.REFUSED,
    **fields.CONSTRAINTS,
    "previous_response_id": "refused: send the history in `input`",
    "conversation": "refused: send the history in `input`",
    "prompt": fields.REFUSED,
    "background": fields.REFUSED,
}
TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def read(body: dict[str, Any]) -> Query:
    """Read the body of a responses request. Raises `ApiError`."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise bad("previous_response_id, conversation: not supported; send the history in input")
    fields.free_text(take(body, "text", dict, {}).get("format"), "text.format")
    fields.refuse(body, FIELDS)
    messages: list[Message] = []
    if instructions := take(body, "instructions", str, ""):
        messages.append(Message("system", "".join(fields.system_texts((instructions,)))))
    given = take(body, "input", (str, list))
    if isinstance(given, str):
        messages.append(Message("user", given))
    else:
        messages += _merged(fields.items(given, "input"))
    fields.ends_with_question(messages)
    tools = fields.items(take(body, "tools", list, []), "tools")
    reasoning = take(body, "reasoning", dict, {})
    return Query(
        tuple(messages),
        [_tool_schema(tool) for tool in tools],
        fields.count(body, "max_output_tokens"),
        (),
        fields.rest(body, FIELDS),
        calls_tools=take(body, "tool_choice", (str, dict), "auto") != "none",
        parallel=take(body, "parallel_tool_calls", bool, True),
        template_args=fields.template_args(body, take(reasoning, "effort", str, None)),
    )


def _merged(given: list[dict[str, Any]]) -> list[Message]:
    """Return the items as messages. The API has separate items for a turn's thought, text and
    calls. Successive items of a turn are merged into one assistant message."""
    messages: list[Message] = []
    answering = False  # True while the last message is an assistant's that may grow

    def extend(text: str = "", calls: tuple[Call, ...] = (), thought: str = "") -> None:
        last = messages[-1] if answering else None
        if last is None or text and last.text or thought and last.thought:
            found = text, calls, thought
            messages.append(Message("assistant", *found, empty=not text))
        else:
            found = last.text or text, last.calls + calls, last.thought or thought
            messages[-1] = Message("assistant", *found, empty=not found[0])

    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message")
        own = kind in ("function_call", "reasoning") or item.get("role") == "assistant"
        if kind == "message" and own:
            extend(_first_text(item.get("content"), where))
        elif kind == "function_call":
            arguments = fields.arguments(item.get("arguments"), where)
            extend(calls=(Call(take(item, "call_id", str), take(item, "name", str), arguments),))
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            extend(thought=_first_text(parts, where))
        elif kind == "function_call_output":
            output = fields.texts(item.get("output"), TEXT, where)
            messages.append(Message.of("tool", output, call_id=take(item, "call_id", str)))
        elif kind == "message":
            role = take(item, "role", str)
            if role not in ROLES:
                raise bad(f"{where}.role: {role!r} is none of {', '.join(ROLES)}")
            content = item.get("content")
            texts = fields.texts(content, TEXT, where)
            if role == "system" and isinstance(content, str):  # parts stay, as in vLLM
                texts = fields.system_texts(texts)
            messages.append(Message.of(role, texts))
        else:
            raise bad(f"{where}.type: {kind!r} is not supported")
        answering = own
    return messages


def _first_text(content: Any, where: str) -> str:
    """Return the first part's text. vLLM ignores an assistant's other parts, too."""
    return next(iter(fields.texts(content, TEXT, where)), "")


def _tool_schema(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("type") != "function":
        raise bad(f"tools: of type {raw.get('type')!r}; only functions are supported")
    return fields.function(raw, "tools")


def write(answer: Answer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the response."""
    made = len(answer.tokens)
    cut = answer.finish == "length"
    return _head(answer, model, body) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + made,
        },
    }


def stream(answer: Answer, model: str, body: dict[str, Any]) -> list[bytes]:
    """Return the events of a streamed response."""
    begun = _head(answer, model, body) | {"status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(_items(answer)):
        events += _item_events(index, item)
    whole = write(answer, model, body)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return [
        f"event: {e['type']}\ndata: {json.dumps(e | {'sequence_number': n})}\n\n".encode()
        for n, e in enumerate(events)
    ]


def _item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    begun = item | {"status": "in_progress"}
    between: list[dict[str, Any]] = []
    if item["type"] == "function_call":
        begun["arguments"] = ""
        kind, name, text = "response.function_call_arguments", "arguments", item["arguments"]
        done = at | {"type": f"{kind}.done", name: text, "name": item["name"]}
        between = [at | {"type": f"{kind}.delta", "delta": text}, done]
    elif item["type"] == "message":
        begun["content"] = []
        [part] = item["content"]
        at |= {"content_index": 0}
        empty, text = part | {"text": ""}, part["text"]
        between = [
            at | {"type": "response.content_part.added", "part": empty},
            at | {"type": "response.output_text.delta", "delta": text, "logprobs": []},
            at | {"type": "response.output_text.done", "text": text, "logprobs": []},
            at | {"type": "response.content_part.done", "part": part},
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *between,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _items(answer: Answer) -> list[dict[str, Any]]:
    said, items = answer.message, []
    if said.thought:
        parts = [{"type": "reasoning_text", "text": said.thought}]
        items.append(
            {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": parts}
        )
    if said.text or not said.calls:
        part = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in said.calls:
        items.append(
            {
                "id": f"fc_{call.id}",
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
        )
    return items


# Fields of the request that the answer repeats, with the value for a request without them.
REPEATED = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


def _head(answer: Answer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    given = {name: body.get(name) for name in REPEATED}
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "temperature": None,
        "top_p": None,
        **{name: REPEATED[name] if value is None else value for name, value in given.items()},
    }
