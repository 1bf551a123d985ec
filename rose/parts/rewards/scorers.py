"""The kinds of reward, a class for each: `reward.name` selects the class, and `reward.args` are its
arguments.

A scorer has `score(episode, limit_s)`, which runs in a reward worker. It returns a `Score` or
raises. If it raises, another worker scores the episode again; if that fails too, the episode is
replaced. A timeout is a score of 0 only where the answer itself is executed (`command`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import urllib.parse
import urllib.request
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import msgspec

from rose import inputs
from rose.config import ConfigError, errors
from rose.files import at_home
from rose.parts.rewards import command
from rose.reward import function
from rose.reward.episode import Episode, Hung, Score, ScoringFailed, score_of

ANSWER_CHARACTERS = 200  # most characters of a judge's answer in an error message


class Scorer(Protocol):
    async def score(self, episode: Episode, limit_s: float) -> Score:
        """Score an episode in `limit_s` seconds. Raises `ScoringFailed`, or any error of a user's
        function."""


@dataclass(frozen=True)
class Environment:
    """The environment's own reward, for use as a part of `sum`."""

    async def score(self, episode: Episode, limit_s: float) -> Score:
        return Score(reward=episode.reward, success=episode.success)


@dataclass(frozen=True)
class Function:
    """A user's function, plain or async: `path` is FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION. It
    is called with an `Episode` and the keyword arguments `args`."""

    path: str
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        call = function.load(self.path, "reward.args.path")
        given = f" with args={self.args}" if self.args else ""
        function.check_call(call, f"reward.args.path={self.path!r}{given}", "episode", **self.args)
        object.__setattr__(self, "call", call)

    async def score(self, episode: Episode, limit_s: float) -> Score:
        plain = not inspect.iscoroutinefunction(self.call)
        try:
            async with asyncio.timeout(limit_s) as limit:
                if plain:
                    value = await asyncio.to_thread(self._result, episode)
                else:
                    value = await self.call(episode, **self.args)
        except TimeoutError:
            if not limit.expired():  # an error of the function itself, as a socket's timeout
                raise
            kind = Hung if plain else ScoringFailed
            raise kind(f"{self.path} gave no score within its limit of {limit_s:g} s") from None
        return score_of(value, self.path)

    def _result(self, episode: Episode) -> Any:
        """Call the function in a thread; if its result is awaitable, await that."""
        return function.result(self.call(episode, **self.args))


@dataclass(frozen=True)
class Command:
    """A program that checks the answer: reward 1 if it exits with code 0, else 0, also after its
    time limit. It runs in a folder with the answer as `answer_file`, and with the task's `files`
    (name -> text)."""

    argv: list[str]
    answer_file: str = "answer.py"
    extract: Annotated[str, msgspec.Meta(pattern="^(code|text)$")] = "code"
    memory_gib: Annotated[float, msgspec.Meta(gt=0)] = 2.0

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigError("reward.args.argv=[]: the program and its arguments are needed")
        name = self.argv[0]
        if "/" in name and not Path(name).is_absolute():
            raise ConfigError(
                f"reward.args.argv={self.argv}: {name} is not in the folder where the program "
                f"starts; give its absolute path ({Path(name).resolve()}), or for a file of the "
                f"task a program that runs it, as [sh, {name}]"
            )
        if command.program(name) is None:
            raise ConfigError(f"reward.args.argv={self.argv}: there is no program {name}")
        if Path(self.answer_file).is_absolute() or ".." in Path(self.answer_file).parts:
            raise ConfigError(
                f"reward.args.answer_file={self.answer_file!r}: must lie in the program's folder"
            )

    async def score(self, episode: Episode, limit_s: float) -> Score:
        answer = episode.response
        files = _files(episode.task.get("files"))
        files[self.answer_file] = command.code_of(answer) if self.extract == "code" else answer
        inputs.verify(*self.argv)  # each time, since each execution reads these files
        try:
            code, _ = await command.run(self.argv, files, limit_s, self.memory_gib)
        except (OSError, ValueError) as error:
            raise ScoringFailed(f"reward.args.argv={self.argv}: {error}") from error
        return Score(reward=float(code == 0), success=code == 0, timed_out=code is None)


