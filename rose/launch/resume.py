"""Continue a run under the same name: what may differ from its stored configuration, when it is
finished, and how long it may take to stop.

Left out: reading checkpoints; the roles do that when they start.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rose import config as configuration
from rose import files, inputs, models
from rose.config import Cluster, Config, ConfigError, Slurm
from rose.config.checks import time_limit
from rose.launch import rank_status
from rose.trainer import checkpoint

# Keys that may change when a run continues: they don't alter the trajectories and updates of the
# remaining steps, or the user changes them on purpose.
MAY_CHANGE = (
    "trainer.steps",
    "trainer.ranks",
    "trainer.zero_stage",
    "trainer.threads",
    "trainer.checkpoint_*",
    "trainer.step_timeout_s",
    "trainer.export_*",
    "trainer.stream",
    "observe.*",
    "cluster.*",
    "eval.episodes",
    "eval.every",
    "eval.samples",
    "eval.beside",
    "eval.temperature",
    "eval.keep_best",
    "eval.stop.*",
    "eval.sets",
    "eval.sets.*",
    "fresh",
    "colocate",
    "output_dir",
    "name",  # the run's folder, which a user may have renamed or copied
    "trainer.sequence_parallel",
    "trainer.offload_activations",
    "trainer.hpz",
    "trainer.compile",
    "trainer.kernels",
    "trainer.gradient_checkpointing",
    "transfer.*",
    "serving.*",
    "reward.ranks",
    "reward.*_workers",
    "reward.max_jobs",
    "reward.per_worker",
    "reward.idle_s",
    "reward.deadline_s",
    "rollout.workers",
    "rollout.hybrid",
    "rollout.draft.*",
    "rollout.threads",
    "rollout.environment_hosts",
    "rollout.engine_*",
    "rollout.host_restarts",
    "rollout.turn_timeout_s",
    "rollout.kv_cache_gib",
    "rollout.resume_turns",
    "rollout.gpu_memory_utilization",
    "rollout.stream_interval",
    "sandbox.bytes_per_s",
    "sandbox.keep",
    "sandbox.local",
    "sandbox.memory_mib",
    "env.step_timeout_s",
    "env.trajectory_timeout_s",
    "env.max_failures_in_row",
    "env.max_failed_tasks",
    "env.members.*.step_timeout_s",
    "env.members.*.trajectory_timeout_s",
    "env.members.*.max_failures_in_row",
    "env.members.*.max_failed_tasks",
    "model.shape",
    "model.shape.*",
    "model.snapshot",
    "sim",
    "sim.*",
)
# Largest share of the time to stop that one save may take. Two saves must fit into half of this
# time: one that runs when the stop begins, and that of the last step. On a busy file system both
# may take a quarter longer: 1 / 2 / (2 x 1.25).
SAVE_SHARE = 1 / 5
WARNING_SAVES = 3.0  # durations of the last save by which Slurm must warn before the time limit
# Share of the time to stop that a step under training and its checkpoint may take together. In the
# last third the ranks end.
STEP_SHARE = 2 / 3
KEPT_SHARE = 1 / 6  # least share of the time to stop that is kept for the checkpoint
REQUEUE_S = 20.0  # seconds of Slurm's warning for killing ranks and for the requeue
KILL_WAIT_S = 30.0  # Slurm's default KillWait: seconds from scancel's SIGTERM to its SIGKILL
# A recipe's model is named by the recipe's arguments. Its path depends only on the cache's folder.
RECIPES_MAY_CHANGE = ("model.path",)


def check(stored: Path, new: Config) -> None:
    """Raise `ConfigError` if the run stored at `stored` (its config.json) can't continue with
    `new`."""
    advice = "restore it from a copy, or start over with fresh=true"
    before = _flatten(configuration.stored(stored, advice))
    now = _flatten(configuration.to_dict(new))
    rules = MAY_CHANGE + (RECIPES_MAY_CHANGE if new.model.source in models.RECIPES else ())
    if new.model.source == "folder":
        # A job that has begun has stored the path resolved, a pending job as it was given.
        now["model.path"] = str(models.resolve(new.model).resolve())
        if before.get("model.source") == "folder":
            before["model.path"] = str(Path(str(before["model.path"])).expanduser().resolve())
    changed = [
        key
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _matches(key, rules)
    ]
    if changed:
        lines = "\n".join(f"  {key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed)
        raise ConfigError(
            f"name={new.name!r}: {Path(stored).parent} holds a run with another "
            f"configuration:\n{lines}\n"
            "Keep these values to continue it, set fresh=true to start over, or give another name."
        )
    other_shape(Path(stored).parent, new)
    check_inputs(Path(stored).parent, new.name)


def check_whole(run_dir: Path) -> None:
    """Raise `ConfigError` for a folder that has checkpoints but no configuration of their run,
    since any other configuration would continue them."""
    if checkpoint.latest(run_dir) is not None:
        raise ConfigError(
            f"{run_dir}: has checkpoints and no config.json, so it can't be known whether this "
            "configuration continues them; restore it, set fresh=true to start over, or give "
            "another name"
        )


def not_applied(stored: Path, new: Config) -> list[str]:
    """Return a text with both values for each key that differs between `new` and the run that is
    running. `stored`: the running run's config.json."""
    if not stored.exists():
        return []
    before, now = _flatten(configuration.stored(stored)), _flatten(configuration.to_dict(new))
    own = ("output_dir", "fresh", "model.*", "cluster.dry_run")  # stored in another form than given
    return [
        f"{key}: {before.get(key)!r}, not {value!r}"
        for key, value in sorted(now.items())
        if before.get(key) != value and not _matches(key, own)
    ]


