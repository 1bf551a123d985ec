"""Rows of metrics.jsonl for steps and evaluations, with the names that the report reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rose.config import Config, Mixture
from rose.coordinator.groups import Rollouts
from rose.coordinator.turns import TurnHub
from rose.observe import held_out
from rose.protocol import Trajectory
from rose.trainer.algorithms.base import differ

MOST_TASKS = 128  # tasks whose successes a step's row counts one by one
MOST_HELD_OUT = 1024  # tasks whose successes an evaluation's row counts one by one
MOST_VALUES = 64  # different rewards, or numbers of turns, that a row counts one by one


def step_row(
    groups: list[list[Trajectory]],
    trained: dict[str, float],
    times: dict[str, float],
    hub: TurnHub,
    rollouts: Rollouts,
    at: float,
) -> dict[str, Any]:
    """Return the values of one training step that ended at `at`.

    `times` has the seconds of each phase. `trained` has the trainer's values, which are added.
    Rates are tokens per second of the rollout phase or, where rollouts run while the trainer
    trains, of the time up to the step's last token. `time_idle` is the part of the rollout phase in
    which an engine, on average, had no turn; `time_rollout` is the remaining part.

    `staleness` of a token is the number of versions between the weights that generated it and the
    weights that it trained. `group_staleness_max` counts from the version at which a group was
    admitted; batching policies bound it.
    """
    stale = _staleness([t for group in groups for t in group], trained_on=hub.weights.version - 1)
    generating_s = hub.counts.token_at - hub.counts.began_at
    rollout_s = max(times["rollout"] + times["idle"], generating_s, 1e-9)
    tokens = {name: w.tokens for name, w in hub.workers.items()}
    made = hub.workers.step_tokens
    borrowed = hub.workers.past["borrowed"]
    borrowed += sum(w.tokens for _, w in hub.workers.of("borrowed"))
    return {
        "kind": "step",
        **{f"time_{phase}": value for phase, value in times.items()},
        "time_step": sum(times.values()),
        **_outcomes(groups),
        "failed_trajectories": rollouts.groups.failed,
        "failed_tasks": rollouts.groups.given_up,
        **asdict(rollouts.counts),
        "tokens_per_s": made / rollout_s,
        "borrowed_workers": len(hub.workers.of("borrowed")),
        "borrowed_token_share": borrowed / made if made else 0.0,
        **{f"tokens_per_s/{name}": n / rollout_s for name, n in tokens.items()},
        "engine_utilisation": hub.workers.busy_s(at) / max(sum(times.values()), 1e-9),
        "staleness_mean": float(stale.mean()),
        "staleness_max": int(stale.max()),
        "group_staleness_max": rollouts.staleness_max,
        "version": hub.weights.version,
        "sync_bytes": hub.weights.sync_bytes,
        "sync_pause_s": hub.weights.sync_pause_s,
        "migrations": hub.ledger.migrations,
        "returned_turns": hub.counts.returned,
        "engine_restarts": hub.workers.restarts,
        "resumed_snapshots": hub.counts.resumed_snapshots,
        "resumed_turns": hub.log.resumed_turns,
        "resumed_tokens": hub.log.resumed_tokens,
        **hub.decoding.row(),
        **trained,
    }


def _outcomes(groups: list[list[Trajectory]]) -> dict[str, Any]:
    """Return the values about a step's trajectories, whenever these were generated."""
    all_of = [t for group in groups for t in group]
    lengths = np.array([t.response_tokens for t in all_of])
    return {
        "reward_mean": float(np.mean([t.reward for t in all_of])),
        "success": float(np.mean([t.success for t in all_of])),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": int(lengths.max()),
        "turns_mean": float(np.mean([t.turns for t in all_of])),
        "branches_mean": float(np.mean([1 + len(t.branches) for t in all_of])),
        "invalid_calls": sum(t.invalid_calls for t in all_of),
        "truncated": sum(t.truncated for t in all_of),
        "truncated_by_turns": sum(t.limit == "turns" for t in all_of),
        "groups_equal": float(np.mean([not differ([t.reward for t in g]) for g in groups])),
        "response_hist": _histogram(lengths),
        "reward_values": value_counts([t.reward for t in all_of]),
        "turn_values": value_counts([t.turns for t in all_of]),
        **_by_task("task_successes", all_of, MOST_TASKS),
    }


