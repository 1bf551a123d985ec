"""Engines on MIG slices: which GPU a slice belongs to.

vLLM 0.32 asks NVML about GPUs by their index. For a slice (CUDA_VISIBLE_DEVICES=MIG-...) it takes
what NVML calls its index, which counts the slices within their GPU, for the index of a GPU: the
engine then ends at its start for a GPU that isn't there, or goes by another one. Left out: what a
slice has of its GPU, which vLLM asks CUDA.
"""

from __future__ import annotations


def find_gpus_of_slices(platform: type, nvml) -> None:
    """Mend `platform`, vLLM's for CUDA by NVML; `nvml`: its module pynvml. May be called any number
    of times."""
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
