"""ROSE's vLLM plugin (entry point group `vllm.general_plugins`): vLLM loads it in every process of
an engine.

It patches vLLM in five ways:
1. vLLM finds the physical GPU of a MIG slice.
2. On a CPU, it asks Linux for AMX, and glibc keeps the memory of one step for the next.
3. It sends tokens in batches of `rollout.stream_interval` tokens (rose/engine/outputs.py).
4. It schedules decoding requests in less time (rose/engine/slots.py).
5. In an engine that shares its device, parts add patches (`shared_device` in rose/extensions.py).
"""

from __future__ import annotations

import gc
import os
from typing import Any

from rose import extensions, heap
from rose.config.checks import NO_DRAFTS

# Names that engines, schedulers and commands agree on. FOLDER is the environment variable with the
# folder through which the engines of a shared device exchange their states.
FOLDER = "ROSE_COSERVING"
# vLLM's stop_reason of a request that our scheduler evicted to free memory or time.
EVICTED = "rose-evicted"


def register() -> None:
    """Patch vLLM in this process; a second call changes nothing. Parts add their patches only if
    `FOLDER` is in the environment."""
    import torch
    from vllm.platforms import current_platform

    # Ask Linux for the AMX tiles (arch_prctl), on a CPU that has them. Without this request, the
    # first attention in bfloat16 kills vLLM 0.32's engine with SIGILL.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    if current_platform.is_cpu():
        heap.keep()
    if current_platform.is_cuda():
        from vllm.platforms.cuda import NvmlCudaPlatform, pynvml

        find_gpus_of_slices(NvmlCudaPlatform, pynvml)
    from rose.engine import described, outputs, slots

    described.listen()
    outputs.install()
    slots.install()
    if FOLDER not in os.environ:
        return
    for part in extensions.modules("shared_device").values():
        part.register()


def end_quickly(core: type) -> None:
    """Make `core`, vLLM's EngineCoreProc, shut down without garbage collections.

    At its end, vLLM runs Python's garbage collector twice over all imported objects, which takes
    more CPU time than the engine's start. The end of the process frees the same memory anyway. Not
    for GPUs, where the order of freeing sleep mode's memory pools depends on these collections."""
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


def refuse_drafts(vllm_config: Any) -> None:
    """Raise `ValueError` for an engine on a CPU that would decode speculatively. Its arguments or
    the model's config.json may ask for that."""
    from vllm.platforms import current_platform

    speculative = vllm_config.speculative_config
    if speculative is not None and current_platform.is_cpu():
        raise ValueError(f"{speculative.method}: {NO_DRAFTS}")


def find_gpus_of_slices(platform: type, nvml) -> None:
    """Make `platform`, vLLM's CUDA platform, map the UUID of a MIG slice to its physical GPU.
    `nvml` is vLLM's pynvml module. A second call changes nothing."""
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
            # NVML counts these calls, so it stays open for earlier nvmlInit calls.
            nvml.nvmlShutdown()

    device_control_id_to_physical_device_id.knows_slices = True
    platform.device_control_id_to_physical_device_id = classmethod(
        device_control_id_to_physical_device_id
    )
    # Modules that were imported earlier may have cached an answer without the patch.
    platform.get_device_capability.cache_clear()
