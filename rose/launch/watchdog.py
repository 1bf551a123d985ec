"""What torch's NCCL watchdog is told in a trainer rank with a GPU.

One rule, of trainer.step_timeout_s: for half of it the other ranks wait for one before the launcher
names that one and ends the attempt (rose/trainer/watch.py); so long the watchdog's own thread may
hang in the driver; all of it is a collective's deadline (rose/trainer/deepspeed_engine.py), after
which the watchdog ends the process by SIGABRT. Either way the run is requeued, and what each rank's
last collectives were is beside the logs, for `torch.distributed.flight_recorder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

COLLECTIVES = "2000"  # that are remembered: some hundred bytes each


def variables(step_timeout_s: float, logs: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Those that the environment, which cluster.env is part of, does not give otherwise."""
    ours = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # end the process; aborting NCCL first may hang
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, int(step_timeout_s / 2))),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": COLLECTIVES,
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-"),  # and the trainer's index
    }
    return {name: value for name, value in ours.items() if name not in environment}
