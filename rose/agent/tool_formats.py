"""Finds the form in which a model writes tool calls and thoughts: Hermes (rose/agent/tool_calls.py)
or a form for which vLLM has a parser (its registry `ToolParserManager`; Apache-2.0).

A form fits a model if it parses the call that the model's own chat template writes; `auto` takes
the first of `CANDIDATES` that fits. vLLM is imported only for forms other than Hermes, since that
takes 0.5 GiB of memory and some seconds.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from rose.agent import tool_calls
from rose.agent.envs.base import ToolCall
from rose.agent.tool_calls import Reading
from rose.config import ConfigError

AUTO, HERMES = "auto", "hermes"
# Forms of the model families that ROSE trains, and of models fine-tuned from them.
CANDIDATES = (HERMES, "qwen3_coder", "llama3_json", "mistral", "pythonic")
# A call of a dummy tool, with which templates and parsers are tried.
PROBE = ToolCall("rose_probe", {"text": "a b", "count": 3})
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        },
    },
}
# The mark that opens a call, such as <tool_call> or [TOOL_CALLS]. Only calls begin with it.
MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
CLOSING = re.compile(r"(</[^<>\s]+>)\s*$")


class Hermes:
    """The tool format that rose/agent/tool_calls.py reads."""

    name = HERMES
    form = tool_calls.FORM  # an example of a call, for messages to the model

    def read(self, thought: str, answer: str, tools: list[dict[str, Any]]) -> Reading:
        """Parse all calls of `answer`, or report a malformed one in `problem`. Never raises."""
        return tool_calls.read(thought, answer)


class OfVllm:
    """A tool format that vLLM's parser `name` reads. `written`: the call `PROBE` as the model's
    template writes it. Raises `ConfigError` if the parser refuses the tokenizer."""

    def __init__(self, name: str, tokenizer: Any, written: str) -> None:
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # no log line per malformed call
        self.name = name
        self.form = written.replace(PROBE.name, "...").strip()
        self._parser = ToolParserManager.get_tool_parser(name)
        self._tokenizer = get_cached_tokenizer(tokenizer)
        begin = written.partition(PROBE.name)[0].strip()
        mark = MARK.match(begin)
        # Calls without a mark begin with {"name": or [, and count only at the answer's start.
        self._opening, self._anywhere = (mark[0], True) if mark else (begin, False)
        closing = CLOSING.search(written)
        self._closing = closing[1] if closing else ""
        self._request = functools.lru_cache(64)(_request)
        try:
            self._parser(self._tokenizer, self._request(json.dumps([PROBE_TOOL])).tools)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"model.tool_format={name!r}: {error}") from None

    def read(self, thought: str, answer: str, tools: list[dict[str, Any]]) -> Reading:
        request = self._request(json.dumps(tools))
        try:
            found = self._parser(self._tokenizer, request.tools).extract_tool_calls(answer, request)
            calls = tuple(_call(each.function) for each in found.tool_calls)
        except Exception:  # any type, as parsers differ
            return self._bad(thought, answer)
        if self._closing and answer.count(self._opening) != answer.count(self._closing):
            return self._bad(thought, answer)
        begun = answer.lstrip().startswith(self._opening)
        if not calls and (begun or self._anywhere and self._opening in answer):
            return self._bad(thought, answer)
        return Reading(thought, (found.content or "").strip() if calls else answer, calls)

    def _bad(self, thought: str, answer: str) -> Reading:
        return Reading(thought, answer, problem=f"Bad tool call: write it as {self.form}")


def _call(function: Any) -> ToolCall:
    """Convert a call that vLLM has parsed. Raises `ValueError` if it is malformed."""
    arguments = tool_calls.loads(function.arguments or "{}")
    if not function.name or not isinstance(arguments, dict):
        raise ValueError(f"no call: {function}")
    return ToolCall(function.name, arguments)


def _request(tools: str) -> Any:
    """Return a request with these tools, a JSON list, which vLLM's parsers expect."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    listed = json.loads(tools)
    return ChatCompletionRequest(
        messages=[], tools=listed or None, tool_choice="auto" if listed else "none"
    )


def check_names(tool_format: str, reasoning_format: str) -> None:
    """Raise `ConfigError` if one of these two forms doesn't exist."""
    if tool_format not in (AUTO, HERMES):
        from vllm.tool_parsers import ToolParserManager

        _check("model.tool_format", tool_format, ToolParserManager.list_registered())
    if reasoning_format != AUTO:
        from vllm.reasoning import ReasoningParserManager

        _check("model.reasoning_format", reasoning_format, ReasoningParserManager.list_registered())


def _check(key: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ConfigError(f"{key}={name!r}: no such form; there are auto, {', '.join(known)}")


def find(name: str, tokenizer: Any, written: str | None) -> Hermes | OfVllm:
    """Return the tool format `name`, or for `auto` a fitting one. `written`: the call `PROBE` as
    the model's template writes it. If it is None, the template writes no calls, and the system
    message describes Hermes. Raises `ConfigError` for a format that can't parse `written`."""
    check_names(name, AUTO)
    if written is None:
        if name in (AUTO, HERMES):
            return Hermes()
        raise ConfigError(
            f"model.tool_format={name!r}: the model's chat template writes no tool calls; such a "
            "model is told about hermes in its system message (auto)"
        )
    for candidate in CANDIDATES if name == AUTO else (name,):
        try:
            made = Hermes() if candidate == HERMES else OfVllm(candidate, tokenizer, written)
        except ConfigError:
            if name == AUTO:
                continue
            raise
        if made.read("", written, [PROBE_TOOL]).calls == (PROBE,):
            return made
    raise ConfigError(
        f"model.tool_format={name!r}: the model's chat template writes a call as {written!r}, "
        "which "
        + ("is none of " + ", ".join(CANDIDATES) if name == AUTO else "this form does not read")
        + "; give another of vLLM's tool parsers, or auto"
    )


def thoughts(
    name: str, tokenizer: Any, template_args: dict[str, Any]
) -> Callable[[str], tuple[str, str]]:
    """Return a function that splits a text into (thought, answer). It uses vLLM's parser `name`, or
    splits at ``</think>`` for `auto`. Some parsers depend on the template's arguments, such as
    `enable_thinking`. Raises `ConfigError`."""
    if name == AUTO:
        return tool_calls.split_thought
    check_names(AUTO, name)
    from vllm.reasoning import ReasoningParserManager

    request = _request("[]")
    try:
        kind = ReasoningParserManager.get_reasoning_parser(name)
        parser = kind(tokenizer, chat_template_kwargs=template_args)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"model.reasoning_format={name!r}: {error}") from None

    def split(text: str) -> tuple[str, str]:
        try:
            thought, answer = parser.extract_reasoning(text, request)
        except Exception:  # any type, as parsers differ
            return "", text
        return (thought or "").strip(), answer or ""

    return split
