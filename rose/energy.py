"""The energy counters of this process's GPUs, read through NVML."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any


def counters() -> dict[str, float]:
    """Map the UUID of each GPU that this process may use to the joules that it has used since the
    driver was loaded. GPUs without a counter (older than Volta, MIG slices) are left out. Without
    NVML or GPUs the result is empty."""
    found = {}
    for uuid, device in _devices().items():
        nvml = _nvml()
        try:
            millijoules = nvml.nvmlDeviceGetTotalEnergyConsumption(device)
            found[uuid] = millijoules / 1000
        except nvml.NVMLError:
            continue
    return found


@cache
def _nvml() -> ModuleType | None:
    """Return pynvml, initialized; None when it isn't installed or no driver is loaded. An
    environment with vLLM always has pynvml, because vLLM depends on it."""
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
    """Map UUIDs to NVML handles, for the GPUs that CUDA_VISIBLE_DEVICES lists by index or UUID. If
    the variable is unset, for all GPUs of the machine."""
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
