"""A Slurm job's time limit, beside the warning before it."""

from __future__ import annotations

import re

from rose.config.tree import Config

# Seconds from a job's start to its first step, at least: without them an attempt is warned before
# it can do anything, and so is each one after it.
START_S = 60
# Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, and days before these.
FORM = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def seconds(time: str | int) -> int | None:
    """Return a time limit in seconds, in whole minutes, to which Slurm rounds up; None where it is
    none of Slurm's forms, which sbatch refuses, or no limit (UNLIMITED)."""
    match = FORM.fullmatch(str(time).strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is None and match[4] is None:  # minutes, or minutes:seconds
        whole = 60 * first + second
    else:
        whole = 86400 * days + 3600 * first + 60 * second + third
    return -(-whole // 60) * 60


def too_short(c: Config, warning_s: int, default: str = "") -> str:
    """Return which time limit of the run's job leaves no time between a start and the warning that
    comes `warning_s` before it, and what would be right; "" if none does. `default`:
    SBATCH_TIMELIMIT, which counts where the job's script names no limit."""
    found = limits(c) or ([("SBATCH_TIMELIMIT", default)] if default else [])
    for source, limit in found:
        allowed = seconds(limit)
        if allowed and allowed < warning_s + START_S:
            return (
                f"{source}={limit!r}: Slurm warns the job {warning_s} s before this limit of "
                f"{allowed} s (cluster.slurm.warning_s={c.cluster.slurm.warning_s}), and a "
                f"start takes {START_S} s or more, so that no step could be trained; at least "
                f"{-(-(warning_s + START_S) // 60)} minutes, or a smaller "
                "cluster.slurm.warning_s"
            )
    return ""


def limits(c: Config) -> list[tuple[str, str | int]]:
    """Return the key and the value of each time limit that the job's script names: of each
    component the last one, since an option in `sbatch` replaces `time`."""
    found = []
    for name in ("trainer", "rollout"):
        component = getattr(c.cluster.slurm, name)
        named = [(f"cluster.slurm.{name}.time", component.time)] if component.time else []
        for at, option in enumerate(component.sbatch):
            word, _, value = option.partition("=")
            if word == "--time":
                named.append((f"cluster.slurm.{name}.sbatch.{at}=--time", value))
        found += named[-1:]
    return found