def other_rates(run_dir: Path, c: Config) -> str:
    """Return a text about the learning rate's jump if the run continues with another trainer.steps,
    on which its schedule depends; "" if there is no jump."""
    latest, stored = checkpoint.latest(run_dir), run_dir / "config.json"
    if latest is None or not stored.exists() or c.trainer.optimizer.schedule == "constant":
        return ""
    before = configuration.load(stored, checked=False).trainer
    if before.steps == c.trainer.steps:
        return ""
    from rose.trainer.schedule import learning_rates  # slow, because of torch

    step = checkpoint.step_of(latest)
    last = learning_rates(before)(step * before.updates_per_step - 1)
    now = learning_rates(c.trainer)(step * c.trainer.updates_per_step)
    return (
        f"trainer.steps={c.trainer.steps}, and {before.steps} before: the learning rate of "
        f"trainer.optimizer.schedule={c.trainer.optimizer.schedule} is {last:.3g} at step {step} "
        f"and {now:.3g} at step {step + 1}; a constant schedule has no such jump"
    )


def check_inputs(run_dir: Path, name: str) -> str:
    """Return a text about files named by keys, and installed packages, that changed since the run's
    last attempt; "" if none did. Raises `ConfigError` if a changed file alters the training and a
    step is already saved."""
    every = list(inputs.changed(run_dir))
    files = [f"{key}: {what}" for key, what in every if not _matches(key, MAY_CHANGE)]
    if files and checkpoint.latest(run_dir) is not None:
        lines = "\n".join(f"  {line}" for line in files)
        raise ConfigError(
            f"name={name!r}: {run_dir} holds a run whose steps were trained with other files:\n"
            f"{lines}\nRestore them to continue it, set fresh=true to start over, or give another "
            f"name. To go on with the files as they are now, remove {run_dir / inputs.NAME}."
        )
    words = [f"{key}: {what}" for key, what in every] + inputs.changed_packages(run_dir)
    return f"changed since the last attempt: {'; '.join(words)}" if words else ""


def _matches(key: str, rules: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(key, rule) for rule in rules)