def reward_row(
    groups: list[list[Trajectory]], times: dict[str, float], failures: int
) -> dict[str, Any]:
    """Return the times of scoring in a step whose rewards a pool computed.

    `failures` is the number of episodes without a score since the step before. `time_reward_wait`
    is the part of the rollout phase in which only scores were missing, in seconds.
    """
    scored = [t for group in groups for t in group if "reward_wait_s" in t.stats]
    if not scored:
        return {}
    last_episode_ended = max(t.finished - t.stats["reward_wait_s"] for t in scored)
    return {
        "time_reward_wait": min(
            max(0.0, max(t.finished for t in scored) - last_episode_ended),
            times["rollout"] + times["idle"],
        ),
        "reward_wait_s_mean": float(np.mean([t.stats["reward_wait_s"] for t in scored])),
        "reward_wait_s_max": max(t.stats["reward_wait_s"] for t in scored),
        "reward_queue_s_mean": _mean("reward_queue_s", scored),
        "reward_score_s_mean": _mean("reward_score_s", scored),
        "reward_timeouts": sum(t.stats.get("reward_timed_out", 0.0) > 0 for t in scored),
        "reward_failures": failures,
        "reward_by_jobs": _mean("reward_by_job", scored),
    }


def _mean(name: str, trajectories: list[Trajectory]) -> float:
    """Return the mean of a statistic, which counts as 0 where it is missing. An environment of the
    user's may report only some of the statistics under ROSE's names."""
    return float(np.mean([t.stats.get(name, 0.0) for t in trajectories]))


def checkpoint_row(groups: list[list[Trajectory]]) -> dict[str, Any]:
    """Return the costs of the checkpoints of a step's sandboxes: numbers of turns by the sort of
    capture, mean milliseconds of the agent's time per turn, and bytes."""
    kept = [t.stats for group in groups for t in group if "checkpoint_seconds" in t.stats]
    if not kept:
        return {}
    sums = {
        name: sum(stats.get(f"checkpoint_{name}", 0.0) for stats in kept)
        for name in ("none", "files", "process", "skipped", "seconds", "raw_bytes", "bytes")
    }
    turns = sums["none"] + sums["files"] + sums["process"] + sums["skipped"]
    milliseconds = 1e3 * sums.pop("seconds") / max(1, turns)
    row = {f"checkpoint_{name}": value for name, value in sums.items()}
    return row | {"checkpoint_ms_mean": milliseconds}


def evaluation(groups: list[list[Trajectory]], config: Config, step: int) -> dict[str, Any]:
    """Return the row of an evaluation that began with the weights of `step`; a group is a task.

    The row has values of the run's own environments together (if they have no tasks, of all
    eval.sets), then of each member of a mixture and of each set. `eval_versions_later` is the
    number of versions by which the weights of the newest token are newer than `step`.
    """
    own = [group for group in groups if group[0].domain in config.env.members] or groups
    domains = [*(config.env.members if isinstance(config.env, Mixture) else ()), *config.eval.sets]
    stale = _staleness([t for group in groups for t in group], trained_on=step)
    return (
        evaluation_row(own)
        | evaluation_by_domain(domains, groups)
        | {"eval_versions_later": max(0, -int(stale.min()))}
        | _by_task("eval_task_successes", [t for g in groups for t in g], MOST_HELD_OUT)
    )


