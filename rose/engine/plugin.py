"""vLLM's entry point into ROSE (group `vllm.general_plugins`): loaded in every process of an
engine.

It gives our schedulers what vLLM doesn't: the engine core around them, to reach its workers and to
wake its loop. A scheduler of another class is left alone. It gives vLLM the GPU of a MIG slice. And
on a CPU it does what vLLM leaves to its environment: it asks Linux for AMX, and keeps the memory of
one step for the next.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

from rose import heap
from rose.config.checks import NO_DRAFTS
from rose.engine.drafts import EXTENSION

# Names that engines, schedulers and commands agree on.
FOLDER = "ROSE_COSERVING"  # environment: the folder of a device's boards
CONFIG = "config.json"  # in it: what `rose.lending.vllm.device.Device` reads
STEPS = "ROSE_COSERVING_STEPS"  # environment: a file for an engine's steps, a JSON object a line
EVICTED = "rose-evicted"  # vLLM's stop_reason of a request handed back for want of memory or time


def register() -> None:
    """May be called any number of times in a process. In engines that share no device it only does
    what is for CPUs and for MIG slices."""
    from vllm.platforms import current_platform

    ask_for_amx()
    if current_platform.is_cpu():
        heap.keep()
    if current_platform.is_cuda():
        from vllm.platforms.cuda import NvmlCudaPlatform, pynvml

        find_gpus_of_slices(NvmlCudaPlatform, pynvml)
    if FOLDER not in os.environ:
        return
    from vllm.v1.engine.core import EngineCoreProc

    from rose.processes import die_with_parent

    parent = multiprocessing.parent_process()
    if parent is not None:  # vLLM's engine would wait for ever for an API server that was killed
        die_with_parent(parent.pid)
    original = EngineCoreProc.run_busy_loop
    if getattr(original, "attaches", False):
        return

    def run_busy_loop(self):
        if hasattr(self.scheduler, "attach"):
            self.scheduler.attach(self)
        return original(self)

    def rose_rest(self, resting):
        """A utility for `Engine`: see `RolloutScheduler.rest`; nothing for other schedulers."""
        if hasattr(self.scheduler, "rest"):
            self.scheduler.rest(resting)

    run_busy_loop.attaches = True
    EngineCoreProc.run_busy_loop, EngineCoreProc.rose_rest = run_busy_loop, rose_rest


def end_quickly(core: type) -> None:
    """For vLLM's EngineCoreProc, whose process ends with it, and its memory with the process. vLLM
    has Python's collector look through all that was ever imported before, twice: more CPU time than
    the engine's start. Not for GPUs: the order in which sleep mode's pools go depends on it."""
    original = core.shutdown
    if getattr(original, "quick", False):
        return

    def shutdown(self):
        collect, gc.collect = gc.collect, lambda *_: 0
        try:
            original(self)
        finally:
            gc.collect = collect

    shutdown.quick = True
    core.shutdown = shutdown


def refuse_drafts(vllm_config: Any, mended: tuple[str, ...] = ()) -> None:
    """Raises `ValueError` for an engine on a CPU that would decode speculatively, however it was
    asked to: by its arguments, or by a model's own config.json. Not for the methods of `mended`
    with a worker that mends vLLM's sampling (rose/engine/drafts/rejection.py)."""
    from vllm.platforms import current_platform

    speculative = vllm_config.speculative_config
    if speculative is None or not current_platform.is_cpu():
        return
    mends = mended and vllm_config.parallel_config.worker_extension_cls == EXTENSION
    if not mends or speculative.method not in mended:
        raise ValueError(f"{speculative.method}: {NO_DRAFTS}")


def ask_for_amx() -> None:
    """Linux gives a process the AMX tiles that it asked for (arch_prctl); without, the first
    attention in bfloat16 on a CPU that has them ends vLLM 0.32's engine by SIGILL. Nothing happens
    on other CPUs."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def find_gpus_of_slices(platform: type, nvml) -> None:
    """Mend `platform`, vLLM's for CUDA; `nvml`: its module pynvml. May be called again."""
    original = platform.device_control_id_to_physical_device_id
    if getattr(original, "knows_slices", False):
        return

    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        if not device_id.startswith("MIG-"):
            return original(device_id)
        nvml.nvmlInit()
        try:
            part = nvml.nvmlDeviceGetHandleByUUID(device_id)
            return nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
        finally:
            nvml.nvmlShutdown()  # it counts: NVML stays open for whoever opened it before

    device_control_id_to_physical_device_id.knows_slices = True
    platform.device_control_id_to_physical_device_id = classmethod(
        device_control_id_to_physical_device_id
    )
    platform.get_device_capability.cache_clear()  # what modules asked before this one was loaded