def _files(given: Any) -> dict[str, str]:
    """Return a task's `files` (name -> text) without nulls: Parquet gives every row the keys of all
    rows, with null where a row lacks one. Raises `ScoringFailed`."""
    if not isinstance(given, dict | None):
        raise ScoringFailed(
            f"the task's files are a {type(given).__name__}, {given!r:.80}; a map of names to "
            "texts is needed"
        )
    kept = {name: text for name, text in (given or {}).items() if text is not None}
    for name, text in kept.items():
        if not isinstance(text, str):
            raise ScoringFailed(f"the task's file {name!r} is {text!r:.80}; a text is needed")
    return kept


@dataclass(frozen=True)
class Judge:
    """A model behind an OpenAI-compatible server answers with a number, which `pattern` finds. The
    range `low` to `high` is mapped to rewards of 0 to 1.

    In `prompt`, {prompt}, {response}, {transcript} and {task.KEY} are replaced by the episode's
    texts. `url` ends before /chat/completions. `api_key_file`: a file with the server's key.
    """

    url: str
    model: str
    prompt: str
    pattern: str
    low: float
    high: float
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    api_key_file: str | None = None

    PLACES: ClassVar[re.Pattern] = re.compile(r"\{(prompt|response|transcript|task\.\w+)\}")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://\S+", self.url):
            raise ConfigError(
                f"reward.args.url={self.url!r}: must be http://HOST:PORT/v1 or the like"
            )
        if not self.low < self.high < math.inf or math.isinf(self.low):
            raise ConfigError(
                f"reward.args.high={self.high}: must be above reward.args.low={self.low}, both "
                "finite"
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"reward.args.pattern={self.pattern!r}: {error}") from None
        if groups != 1:
            raise ConfigError(
                f"reward.args.pattern={self.pattern!r}: must have one group, the number"
            )
        if self.api_key_file is not None and not Path(self.api_key_file).is_file():
            raise ConfigError(f"reward.args.api_key_file={self.api_key_file!r}: no such file")

    def filled(self, episode: Episode) -> str:
        """Return `prompt` with the episode's texts in place. Raises `ScoringFailed` for a KEY that
        the task lacks."""

        def text(found: re.Match) -> str:
            match found[1].partition("."):
                case ("task", _, key):
                    if key not in episode.task:
                        raise ScoringFailed(
                            f"reward.args.prompt asks for {{task.{key}}}; the environment's task "
                            f"has {', '.join(episode.task) or 'nothing'}"
                        )
                    return str(episode.task[key])
                case ("transcript", *_):
                    return "".join(said.text for said in episode.transcript)
                case (name, *_):
                    return getattr(episode, name)

        return self.PLACES.sub(text, self.prompt)

    async def score(self, episode: Episode, limit_s: float) -> Score:
        answer = await self._ask(self.filled(episode), limit_s)
        numbers = re.findall(self.pattern, answer)
        try:
            number = float(numbers[-1])
            if math.isnan(number):
                raise ValueError("not a number")
        except (IndexError, ValueError):
            raise ScoringFailed(
                f"the judge {self.model} gave no number that reward.args.pattern="
                f"{self.pattern!r} finds: {answer[-ANSWER_CHARACTERS:]!r}"
            ) from None
        bounded = min(max(number, self.low), self.high)
        return Score(reward=(bounded - self.low) / (self.high - self.low))

    async def _ask(self, prompt: str, limit_s: float) -> str:
        """Send a prompt to the judge, and return its answer."""
        import aiohttp

        key = (
            Path(self.api_key_file).read_text(encoding="utf-8").strip() if self.api_key_file else ""
        )
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        where = f"{self.url.rstrip('/')}/chat/completions"
        # A cluster's own servers speak http. The site's proxy is for https, to services outside.
        # aiohttp's option for proxies, trust_env, would also send the password of a ~/.netrc.
        proxy = urllib.request.getproxies().get("https") if where.startswith("https://") else None
        if proxy and urllib.request.proxy_bypass(urllib.parse.urlsplit(where).netloc):
            proxy = None
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s)) as session,
                session.post(
                    where,
                    json=body,
                    headers={"Authorization": f"Bearer {key}"} if key else {},
                    proxy=proxy,
                ) as response,
            ):
                text = await response.text()
                if response.status != 200:
                    raise ScoringFailed(
                        f"the judge at {where} answered {response.status}: "
                        f"{text[:ANSWER_CHARACTERS]}"
                    )
                return json.loads(text)["choices"][0]["message"]["content"] or ""
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise ScoringFailed(f"the judge at {where}: {error!r}") from error


