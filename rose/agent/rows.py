"""Checks at launch which of the environments' known tasks leave no room in the model's context.

Some tasks are known before a run starts, for example the rows of a file. A row whose first prompt
fills `model.max_context` fails whenever a group draws it. The group then gets another task, and too
many such failures end a run. So the launcher lists these rows, and rejects a file with too many.

The check is cheap. A byte is at most one token, so a row with fewer bytes than the context has
tokens fits. Only other rows are rendered by the chat template and tokenized, on all cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import xxhash

from rose import config
from rose.agent import envs, returned
from rose.agent.envs.base import Environment, Start
from rose.config import ConfigError
from rose.reward import values

if TYPE_CHECKING:
    from rose.agent.chat import ChatFormat

NAMED = 8  # most tasks that a message names; the others are only counted
AT_ONCE = 256  # tasks per batch, which takes a few seconds at most
SAY_S = 5.0  # seconds between two lines of progress


def known(c: config.Config) -> dict[str, Iterable[tuple[str, Start]]]:
    """Return the tasks of each environment that has `starts`, by its key in the configuration."""
    found = {key: envs.build(member) for key, member in c.environments.values()}
    return {key: _given(key, made) for key, made in found.items() if getattr(made, "starts", None)}


def _given(key: str, environment: Environment) -> Iterator[tuple[str, Start]]:
    """Yield the tasks of the environment's `starts`. Raises `ConfigError` if `starts` is faulty."""
    what = f"{key}.name: {type(environment).__name__}.starts"
    try:
        for task in environment.starts():
            if not isinstance(task, tuple) or len(task) != 2:
                raise ConfigError(f"{what} gave {values.shown(task)}, not (name, Start)")
            yield task
    except ConfigError:
        raise
    except Exception as error:  # a user's method
        raise ConfigError(f"{what} raised {error!r}") from error


def check(c: config.Config, chat: ChatFormat, say: Callable[[str], None]) -> None:
    """Report the tasks that can't start because their prompt doesn't fit or the chat template
    refuses it. Raises `ConfigError` if their share is above max_failed_tasks."""
    shares = {key: member.max_failed_tasks for key, member in c.environments.values()}
    for key, tasks in known(c).items():
        tried = list(_tried(tasks, chat, c.model.max_context, say))
        unfit = [f"{name} ({why})" for name, why in tried if why]
        if not unfit:
            continue
        more = f", and {len(unfit) - NAMED:,} more" if unfit[NAMED:] else ""
        words = (
            f"{len(unfit):,} of {len(tried):,} tasks can't begin, as they leave no room in "
            f"model.max_context={c.model.max_context} or as the chat template refuses them: "
            f"{'; '.join(unfit[:NAMED])}{more}"
        )
        if len(unfit) > shares[key] * len(tried):
            raise ConfigError(
                f"{key}.args: {words}; raise model.max_context, leave them out, or raise "
                f"{key}.max_failed_tasks={shares[key]:g}"
            )
        say(f"{key}: {words}. A group that draws one of them gets another task")


def _tried(
    tasks: Iterable[tuple[str, Start]], chat: ChatFormat, most: int, say: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """Yield (name, problem) per task; the problem is "" for a prompt below `most` tokens."""
    overheads: dict[bytes, int] = {}  # bytes that the template adds to the contents, by shape
    began, said, done, tasks = time.monotonic(), time.monotonic(), 0, iter(tasks)
    while some := list(islice(tasks, AT_ONCE)):
        why, long = {}, {}  # problems and long prompts, by the task's place in `some`
        for place, (_, start) in enumerate(some):
            try:
                if _bytes(start, chat, overheads) >= most:
                    long[place] = _written(start, chat)
            except Exception as error:  # refused by the template, or invalid messages
                why[place] = str(error)
        for place, tokens in zip(long, chat.counts(list(long.values())), strict=True):
            if tokens >= most:
                why[place] = f"{tokens:,} tokens"
        yield from ((name, why.get(place, "")) for place, (name, _) in enumerate(some))
        done += len(some)
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say(f"prompts whose tokens were counted: {done:,} in {said - began:.0f} s")


def _bytes(start: Start, chat: ChatFormat, overheads: dict[bytes, int]) -> int:
    """Estimate the bytes of a task's prompt. Messages of one shape differ only in contents, so the
    template's own bytes are measured once per shape (`overheads`). Raises `ValueError` for invalid
    messages, and any error of the template."""
    messages = returned.start_messages(start)
    own = sum(len((m.get("content") or "").encode("utf-8", "replace")) for m in messages)
    rest = [{key: m[key] for key in m if key != "content"} for m in messages]
    written = json.dumps([start.tools, rest], default=values.to_json)
    shape = xxhash.xxh3_128_digest(written.encode())
    if shape not in overheads:
        overheads[shape] = len(_written(start, chat).encode("utf-8", "replace")) - own
    return own + max(0, overheads[shape])


def _written(start: Start, chat: ChatFormat) -> str:
    """Render the first prompt. Raises the errors of `_bytes`."""
    start = returned.start(start)
    return chat.written(start.messages, start.tools)
