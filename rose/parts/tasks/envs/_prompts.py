"""Prompts from files, and the reward of their answers, for the environments `prompts` and `mcp`.

A file is jsonl, json (a list), parquet, or a folder that the package datasets saved
(`FOLDER#SPLIT` for one with several splits). The seed determines a trajectory's row, and each row
is equally likely. Rows are read once per process.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rose import inputs
from rose.agent.envs import _workers
from rose.agent.envs.base import Action, Start
from rose.config import ConfigError
from rose.files import LFS_ADVICE, is_lfs_pointer, json_lines, user_text
from rose.reward import function
from rose.reward.episode import Episode, Said, Score, score_of

KEYS = ("env.args.data", "env.args.held_out")
MATH = "rose.parts.tasks.envs._math:reward"
FORMATS = "a .jsonl, .json or .parquet file, or a folder that the package datasets saved"
JUDGE_S = 20.0  # most seconds for `math`, which takes milliseconds unless the machine is busy
ROLES = ("system", "user", "assistant", "tool")
PASSED = ("text", "row", "messages", "episode")  # possible parameters of a reward function
OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs


class Prompts:
    """Rows and their reward. Raises `ConfigError` for unreadable files and rows without a field."""

    def __init__(
        self,
        data: str,
        held_out: str | float,
        prompt_field: str,
        answer_field: str,
        system: str | None,
        reward: str | None,
    ):
        here = self._here = os.getcwd()  # the folder that paths are relative to
        places = (data, held_out) if isinstance(held_out, str) else (data,)
        self._places = prompt_field, places
        rows = [_rows(*each, prompt_field, here) for each in zip(KEYS, places, strict=False)]
        if isinstance(held_out, str):
            self.train, self.held_out = rows
        elif isinstance(held_out, float) and 0 < held_out < 1:
            self.train, self.held_out = _split(data, prompt_field, held_out, here)
        else:
            raise ConfigError(
                f"env.args.held_out={held_out!r}: {FORMATS}, or a share of the rows above 0 and "
                "below 1"
            )
        self.prompt_field, self.answer_field, self.system = prompt_field, answer_field, system
        for key, place in zip(KEYS, places, strict=False):
            if reward == "math":
                _check_answers(key, place, answer_field, prompt_field, here)
            if system:
                _check_system(key, place, prompt_field, here)
        self.doubt = _in_both(data, held_out, prompt_field, here) if places[1:] else ""  # a warning
        self.reward = MATH if reward == "math" else reward
        self._function, self._takes = (None, ()) if reward is None else _function(self.reward, here)

    def row(self, seed: int) -> dict[str, Any]:
        """Return the row of this seed: a held-out one if the seed is odd."""
        rows = self.held_out if seed % 2 else self.train
        return rows[random.Random(seed).randrange(len(rows))]

    def task_name(self, seed: int) -> str:
        return self._names()[id(self.row(seed))]

    def starts(self, tools: list[dict[str, Any]] | None = None) -> Iterator[tuple[str, Start]]:
        """Yield every row's name and first prompt."""
        names = self._names()
        for row in (*self.train, *self.held_out):
            yield names[id(row)], self.start(row, tools)

    def _names(self) -> dict[int, str]:
        """Return each row's name by its id(), which is stable, as `_rows` reads each file once."""
        return _named(*self._places, self._here)

    def start(self, row: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> Start:
        """Return the row's first prompt."""
        prompt = row[self.prompt_field]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Start(messages=[*system, *asked], tools=tools or [], task=row)

    async def score(
        self, row: dict[str, Any], seed: int, messages: list[dict[str, Any]], action: Action
    ) -> Score:
        """Return the score of `messages`, whose last one is the turn `action`; 0 without a reward
        function. If the function raises, or returns no number, the error is raised, so that the
        trajectory fails. Cancelling this ends the function's process."""
        if self.reward is None:
            return Score(reward=0.0, success=False)
        text = messages[-1]["content"]
        if self.reward == MATH:
            right = {"answer": row[self.answer_field]}
            said = action.answer.encode("utf-8", "replace").decode()
            try:
                value = await _workers.call(MATH, JUDGE_S, text=said, row=right)
            except _workers.FunctionTooSlow:  # caused by the policy's text, such as 9**9**9
                value = 0.0
            return Score(reward=value)
        offered = {"text": text, "row": row, "messages": messages}
        if "episode" in self._takes:
            offered["episode"] = self._episode(row, seed, messages, action.truncated)
        given = {name: offered[name] for name in self._takes}
        if inspect.iscoroutinefunction(self._function):
            value = await self._function(**given)
        else:
            value = await _workers.call(self.reward, **given)
        return score_of(value, self.reward)

    def _episode(
        self, row: dict[str, Any], seed: int, messages: list[dict[str, Any]], truncated: bool
    ) -> Episode:
        """Return the episode as scorers of `reward=` get it, but with "" for the names of
        trajectory and domain, and plain messages. Only the agent loop knows names and the
        template's text."""
        asked = len(self.start(row).messages)
        prompt = "\n\n".join(message["content"] for message in messages[:asked])
        parts = [Said(m["role"] == "assistant", m["content"]) for m in messages[asked:]]
        return Episode(
            trajectory="",
            domain="",
            seed=seed,
            task=row,
            transcript=[Said(False, prompt), *parts],
            reward=0.0,
            success=False,
            truncated=truncated,
            turns=sum(each.policy for each in parts),
        )


@functools.cache
def _function(spec: str, here: str) -> tuple[Any, tuple[str, ...]]:
    """Return the reward function, and the parameters of `PASSED` that it takes."""
    try:
        found = _workers.load("env.args.reward", spec)
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and spec == MATH:
            from rose.agent.envs import missing

            raise missing("env.args.reward='math'", error.__cause__) from error
        raise
    where, some = f"env.args.reward={spec!r}", f"some of {', '.join(PASSED)}"
    function.check_kind(found, where)
    try:
        own, seen = _parameters(found)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: it shows Python no parameters, as some functions in C don't; call it in a "
            f"function of your own, which takes {some}"
        ) from None
    named = {p.name: p for p in seen if p.kind not in OPEN}
    unknown = [
        p.name for p in own if p.kind not in OPEN and p.name not in PASSED and p.default is p.empty
    ]
    if [p.kind for p in own] == [inspect.Parameter.VAR_POSITIONAL]:
        unknown = [f"*{own[0].name}"]
    if unknown:
        raise ConfigError(f"{where}: it takes {', '.join(unknown)}; a reward function takes {some}")
    if unnamed := [n for n, p in named.items() if n in PASSED and p.kind is p.POSITIONAL_ONLY]:
        raise ConfigError(
            f"{where}: it takes {', '.join(unnamed)} only by position (before a /), and a reward "
            "function is called with names; remove the /"
        )
    if any(p.kind is p.VAR_KEYWORD for p in seen):
        return found, PASSED
    return found, tuple(name for name in PASSED if name in named)


