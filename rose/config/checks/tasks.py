"""Checks of environments, evaluation, sandboxes and rewards."""

from __future__ import annotations

import os
import re

from rose.config.checks.need import MOST_AT_ONCE, Need
from rose.config.errors import ConfigError
from rose.config.rollout import Eval
from rose.config.tree import Config

SCORING_SPARE_S = 20.0  # part of reward.deadline_s to start workers and to detect hung workers


def check(c: Config, need: Need) -> None:
    _check_env(c, need)
    _check_eval(c, need)
    _check_sandbox(c, need)
    _check_reward(c, need)


def _check_env(c: Config, need: Need) -> None:
    """Check each environment of a mixture, and that there is at least one."""
    need(
        len(c.env.members) > 0,
        "env.members",
        "a mixture needs members: env=games has some, and one more, here "
        "called more, is +env@env.members.more=reasoning +env.members.more.weight=1",
    )
    for name, member in c.env.members.items():
        key = c.env.key_of(name)
        need(
            key == "env" or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None,
            key,
            f"letters, digits, _ and - only in a member's name, which is {name!r}",
        )
        need(
            member.max_new_tokens < c.model.max_context,
            f"{key}.max_new_tokens",
            f"one turn must fit into model.max_context={c.model.max_context}",
        )


def _check_eval(c: Config, need: Need) -> None:
    """Check that sets don't have names of trained environments, and that evaluations run between
    steps if an option needs them."""
    e = c.eval
    for name, one in e.sets.items():
        key = f"eval.sets.{name}"
        need(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None,
            f"{key}.name",
            f"letters, digits, _ and - only in a set's name, which is {name!r}",
        )
        need(
            name not in c.env.members,
            f"{key}.name",
            f"env has a member {name} already: another name for the set",
        )
        need(
            one.max_new_tokens < c.model.max_context,
            f"{key}.max_new_tokens",
            f"one turn must fit into model.max_context={c.model.max_context}",
        )
    _check_samples(e, need)
    need(
        not e.keep_best or e.every > 0 or c.mode != "train",
        "eval.every",
        "above 0: eval.keep_best=true compares evaluations between steps",
    )
    need(
        e.stop.patience == 0 or e.every > 0,
        "eval.every",
        f"above 0: eval.stop.patience={e.stop.patience} counts evaluations between steps",
    )
    need(
        not (e.stop.patience or e.keep_best) or e.episodes > 0 or bool(e.sets),
        "eval.episodes",
        "above 0, or an eval.sets: eval.stop and eval.keep_best go by held-out tasks",
    )


def _check_samples(e: Eval, need: Need) -> None:
    """Check the number of samples of each task, and their temperature."""
    for name in ("", *e.sets):
        samples, temperature = e.of(name)
        key, tasks = (f"eval.sets.{name}", e.sets[name].episodes) if name else ("eval", e.episodes)
        need(
            samples * tasks <= MOST_AT_ONCE,
            f"{key}.episodes",
            f"with {samples} samples of each at most {MOST_AT_ONCE // samples}",
        )
        own = f".sets.{name}" if name and e.sets[name].temperature is not None else ""
        need(
            samples == 1 or temperature > 0,
            f"eval{own}.temperature",
            f"above 0, as {samples} greedy samples of a task would all be the same",
        )


def _check_sandbox(c: Config, need: Need) -> None:
    """Check that the folders for checkpoints are absolute paths."""
    for key in ("store", "local"):
        folder = getattr(c.sandbox, key)
        need(folder is None or os.path.isabs(folder), f"sandbox.{key}", "a path from the root")


def _check_reward(c: Config, need: Need) -> None:
    """Check the workers and deadlines of the reward ranks."""
    r = c.reward
    need(
        r.min_workers <= r.max_workers,
        "reward.min_workers",
        f"must not be more than reward.max_workers={r.max_workers}",
    )
    need(
        r.deadline_s >= 2 * r.timeout_s + SCORING_SPARE_S,
        "reward.deadline_s",
        f"at least twice reward.timeout_s={r.timeout_s:g} and {SCORING_SPARE_S:g} s: a score is "
        "tried twice, by workers that must start",
    )
    if r.max_jobs:
        need(
            r.pools > 0 and c.rollout.replay is None,
            "reward.max_jobs",
            "0: with reward=environment, or rollout.replay, there is nothing for them to compute",
        )
        need(
            c.cluster.kind == "slurm" or c.mode != "train",
            "reward.max_jobs",
            "they are submitted to Slurm: cluster=slurm; on this machine raise reward.max_workers="
            f"{r.max_workers} instead",
        )
    for key, member in c.environments.values():
        unscored = member.name in ("prompts", "mcp") and member.args.get("reward", "") is None
        if unscored and not r.pools:
            raise ConfigError(
                f"{key}.args.reward=null: then reward= must say what an answer is "
                "worth, as reward=function; with reward=environment nothing scores the answers"
            )
