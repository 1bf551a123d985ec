"""Extend vLLM in engines that share a device (a hook of rose/extensions.py)."""

from __future__ import annotations

import multiprocessing
from typing import Any

from rose.config import Rollout
from rose.parts.lending.config import Lending
from rose.parts.lending.operator import metrics
from rose.parts.lending.vllm import device
from rose.processes import die_with_parent

# Tokens of the largest step with CUDA graphs. To launch a larger step takes less time than the GPU
# needs to compute it.
MOST_CAPTURED = 512
WORKER = "rose.parts.lending.vllm.worker_extension.LentWorker"


def engine_args(gpus: bool, rollout: Rollout) -> dict[str, Any]:
    """Return vLLM's arguments of a rollout engine on a shared device. On a GPU,
    `Engine.deactivate` needs sleep mode to release the weights."""
    lending, own = device.here().serving.lending, {"worker_extension_cls": WORKER}
    return own | {"enable_sleep_mode": True} | steps_on_gpu(lending, rollout) if gpus else own


def steps_on_gpu(lending: Lending, rollout: Rollout) -> dict[str, Any]:
    """Return vLLM's arguments for the size and the CUDA graphs of a rollout engine's steps.

    The gate admits at most serving.lending.chunk_tokens, and vLLM reserves memory for the largest
    step. With serving.lending.stops=layer a step waits between layers while the online engine
    computes (rose/parts/lending/vllm/stops.py). It can wait only between CUDA graphs, so each piece
    of the model gets a graph of its own. Engines with tensor parallelism never wait within a step.
    """
    args: dict[str, Any] = {}
    most, own = max(lending.chunk_tokens, rollout.max_sequences), rollout.engine_args
    # Without chunked prefill vLLM needs steps that hold a whole prompt.
    if own.get("enable_chunked_prefill", True):
        args["max_num_batched_tokens"] = most
    if not {"compilation_config", "cudagraph_capture_sizes"} & set(own):
        # By default vLLM captures steps of up to twice max_sequences, which prompts may exceed.
        args["max_cudagraph_capture_size"] = min(most, MOST_CAPTURED)
    if lending.stops == "layer" and rollout.tensor_parallel == 1:
        args["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
    return args


def register() -> None:
    """Patch vLLM in this process; a second call changes nothing. ROSE's schedulers get their engine
    core, so that they can call its workers and wake its loop. Other schedulers are left alone. The
    engine's own /metrics gets the boards' metrics."""
    from vllm.v1.engine.core import EngineCoreProc

    metrics.register_if_serving()
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Otherwise vLLM's engine process waits for ever after its API server was killed.
        die_with_parent(parent.pid)
    original = EngineCoreProc.run_busy_loop
    if getattr(original, "attaches", False):
        return

    def run_busy_loop(self):
        if hasattr(self.scheduler, "attach"):
            self.scheduler.attach(self)
        return original(self)

    def rose_set_inactive(self, inactive):
        """Pass on to `RolloutScheduler.set_inactive`. `Engine` calls this in every engine."""
        if hasattr(self.scheduler, "set_inactive"):
            self.scheduler.set_inactive(inactive)

    run_busy_loop.attaches = True
    EngineCoreProc.run_busy_loop = run_busy_loop
    EngineCoreProc.rose_set_inactive = rose_set_inactive
