"""Checks at launch which tasks that are known beforehand leave no room in the model's context.

A file's rows are known before anything starts. One whose first prompt fills `model.max_context`
fails whenever a group draws it: the group is given another task, and the failure is counted. So the
launcher names such rows, and refuses a file of which too many are: the run would end there.

Cheap: no byte makes two tokens, so a row with fewer bytes than the context has tokens fits. Only
the others are written by the chat template, and their tokens counted by all cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from rose import config
from rose.agent import envs, returned
from rose.agent.envs.base import Start
from rose.config import ConfigError

if TYPE_CHECKING:
    from rose.agent.chat import ChatFormat

NAMED = 8  # tasks that a message names; the others are counted
AT_ONCE = 256  # prompts whose tokens are counted at once: some seconds of work at most
SAY_S = 5.0  # seconds between two lines of progress


def known(c: config.Config) -> dict[str, Iterable[tuple[str, Start]]]:
    """The tasks of each environment that knows them, by its key in the configuration."""
    found = {key: envs.build(member) for key, member in c.environments.values()}
    return {key: made.starts() for key, made in found.items() if hasattr(made, "starts")}


def check(c: config.Config, chat: ChatFormat, say: Callable[[str], None]) -> None:
    """Say which tasks can't begin: their prompt doesn't fit, or the chat template refuses it.
    Raises `ConfigError` where more than max_failed_tasks can't."""
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
    """Each task's name, and why it can't begin with `most` tokens of context; "" if it can."""
    overheads: dict[str, int] = {}  # bytes that the template writes around messages of one shape
    began, said, done, tasks = time.monotonic(), time.monotonic(), 0, iter(tasks)
    while some := list(islice(tasks, AT_ONCE)):
        why, long = {}, {}  # Tasks by place, as names may repeat.
        for place, (_, start) in enumerate(some):
            try:
                if _bytes(start, chat, overheads) >= most:
                    long[place] = chat.written(start.messages, start.tools)
            except (ValueError, ConfigError) as error:  # The template refuses them.
                why[place] = str(error)
        for place, tokens in zip(long, chat.counts(list(long.values())), strict=True):
            if tokens >= most:
                why[place] = f"{tokens:,} tokens"
        yield from ((name, why.get(place, "")) for place, (name, _) in enumerate(some))
        done += len(some)
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say(f"prompts whose tokens were counted: {done:,} in {said - began:.0f} s")


def _bytes(start: Start, chat: ChatFormat, overheads: dict[str, int]) -> int:
    """The bytes that the template writes for a task. Raises `ValueError` for messages that are
    none, and what the template raises."""
    own = sum(len((m.get("content") or "").encode("utf-8", "replace")) for m in start.messages)
    shape = json.dumps([start.tools, [sorted(m) + [m["role"]] for m in start.messages]])
    if shape not in overheads:
        returned.start(start)
        written = chat.written(start.messages, start.tools)
        overheads[shape] = len(written.encode("utf-8", "replace")) - own
    return own + max(0, overheads[shape])
