"""The energy counters of this process's GPUs, by NVML; nothing where there are none."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any


def counters() -> dict[str, float]:
    """UUID of each GPU that this process may use -> joules since its driver was loaded. One that
    doesn't tell (older than Volta, a MIG slice) is left out."""
    found = {}
    for uuid, device in _devices().items():
        nvml = _nvml()
        try:
            found[uuid] = nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000  # of millijoules
        except nvml.NVMLError:
            continue
    return found


@cache
def _nvml() -> ModuleType | None:
    """vLLM's package brings it; None without it, or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@cache
def _devices() -> dict[str, Any]:
    """Those that CUDA_VISIBLE_DEVICES lists, by index or UUID; all if it is unset."""
    nvml = _nvml()
    if nvml is None:
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = range(nvml.nvmlDeviceGetCount()) if listed is None else filter(None, listed.split(","))
    found = {}
    for name in map(str, names):
        try:
            device = (
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(name)
            )
            found[str(nvml.nvmlDeviceGetUUID(device))] = device
        except nvml.NVMLError:
            continue
    return found
