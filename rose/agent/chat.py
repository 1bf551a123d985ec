"""Chat messages and observations -> tokens, by the model's own template, without re-tokenising.

A conversation's first prompt is rendered by the template as usual. After that only the text between
the end of the policy's turn and its next generation prompt is encoded and appended: a template may
rewrite earlier turns (Qwen3 drops their thinking), a trajectory must not. That text is the
template's rendering of a dummy conversation, after the dummy answer. Left out: images, and
templates that write a tool's result only behind a message with calls.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import transformers
from jinja2 import TemplateError

from rose.agent import tool_formats
from rose.agent.envs.base import Action, outside_thoughts
from rose.agent.tool_calls import CLOSE, FORM, OPEN, BadCall, Reading
from rose.config import ConfigError, Model
from rose.models import end_tokens

ANSWER = "ROSE-ANSWER-7f3a"
OBSERVATION = 'ROSE-OBSERVATION-7f3a-{}"end'  # the quotation mark: does the template escape it?
LOOP_CHARACTERS = 20_000  # are made tokens of within the event loop: some milliseconds
COMPOSED = 4  # characters that NFC makes one, at most: a Greek letter with three marks
CACHED = 4096  # characters: longer texts are seldom the same, and thousands of them fill memory
CACHE = 4096  # texts; FrozenLake has about as many observations in a step of 64 trajectories

# Types of models of which `AutoTokenizer` takes the class that their tokenizer_config.json names.
NAMED = ("qwen3", "qwen3_moe")

RESPONSE = {"<tool_response>", "</tool_response>"}

Observer = Literal["tool", "user"]
Tokens = TypeVar("Tokens")


class CannotExtend(ConfigError):
    """The template doesn't write these messages after an answer in a way that could be appended."""


def tokenizer_class(folder: str | Path) -> type:
    """The class whose `from_pretrained` loads the tokenizer in `folder` as `AutoTokenizer` does. Of
    models in `NAMED` it is looked up here: `AutoTokenizer` itself imports torch, for 3 s."""
    given, own = (
        json.loads(path.read_text(encoding="utf-8"))
        if (path := Path(folder) / name).is_file()
        else {}
        for name in ("config.json", "tokenizer_config.json")
    )
    if given.get("model_type") in NAMED and "auto_map" not in own:
        name = own.get("tokenizer_class")
        if name is not None and hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoTokenizer


@dataclass(frozen=True)
class _Gap:
    """The text between an answer and the next turn, `texts` around the messages' contents."""

    end: str  # the end-of-turn token
    texts: tuple[str, ...]
    escaped: tuple[bool, ...]  # whether the template writes a content as a JSON string