def evaluation_row(groups: list[list[Trajectory]]) -> dict[str, Any]:
    """Return means over all samples of all tasks and, where tasks have several samples, pass@k over
    the tasks with at least k samples."""
    trajectories = [t for group in groups for t in group]
    successes = sum(t.success for t in trajectories)
    most = max(map(len, groups))
    correct = [(len(group), sum(t.success for t in group)) for group in groups]
    return {
        "kind": "eval",
        "eval_n": len(trajectories),
        "eval_successes": successes,
        "eval_success": successes / len(trajectories),
        "eval_reward": float(np.mean([t.reward for t in trajectories])),
        "eval_turns": float(np.mean([t.turns for t in trajectories])),
        "eval_invalid_calls": sum(t.invalid_calls for t in trajectories),
        **({"eval_tasks": len(groups)} if most > 1 else {}),
        **{
            f"eval_pass_at_{k}": float(
                np.mean([held_out.pass_at_k(n, c, k) for n, c in correct if n >= k])
            )
            for k in held_out.sample_counts(most)
        },
    }


def by_member(members: Iterable[str], trajectories: list[Trajectory]) -> dict[str, Any]:
    """Return a step's values for each member of a mixture, as `success/<member>`. A member without
    trajectories in the step has only `trajectories/<member>`."""
    row: dict[str, Any] = {}
    for name in members:
        own = [t for t in trajectories if t.domain == name]
        row[f"trajectories/{name}"] = len(own)
        if own:
            row |= {
                f"success/{name}": float(np.mean([t.success for t in own])),
                f"reward_mean/{name}": float(np.mean([t.reward for t in own])),
                f"turns_mean/{name}": float(np.mean([t.turns for t in own])),
                f"response_tokens_mean/{name}": float(np.mean([t.response_tokens for t in own])),
                f"invalid_calls/{name}": sum(t.invalid_calls for t in own),
                f"truncated/{name}": sum(t.truncated for t in own),
            }
    return row


def _by_task(
    key: str, trajectories: list[Trajectory], most: int
) -> dict[str, dict[str, list[int]]]:
    """Return {key: task -> [times solved, times tried]}. It is empty if the environments name no
    tasks, or more than `most` of them."""
    found: dict[str, list[int]] = {}
    for t in trajectories:
        if t.task:
            counts = found.setdefault(f"{t.domain}: {t.task}", [0, 0])
            counts[0] += t.success
            counts[1] += 1
    return {key: found} if 0 < len(found) <= most else {}


def value_counts(values: Sequence[float]) -> list[list[float]]:
    """Return [value, count] pairs in ascending order. More than `MOST_VALUES` different values are
    counted in that many equal parts of their range, each with its middle as the value."""
    found, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    if len(found) > MOST_VALUES:
        counts, edges = np.histogram(values, MOST_VALUES)
        found = (edges[:-1] + edges[1:]) / 2
    return [[float(v), int(n)] for v, n in zip(found, counts, strict=True) if n]


def evaluation_by_domain(domains: Iterable[str], groups: list[list[Trajectory]]) -> dict[str, Any]:
    """Return the values of `evaluation_row` for each member of a mixture and each set that has
    held-out tasks, as `eval_success/<member>`."""
    return {
        f"{key}/{name}": value
        for name in domains
        if (own := [group for group in groups if group[0].domain == name])
        for key, value in evaluation_row(own).items()
        if key != "kind"
    }


def _staleness(trajectories: list[Trajectory], trained_on: int) -> np.ndarray:
    """Return the staleness of each token that the policy generated, (T,) int; [0] if none."""
    samples = [sample for t in trajectories for sample in t.samples()]
    versions = np.concatenate([np.frombuffer(s.versions, "<i4") for s in samples])
    made = versions[versions >= 0]
    return trained_on - made if made.size else np.zeros(1, int)


def _histogram(lengths: np.ndarray) -> list[list[int]]:
    """Return [upper edge, count] pairs. Each edge is a quarter above the last, so that differences
    are visible between short responses as well as between long ones."""
    edges = [8]
    while edges[-1] < lengths.max():
        edges.append(int(edges[-1] * 1.25) + 1)
    # An integer length falls below its edge + 0.5, so each bin includes its upper edge.
    counts, _ = np.histogram(lengths, bins=[-1, *(edge + 0.5 for edge in edges)])
    return [[edge, int(n)] for edge, n in zip(edges, counts, strict=False)]
