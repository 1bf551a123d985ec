"""The calls of one trajectory. Each becomes one turn, even if the agent sends it several times.

Two requests with the same history and the same parameters are the same call: the second waits for
the first, or gets its recorded answer. The run sets temperature, top_p and similar parameters, and
ignores those of the agent, because the policy must be trained on its own samples.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rose import config
from rose.agent.chat import CannotExtend, ChatFormat
from rose.agent.loop import RequestTurn, checked, turn_seed
from rose.agent.tool_calls import CLOSE
from rose.parts.adapters.gateway.history import Call, History, Message, Node, Place, digests
from rose.protocol import (
    FinishReason,
    Sampling,
    StartTrajectory,
    TurnRequest,
    TurnResult,
    seed_of,
    unpack_floats,
    unpack_tokens,
)

# Most end marks to try for the end of a turn's first call. Strings may contain marks, too.
MOST_MARKS = 8
MOST_OPEN = 16  # open requests of one trajectory; no framework starts as many sub-agents
# Number of refused calls, or of repeated calls, after which an agent is ended as broken.
MOST_REFUSED = 256
MESSAGE_CHARACTERS = 50  # characters that take as long to read as a message's frame
RATE = 50.0  # most calls per second on average, more than any model answers
BURST = 500  # most calls at once, those of ten seconds


class ApiError(Exception):
    """A refused call; each API has its own JSON form for it. `code` is OpenAI's, if it has one."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class Query:
    """An agent's request for a turn, the same for all APIs."""

    messages: tuple[Message, ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list)  # OpenAI function schemas
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    others: dict[str, Any] = field(default_factory=dict)  # other fields that distinguish calls
    tokens: tuple[int, ...] = ()  # prompt of a call by token ids, which has no messages
    calls_tools: bool = True  # False: tool calls in the answer are returned as text
    parallel: bool = True  # False: the turn ends with its first call
    template_args: dict[str, Any] = field(default_factory=dict)  # arguments that override the run's

    @property
    def characters(self) -> int:
        """Number of characters in all messages."""
        return sum(len(message.text) for message in self.messages)

    @property
    def size(self) -> int:
        """Number of characters that take time to read, in messages, calls and tools."""
        calls = [call.arguments for message in self.messages for call in message.calls]
        frames = MESSAGE_CHARACTERS * len(self.messages)
        return self.characters + frames + len(json.dumps([self.tools, calls], default=str))

    def digest(self) -> bytes:
        """Return a digest that equal calls share."""
        history = digests(self.messages, self.tools, self.template_args)[-1]
        rest = [self.max_tokens, self.stop, self.others, self.tokens, self.calls_tools]
        rest += [self.parallel]
        return hashlib.sha256(
            history + json.dumps(rest, sort_keys=True, default=str).encode()
        ).digest()


@dataclass(frozen=True)
class Answer:
    """The answer to a call, the same for all APIs."""

    node: Node
    message: Message
    finish: str  # stop, length or tool_calls
    stopped_by: str | None  # the string of `Query.stop` that ended the answer
    prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    id: str


