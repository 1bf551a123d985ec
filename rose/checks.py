"""All checks of a run that are made before anything is started or written.

Left out: checks of keys that need neither policies nor files (rose/config/checks), and pairs of
features that exclude each other (rose/launch/exclusions.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rose import extensions, policies
from rose.agent import envs, rows, tool_formats
from rose.config import Config, ConfigError
from rose.coordinator import replay
from rose.engine import arguments
from rose.launch import doubts, exclusions, gpus, model, plan, resume, slurm
from rose.memory import host_bytes
from rose.trainer import algorithms, compilers


def check(tree: dict) -> plan.Plan:
    """Check a composed configuration and plan the run; start nothing. Raises `ConfigError`."""
    c = exclusions.from_dict(tree)
    envs.check(c.env, c.eval.sets)
    tool_formats.check_names(c.model.tool_format, c.model.reasoning_format)
    tracked = {"wandb.project": c.observe.wandb.project, "mlflow.uri": c.observe.mlflow.uri}
    for key, value in tracked.items():
        if value:
            needed("trackers", "trackers", f"observe.{key}={value!r}").check(c.observe)
    c = with_whole_paths(c)
    scheduler = policies.build(c.scheduler, c.rollout.turn_timeout_s)
    check_domains(c)
    algorithm = algorithms.build(c.algorithm.name, c.algorithm.args)
    if exclusions.ASKS_FOR_JOBS.used(exclusions.Run(c, None)):
        name = c.scheduler.provisioning.name
        needed("commands", "lending", f"scheduler.provisioning.name={name!r}")
    if c.hybrids:
        needed("hybrid_devices", "hybrid", f"rollout.hybrid={c.hybrids}")
    if c.reward.pools:
        _scorers(c).build(c.reward.name, c.reward.args)
    if c.rollout.replay is not None:
        replay.check(Path(c.rollout.replay), c)
    if getattr(algorithm, "needs_turn_rewards", False):
        check_turn_rewards(c)
    arguments.check(c)
    compilers.check(c)
    check_forks(c, getattr(algorithm, "trains_segments", False))
    if c.trainer.router_replay and c.rollout.replay is None:
        refuse_programs(c, "keeps no experts of what it is answered: trainer.router_replay=false")
    found = doubts.of(c, scheduler.staleness, algorithm.corrects_mismatch)
    found += doubts.unclipped(c, algorithm.recompute_proximal)
    found += envs.doubts(c.env, bool(c.eval.episodes))
    found += doubts.simulated(c)
    made = plan.make(c, model.shape(c), found, host_gib(c))
    stored = c.run_dir / "config.json"
    if not c.cluster.dry_run:
        if c.cluster.kind == "slurm":
            slurm.check_programs()
        else:
            gpus.for_launcher(c)
    try:
        if not c.fresh and os.path.exists(stored):
            resume.check(stored, made.config)
        elif not c.fresh:
            resume.check_whole(c.run_dir)
    except ConfigError as error:
        if not c.cluster.dry_run:
            raise
        return replace(made, warnings=(*made.warnings, f"this will be refused: {error}"))
    return made


def host_gib(c: Config) -> float | None:
    """Return the host memory in GiB that the run may use; None if it runs on another machine."""
    if c.cluster.dry_run or c.cluster.kind != "local":
        return None
    return host_bytes() / 2**30


def with_whole_paths(c: Config) -> Config:
    """Make the paths of files that ranks read absolute, with symbolic links resolved. Ranks in a
    container may start in another folder, and the container mounts the resolved path."""
    reward = c.reward
    if reward.pools:
        reward = msgspec.structs.replace(reward, args=_scorers(c).whole_paths(reward.args))
    replayed, token = (
        path and str(Path(path).resolve())
        for path in (c.rollout.replay, c.transfer.relay_token_file)
    )
    return msgspec.structs.replace(
        c,
        env=envs.with_whole_paths(c.env),
        eval=msgspec.structs.replace(
            c.eval, sets={name: envs.with_whole_paths(one) for name, one in c.eval.sets.items()}
        ),
        rollout=msgspec.structs.replace(c.rollout, replay=replayed),
        transfer=msgspec.structs.replace(c.transfer, relay_token_file=token),
        reward=reward,
    )


def _scorers(c: Config) -> Any:
    """Return the module `scorers` of the part `rewards`."""
    return needed("scorers", "rewards", f"reward.name={c.reward.name!r}")


def needed(module: str, part: str, key: str) -> Any:
    """Return a part's module, which the run needs because of `key` (KEY=VALUE). Raises
    `ConfigError` if the part is missing."""
    if (found := extensions.modules(module).get(part)) is None:
        raise ConfigError(f"{key}: {extensions.missing(f'rose.parts.{part}')}")
    return found


def check_formats(c: Config) -> None:
    """Raise `ConfigError` for a chat template that can't render trajectories, and for a tool or
    reasoning format that isn't the model's. A model that ROSE makes, with both formats `auto`, has
    ROSE's own template and needs no check."""
    auto = (c.model.tool_format, c.model.reasoning_format) == (tool_formats.AUTO, tool_formats.AUTO)
    if c.model.source in ("folder", "hub") or not auto:
        from rose.agent.chat import ChatFormat  # imports transformers
        from rose.models import resolve

        problem = ChatFormat.of(resolve(c.model), c.model).tools_problem
        made = (
            {key: envs.build(member) for key, member in c.environments.values()} if problem else {}
        )
        if played := [key for key, env in made.items() if env.requires_tool]:
            raise ConfigError(f"{problem}, which {', '.join(played)} has; take another model")