def _parameters(found: Any) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return a function's own parameters, and those that its caller can set. They differ for a
    decorator with *args or **kwargs: its caller can set those of the wrapped function, some of
    which the decorator may set itself. Raises `TypeError` or `ValueError` if Python sees none."""
    own = list(inspect.signature(found, follow_wrapped=False).parameters.values())
    if any(p.kind in OPEN for p in own):
        return own, list(inspect.signature(found).parameters.values())
    return own, own


@functools.cache
def _named(field: str, places: tuple[str, ...], here: str) -> dict[int, str]:
    """Map each row's id() to its name, which has the row's number and file."""
    return {
        id(row): f"row {number} of {place}"
        for key, place in zip(KEYS, places, strict=False)
        for number, row in enumerate(_rows(key, place, field, here), 1)
    }


@functools.cache
def _rows(key: str, place: str, field: str, here: str) -> list[dict[str, Any]]:
    """Read and check a file's rows. Raises `ConfigError`."""
    path, _, split = (place, "", "") if os.path.exists(place) else place.partition("#")
    try:
        rows = _read(key, Path(path), split)
    except ConfigError:
        raise
    except Exception as error:  # any error of a reader on a damaged file
        raise ConfigError(f"{key}={place!r}: can't be read: {error}") from error
    if not rows:
        raise ConfigError(f"{key}={place!r}: no rows there")
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict) and (wrong := _wrong_roles(row.get(field))):
            raise ConfigError(f"env.args.prompt_field={field!r}: row {number} of {place} {wrong}")
        if not isinstance(row, dict) or not _is_prompt(row.get(field)):
            raise ConfigError(
                f"env.args.prompt_field={field!r}: row {number} of {place} has no text there, nor "
                f"a list of messages with role and content; {_instead(row, field)}"
            )
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:  # dates or bytes, from parquet and datasets
            raise ConfigError(
                f"{key}={place!r}: row {number} can't be given to a reward function as JSON "
                f"({error}); leave such columns out, or write them as texts"
            ) from None
    return rows


def _wrong_roles(prompt: Any) -> str:
    """Return what is wrong with the roles of a prompt that is a list of messages, else ""."""
    if not isinstance(prompt, list) or not _is_prompt(prompt):
        return ""
    roles = [message["role"] for message in prompt]
    if unknown := [role for role in roles if role not in ROLES]:
        return f"has the role {unknown[0]!r}; roles are {', '.join(ROLES)}"
    if roles[-1] == "assistant":
        return (
            "ends with the assistant's answer, as rows for supervised training do: the policy "
            "would see it; leave that message out (its text may be env.args.answer_field)"
        )
    if "system" in roles[1:]:
        return "has a system message that is not its first; chat templates take one, at the start"
    return ""


