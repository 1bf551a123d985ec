"""srun's command line for the doctor's short jobs."""

from __future__ import annotations

from rose.config import Component, Config

QUEUE_S = 40  # heterogeneous jobs are started by the backfill scheduler alone, every 30 s where nobody changed that


def srun(*options: str, queue_s: int = QUEUE_S) -> list[str]:
    """Its own job, of a minute at most; ends if it doesn't start within `queue_s`."""
    return ["srun", f"--immediate={queue_s}", "--time=1", *options]


def task(c: Config, component: Component, gpus: int = 1) -> list[str]:
    """Options for one task on a node of this component; with GPUs only if the run has some."""
    named = {name: getattr(component, name) for name in ("partition", "account", "qos", "constraint")}
    return ["--nodes=1", "--ntasks=1", *(f"--{name}={value}" for name, value in named.items() if value is not None),
            *([f"--gpus-per-node={gpus}"] if c.cluster.gpus else [])]