def check_rows(c: Config, say: Callable[[str], None]) -> None:
    """Raise `ConfigError` for a data file in which too many rows don't fit the model's context.
    `say` receives progress and the rows that don't fit. A replay reads no data file."""
    here = c.model.source in ("folder", "hub") or c.cluster.kind == "local"
    if here and c.rollout.replay is None and rows.known(c):
        from rose.agent.chat import ChatFormat  # imports transformers
        from rose.models import resolve

        rows.check(c, ChatFormat.of(resolve(c.model), c.model), say)


def check_domains(c: Config) -> None:
    """Raise `ConfigError` if `scheduler.routing` assigns hardware to a domain that the run doesn't
    have. The hardware's name can't be checked: workers report theirs only when they join."""
    routing = c.scheduler.routing
    for domain, hardware in routing.args["hardware"].items() if routing.name == "rollart" else ():
        if domain not in c.environments:
            raise ConfigError(
                f"scheduler.routing.args.hardware.{domain}={hardware!r}: no such domain in this "
                f"run; its environments are {', '.join(c.environments)}"
            )


def check_forks(c: Config, needed: bool) -> None:
    """Raise `ConfigError` if trajectories are to fork and can't, or if the algorithm compares forks
    (`needed`) and trajectories don't fork."""
    branching, size = c.rollout.branch, c.rollout.group_size
    if c.rollout.replay is not None:
        return
    if needed and not branching.ways:
        raise ConfigError(
            f"algorithm.name={c.algorithm.name!r}: compares trajectories that fork off each other: "
            "rollout/branch=tree; without forks it is algorithm=grpo"
        )
    if needed and size == branching.leaves:
        raise ConfigError(
            f"rollout.branch.ways={branching.ways}: with rollout.group_size={size} a group is one "
            f"tree, whose turns before the fork algorithm.name={c.algorithm.name} could compare "
            "with nothing; a larger group, or fewer ways"
        )
    if branching.ways:
        refuse_programs(c, "can't be copied: rollout/branch=none")


def refuse_programs(c: Config, why: str) -> None:
    """Raise `ConfigError` if an agent of the run is a separate program. `why` completes the
    sentence "an agent whose program ..."."""
    for name, member in c.env.members.items():
        if envs.is_program(member):
            key = f"{c.env.key_of(name)}.name={member.name!r}"
            raise ConfigError(f"{key}: an agent of its own, whose program {why}")


def check_turn_rewards(c: Config) -> None:
    """Raise `ConfigError` if trajectories lack the rewards per turn that the algorithm needs."""
    needs = f"which algorithm.name={c.algorithm.name} needs"
    if c.rollout.replay is not None:
        try:
            replay.check_turn_rewards(Path(c.rollout.replay), needs)
        except ValueError as error:  # a damaged file
            raise ConfigError(str(error)) from None
        return
    for name, member in c.env.members.items():
        if not envs.rewards_turns(member):
            raise ConfigError(
                f"{c.env.key_of(name)}.name={member.name!r}: gives no rewards of turns, {needs}; "
                "frozen_lake, minigrid and calculator do with args.shaping above 0, and "
                "environments with rewards_turns = True; or algorithm=grpo"
            )
    if not c.reward.environment_weight:
        raise ConfigError(
            f"reward.name={c.reward.name!r}: replaces the environment's rewards, and with them "
            f"those of turns, {needs}; reward=environment, or reward=sum with a part "
            "{name: environment}"
        )