def _instead(row: Any, field: str) -> str:
    """Return, for an error, what a row has instead of a prompt."""
    if not isinstance(row, dict):
        return f"it is {row!r:.80}"
    if isinstance(row.get(field), list) and row[field]:
        at, message = next((n, m) for n, m in enumerate(row[field]) if not _is_message(m))
        return f"message {at + 1} there is {message!r:.200}, whose content must be text"
    return f"it has {', '.join(row)}"


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str) and "role" in value


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_message, value))
    return isinstance(value, str) and bool(value.strip())


def _read(key: str, path: Path, split: str) -> list[Any]:
    """Read the rows of a file or folder, by its suffix."""
    place = f"{key}={str(path)!r}"
    if not path.exists():
        raise ConfigError(f"{place}: no such file or folder: {path.absolute()}; give {FORMATS}")
    inputs.verify(path)
    try:
        if path.is_dir():
            return _saved(place, path, split)
        if is_lfs_pointer(path):
            raise ConfigError(f"{place}: {LFS_ADVICE}")
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
    except ModuleNotFoundError as error:
        from rose.agent.envs import missing

        raise missing(place, error) from error
    if path.suffix == ".json":
        whole = user_text(path)
        try:
            rows = json.loads(whole)
        except ValueError as error:
            raise ConfigError(
                f"{place}: it is no JSON ({error}); a file with a row on each line is named .jsonl"
            ) from None
        if not isinstance(rows, list):
            raise ConfigError(f"{place}: must be a list of rows, and is a {type(rows).__name__}")
        return rows
    if path.suffix != ".jsonl":
        raise ConfigError(f"{place}: must be {FORMATS}")
    try:
        return json_lines(path)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _saved(place: str, path: Path, split: str) -> list[Any]:
    """Read a folder that the package datasets saved."""
    import datasets

    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ConfigError(f"{place}: write {path}#SPLIT, one of {', '.join(found)}")
        found = found[split]
    return found.to_list()


@functools.cache
def _split(place: str, field: str, share: float, here: str) -> tuple[list, list]:
    """Return (training, held-out) rows. Only a row's prompt decides its side, so equal prompts are
    on one side, and rows that are added or reordered don't move others."""
    sides: tuple[list, list] = ([], [])
    for row in _rows(KEYS[0], place, field, here):
        digest = hashlib.sha256(json.dumps(row[field], sort_keys=True).encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < share * 2**64].append(row)
    if not all(sides):
        raise ConfigError(
            f"env.args.held_out={share!r}: of {len(sides[0]) + len(sides[1])} rows of {place}, "
            f"{len(sides[1])} are held out; both sides need some"
        )
    return sides


@functools.cache  # cached, because each trajectory builds an environment
def _check_answers(key: str, place: str, field: str, prompt_field: str, here: str) -> None:
    """Raise `ConfigError` for a row without an answer that `math` can compare."""
    for number, row in enumerate(_rows(key, place, prompt_field, here), 1):
        value = row.get(field)
        empty = isinstance(value, str) and not value.strip() or value != value  # NaN
        if isinstance(value, str | int | float) and not empty:
            continue
        what = f"has no answer there; it has {', '.join(row)}"
        if value is not None and not empty:
            what = (
                f"has a {type(value).__name__} there, {value!r:.80}; env.args.reward=math compares "
                "with a text or a number: write the answer as one, or give a reward function"
            )
        raise ConfigError(f"env.args.answer_field={field!r}: row {number} of {place} {what}")


@functools.cache
def _check_system(key: str, place: str, field: str, here: str) -> None:
    """Raise `ConfigError` for a row with a system message besides env.args.system."""
    for number, row in enumerate(_rows(key, place, field, here), 1):
        if isinstance(row[field], list) and row[field][0]["role"] == "system":
            raise ConfigError(
                f"env.args.system: row {number} of {place} has a system message of its own, and "
                "chat templates take one; leave env.args.system out, or that message"
            )


@functools.cache
def _in_both(data: str, held_out: str, field: str, here: str) -> str:
    """Return a warning if held-out prompts are also training prompts, else ""."""
    trained, other = (
        [json.dumps(row[field], sort_keys=True) for row in _rows(key, place, field, here)]
        for key, place in zip(KEYS, (data, held_out), strict=True)
    )
    known = set(trained)
    both = sum(prompt in known for prompt in other)
    words = (
        f"env.args.held_out={held_out!r}: {both} of its {len(other)} prompts are in env.args.data, "
        "too, so evaluation measures what was trained"
    )
    return words if both else ""
