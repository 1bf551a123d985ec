"""Saves the trajectories that a training step consumes, so that the trainer can run without
rollouts.

Each step's groups are saved as ``rollouts/step-000012.msgpack`` (msgspec, a list of groups, each a
list of `Trajectory`). ``rollout.replay=<run folder>`` trains from such files and starts no rollout.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from rose import config as configuration
from rose.config import Config, ConfigError
from rose.files import write_whole
from rose.protocol import BatchSummary, Trajectory
from rose.trainer import segments

_decoder = msgspec.msgpack.Decoder(list[list[Trajectory]])


def path_of(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "rollouts" / f"step-{step:06d}.msgpack"


def save(run_dir: Path, step: int, groups: list[list[Trajectory]]) -> None:
    """Write the step's groups atomically."""
    path = path_of(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    # Synced, so that it is on disk before the checkpoint that counts the step as done.
    write_whole(path, msgspec.msgpack.encode(groups), sync=True)


def load(run_dir: Path, step: int) -> list[list[Trajectory]]:
    """Return the groups of a step. Raises `ValueError` with the file's name if it is missing or
    holds something else."""
    path = path_of(run_dir, step)
    try:
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"rollout.replay: {path} is missing") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"rollout.replay: {path} holds no trajectories: {error}") from None


def check(run_dir: Path, config: Config) -> None:
    """Raise `ConfigError` unless the run at `run_dir` can be replayed with `config`.

    1. Every step up to trainer.steps must be saved.
    2. The temperature, on which the saved log-probabilities depend, and the sizes of batches and
       groups must be those of the saved run.

    A folder without config.json passes the second check.
    """
    steps = config.trainer.steps
    missing = next(
        (path for step in range(1, steps + 1) if not (path := path_of(run_dir, step)).is_file()),
        None,
    )
    if missing is not None:
        raise ConfigError(
            f"rollout.replay={str(run_dir)!r}: {missing} is missing; give the folder of a run with "
            f"trainer.steps={steps} or more saved steps (observe.save_trajectories=true, "
            "observe.keep_steps=null)"
        )
    stored = Path(run_dir) / "config.json"
    if not stored.is_file():
        return
    tree = configuration.stored(stored)
    for key, now in (
        ("rollout.temperature", config.rollout.temperature),
        ("rollout.group_size", config.rollout.group_size),
        ("trainer.batch_size", config.trainer.batch_size),
    ):
        name, _, last = key.partition(".")
        section = tree.get(name)
        was = section.get(last, now) if isinstance(section, dict) else now
        if was != now:
            raise ConfigError(
                f"{key}={now:g}: the trajectories of rollout.replay={str(run_dir)!r} were made "
                f"with {key}={was}"
            )


def check_turn_rewards(run_dir: Path, needs: str) -> None:
    """Raise `ConfigError` unless the first saved step's trajectories have rewards of turns. `needs`
    is a clause of the error, which names the algorithm that needs them."""
    if not all(
        t.turn_rewards or not t.response_tokens for group in load(run_dir, 1) for t in group
    ):
        raise ConfigError(
            f"rollout.replay={str(run_dir)!r}: its trajectories have no rewards of turns, {needs}; "
            "give the folder of a run whose environment gives them, or another algorithm"
        )


def summarise(groups: list[list[Trajectory]], config: Config) -> BatchSummary:
    """Return the summary of the batch that every trainer rank gets, with a row for each trajectory
    in the order of the groups."""
    rows = [(t, index) for index, group in enumerate(groups) for t in group]
    return BatchSummary(
        rewards=[t.reward for t, _ in rows],
        groups=[g for _, g in rows],
        response_tokens=[t.response_tokens for t, _ in rows],
        truncated=[t.truncated and t.limit != "turns" for t, _ in rows],
        turn_rewards=[t.turn_rewards for t, _ in rows],
        segments=segments.find([t for t, _ in rows]),
        limits=[closest_limit(t, config) for t, _ in rows],
    )


def closest_limit(trajectory: Trajectory, config: Config) -> tuple[int, int]:
    """Return (tokens generated, most tokens allowed) for the limit that is used up furthest. A leaf
    is one path through the trajectory's branches.

    1. All turns together: env.max_turns * env.max_new_tokens.
    2. A leaf's tokens: model.max_context less its prompt and observations.
    3. A leaf's last turn: env.max_new_tokens.
    """
    environments = [env for _, env in config.environments.values()]
    env = config.environments.get(trajectory.domain, (None, environments[0]))[1]
    leaves = trajectory.samples()
    found = [(trajectory.response_tokens, env.max_turns * env.max_new_tokens)]
    for leaf, made in zip(leaves, _made(leaves), strict=True):
        found.append((made, made + config.model.max_context - len(leaf.mask)))
        found += [(tokens, env.max_new_tokens) for _, tokens in leaf.turn_tokens[-1:]]
    return max(found, key=lambda used: used[0] / max(1, used[1]))


def _made(leaves: list[Trajectory]) -> list[int]:
    """Return the number of the policy's tokens in each leaf. Tokens shared with an earlier leaf
    count, too, although only the mask of the earlier leaf marks them."""
    if len(leaves) == 1:
        return [leaves[0].response_tokens]
    known: list[tuple[np.ndarray, np.ndarray]] = []  # tokens, and whether the policy made each
    for leaf in leaves:
        tokens = np.frombuffer(leaf.tokens, np.int32)
        marks = np.frombuffer(leaf.mask, np.uint8).copy()
        for before, made in known:
            shorter = min(len(tokens), len(before))
            differs = np.flatnonzero(tokens[:shorter] != before[:shorter])
            shared = differs[0] if len(differs) else shorter
            marks[:shared] |= made[:shared]
        known.append((tokens, marks))
    return [int(made.sum()) for _, made in known]
