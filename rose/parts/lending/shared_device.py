"""Extend vLLM in engines that share a device (a hook of rose/extensions.py)."""

from __future__ import annotations

import multiprocessing
from typing import Any

from rose.parts.lending.config import Lending
from rose.parts.lending.operator import metrics
from rose.parts.lending.vllm import device
from rose.processes import die_with_parent

WORKER = "rose.parts.lending.vllm.worker_extension.LentWorker"


def engine_args(gpus: bool, tensor_parallel: int) -> dict[str, Any]:
    """Return vLLM's arguments of a rollout engine on a shared device. Sleep mode lets
    `Engine.deactivate` release the weights of a GPU."""
    lending, own = device.here().serving.lending, {"worker_extension_cls": WORKER}
    return own | {"enable_sleep_mode": True} | graphs(lending, tensor_parallel) if gpus else own


def graphs(lending: Lending, tensor_parallel: int) -> dict[str, Any]:
    """Return vLLM's argument for the CUDA graphs of a rollout engine. Between two attentions, a
    step can only stop where a graph ends. One with tensor parallelism has no stops."""
    stops = lending.stops == "layer" and tensor_parallel == 1
    return {"compilation_config": {"cudagraph_mode": "PIECEWISE"}} if stops else {}


def register() -> None:
    """Give ROSE's schedulers the engine core around them, to call its workers and to wake its loop,
    and the engine's own /metrics the boards. A scheduler of another class is left alone. A second
    call changes nothing."""
    from vllm.v1.engine.core import EngineCoreProc

    metrics.register_if_serving()
    parent = multiprocessing.parent_process()
    if parent is not None:
        # vLLM's engine process would wait for ever for an API server that was killed.
        die_with_parent(parent.pid)
    original = EngineCoreProc.run_busy_loop
    if getattr(original, "attaches", False):
        return

    def run_busy_loop(self):
        if hasattr(self.scheduler, "attach"):
            self.scheduler.attach(self)
        return original(self)

    def rose_set_inactive(self, inactive):
        """Called by `Engine`: see `RolloutScheduler.set_inactive`. Ignored by other schedulers."""
        if hasattr(self.scheduler, "set_inactive"):
            self.scheduler.set_inactive(inactive)

    run_busy_loop.attaches = True
    EngineCoreProc.run_busy_loop = run_busy_loop
    EngineCoreProc.rose_set_inactive = rose_set_inactive
