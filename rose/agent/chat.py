"""Converts chat messages to tokens with the model's own template, and never re-tokenises.

The template renders a conversation's first prompt as usual. After a turn, only the text from the
end of that turn to the next generation prompt is encoded and appended. Rendering the conversation
again would change it, since a template may rewrite earlier turns (Qwen3 drops their thoughts). To
find the appended text, a conversation with a dummy answer is rendered: it is what the template
writes after that answer. The template gets its input in the form of `vllm serve`
(rose/agent/template.py). Images are rejected. Tools are rejected if the template leaves out their
results, or writes a result after a tool call otherwise than after a plain answer.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import transformers

from rose.agent import tool_formats
from rose.agent.envs.base import Action, outside_thoughts
from rose.agent.gaps import (
    ANSWER,
    CannotExtend,
    Gaps,
    Observer,
    call_id,
    calling,
    observed_messages,
    plain_message,
)
from rose.agent.template import TOOLS_AS_TEXT, arguments, served_messages, served_tool
from rose.agent.tool_calls import CLOSE, OPEN, BadCall, Reading
from rose.config import ConfigError, Model
from rose.models import end_tokens

LOOP_CHARACTERS = 20_000  # most characters tokenized in the event loop, in a few milliseconds
COMPOSED = 4  # most characters that NFC composes to one: a Greek letter with three marks
CACHED = 4096  # most characters of a cached text; longer texts seldom repeat and would fill memory
VARIANTS = 16  # most cached formats, one per set of template arguments; an agent uses one or two
CACHE = 4096  # most cached texts; FrozenLake with 64 trajectories has about as many per step

# Model types for which `AutoTokenizer` uses the class that tokenizer_config.json names.
NAMED = ("qwen3", "qwen3_moe")

RESPONSE = {"<tool_response>", "</tool_response>"}

Tokens = TypeVar("Tokens")


def tokenizer_class(folder: str | Path) -> type:
    """Return a class whose `from_pretrained` loads the tokenizer in `folder`. Models in `NAMED`
    don't need `AutoTokenizer`, which takes 3 s because it imports torch."""
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


