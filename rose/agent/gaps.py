"""Finds the text that a chat template writes between two turns of the policy: the gap.

It renders dummy conversations, and rejects templates that would rewrite a trajectory's earlier
text. It works on text, which rose/agent/chat.py converts to tokens.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rose.agent import tool_formats
from rose.config import ConfigError

CACHE = 4096  # most cached gaps, one per sequence of roles; a run has few such sequences
ANSWER = "ROSE-ANSWER-7f3a"
OBSERVATION = 'ROSE-OBSERVATION-7f3a-{}"end'  # dummy with a quotation mark, to detect escaping
# Contents of dummy messages, to find out how a template changes contents.
TRIED = (
    "",
    "\n \u00a0" + OBSERVATION + "\\n\t ",
    "0",
    "<b> & 'x'\n\nÄ\u2028 \"" + OBSERVATION,
    '{"a": 1}',
    "[1]",
    "a</think>\n\nb<think>c",
)
LONG = 5  # rounds of a long dummy conversation, in case a template depends on the length
# Marks of thoughts, which templates write into generation prompts and leave out of earlier turns.
THINKING = re.compile(r"</?think>|\[/?THINK\]|\s")

Observer = Literal["tool", "user"]


class CannotExtend(ConfigError):
    """The template refuses these messages, or its text can't be appended to generated tokens."""


@dataclass(frozen=True)
class Gap:
    """The text between an answer and the next turn. It holds the observations of the answer."""

    end: str  # the end-of-turn token
    texts: tuple[str, ...]  # texts before, between and after the messages' contents
    # For each content (escaped as a JSON string, stripped of white space). None if the template
    # changes contents in another way, so that the template must render each observation.
    forms: tuple[tuple[bool, bool], ...] | None
    ids: bool  # True: the template writes each call's id beside its result

    def write(self, contents: Sequence[str]) -> str:
        """Return the text after the end-of-turn token."""
        whole = [self.texts[0]]
        for text, (escaped, trimmed), after in zip(
            contents, self.forms, self.texts[1:], strict=True
        ):
            text = text.strip() if trimmed else text
            whole += [json.dumps(text, ensure_ascii=False)[1:-1] if escaped else text, after]
        return "".join(whole)


