"""Anthropic's messages: POST /v1/messages, and POST /v1/messages/count_tokens.

In this API a user message contains the tool results. Here each result becomes a message of its own,
before the user's text. Images, documents, caching (`cache_control` is ignored), server tools, and
all fields that `FIELDS` marks as refused are not supported.
"""

from __future__ import annotations

import json
from typing import Any

from rose.parts.adapters.gateway import fields
from rose.parts.adapters.gateway.fields import bad, take
from rose.parts.adapters.gateway.history import Call, Message
from rose.parts.adapters.gateway.session import Answer, ApiError, Query

FIELDS = {
    "model": "returned in the answer; every name is the policy's",
    "system": fields.USED,
    "messages": "used: texts and text blocks; the last one must not be the assistant's",
    "tools": "used: the agent's own",
    "tool_choice": f"{fields.CHOICE}. With `disable_parallel_tool_use` the turn ends with its "
    "first call",
    "max_tokens": fields.USED,
    "stop_sequences": "used: at most 16 strings",
    "stream": "used: the turn comes in one piece when it is complete",
    "output_config": f"`format`: only `text`; `effort`: {fields.EFFORT}",
    "chat_template_kwargs": fields.TEMPLATE,
    "output_format": "only `text`",
    "temperature": fields.SAMPLING,
    "top_p": fields.SAMPLING,
    "top_k": fields.SAMPLING,
    "thinking": f"`disabled` is an effort of `none`; else {fields.APART}",
    "context_management": fields.APART,
    "metadata": fields.IGNORED,
    "service_tier": fields.IGNORED,
    "cache_control": fields.IGNORED,
    "container": fields.REFUSED,
    "mcp_servers": fields.REFUSED,
}
TEXT = ("text",)


def read(body: dict[str, Any]) -> Query:
    """Return the query in the body of a messages request. Raises `ApiError`."""
    if fields.count(body, "max_tokens") is None:
        raise bad("max_tokens: missing")
    return read_prompt(body)


def read_prompt(body: dict[str, Any]) -> Query:
    """Return the query of a request to count tokens. It has the fields of a messages request, but
    needs no `max_tokens`. Raises `ApiError`."""
    fields.refuse(body, FIELDS)
    output = take(body, "output_config", dict, {})
    fields.free_text(output.get("format"), "output_config.format")
    fields.free_text(body.get("output_format"), "output_format")
    messages: list[Message] = []
    if given := body.get("system"):
        messages.append(Message("system", _system(given, "system")))
    listed = fields.items(take(body, "messages", list), "messages")
    for i, each in enumerate(listed):
        messages += _messages(each, f"messages[{i}]")
    fields.ends_with_question(messages)
    choice = take(body, "tool_choice", dict, {})
    disabled = take(body, "thinking", dict, {}).get("type") == "disabled"
    effort = "none" if disabled else take(output, "effort", str, None)
    tools = fields.items(take(body, "tools", list, []), "tools")
    return Query(
        tuple(messages),
        [_tool_schema(tool) for tool in tools],
        fields.count(body, "max_tokens"),
        fields.stops(body, "stop_sequences"),
        fields.rest(body, FIELDS),
        calls_tools=choice.get("type") != "none",
        parallel=not take(choice, "disable_parallel_tool_use", bool, False),
        template_args=fields.template_args(body, effort),
    )


def _messages(raw: dict[str, Any], where: str) -> list[Message]:
    """Convert one message. A user's message becomes a message for each tool result, and then a
    message with the text, if there is any."""
    role, content = take(raw, "role", str), take(raw, "content", (str, list))
    if role not in ("user", "assistant", "system"):
        raise bad(f"{where}.role: {role!r} is neither user nor assistant")
    if role == "system":
        return [Message(role, text)] if (text := _system(_as_parts(content), where)) else []
    if isinstance(content, str):
        return [Message(role, content)]
    blocks = fields.items(content, f"{where}.content")
    if role == "assistant":
        return [_assistant_message(blocks, where)]
    results = [_result_message(b, where) for b in blocks if b.get("type") == "tool_result"]
    texts = _texts([block for block in blocks if block.get("type") != "tool_result"], where)
    return results + ([Message.of(role, texts)] if texts else [])


def _as_parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _system(content: Any, where: str) -> str:
    """Return the system message's text without Claude Code's billing line. A block that begins with
    it is dropped whole, as in vLLM; a string loses only the line."""
    texts = fields.texts(content, TEXT, where)
    if isinstance(content, str):
        return "".join(fields.system_texts(texts))
    return "".join(text for text in texts if not text.startswith(fields.BILLING))


def _texts(blocks: list[dict[str, Any]], where: str) -> tuple[str, ...]:
    """Return the texts of the blocks, without empty ones."""
    return tuple(text for text in fields.texts(blocks, TEXT, where) if text)


def _assistant_message(blocks: list[dict[str, Any]], where: str) -> Message:
    calls, said, thought = [], [], []
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                given = fields.arguments(block.get("input"), where)
                calls.append(Call(take(block, "id", str, ""), take(block, "name", str), given))
            case "thinking":
                thought.append(take(block, "thinking", str))
            case "redacted_thinking":
                continue  # encrypted, so not for prompts; dropped by vLLM, too
            case _:
                said.append(block)
    parts = _texts(said, f"{where}.content")
    return Message.of("assistant", parts, calls=tuple(calls), thought="".join(thought))


def _result_message(block: dict[str, Any], where: str) -> Message:
    texts = fields.texts(block.get("content"), TEXT, f"{where}.content")
    return Message("tool", "\n".join(texts), call_id=take(block, "tool_use_id", str, ""))


def _tool_schema(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("type") not in (None, "custom"):
        raise bad(f"tools: of type {raw['type']!r}; only an agent's own are supported")
    schema = take(raw, "input_schema", dict, {})
    if "type" not in schema:
        schema = schema | {"type": "object"}  # the last key, as in vLLM
    return fields.function(raw | {"parameters": schema}, "tools")


def write(answer: Answer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the response."""
    return _head(answer, model) | {
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.tokens)},
    }


def stream(answer: Answer, model: str, body: dict[str, Any]) -> list[bytes]:
    """Return the events of a streamed response."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": _head(answer, model) | empty}
    ]
    for index, block in enumerate(_blocks(answer)):
        begin, delta = _stream_parts(block)
        events += [
            {"type": "content_block_start", "index": index, "content_block": begin},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    events += [
        {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stopped_by},
            "usage": {"output_tokens": len(answer.tokens)},
        },
        {"type": "message_stop"},
    ]
    return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]


def refuse(error: ApiError) -> dict[str, Any]:
    """Return the body of the response to a refused call."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
    }
    kind = kinds.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # a prefix that clients recognise
    return {"type": "error", "error": {"type": kind, "message": message}}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    said = answer.message
    blocks: list[dict[str, Any]] = []
    if said.thought:
        blocks.append({"type": "thinking", "thinking": said.thought, "signature": answer.id})
    if said.text or not said.calls:
        blocks.append({"type": "text", "text": said.text})
    for call in said.calls:
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        )
    return blocks


def _stream_parts(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the block as its first event has it, and the one delta that completes it."""
    match block["type"]:
        case "text":
            return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            return block | {"thinking": ""}, delta
    written = json.dumps(block["input"])
    return block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}


def _stop_reason(answer: Answer) -> str:
    if answer.stopped_by:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish]


def _head(answer: Answer, model: str) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": model}
