"""srun's command line for the doctor's short jobs."""

from __future__ import annotations

import math

from rose.config import Component, Config
from rose.doctor.finding import DEADLINE_S, IMPORT_S

# heterogeneous jobs are started by the backfill scheduler alone, every 30 s where nobody changed
# that
QUEUE_S = 40
GPUS_S = IMPORT_S + DEADLINE_S  # for torch to be read from a busy file system, and then to compute
CPUS_PER_GPU = 2  # a process per GPU imports torch, and NCCL has a thread beside it


def srun(*options: str, queue_s: int = QUEUE_S, work_s: float = 60.0) -> list[str]:
    """A job of `work_s` seconds at most, in whole minutes; ends unless it starts in `queue_s`."""
    return ["srun", f"--immediate={queue_s}", f"--time={math.ceil(work_s / 60)}", *options]


def task(c: Config, component: Component, gpus: int = 1) -> list[str]:
    """Options for one task on a node of this component; with GPUs only if the run has some."""
    options = {n: getattr(component, n) for n in ("partition", "account", "qos", "constraint")}
    named = [f"--{name}={value}" for name, value in options.items() if value is not None]
    with_gpus = [f"--gpus-per-node={gpus}"] if c.cluster.gpus else []
    return ["--nodes=1", "--ntasks=1", *named, *with_gpus]


def gpu_task(c: Config, component: Component, gpus: int) -> list[str]:
    """The same for one that computes on `gpus` of the node's: with CPUs for them, and the memory
    that ranks have, but for all of a node's ("0"), which a node with other jobs hasn't."""
    memory = [f"--mem={component.mem}"] if component.mem not in (None, "0") else []
    return [*task(c, component, gpus), f"--cpus-per-task={CPUS_PER_GPU * gpus}", *memory]