@dataclass(frozen=True)
class Sum:
    """The weighted sum of `parts` (name -> {name, args, weight}). `success` is True if it is True
    of all parts that report one, and None if no part does."""

    parts: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("reward.args.parts={}: at least one part is needed")
        made = {}
        for label, part in self.parts.items():
            key = f"reward.args.parts.{label}"
            unknown = sorted(set(part) - {"name", "args", "weight"})
            arguments = part.get("args", {})
            bad = unknown or part.get("name") in (None, "sum") or not isinstance(arguments, dict)
            if bad:
                others = ", ".join(name for name in KINDS if name != "sum")
                raise ConfigError(
                    f"{key}={part!r}: must be {{name, args, weight}} with a name of {others}"
                )
            weight = part.get("weight", 1.0)
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ConfigError(f"{key}.weight={weight!r}: must be a finite number")
            try:
                made[label] = (build(part["name"], arguments), float(weight))
            except ConfigError as error:
                raise ConfigError(str(error).replace("reward.args", f"{key}.args", 1)) from None
        object.__setattr__(self, "made", made)

    async def score(self, episode: Episode, limit_s: float) -> Score:
        scores = await asyncio.gather(
            *(scorer.score(episode, limit_s) for scorer, _ in self.made.values())
        )
        weights = [weight for _, weight in self.made.values()]
        verdicts = [score.success for score in scores if score.success is not None]
        return Score(
            reward=sum(w * score.reward for w, score in zip(weights, scores, strict=True)),
            success=all(verdicts) if verdicts else None,
            timed_out=any(score.timed_out for score in scores),
        )


KINDS: dict[str, type] = {
    "environment": Environment,
    "function": Function,
    "command": Command,
    "judge": Judge,
    "sum": Sum,
}


def whole_paths(args: Any) -> Any:
    """Return `reward.args` with absolute paths of files, as workers start in other folders. A ~ at
    the start of a path is expanded, since no shell does that within a list or map."""
    if isinstance(args, dict):
        return {key: _whole_path(key, value) for key, value in args.items()}
    return args


def _whole_path(key: str, value: Any) -> Any:
    if key == "path" and isinstance(value, str) and ".py:" in value:
        file, colon, name = value.rpartition(":")
        return f"{at_home(file).resolve()}{colon}{name}"
    if key == "argv" and isinstance(value, list):
        return [os.path.expanduser(each) if isinstance(each, str) else each for each in value]
    if key == "api_key_file" and isinstance(value, str):
        return str(at_home(value).resolve())
    return whole_paths(value)


def build(name: str, args: dict[str, Any]) -> Scorer:
    """Build the scorer of `reward.name` with `reward.args`. Raises `ConfigError`."""
    if name not in KINDS:
        raise ConfigError(f"reward.name={name!r}: no such reward; there are {', '.join(KINDS)}")
    known = [each.name for each in fields(KINDS[name])]
    errors.check_known(args, known, "reward.args", name)
    try:
        return msgspec.convert(args, KINDS[name])
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from None


def _explain(message: str) -> str:
    """Return msgspec's message with the full key. A message of a `__post_init__` has the key
    already."""
    text, found, key = message.partition(" - at `$.")
    if text.startswith("reward."):
        return text
    where = f"reward.args.{key.rstrip('`')}" if found else "reward.args"
    return f"{where}: {text[0].lower()}{text[1:]}"
