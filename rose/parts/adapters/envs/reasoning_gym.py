"""Tasks of reasoning-gym: more than a hundred families of questions, generated and scored by rules.

Worker processes do this, because some tasks take seconds, and scorers parse the policy's text. The
reward is the library's score. A text that its scorer can't read is a wrong answer. Not supported:
`composite` (`tasks` has weights instead), and a difficulty that follows the rewards.
Package: reasoning-gym (Stojanovski et al., 2025, arXiv:2505.24760).
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

from reasoning_gym.factory import CURRICULA, DATASETS
from reasoning_gym.utils import extract_answer

from rose.agent.envs import _workers
from rose.agent.envs.base import Action, Start, Step
from rose.config import ConfigError

EXCEPT = ("composite",)
OURS = ("size", "seed")  # arguments of all tasks that ROSE sets
SEEDS = 2**31 - 1  # mask for seeds, since numpy, which some tasks use, takes no larger ones
JUDGE_S = 60.0  # most seconds to score; the slowest task needs 10 for a usual text
SYSTEM = (
    "Think step by step. Then give the final answer, and nothing else, between <answer> and "
    "</answer>."
)


class ReasoningGym:
    """Each episode asks one question of one of `tasks`. An entry of `tasks` is a name, or {task:
    NAME, weight: 1.0, level: null, and the task's own arguments}. `all` stands for every task.
    `level` is a level of the task's curriculum, 0 the easiest, or [lowest, highest] to draw from.

    The reward is the library's score, 0 to 1. Success begins at 0.99. Raises `ConfigError`.
    """

    requires_tool = False

    def __init__(
        self, tasks: Sequence[str | dict[str, Any]] = ("chain_sum",), system: str | None = SYSTEM
    ):
        if not tasks:
            raise ConfigError(
                f"env.args.tasks={tasks!r}: a list of names, or of {{task: NAME, weight: 1.0}}"
            )
        self.tasks = [
            _task(number, entry)
            for number, entry in enumerate(tasks)
            for entry in (sorted(set(DATASETS) - set(EXCEPT)) if entry == "all" else [entry])
        ]
        self.system = system
        self._drawn: tuple[str, dict, int] | None = None

    async def reset(self, seed: int) -> Start:
        rng = random.Random(seed)
        (chosen,) = rng.choices(self.tasks, [task["weight"] for task in self.tasks])
        level = chosen["level"] and rng.randint(*chosen["level"])
        of_level = {} if level is None else _arguments_of_level(chosen["task"], level)
        arguments = of_level | chosen["arguments"]
        self._drawn = chosen["task"], arguments, seed & SEEDS  # the mask keeps parity
        name, arguments, seed = self._drawn
        question = await _workers.call(f"{__name__}:ask", name=name, arguments=arguments, seed=seed)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return Start(messages=[*messages, {"role": "user", "content": question}])

    async def step(self, action: Action) -> Step:
        name, arguments, seed = self._drawn
        text = action.answer.encode("utf-8", "replace").decode()
        try:
            score = await _workers.call(
                f"{__name__}:score", JUDGE_S, name=name, arguments=arguments, seed=seed, text=text
            )
        except _workers.FunctionTooSlow:
            score = 0.0
        return Step(observation=f"Score {score:g}.", reward=score, done=True, success=score >= 0.99)

    async def close(self) -> None:
        """Do nothing: an episode holds no resources."""


def ask(name: str, arguments: dict[str, Any], seed: int) -> str:
    """Return the question of this seed."""
    return _entry(name, json.dumps(arguments), seed)[1]["question"]


def score(name: str, arguments: dict[str, Any], seed: int, text: str) -> float:
    """Return the score, 0 to 1, of the text in the last <answer>; 0 without one."""
    dataset, entry = _entry(name, json.dumps(arguments), seed)
    answer = extract_answer(text)
    if answer is None:
        return 0.0
    try:
        return min(1.0, max(0.0, float(dataset.score_answer(answer, entry))))
    except Exception:  # any error, as some scorers parse numbers of texts that have none
        return 0.0


@functools.lru_cache(64)
def _entry(name: str, arguments: str, seed: int) -> tuple[Any, dict]:
    """Return a data set of one question, and the question. `arguments` is a JSON object."""
    cls, config = DATASETS[name]
    dataset = cls(config(seed=seed, size=1, **json.loads(arguments)))
    return dataset, dataset[0]


def _task(number: int, entry: Any) -> dict[str, Any]:
    """Check an entry of `tasks` and return it as {task, weight, level, arguments}."""
    key = f"env.args.tasks[{number}]"
    entry = {"task": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or "task" not in entry:
        raise ConfigError(f"{key}={entry!r}: a name, or {{task: NAME, weight: 1.0, level: 0}}")
    name, rest = entry["task"], {k: v for k, v in entry.items() if k != "task"}
    if name not in DATASETS or name in EXCEPT:
        raise ConfigError(
            f"{key}={name!r}: no such task; there are {', '.join(sorted({*DATASETS} - {*EXCEPT}))}"
        )
    weight, level = rest.pop("weight", 1.0), rest.pop("level", None)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ConfigError(f"{key}.weight={weight!r}: a number above 0")
    levels = [level, level] if type(level) is int else level
    if levels is not None:
        _check_level(f"{key}.level={level!r}", name, levels)
    _check_arguments(key, name, rest)
    return {"task": name, "weight": weight, "level": levels, "arguments": rest}


def _check_level(where: str, name: str, levels: Any) -> None:
    if name not in CURRICULA:
        raise ConfigError(f"{where}: {name} has no levels; give its own arguments")
    most = max(len(a.levels) for a in CURRICULA[name]().attributes.values()) - 1
    whole = isinstance(levels, list) and [type(n) for n in levels] == [int, int]
    if not whole or not 0 <= levels[0] <= levels[1] <= most:
        raise ConfigError(f"{where}: {name} has the levels 0 to {most}; one, or [lowest, highest]")


def _check_arguments(key: str, name: str, arguments: dict[str, Any]) -> None:
    config = DATASETS[name][1]
    known = [field for field in config.__dataclass_fields__ if field not in OURS]
    for argument, value in arguments.items():
        if argument not in known:
            raise ConfigError(
                f"{key}.{argument}={value!r}: {name} takes {', '.join(known) or 'no arguments'}"
            )
    try:
        getattr(config(**arguments), "validate", bool)()
    except Exception as error:  # AssertionError or any other, from the task's own check
        raise ConfigError(f"{key}={arguments!r}: {name} refuses them: {error!r}") from None


@functools.lru_cache(256)
def _arguments_of_level(name: str, level: int) -> dict[str, Any]:
    """Return the arguments of a level that differ from the task's defaults. An attribute with fewer
    levels gets its highest level."""
    curriculum = CURRICULA[name]()
    curriculum.set_global_level(level)
    made, usual = (vars(c) for c in (curriculum.generate_configuration(), DATASETS[name][1]()))
    return {f: value for f, value in made.items() if f not in OURS and value != usual.get(f)}
