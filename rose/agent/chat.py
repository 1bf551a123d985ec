"""Chat messages and observations -> tokens, by the model's own template, without re-tokenising.

A conversation's first prompt is rendered by the template as usual. After that only the text between
the end of the policy's turn and its next generation prompt is encoded and appended: a template may
rewrite earlier turns (Qwen3 drops their thinking), a trajectory must not. That text is the
template's rendering of a dummy conversation, after the dummy answer. Left out: images, parallel
calls.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import AutoTokenizer

from rose.agent.tool_calls import CLOSE, FORM, OPEN
from rose.config import ConfigError

ANSWER, OBSERVATION = "ROSE-ANSWER-7f3a", "ROSE-OBSERVATION-7f3a"
CACHE = 4096  # texts; FrozenLake has about as many observations in a step of 64 trajectories

RESPONSE = {"<tool_response>", "</tool_response>"}

Observer = Literal["tool", "user"]


class ChatFormat:
    """The tokenizer and chat template in `folder`, with `template_args` (such as enable_thinking).

    Raises `ConfigError` naming model.path when the folder has no usable tokenizer or template.
    """

    def __init__(self, folder: str | Path, template_args: dict[str, Any] | None = None):
        self.folder, self.template_args = str(folder), dict(template_args or {})
        self._tokenizer = self._load()
        self._backend = self._tokenizer.backend_tokenizer
        self.eos_ids: frozenset[int] = frozenset(self._find_eos())
        # marks of turns and responses must not act as such in what an environment says; those of
        # calls, which the loop's own messages show to the model, begin nothing there
        marks = (self._tokenizer.get_added_vocab().keys() | RESPONSE) - {OPEN, CLOSE}
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self.native_tools = self._has_tools()
        self._between = {role: self._text_between(role) for role in ("tool", "user")}
        self._start = functools.lru_cache(CACHE)(self._start_tokens)
        self._observation = functools.lru_cache(CACHE)(self._observation_tokens)

    def start(self, messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> list[int]:
        """First prompt, up to and including the generation prompt.

        Templates that ignore tools (SmolLM2) get them described in the system message.
        """
        return list(self._start(json.dumps(messages), json.dumps(tools)))

    def observation(self, text: str, role: Observer, closed: bool = True) -> list[int]:
        """Tokens from the policy's last token to its next turn.

        `closed`: the last token was an end-of-turn token; else (cut by a limit) one is supplied.
        """
        return list(self._observation(text, role, closed))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of a turn, without the end-of-turn token at its end."""
        tokens = [int(token) for token in tokens]
        while tokens and tokens[-1] in self.eos_ids:
            tokens.pop()
        return self._backend.decode(tokens, skip_special_tokens=False)

    def _load(self):
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path={self.folder!r}: no tokenizer could be loaded there ({error})"
            ) from error
        if not tokenizer.is_fast:
            raise self._error("its tokenizer has no tokenizer.json (fast tokenizer)")
        if tokenizer.chat_template is None:
            raise self._error("its tokenizer has no chat template; use an instruction-tuned model")
        return tokenizer

    def _find_eos(self) -> set[int]:
        path = Path(self.folder) / "generation_config.json"
        given = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        ids = {given} if isinstance(given, int) else set(given or [])
        if self._tokenizer.eos_token_id is not None:
            ids.add(self._tokenizer.eos_token_id)
        if not ids:
            raise self._error(
                "neither its tokenizer nor its generation_config.json names an eos token"
            )
        return ids

    def _render(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=True,
            **self.template_args,
        )

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _start_tokens(self, messages: str, tools: str) -> list[int]:
        messages, tools = json.loads(messages), json.loads(tools)
        if tools and not self.native_tools:
            messages, tools = _describe(messages, tools), []
        return self._encode(self._render(messages, tools))

    def _observation_tokens(self, text: str, role: Observer, closed: bool) -> list[int]:
        end, before, after = self._between[role]
        text = text.encode(
            "utf-8", "replace"
        ).decode()  # lone surrogates, from JSON that the model wrote
        text = self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text)
        tokens = self._encode(end + before + text + after)
        return tokens[1:] if closed else tokens

    def _has_tools(self) -> bool:
        tool = {
            "type": "function",
            "function": {"name": "rose_probe", "description": "", "parameters": {}},
        }
        try:
            self._render([_message("user"), _message("assistant"), _message("tool")])
            return "rose_probe" in self._render([_message("user")], [tool])
        except TemplateError:  # it knows no tool role
            return False

    def _text_between(self, role: Observer) -> tuple[str, str, str]:
        """(end-of-turn token, text before the observation, text after it)."""
        wrap = role == "tool" and not self.native_tools
        content = f"<tool_response>\n{OBSERVATION}\n</tool_response>" if wrap else OBSERVATION
        said, observed = _message("assistant", ANSWER), _message("user" if wrap else role, content)
        between = self._after_answer([_message("user"), said, observed])
        later = self._after_answer(
            [_message("user"), _message("assistant"), _message("user"), said, observed]
        )
        if between != later:
            raise self._error(
                f"what its chat template writes after an answer depends on the turns before "
                f"({between!r}, then {later!r}); tokens of a trajectory could not stay as generated"
            )
        end = next((token for token in self._eos_texts() if between.startswith(token)), None)
        if end is None:
            raise self._error(
                f"its chat template ends an answer with {between[:30]!r}, which is none of its "
                f"end-of-turn tokens {self._eos_texts()}; set eos_token_id in generation_config.json"
            )
        before, _, after = between[len(end) :].partition(OBSERVATION)
        return end, before, after

    def _after_answer(self, messages: list[dict]) -> str:
        try:
            text = self._render(messages)
        except TemplateError as error:
            raise self._error(
                f"its chat template refuses a conversation of several turns: {error}"
            ) from error
        if (
            text.count(ANSWER) != 1
            or text.count(OBSERVATION) != 1
            or text.index(ANSWER) > text.index(OBSERVATION)
        ):
            raise self._error("its chat template does not write each message once, in order")
        return text.partition(ANSWER)[2]

    def _eos_texts(self) -> list[str]:
        return [
            self._backend.id_to_token(i)
            for i in sorted(self.eos_ids)
            if self._backend.id_to_token(i)
        ]

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"model.path={self.folder!r}: {text}")


def _message(role: str, content: str = "x") -> dict[str, str]:
    return {"role": role, "content": content}


def _describe(messages: list[dict], tools: list[dict]) -> list[dict]:
    """Messages whose system message lists the tools and how to call one."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    text = f"# Tools\n{listed}\nTo call a tool, write {FORM}"
    if messages[0]["role"] == "system":
        return [_message("system", f"{messages[0]['content']}\n\n{text}"), *messages[1:]]
    return [_message("system", text), *messages]
