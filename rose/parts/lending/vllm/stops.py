"""The stops of a rollout engine's step: before the attention of each layer, and before the logits,
the step waits while the online engine's flag is up (rose/parts/lending/flag.py).

vLLM splits the compiled model at each attention, a custom op. With CUDA graphs of the pieces
(cudagraph_mode=PIECEWISE), Python runs between them. So stops need no other op and no change to the
code that vLLM compiles. On a GPU only the stream waits. Meanwhile the thread submits the next
pieces of the step, and the other process has the device. On a CPU the computing thread waits.

A rollout engine with tensor parallelism has no stops. When the flag is raised, its ranks would stop
at different layers. A rank that got further would spin in a collective operation and keep the
device from the online engine.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from rose.parts.lending.config import Lending
from rose.parts.lending.flag import MAY_GO, Flag
from rose.parts.lending.vllm import device
from rose.parts.lending.vllm.vmm import CudaDriver, CudaError

# Most seconds of a stop on a CPU, should the scheduler not end it (lending.patience_s).
DEADLINE_S = 20.0

Stop = Callable[[], None]


def parts(vllm_config: Any, lending: Lending) -> int:
    """Return the number of parts of a step between which it can be stopped."""
    if lending.stops == "step" or vllm_config.parallel_config.world_size > 1:
        return 1
    return vllm_config.model_config.get_num_layers(vllm_config.parallel_config) + 1


def stop_steps(worker: Any) -> None:
    """Add the stops to the model of vLLM's `worker`, in an engine that shares its device. Call it
    before CUDA graphs are captured. Steps don't stop until there is a scheduler. Raises
    `ValueError` for a GPU that can't wait for the flag."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    here = device.here()
    if parts(worker.vllm_config, here.serving.lending) == 1:
        return
    flag = Flag(here.folder)
    flag.ignored = True
    stop = on_gpu(flag, worker.device) if worker.device.type == "cuda" else on_cpu(flag)
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        # Other layers, such as experts, are inside the pieces that CUDA graphs capture.
        if isinstance(layer, AttentionLayerBase):
            latent = hasattr(layer, "forward_impl")
            _stop_before(*((layer, "forward_impl") if latent else (layer.impl, "forward")), stop)
    _stop_before(worker.get_model(), "compute_logits", stop)


def on_gpu(flag: Flag, gpu: Any, driver: CudaDriver | None = None) -> Stop:
    """Return a function that stops the CUDA stream which is current when it is called. Tries it
    once. Raises `ValueError` if the GPU can't do it."""
    import torch

    driver, index = driver or CudaDriver(gpu.index or 0), gpu.index or 0
    current = torch._C._cuda_getCurrentRawStream

    def stop() -> None:
        driver.wait(current(index), word, MAY_GO)

    try:
        word = driver.lock(flag.address, mmap.PAGESIZE)
        stop()
    except CudaError as error:
        raise ValueError(
            f"serving.lending.stops=layer: streams of {gpu} can't wait for a word in host memory "
            f"({error}); set serving.lending.stops=step"
        ) from error
    stop.flag = flag  # type: ignore[attr-defined]  # CUDA locks its page, which must stay mapped.
    return stop


def on_cpu(flag: Flag) -> Stop:
    """Return a function that stops the thread which calls it."""

    def stop() -> None:
        if not flag.may_go:
            flag.wait(DEADLINE_S)

    return stop


def _stop_before(target: Any, name: str, stop: Stop) -> None:
    """Make the method `name` of `target` call `stop` first."""
    original = getattr(target, name)

    def stopping(*args, **kwargs):
        stop()
        return original(*args, **kwargs)

    setattr(target, name, stopping)
