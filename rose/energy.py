"""The energy counters of this process's GPUs, read through NVML."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any


def counters() -> dict[str, float]:
    """Map the UUID of each GPU that this process may use to its joules since the driver was loaded.
    A GPU without a counter (older than Volta, a MIG slice) is left out. The result is empty without
    NVML or GPUs."""
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
    """Return pynvml, initialized, or None when it isn't installed or no driver is loaded. vLLM
    depends on pynvml, so it is there wherever vLLM is."""
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
    """Map UUID to NVML handle of the GPUs that CUDA_VISIBLE_DEVICES lists by index or UUID. All
    GPUs of the machine if the variable is unset."""
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