class ChatFormat:
    """The tokenizer and chat template in `folder`, with `template_args` (such as enable_thinking),
    and the forms of tool calls and thoughts (rose/agent/tool_formats.py).

    Raises `ConfigError` naming model.path when the folder has no usable tokenizer or template, and
    naming model.tool_format or model.reasoning_format when that is not the template's.
    """

    def __init__(
        self,
        folder: str | Path,
        template_args: dict[str, Any] | None = None,
        tool_format: str = tool_formats.AUTO,
        reasoning_format: str = tool_formats.AUTO,
        end_of_turn: Sequence[str] = (),
    ):
        self.folder, self.template_args = str(folder), dict(template_args or {})
        self._tokenizer = self._load()
        self._backend = self._tokenizer.backend_tokenizer
        self.eos_ids: frozenset[int] = frozenset(end_tokens(folder, end_of_turn))
        self.vocabulary = self._find_vocabulary()  # token ids are below
        # marks of turns and responses must not act as such in what an environment says; those of
        # calls, which the loop's own messages show to the model, begin nothing there
        marks = (self._tokenizer.get_added_vocab().keys() | RESPONSE) - {OPEN, CLOSE}
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._longest = _longest_token(self._backend)
        self.native_tools = self._has_tools()
        self._gap = functools.lru_cache(CACHE)(self._find_gap)
        for role in ("tool", "user"):
            self._gap((role,))
        self._named_thoughts = reasoning_format != tool_formats.AUTO
        self._opens_thought = self._render([_message("user")]).rstrip().endswith("<think>")
        self._split = tool_formats.thoughts(reasoning_format, self._tokenizer)
        self.format = tool_formats.find(tool_format, self._tokenizer, self._written_call())
        self._start = functools.lru_cache(CACHE)(self._start_tokens)
        self._observation = functools.lru_cache(CACHE)(self._observation_tokens)

    @classmethod
    def of(cls, folder: str | Path, model: Model) -> ChatFormat:
        """As `model` says, whose folder this is."""
        formats = model.tool_format, model.reasoning_format
        return cls(folder, model.chat_template_args, *formats, model.end_of_turn)

    def start(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """First prompt, up to and including the generation prompt. `messages` are as Hugging Face's
        templates take them: calls in `tool_calls`, their arguments an object.

        Templates that ignore tools (SmolLM2) get them described in the system message, and calls
        and results as text. Raises `CannotExtend` when the template refuses the messages.
        """
        key = json.dumps(messages), json.dumps(tools)
        short = sum(map(len, key)) <= CACHED
        return list(self._start(*key) if short else self._start_tokens(*key))

    def least_tokens(self, characters: int) -> int:
        """The tokens that so many characters of messages make at least; 0 where nobody knows. What
        can't fit is refused by that, without a second of work for each 100 kB."""
        return characters // self._longest if self._longest else 0

    async def in_thread(self, characters: int, write: Callable[..., Tokens], *given: Any) -> Tokens:
        """`write(*given)`, beside the event loop where it works on many `characters`."""
        if characters <= LOOP_CHARACTERS:
            return write(*given)
        return await asyncio.to_thread(write, *given)

    def written(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The text whose tokens are `start`'s. Raises `CannotExtend`."""
        if not self.native_tools:
            messages, tools = _as_text(_describe(messages, tools) if tools else messages), []
        try:
            return self._render(messages, tools)
        except Exception as error:  # a template is a program: of what its author didn't think of
            raise CannotExtend(
                f"model.path={self.folder!r}: its chat template refuses these messages: {error}"
            ) from None

    def counts(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text, counted by all cores."""
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        return list(map(len, self._backend.encode_batch(texts, add_special_tokens=False)))

    def observation(self, text: str, role: Observer, closed: bool = True) -> list[int]:
        """Tokens from the policy's last token to its next turn.

        `closed`: the last token was an end-of-turn token; else (cut by a limit) one is supplied.
        """
        return self.observations([(role, text)], closed)

    def observations(
        self, messages: Sequence[tuple[Observer, str]], closed: bool = True
    ) -> list[int]:
        """As `observation` for several (who says it, text) in a row: results of calls in one turn,
        and what a user says after them. Raises `CannotExtend`."""
        short = sum(len(text) for _, text in messages) <= CACHED
        tokens = self._observation if short else self._observation_tokens
        return list(tokens(tuple(messages), closed))

    def read(self, text: str, tools: list[dict[str, Any]]) -> Reading:
        """Thought, content and calls of a turn's text."""
        return self.format.read(*self._split(text), tools)

    def parse(self, text: str, tools: list[dict[str, Any]]) -> Action | BadCall:
        """What a turn asks for, or what is wrong with its calls."""
        return self.read(text, tools).action(text)

    def said(self, text: str) -> str | None:
        """`Action.said` of a turn's text."""
        if self._named_thoughts:
            return self._split(text)[1]
        return outside_thoughts(f"<think>{text}") if self._opens_thought else None

    def neutral(self, text: str) -> str:
        """`text` in which nothing acts as a mark of the template's."""
        return self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of a turn, without the end-of-turn token at its end."""
        tokens = [int(token) for token in tokens]
        while tokens and tokens[-1] in self.eos_ids:
            tokens.pop()
        return self._backend.decode(tokens, skip_special_tokens=False)

    def _load(self):
        try:
            tokenizer = tokenizer_class(self.folder).from_pretrained(self.folder)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path={self.folder!r}: no tokenizer could be loaded there ({error})"
            ) from error
        if not tokenizer.is_fast:
            raise self._error("its tokenizer has no tokenizer.json (fast tokenizer)")
        if tokenizer.chat_template is None:
            raise self._error("its tokenizer has no chat template; use an instruction-tuned model")
        return tokenizer

    def _find_vocabulary(self) -> int:
        """The model's, which may be padded; the tokenizer's where no model lies beside it."""
        path = Path(self.folder) / "config.json"
        given = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = given.get("text_config") or {}  # of models that see, too
        return given.get("vocab_size") or text.get("vocab_size") or len(self._tokenizer)

    def _render(
        self, messages: list[dict], tools: list[dict] | None = None, prompt: bool = True
    ) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.template_args,
        )

    def _encode(self, text: str) -> list[int]:
        # lone surrogates, from JSON that a model or an agent wrote
        text = text.encode("utf-8", "replace").decode()
        # A batch releases the interpreter's lock, which `encode` keeps.
        [encoded] = self._backend.encode_batch([text], add_special_tokens=False)
        return encoded.ids

    def _start_tokens(self, messages: str, tools: str) -> list[int]:
        return self._encode(self.written(json.loads(messages), json.loads(tools)))

    def _observation_tokens(
        self, messages: tuple[tuple[Observer, str], ...], closed: bool
    ) -> list[int]:
        gap = self._gap(tuple(role for role, _ in messages))
        whole = [gap.end, gap.texts[0]]
        for (_, text), escaped, after in zip(messages, gap.escaped, gap.texts[1:], strict=True):
            text = self.neutral(text)
            whole += [json.dumps(text, ensure_ascii=False)[1:-1] if escaped else text, after]
        tokens = self._encode("".join(whole))
        return tokens[1:] if closed else tokens

    def _has_tools(self) -> bool:
        tool = {
            "type": "function",
            "function": {"name": "rose_probe", "description": "", "parameters": {}},
        }
        try:
            result = _message("tool") | {"tool_call_id": _call_id(0)}
            self._render([_message("user"), _message("assistant"), result])
            return "rose_probe" in self._render([_message("user")], [tool])
        except TemplateError:  # it knows no tool role
            return False

    def _written_call(self) -> str | None:
        """What the template writes for one call, up to the end of the turn; None if it ignores
        calls."""
        call = {"id": _call_id(0), "type": "function", "function": _probe_function()}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        tools = [tool_formats.PROBE_TOOL]
        try:
            before = self._render([_message("user")], tools)
            text = self._render([_message("user"), reply], tools, prompt=False)
        except (TemplateError, TypeError, KeyError):
            return None
        if not self.native_tools or tool_formats.PROBE.name not in text[len(before) :]:
            return None
        # what the generation prompt adds, as an empty thought, may be missing from the rendering
        shared = len(os.path.commonprefix([before, text]))
        written = text[shared:].rstrip()
        for end in self._eos_texts():
            written = written.removesuffix(end)
        return written

    def _find_gap(self, roles: tuple[Observer, ...]) -> _Gap:
        """Rendered twice, the second time after one turn more: the same must come after the
        answer."""
        contents = [OBSERVATION.format(i) for i in range(len(roles))]
        observed = [
            _message(role, content) | ({"tool_call_id": _call_id(i)} if role == "tool" else {})
            for i, (role, content) in enumerate(zip(roles, contents, strict=True))
        ]
        observed = observed if self.native_tools else _as_text(observed)
        reply = _message("assistant", ANSWER)
        between = self._after_answer([_message("user"), reply, *observed])
        later = self._after_answer(
            [_message("user"), _message("assistant"), _message("user"), reply, *observed]
        )
        if between != later:
            raise self._cannot(
                f"what its chat template writes after an answer depends on the turns before "
                f"({between!r}, then {later!r}); tokens of a trajectory could not stay as generated"
            )
        end = next((token for token in self._eos_texts() if between.startswith(token)), None)
        if end is None:
            raise self._cannot(
                f"its chat template ends an answer with {between[:30]!r}, which is none of its "
                f"end-of-turn tokens {self._eos_texts()}; model.end_of_turn names others"
            )
        return _Gap(end, *self._cut(between[len(end) :], contents))

    def _cut(self, text: str, contents: list[str]) -> tuple[tuple[str, ...], tuple[bool, ...]]:
        """(texts around the contents, whether each of these is escaped)."""
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

    def _after_answer(self, messages: list[dict]) -> str:
        try:
            text = self._render(messages)
        except (TemplateError, TypeError, KeyError) as error:
            raise self._cannot(
                f"its chat template refuses a conversation of several turns: {error}"
            ) from error
        before, found, after = text.partition(ANSWER)
        if not found or ANSWER in after or OBSERVATION.partition("{")[0] in before:
            raise self._cannot("its chat template does not write each message once, in order")
        return after

    def _eos_texts(self) -> list[str]:
        return [
            self._backend.id_to_token(i)
            for i in sorted(self.eos_ids)
            if self._backend.id_to_token(i)
        ]

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"model.path={self.folder!r}: {text}")

    def _cannot(self, text: str) -> CannotExtend:
        return CannotExtend(f"model.path={self.folder!r}: {text}")


def _longest_token(backend: Any) -> int:
    """The most characters that a token stands for, or 0 where one may stand for any number, as in
    tokenizers that collapse spaces or know words alone.

    In byte-level BPE a token's name has a character for each byte. Normalisation to NFC composes
    up to `COMPOSED` characters to one.
    """
    pieces = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer else b""
    normalizer = type(backend.normalizer).__name__
    added = backend.get_added_tokens_decoder().values()
    if (
        type(backend.model).__name__ != "BPE"
        or b"ByteLevel" not in pieces
        or normalizer not in ("NoneType", "NFC")
        or any(token.lstrip or token.rstrip for token in added)  # These take spaces with them.
    ):
        return 0
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return longest * (COMPOSED if normalizer == "NFC" else 1)


def _message(role: str, content: str = "x") -> dict[str, str]:
    return {"role": role, "content": content}


def _describe(messages: list[dict], tools: list[dict]) -> list[dict]:
    """Messages whose system message lists the tools and how to call one."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    text = f"# Tools\n{listed}\nTo call a tool, write {FORM}"
    if messages[0]["role"] == "system":
        return [_message("system", f"{messages[0]['content']}\n\n{text}"), *messages[1:]]
    return [_message("system", text), *messages]


def _as_text(messages: list[dict]) -> list[dict]:
    """For templates that know no tools: calls in Hermes form, results in a user's message, those in
    a row in one."""
    merged: list[dict] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if merged and merged[-1].get("results"):
                merged[-1]["content"] += f"\n{content}"
            else:
                merged.append(_message("user", content) | {"results": True})
            continue
        for call in message.get("tool_calls") or ():
            function = call["function"]
            written = json.dumps({"name": function["name"], "arguments": function["arguments"]})
            content += f"{OPEN}\n{written}\n{CLOSE}"
        merged.append(_message(role, content))
    return [_message(message["role"], message["content"]) for message in merged]


def _call_id(index: int) -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    return f"rose{index:05d}"


def _probe_function() -> dict[str, Any]:
    return {"name": tool_formats.PROBE.name, "arguments": tool_formats.PROBE.arguments}