def other_shape(run_dir: Path, c: Config) -> str:
    """Return a text if the number of ranks or the ZeRO stage has changed since the run's last
    checkpoint; "" otherwise. Raises `ConfigError` if the checkpoint can't be loaded with `c`."""
    latest = checkpoint.latest(run_dir)
    if latest is None:
        return ""
    try:
        state = checkpoint.read_trainer(latest, c.trainer)
    except ValueError as error:
        raise ConfigError(f"name={c.name!r}: {error}") from None
    saved = (state["ranks"], state["zero_stage"])
    now = (c.trainer.ranks, c.trainer.zero_stage)
    return "" if saved == now else f"{latest}: {checkpoint.change(saved, now)}"


def last_saved(run_dir: Path) -> str:
    """Return a text on the checkpoint from which the run continues; "" without a checkpoint."""
    latest = checkpoint.latest(run_dir)
    return f"continues after step {checkpoint.step_of(latest)}, {latest}" if latest else ""


def mark_finished(run_dir: Path, steps: int, stopped: Config | None = None) -> None:
    """Record that all `steps` training steps and the last evaluation are done and saved. This is
    the coordinator's last write. `stopped`: the configuration of a run that eval.stop ended before
    trainer.steps."""
    path = _finished_file(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {"steps": steps}
    if stopped is not None:
        done |= {"asked": stopped.trainer.steps, "stop": _stop_rule(stopped)}
    files.write_whole(path, json.dumps(done).encode() + b"\n", sync=True)


def finished_mark(run_dir: Path) -> bytes | None:
    """Return the bytes that `mark_finished` has written; empty if none, None if they can't be read
    now. Two attempts that finish the run write different bytes."""
    try:
        return _finished_file(run_dir).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError:
        return None


def is_finished(run_dir: Path, c: Config) -> bool:
    """True if the run has finished at least trainer.steps, or if the same eval.stop ended it early
    on the way to at least trainer.steps."""
    done = _read_finished(run_dir)
    if done is None:
        return False
    rule = _stop_rule(c)
    stopped = done.get("stop", rule) == rule and done.get("asked", 0) >= c.trainer.steps
    return stopped or done["steps"] >= c.trainer.steps


def finished_steps(run_dir: Path) -> int:
    """Return the number of steps of a finished run; 0 if it has not finished."""
    done = _read_finished(run_dir)
    return done["steps"] if done is not None else 0


def stopped_early(run_dir: Path) -> int | None:
    """Return the step at which eval.stop ended the run; None if it didn't."""
    done = _read_finished(run_dir)
    early = done is not None and done["steps"] < done.get("asked", done["steps"])
    return done["steps"] if early else None


def _stop_rule(c: Config) -> list[float]:
    return [c.eval.stop.patience, c.eval.stop.min_gain]


def _read_finished(run_dir: Path) -> dict[str, Any] | None:
    path = _finished_file(run_dir)
    if not path.exists():
        return None
    advice = "remove it to train on"
    found = configuration.stored(path, advice)
    if not isinstance(found.get("steps"), int):
        raise ConfigError(f"{path}: is damaged (no number of steps); {advice}")
    return found


def requeues_without_checkpoint(run_dir: Path, job: str, restarts: int) -> int:
    """Return the number of times that `job` was requeued since the run's last new checkpoint.
    `restarts` counts all its requeues; status/requeues.json has the count at that checkpoint."""
    path = Path(run_dir) / "status" / "requeues.json"
    latest = checkpoint.latest(run_dir)
    step = checkpoint.step_of(latest) if latest else 0
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        before = int(noted["step"]), str(noted["job"]), int(noted["restarts"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        before = (-1, "", 0) if step else (0, job, 0)
    if before[0] < step:
        before = step, job, restarts
    elif before[1] != job:
        before = before[0], job, 0
    noted = dict(zip(("step", "job", "restarts"), before, strict=True))
    with suppress(OSError):  # a full disk, which must not prevent the requeue
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(noted).encode() + b"\n")
    return restarts - before[2]


def note_save(run_dir: Path, seconds: float) -> None:
    """Record how many seconds the last checkpoint took, from the request until it was on disk."""
    path = Path(run_dir) / "status" / "save.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, json.dumps({"seconds": seconds}).encode() + b"\n")


def last_save_s(run_dir: Path) -> float:
    """Return the seconds that the run's last checkpoint took; 0 before the first."""
    path = Path(run_dir) / "status" / "save.json"
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def stop_s(run_dir: Path, cluster: Cluster) -> float:
    """Return the seconds that a run may take to stop: cluster.stop_timeout_s, or more if one save
    would take more than `SAVE_SHARE` of it."""
    return max(cluster.stop_timeout_s, last_save_s(run_dir) / SAVE_SHARE)


def end_s(run_dir: Path, cluster: Cluster, warned: bool) -> float:
    """Return how many seconds after a signal the remaining processes are killed: `stop_s`, or less
    if Slurm has `warned` the job, which must ask for its requeue before the time limit."""
    limit_s = stop_s(run_dir, cluster)
    if not warned or cluster.slurm is None:
        return limit_s
    warning = warning_s(run_dir, cluster.slurm)
    return min(limit_s, max(warning - REQUEUE_S, warning / 2))


def note_warned(run_dir: Path, attempt: int) -> None:
    """Record that Slurm has warned the job, or that its time limit is near. The coordinator reads
    this when it gets its signal, so call it before."""
    with suppress(OSError):  # a full disk, which must not prevent the signal
        _warned_file(run_dir, attempt).touch()


def is_warned(run_dir: Path, attempt: int) -> bool:
    return _warned_file(run_dir, attempt).exists()


def step_end_s(run_dir: Path, cluster: Cluster, warned: bool) -> float:
    """Return the seconds that a stop may wait for the end of a step under training, so that the
    step is saved. This is the time to stop, less the time for the checkpoint and for ranks to end.
    The time to stop is at most
    1. in a `warned` job: Slurm's warning time, of which the launcher keeps a part (`end_s`);
    2. in any other Slurm job, which was cancelled or preempted: `KILL_WAIT_S`.
    """
    limit_s = stop_s(run_dir, cluster)
    if warned and cluster.slurm is not None:
        limit_s = min(limit_s, warning_s(run_dir, cluster.slurm))
    if not warned and (cluster.slurm is not None or "SLURM_JOB_ID" in os.environ):
        limit_s = min(limit_s, KILL_WAIT_S)
    saving_s = max(KEPT_SHARE * limit_s, 2 * last_save_s(run_dir))
    ends_s = min(STEP_SHARE * limit_s, end_s(run_dir, cluster, warned))
    return max(0.0, ends_s - saving_s)


def save_s(run_dir: Path, cluster: Cluster, waited_s: float) -> float:
    """Return the seconds that saving the last step may take while a run stops, after `waited_s` of
    waiting for the step's end. If Slurm has warned the job, this limit may exceed the launcher's
    (`end_s`). That is harmless, because a save that takes longer than `end_s` is lost anyway."""
    limit_s = stop_s(run_dir, cluster)
    left_s = max(STEP_SHARE * limit_s - waited_s, KEPT_SHARE * limit_s)
    return min(limit_s / 2, left_s)


def warning_s(run_dir: Path, slurm: Slurm) -> int:
    """Return how many seconds before its time limit a job must be warned, to save its last step.
    This is the larger of cluster.slurm.warning_s and `WARNING_SAVES` times the last checkpoint's
    seconds. The latter is at most half of the job's time, so that one slow save can't fill all
    later attempts."""
    saving_s = math.ceil(WARNING_SAVES * last_save_s(run_dir))
    return max(slurm.warning_s, int(min(saving_s, time_limit.job_s(slurm) / 2)))


def move_aside(run_dir: Path) -> Path:
    """Rename a run's folder to <name>.old-<n>, the first n that is free, and return the new
    path."""
    n = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.old-{n}")).exists():
        n += 1
    return run_dir.rename(aside)


def _warned_file(run_dir: Path, attempt: int) -> Path:
    return rank_status.folder(run_dir, attempt) / "warned"


def _finished_file(run_dir: Path) -> Path:
    return Path(run_dir) / "status" / "finished.json"


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        key: value
        for name, branch in tree.items()
        for key, value in _flatten(branch, f"{prefix}.{name}" if prefix else name).items()
    }