class Gaps:
    """The gaps of one template. `render(messages, tools)` returns the template's text. `ends`: the
    end-of-turn tokens. `native`: True if the template itself lists tools."""

    def __init__(
        self,
        folder: str,
        render: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str],
        ends: Sequence[str],
        native: bool,
    ) -> None:
        self._folder, self._render, self._ends, self._native = folder, render, ends, native
        # of(roles, tools, system) returns a gap, which `_find` finds at the first call.
        self.of = functools.lru_cache(CACHE)(self._find)

    def tools_problem(self) -> str:
        """Return why the template can't be used with tools; "" if it can."""
        try:
            self.of(("user",), True)
            self.of(("tool",), True)
            said = plain_message("tool", OBSERVATION) | {"tool_call_id": call_id(0)}
            call = calling({"text": ANSWER})
            text = self.after_answer([plain_message("user"), call, said], True)
            ends = [text.find(end) for end in self._ends if end in text]
            after = text[min(ends) :] if ends else text
            plain = [plain_message("user"), plain_message("assistant", ANSWER), said]
            if self._native and after != (behind := self.after_answer(plain, True)):
                raise self._cannot(
                    "its chat template writes a tool's result otherwise behind a call "
                    f"({after!r}) than behind an answer without one ({behind!r})"
                )
        except CannotExtend as error:
            return f"{error}; such a template can't be used with tools"
        return ""

    def _find(self, roles: tuple[Observer, ...], tools: bool, system: bool = False) -> Gap:
        """Find the gap with observations of these roles. `system`: there is a system message.
        Raises `CannotExtend` if it depends on earlier turns, or an answer changes its prompt."""
        contents = [OBSERVATION.format(i) for i in range(len(roles))]
        reply, observed = plain_message("assistant", ANSWER), observed_messages(roles, contents)
        front = [plain_message("system", "y")] if system else []
        begun = [plain_message("user"), reply, *observed]
        between = self.after_answer([*front, *begun], tools)
        for earlier in self._earlier(tools):
            later = self.after_answer([*front, *earlier, *begun], tools)
            if between != later:
                raise self._cannot(
                    f"what its chat template writes after an answer depends on the turns before "
                    f"({between!r}, then {later!r}); tokens of a trajectory could not stay as "
                    "generated"
                )
        end = next((token for token in self._ends if between.startswith(token)), None)
        if end is None:
            raise self._cannot(
                f"its chat template ends an answer with {between[:30]!r}, which is none of its "
                f"end-of-turn tokens {self._ends}; model.end_of_turn names others"
            )
        again = [*front, plain_message("user"), plain_message("assistant"), *observed]
        self._check_opening([*front, plain_message("user")], again, observed, tools)
        others = [
            {**m, "tool_call_id": "9Zx8Yw7Vu"} if m["role"] == "tool" else m for m in observed
        ]
        ids = between != self.after_answer([*front, *begun[:2], *others], tools)
        texts, escaped = self._cut(between[len(end) :], contents)
        for trims in itertools.product((False, True), repeat=len(set(roles))):
            trimmed = dict(zip(sorted(set(roles)), trims, strict=True))
            forms = tuple((e, trimmed[r]) for e, r in zip(escaped, roles, strict=True))
            gap = Gap(end, texts, forms, ids)
            if all(self._is_written(gap, roles, text, tools) for text in TRIED):
                return gap
        return Gap(end, texts, None, ids)

    def _earlier(self, tools: bool) -> Iterator[list[dict[str, Any]]]:
        """Yield dummy beginnings of a conversation: one round, many rounds, a round with a call."""
        plain = [plain_message("user"), plain_message("assistant")]
        yield plain
        yield plain * LONG
        if tools:
            result = plain_message("tool") | {"tool_call_id": call_id(0)}
            yield [plain[0], calling({"text": "x"}), result, plain[1]]

    def _is_written(self, gap: Gap, roles: tuple[Observer, ...], text: str, tools: bool) -> bool:
        """True if the template writes observations with this text as `gap` does."""
        contents = [text.replace("{}", str(i)) for i in range(len(roles))]
        begun = [plain_message("user"), plain_message("assistant", ANSWER)]
        said = [*begun, *observed_messages(roles, contents)]
        return self.after_answer(said, tools) == gap.end + gap.write(contents)

    def _check_opening(
        self, first: list[dict], second: list[dict], observed: list[dict], tools: bool
    ) -> None:
        """Raise `CannotExtend` if an answer changes the prompt before it, in turn 1 or 2. Templates
        do that if they list tools before the last user message. Marks of thoughts may change."""
        found = []
        for messages in (first, second):
            prompt = self._written_prompt(messages, tools)
            reply = plain_message("assistant", ANSWER)
            before = self._written_prompt([*messages, reply, *observed], tools).partition(ANSWER)[0]
            shared = len(os.path.commonprefix([prompt, before]))
            lost, gained = (THINKING.sub("", text[shared:]) for text in (prompt, before))
            found.append(gained)
            if lost or gained != found[0]:
                raise self._cannot(
                    f"its chat template ends a prompt with {prompt[shared:]!r} and has "
                    f"{before[shared:]!r} there once it is answered; tokens of a trajectory could "
                    "not stay as they were"
                )

    def _cut(self, text: str, contents: list[str]) -> tuple[tuple[str, ...], tuple[bool, ...]]:
        """Cut `text` at `contents`. Return (texts around them, True for each that is escaped)."""
        texts, escaped = [], []
        for content in contents:
            escaped.append(content not in text)
            before, found, text = text.partition(
                json.dumps(content)[1:-1] if escaped[-1] else content
            )
            if not found:
                raise self._cannot("its chat template does not write each message once, in order")
            texts.append(before)
        if any(OBSERVATION.partition("{")[0] in part for part in [*texts, text]):
            raise self._cannot("its chat template does not write each message once, in order")
        return (*texts, text), tuple(escaped)

    def _written_prompt(self, messages: list[dict], tools: bool) -> str:
        try:
            return self._render(messages, [tool_formats.PROBE_TOOL] if tools else None)
        except Exception as error:  # any type, since a template is a program
            raise self._cannot(
                f"its chat template refuses a conversation of several turns: {error}"
            ) from error

    def after_answer(self, messages: list[dict], tools: bool) -> str:
        """Render `messages`, and return the text after the answer `ANSWER` in them."""
        before, found, after = self._written_prompt(messages, tools).partition(ANSWER)
        if not found or ANSWER in after or OBSERVATION.partition("{")[0] in before:
            raise self._cannot("its chat template does not write each message once, in order")
        return after

    def _cannot(self, text: str) -> CannotExtend:
        return CannotExtend(f"model.path={self._folder!r}: {text}")


def plain_message(role: str, content: str = "x") -> dict[str, str]:
    return {"role": role, "content": content}


def observed_messages(roles: Sequence[Observer], contents: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages with these observations, as results of calls or as a user's text."""
    return [
        plain_message(role, content) | ({"tool_call_id": call_id(i)} if role == "tool" else {})
        for i, (role, content) in enumerate(zip(roles, contents, strict=True))
    ]


def calling(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message that calls the dummy tool `PROBE`."""
    function = {"name": tool_formats.PROBE.name, "arguments": arguments}
    call = {"id": call_id(0), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def call_id(index: int) -> str:
    """Return the id of a turn's call: nine letters and digits, as Mistral's templates require."""
    return f"rose{index:05d}"