class ChatFormat:
    """The tokenizer and chat template in `folder`, with `template_args` (such as enable_thinking),
    and the forms of tool calls and thoughts (rose/agent/tool_formats.py). Raises `ConfigError`. It
    names model.path if the folder has no usable tokenizer or template, and model.tool_format or
    model.reasoning_format if this setting doesn't fit the model."""

    def __init__(
        self,
        folder: str | Path,
        template_args: dict[str, Any] | None = None,
        tool_format: str = tool_formats.AUTO,
        reasoning_format: str = tool_formats.AUTO,
        end_of_turn: Sequence[str] = (),
    ):
        self.folder, self.template_args = str(folder), dict(template_args or {})
        self._tokenizer = self._load_tokenizer()
        self._backend = self._tokenizer.backend_tokenizer
        self.eos_ids: frozenset[int] = frozenset(end_tokens(folder, end_of_turn))
        self.vocabulary = self._find_vocabulary()  # size: all token ids are smaller
        of_tools = self._tokenizer.get_chat_template(None, [tool_formats.PROBE_TOOL])
        # Marks of turns and tool responses, which `neutral` breaks up in an environment's text.
        # Marks of calls are harmless there, and the loop's own messages quote them to the model.
        marks = (_marks(self._backend, self.template + of_tools) | RESPONSE) - {OPEN, CLOSE}
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._longest = _longest_token(self._backend)
        self.native_tools = self._has_tools()
        self._arguments = arguments(self.template) | arguments(of_tools)
        if not self.native_tools:
            self._tokenizer.chat_template = TOOLS_AS_TEXT + self._tokenizer.get_chat_template()
        self._learn_gaps()
        self._with = functools.lru_cache(VARIANTS)(self._variant)
        self._reasoning_format = reasoning_format
        self._find_thoughts()
        self._check_vocabulary()
        self.format = tool_formats.find(
            tool_format, self._tokenizer, None if self.tools_problem else self._written_call()
        )

    def _learn_gaps(self) -> None:
        """Find the text that the template writes after an answer, with `self.template_args`. Create
        empty caches of tokens. Raises `CannotExtend`."""
        self._gaps = Gaps(self.folder, self._render, self._eos_texts(), self.native_tools)
        self._gaps.of(("user",), False)
        self.tools_problem = self._gaps.tools_problem()  # "" if the template can be used with tools
        self._start = functools.lru_cache(CACHE)(self._start_tokens)
        self._observation = functools.lru_cache(CACHE)(self._observation_tokens)

    def _find_thoughts(self) -> None:
        """Find out whether, with `self.template_args`, a turn begins inside a thought. Choose the
        function that splits a turn's text into thought and answer."""
        self._opens_thought = self._render([plain_message("user")]).rstrip().endswith("<think>")
        self._split = tool_formats.thoughts(
            self._reasoning_format, self._tokenizer, self.template_args
        )

    def with_args(self, given: dict[str, Any]) -> ChatFormat:
        """Return this format with a request's template arguments, which override the run's.
        Arguments that the template does not read are ignored. Raises `CannotExtend`."""
        kept = {name: value for name, value in given.items() if name in self._arguments}
        return self._with(json.dumps(kept, sort_keys=True)) if kept else self

    def _variant(self, given: str) -> ChatFormat:
        """Return this format with further template arguments, given in JSON."""
        other = copy.copy(self)
        other.template_args = self.template_args | json.loads(given)
        if other.template_args == self.template_args:
            return self
        other._learn_gaps()
        other._find_thoughts()
        return other

    @classmethod
    def of(cls, folder: str | Path, model: Model) -> ChatFormat:
        """Return the format of the model in `folder`, with the settings of `model`."""
        formats = model.tool_format, model.reasoning_format
        return cls(folder, model.chat_template_args, *formats, model.end_of_turn)

    def start(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of the first prompt, up to and including the generation prompt.
        `messages` have OpenAI's form; each content is text, null, or a list of texts or of parts
        with `text`. For templates that ignore tools (SmolLM2), the system message describes the
        tools, and calls and results become text. Raises `CannotExtend` if the template refuses the
        messages."""
        key = json.dumps(messages), json.dumps(tools)
        short = sum(map(len, key)) <= CACHED
        return list(self._start(*key) if short else self._start_tokens(*key))

    def least_tokens(self, characters: int) -> int:
        """Return a lower bound on the number of tokens of a text of this length; 0 if unknown. With
        it, callers reject a too long text without tokenizing it (a second per 100 kB)."""
        return characters // self._longest if self._longest else 0

    async def in_thread(self, characters: int, write: Callable[..., Tokens], *given: Any) -> Tokens:
        """Return `write(*given)`, which tokenizes this number of `characters`. If these are more
        than `LOOP_CHARACTERS`, a thread runs it, so that it doesn't block the event loop."""
        if characters <= LOOP_CHARACTERS:
            return write(*given)
        return await asyncio.to_thread(write, *given)

    def written(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Return the text whose tokens `start` returns. Raises `CannotExtend`."""
        if tools and self.tools_problem:
            raise CannotExtend(self.tools_problem)
        try:
            return self._render(messages, tools)
        except Exception as error:  # any type, since a template is a program
            raise CannotExtend(
                f"model.path={self.folder!r}: its chat template refuses these messages: {error}"
            ) from None

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, counted on all cores."""
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        return list(map(len, self._backend.encode_batch(texts, add_special_tokens=False)))

    def observations(
        self,
        messages: Sequence[tuple[Observer, str]] | Sequence[dict[str, Any]],
        closed: bool = True,
        tools: bool | None = None,
        system: bool = False,
    ) -> list[int]:
        """Return the tokens between the policy's last token and its next turn. They hold the
        observations `messages`: results of the turn's calls, then messages of the user. All are
        (role, text) pairs, or all are OpenAI messages. `closed`: the policy's last token ended its
        turn; otherwise an end-of-turn token comes first. `tools`: the trajectory has tools; None:
        if a message has the role tool. `system`: it has a system message. Raises `CannotExtend`."""
        whole = list(messages)
        if whole and isinstance(whole[0], tuple):
            whole = observed_messages(*zip(*whole, strict=True))
        if tools is None:
            tools = any(message["role"] == "tool" for message in whole)
        key = json.dumps(whole)
        write = self._observation if len(key) <= CACHED else self._observation_tokens
        return list(write(key, closed, tools, system))

    def read(self, text: str, tools: list[dict[str, Any]]) -> Reading:
        """Split a turn's text into thought, content and calls."""
        return self.format.read(*self._split(text), tools)

    def without_thought(self, text: str) -> str:
        """Return a turn's text after its thought, with its calls as text."""
        return self._split(text)[1]

    def parse(self, text: str, tools: list[dict[str, Any]]) -> Action | BadCall:
        """Return the action in a turn's text, or its malformed call."""
        return self.read(text, tools).action(text)

    def said(self, text: str) -> str | None:
        """Return a turn's text outside of thoughts; None if <think> and </think> mark them."""
        if self._reasoning_format != tool_formats.AUTO:
            return self._split(text)[1]
        return outside_thoughts(f"<think>{text}") if self._opens_thought else None

    def neutral(self, text: str) -> str:
        """Return `text` with a space in each mark of the template, which makes it plain text."""
        return self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without the end-of-turn tokens at their end."""
        tokens = [int(token) for token in tokens]
        while tokens and tokens[-1] in self.eos_ids:
            tokens.pop()
        return self._backend.decode(tokens, skip_special_tokens=False)

    @property
    def template(self) -> str:
        """The template for conversations without tools; for all, if `native_tools` is False."""
        return self._tokenizer.get_chat_template()

    @property
    def thinks(self) -> bool:
        """True if the model thinks between <think> and </think>. Both must be single tokens, and
        the template must open a thought or have the argument enable_thinking."""
        marks = {"<think>", "</think>"} <= self._tokenizer.get_vocab().keys()
        asked = "enable_thinking" in self._arguments and "</think>" in self.template
        return marks and (asked or self._opens_thought)

    def _load_tokenizer(self):
        try:
            tokenizer = tokenizer_class(self.folder).from_pretrained(self.folder)
        except Exception as error:  # any type, for a damaged file
            raise ConfigError(
                f"model.path={self.folder!r}: no tokenizer could be loaded there "
                f"({type(error).__name__}: {error})"
            ) from error
        if not tokenizer.is_fast:
            raise self._error("its tokenizer has no tokenizer.json (fast tokenizer)")
        if tokenizer.chat_template is None:
            raise self._error("its tokenizer has no chat template; use an instruction-tuned model")
        return tokenizer

    def _find_vocabulary(self) -> int:
        """Return config.json's vocabulary size, padding included; without one, the tokenizer's."""
        path = Path(self.folder) / "config.json"
        given = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = given.get("text_config") or {}  # present in vision-language models
        return given.get("vocab_size") or text.get("vocab_size") or len(self._tokenizer)

    def _check_vocabulary(self) -> None:
        """Raise `ConfigError` if the template writes a token outside of the model's vocabulary."""
        for token in self._encode(self._render([plain_message("user")])):
            if token >= self.vocabulary:
                raise self._error(
                    f"its chat template writes {self._tokenizer.convert_ids_to_tokens(token)!r}, "
                    f"token {token}, and config.json has vocab_size={self.vocabulary}; give the "
                    "model more rows (resize_token_embeddings) and save it again"
                )

    def _render(
        self, messages: list[dict], tools: list[dict] | None = None, prompt: bool = True
    ) -> str:
        """Return the template's text, which ends with the generation prompt if `prompt`."""
        tools = [served_tool(tool) for tool in tools] if tools else None
        template = self._tokenizer.get_chat_template(None, tools)
        return self._tokenizer.apply_chat_template(
            served_messages(messages, template),
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.template_args,
        )

    def _encode(self, text: str) -> list[int]:
        # Replace lone surrogates, which a model's or an agent's JSON may contain.
        text = text.encode("utf-8", "replace").decode()
        # `encode_batch` releases the GIL; `encode` doesn't.
        [encoded] = self._backend.encode_batch([text], add_special_tokens=False)
        return encoded.ids

    def _start_tokens(self, messages: str, tools: str) -> list[int]:
        """Return what `start` returns, for arguments in JSON, which can be keys of a cache."""
        return self._encode(self.written(json.loads(messages), json.loads(tools)))

    def _observation_tokens(
        self, written: str, closed: bool, tools: bool, system: bool
    ) -> list[int]:
        """Return what `observations` returns, for messages in JSON."""
        messages = json.loads(written)
        for message in messages:
            texts = message["content"]
            message["content"] = (
                self.neutral(texts) if isinstance(texts, str) else list(map(self.neutral, texts))
            )
        gap = self._gaps.of(tuple(message["role"] for message in messages), tools, system)
        plain = all(isinstance(m["content"], str) and "name" not in m for m in messages)
        named = all(m.get("tool_call_id") in (None, call_id(i)) for i, m in enumerate(messages))
        if plain and gap.forms is not None and (named or not gap.ids):
            text = gap.end + gap.write([message["content"] for message in messages])
        else:
            front = [plain_message("system")] if system else []
            said = [*front, plain_message("user"), plain_message("assistant", ANSWER), *messages]
            text = self._gaps.after_answer(said, tools)
        tokens = self._encode(text)
        return tokens[1:] if closed else tokens

    def _has_tools(self) -> bool:
        """True if the template lists tools."""
        try:
            return tool_formats.PROBE.name in self._render(
                [plain_message("user")], [tool_formats.PROBE_TOOL]
            )
        except Exception:  # any type, since a template is a program
            return False

    def _written_call(self) -> str | None:
        """Return the template's text for a call of the dummy tool `PROBE`; None if it has none."""
        reply = calling(tool_formats.PROBE.arguments)
        tools = [tool_formats.PROBE_TOOL]
        try:
            before = self._render([plain_message("user")], tools)
            text = self._render([plain_message("user"), reply], tools, prompt=False)
        except Exception:  # any type, since a template is a program
            return None
        if not self.native_tools or tool_formats.PROBE.name not in text[len(before) :]:
            return None
        # A generation prompt may add text, such as an empty thought, that earlier turns don't have.
        shared = os.path.commonprefix([before, text])
        # Don't cut inside a mark: <think> and <tool_call> both begin with <t.
        if (mark := re.search(r"<[^<>\s]*$", shared)) is not None:
            shared = shared[: mark.start()]
        written = text[len(shared) :].rstrip()
        for end in self._eos_texts():
            written = written.removesuffix(end)
        return written

    def _eos_texts(self) -> list[str]:
        texts = map(self._backend.id_to_token, sorted(self.eos_ids))
        return [text for text in texts if text]

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"model.path={self.folder!r}: {text}")


def _marks(backend: Any, template: str) -> set[str]:
    """Return the added tokens by which a template structures a conversation: special tokens, tokens
    in the template's text, and all that begin with <|, since a template may build <|user|> from its
    parts. Other added tokens are plain text."""
    return {
        token.content
        for token in backend.get_added_tokens_decoder().values()
        if token.content.strip()
        and (token.special or token.content in template or token.content.startswith("<|"))
    }


def _longest_token(backend: Any) -> int:
    """Return the largest number of characters that one token stands for; 0 if there is no bound, as
    in tokenizers that collapse spaces or know whole words only. In byte-level BPE a token's name
    has one character per byte. Normalisation to NFC composes up to `COMPOSED` characters to one."""
    pieces = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer else b""
    normalizer = type(backend.normalizer).__name__
    added = backend.get_added_tokens_decoder().values()
    if (
        type(backend.model).__name__ != "BPE"
        or b"ByteLevel" not in pieces
        or normalizer not in ("NoneType", "NFC")
        or any(token.lstrip or token.rstrip for token in added)  # tokens that absorb spaces
    ):
        return 0
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return longest * (COMPOSED if normalizer == "NFC" else 1)