class Session:
    """The calls and history of a trajectory. The agent sends `key` with every call. `failed` is set
    to the cause when the agent must be ended."""

    def __init__(
        self,
        start: StartTrajectory,
        chat: ChatFormat,
        request_turn: RequestTurn,
        limits: config.Env,
        max_context: int,
        sampling: Sampling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.start, self.key = start, secrets.token_urlsafe(32)
        self._chat, self._request_turn, self._limits = chat, request_turn, limits
        self._max_context, self._sampling, self._clock = max_context, sampling, clock
        self.history = History(chat)
        self.turns = self.migrations = self.invalid_calls = 0
        # "context" or "turns" if the last call was refused because this limit is used up. It is ""
        # again after a later call, such as one with a shortened history, has become a turn.
        self.limit = ""
        self.too_long = ""  # message of the last refusal because of the context
        self.reward: tuple[float, bool] | None = None  # (reward, success), if the agent sent one
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = loop.create_future()
        self.called: asyncio.Future[None] = loop.create_future()  # set at the agent's first call
        self._calls: dict[bytes, asyncio.Task[Answer]] = {}
        self._counting = asyncio.Lock()
        self._open = self._waiting = 0  # open requests, and how many of them wait for the model
        self._refused = self._replays = 0
        self._active_at = clock()
        self._allowance, self._counted_at = float(BURST), clock()
        self.cut = 0  # turns that were running at `close`

    @property
    def idle_s(self) -> float:
        """Seconds since the agent's last call began or was answered; 0 while it waits for an
        answer. The arrival of a body is no wait. Token counts and model lists are no calls."""
        return 0.0 if self._waiting else self._clock() - self._active_at

    @property
    def body_s(self) -> float:
        """Seconds that the body of a request may take to arrive."""
        return self._limits.step_timeout_s

    async def answer(self, query: Query) -> Answer:
        """Answer a call with a new turn, or with the turn of an earlier equal call. `counted` must
        have counted the request. Raises `ApiError`."""
        self._check_length(query)
        digest = await self._chat.in_thread(query.size, query.digest)
        task = self._calls.get(digest)
        if task is None:
            task = self._calls[digest] = asyncio.create_task(self._take_turn(query))
            task.add_done_callback(lambda done: self._forget_failed(digest, done))
        elif task.done():
            self._count_replay()
        self._open += 1
        self._waiting += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # a cancellation by `close`
                raise ApiError(410, "the trajectory has ended", "trajectory_ended") from None
            raise
        except ApiError as error:
            self._refuse(error)
            raise
        except Exception as error:  # An error of ROSE itself: the trajectory can't be used.
            self._fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._open -= 1
            self._waiting -= 1
            self._active_at = self._clock()

    async def prompt_tokens(self, query: Query) -> int:
        """Count the tokens of a prompt, without a turn. For a prompt that can't fit into the
        context this is a lower bound. Raises `ApiError`."""
        least = self._chat.least_tokens(query.characters)
        if least >= self._max_context:
            return least
        async with self._counting:  # a single count at a time, as other agents' turns would wait
            place = await self._chat.in_thread(query.size, self._place, query)
        return len(place.context) // 4

    @contextlib.contextmanager
    def counted(self, is_call: bool = True) -> Iterator[None]:
        """Context of a request, entered before its body is read. It bounds the agent's requests at
        once and per second, and counts refused ones. `is_call` is False for a request that only
        counts tokens or lists models. Raises `ApiError`."""
        self._count()
        if is_call:
            self._active_at = self._clock()
            if not self.called.done():
                self.called.set_result(None)
        self._open += 1
        try:
            yield
        except ApiError as error:
            self._refuse(error)
            raise
        finally:
            self._open -= 1

    def close(self) -> None:
        """Cancel running calls; each is answered with status 410."""
        for task in self._calls.values():
            self.cut += task.cancel()

    def _count(self) -> None:
        """Count a request, with a token bucket. Raises `ApiError` beyond a bound."""
        now = self._clock()
        self._allowance = min(BURST, self._allowance + RATE * (now - self._counted_at)) - 1
        self._counted_at = now
        if self._allowance < 0 or self._open >= MOST_OPEN:
            error = ApiError(
                429,
                f"at most {MOST_OPEN} calls at once and {RATE:g} a second",
                "rate_limit_exceeded",
            )
            self._refuse(error)
            raise error

    def _refuse(self, error: ApiError) -> None:
        """Count a refused call, and end an agent with too many of them."""
        self._refused += 1
        if self._refused >= MOST_REFUSED:
            self._fail(
                f"{self._refused} calls of the agent were refused, the last with {error.status}: "
                f"{error.message}"
            )

    def _count_replay(self) -> None:
        """Count a repeated call, which gets no new answer. End an agent that repeats too many."""
        self._replays += 1
        if self._replays >= MOST_REFUSED:
            self._fail(
                f"{self._replays} calls of the agent were the same as earlier ones and got their "
                "answers; a call with another `seed` or history gets another answer"
            )

    def _fail(self, cause: str) -> None:
        if not self.failed.done():
            self.failed.set_result(cause)

    def _forget_failed(self, digest: bytes, task: asyncio.Task[Answer]) -> None:
        """Forget a call that failed, so that the agent may retry it."""
        if task.cancelled() or task.exception() is not None:
            self._calls.pop(digest, None)

    def _check_length(self, query: Query) -> None:
        """Refuse messages that have too many characters to fit into the context, without tokenising
        them, which would take seconds. Raises `ApiError`."""
        least = self._chat.least_tokens(query.characters)
        if least >= self._max_context:
            error = self._too_long(f"at least {least}")
            self._refuse(error)
            raise error

    def _too_long(self, tokens: str) -> ApiError:
        """Return the error of a prompt that doesn't fit into the context."""
        self.limit = "context"
        self.too_long = (
            f"the messages have {tokens} tokens; the model's context holds {self._max_context} "
            "(model.max_context), the answer included"
        )
        return ApiError(400, self.too_long, "context_length_exceeded")

    async def _take_turn(self, query: Query) -> Answer:
        """Have the policy generate a turn for the call. Raises `ApiError`."""
        place = await self._chat.in_thread(query.size, self._place, query)
        context = place.context
        room = self._max_context - len(context) // 4
        if room <= 0:
            raise self._too_long(str(len(context) // 4))
        if self.turns >= self._limits.max_turns:
            self.limit = "turns"
            raise ApiError(
                403, f"a trajectory has {self._limits.max_turns} calls at most", "turn_limit"
            )
        turn = f"{self.start.id}.t{self.turns}"
        self.turns += 1
        self.limit = ""
        most = min(self._limits.max_new_tokens, query.max_tokens or room, room)
        limit = "context" if most == room else "answer"
        result = await self._request_turn(self._request(turn, context, most, query))
        checked(result, turn, most)
        self.migrations += result.migrations
        return self._record(query, place, result, limit)

    def _place(self, query: Query) -> Place:
        """Return the call's place in the history. Raises `ApiError`."""
        if query.tokens:
            # An engine without a tokenizer doesn't check this, and an unknown id would crash it.
            if (highest := max(query.tokens)) >= self._chat.vocabulary:
                raise ApiError(
                    400, f"token_ids: {highest}; the model has 0 to {self._chat.vocabulary - 1}"
                )
            return self.history.place_tokens(query.tokens)
        try:
            return self.history.place(query.messages, query.tools, query.template_args)
        except CannotExtend as error:
            raise ApiError(400, str(error)) from None

    def _request(self, turn: str, context: bytes, token_limit: int, query: Query) -> TurnRequest:
        answers_tool = bool(query.messages) and query.messages[-1].role == "tool"
        return TurnRequest(
            turn=turn,
            trajectory=self.start.id,
            group=self.start.group,
            phase=self.start.phase,
            tokens=context,
            sampling=msgspec.structs.replace(
                self._sampling,
                seed=turn_seed(self.start.sampling_seed, turn),
                max_new_tokens=token_limit,
            ),
            domain=self.start.domain,
            outcome="ok" if answers_tool else "",
        )

    def _record(self, query: Query, place: Place, result: TurnResult, limit: str) -> Answer:
        """Add the turn to the history and return it as an answer."""
        chat = self._chat.with_args(query.template_args)
        result, text, stopped_by = _until_stop(chat, result, query.stop)
        if not query.parallel and query.calls_tools:
            result, text = _first_call(chat, result, text, query.tools)
        node = self.history.record(place, result, limit)
        reading = chat.read(text, query.tools)
        self.invalid_calls += bool(reading.problem) and query.calls_tools
        calls = tuple(
            Call(f"c{seed_of(result.turn, i):08x}", call.name, call.arguments)
            for i, call in enumerate(reading.calls if query.calls_tools and query.tools else ())
            if query.parallel or not i
        )
        uncalled = reading.calls and not calls  # calls that the agent gets as text
        content = chat.without_thought(text) if uncalled else reading.content
        message = Message("assistant", content, calls, reading.thought)
        if not query.tokens:
            given = query.messages, query.tools
            self.history.answered(*given, message, node, query.template_args)
        if calls:
            finish = "tool_calls"
        elif node.closed or stopped_by:
            finish = "stop"
        else:
            finish = "length"
        return Answer(
            node,
            message,
            finish,
            stopped_by,
            len(place.context) // 4,
            unpack_tokens(result.tokens).tolist(),
            unpack_floats(result.logprobs).tolist(),
            f"{seed_of(self.key, result.turn):08x}",
        )


def _first_call(
    chat: ChatFormat, result: TurnResult, text: str, tools: list[dict[str, Any]]
) -> tuple[TurnResult, str]:
    """Return the turn up to the token that completes its first call, and the text up to there. If
    the model's call format has no end mark, return the whole turn."""
    if len(chat.read(text, tools).calls) < 2:
        return result, text
    end = 0
    for _ in range(MOST_MARKS):
        if (at := text.find(CLOSE, end)) < 0:
            return result, text
        end = at + len(CLOSE)
        if chat.read(text[:end], tools).calls:  # Otherwise the mark is inside a string.
            break
    else:
        return result, text
    tokens = unpack_tokens(result.tokens)
    lengths = range(1, len(tokens) + 1)
    kept = 1 + bisect.bisect_left(lengths, end, key=lambda n: len(chat.decode(tokens[:n])))
    return _cut(result, kept), text[:end]


def _cut(result: TurnResult, kept: int) -> TurnResult:
    """Return the turn with only its first `kept` tokens. The agent never gets the other tokens, so
    they are not part of the trajectory."""
    return msgspec.structs.replace(
        result,
        tokens=result.tokens[: 4 * kept],
        logprobs=result.logprobs[: 4 * kept],
        versions=result.versions[: 4 * kept],
        finish=FinishReason.STOP,
    )


def _until_stop(
    chat: ChatFormat, result: TurnResult, stops: tuple[str, ...]
) -> tuple[TurnResult, str, str | None]:
    """Cut the turn behind the token that completes the first stop string. Return the turn, the text
    before this string, and the string (None if there is none)."""
    tokens = unpack_tokens(result.tokens)
    text = chat.decode(tokens)
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return result, text, None
    at, stop = min(found)
    # The text grows with the tokens, so bisect finds the first length whose text has the string.
    lengths = range(1, len(tokens) + 1)
    kept = 1 + bisect.bisect_left(
        lengths, True, key=lambda n: chat.decode(tokens[:n]).find(stop) >= 0
    )
    return _cut(result, kept), text[:at], stop
