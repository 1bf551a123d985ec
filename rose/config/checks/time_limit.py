"""Check of a Slurm job's time limit against the warning before it."""

from __future__ import annotations

import math
import os
import re

from rose.config.cluster import Slurm
from rose.config.tree import Config

# Least seconds between a job's start and Slurm's warning. With less, no attempt reaches its first
# step, and the job is requeued without progress.
START_S = 60
# Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, and days before these.
FORM = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
NO_LIMIT = ("UNLIMITED", "INFINITE", "-1")


def seconds(time: str | int) -> int | None:
    """Return a time limit in seconds, rounded up to whole minutes as Slurm does. Return None for
    UNLIMITED, and for a text that isn't in one of Slurm's forms."""
    match = FORM.fullmatch(str(time).strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is None and match[4] is None:  # minutes, or minutes:seconds
        whole = 60 * first + second
    else:
        whole = 86400 * days + 3600 * first + 60 * second + third
    return -(-whole // 60) * 60


def known(time: str | int) -> bool:
    """True for a time limit that sbatch accepts."""
    return seconds(time) is not None or str(time).strip().upper() in NO_LIMIT


def too_short(c: Config, warning_s: int, default: str = "") -> str:
    """Return an error about the first time limit that is too short; "" if there is none. Slurm
    warns the job `warning_s` before the limit, and at least `START_S` must pass before the warning.
    `default`: SBATCH_TIMELIMIT, which Slurm uses if the job's script names no limit."""
    found = limits(c.cluster.slurm) or ([("SBATCH_TIMELIMIT", default)] if default else [])
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


def job_s(slurm: Slurm) -> float:
    """Return a job's time limit in seconds. It is in the configuration or in SBATCH_TIMELIMIT;
    otherwise Slurm (23.02 or later) reports it inside the job. Infinite if it is unknown."""
    names = [limit for _, limit in limits(slurm)] or [os.environ.get("SBATCH_TIMELIMIT", "")]
    if found := [allowed for name in names if (allowed := seconds(name))]:
        return min(found)
    begin, end = (os.environ.get(f"SLURM_JOB_{name}_TIME") for name in ("START", "END"))
    return float(end) - float(begin) if begin and end else math.inf


def limits(slurm: Slurm) -> list[tuple[str, str | int]]:
    """Return (key, value) of each component's time limit. An option in `sbatch` replaces `time`."""
    found = []
    for name in ("trainer", "rollout"):
        component = getattr(slurm, name)
        named = [(f"cluster.slurm.{name}.time", component.time)] if component.time else []
        for index, option in enumerate(component.sbatch):
            name_of_option, _, value = option.partition("=")
            if name_of_option == "--time":
                named.append((f"cluster.slurm.{name}.sbatch.{index}=--time", value))
        found += named[-1:]
    return found
