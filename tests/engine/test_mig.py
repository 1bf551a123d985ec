"""An engine on a MIG slice finds its GPU, by vLLM's own class on a stand-in for NVML."""

import sys
import types

import pytest

from rose.engine import plugin


class Nvml:
    """GPUs 0 and 1; the only slice of GPU 1 is the one with index 0 within it, that of GPU 0 has
    the index 3."""

    open = 0
    nvmlDeviceGetIndex = {"GPU-0": 0, "GPU-1": 1, "MIG-a": 0, "MIG-b": 3}.get
    nvmlDeviceGetHandleByIndex = {0: "GPU-0", 1: "GPU-1"}.get
    nvmlDeviceGetCudaComputeCapability = {"GPU-0": (8, 0), "GPU-1": (9, 0)}.get
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle = {"MIG-a": "GPU-1", "MIG-b": "GPU-0"}.get

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.open
        return uuid


@pytest.fixture
def platform(monkeypatch):
    """vLLM's for CUDA by NVML, where no GPU is: its compiled operators are left out."""
    import vllm.platforms

    monkeypatch.delenv(plugin.FOLDER, raising=False)
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("operators"))
    import vllm.platforms.cuda as module

    monkeypatch.setattr(module, "pynvml", Nvml())
    own = type("Own", (module.NvmlCudaPlatform,), {})  # what is mended here is this test's only
    monkeypatch.setattr(module, "NvmlCudaPlatform", own)
    monkeypatch.setattr(vllm.platforms, "_current_platform", own())
    own.get_device_capability.cache_clear()
    yield own
    own.get_device_capability.cache_clear()
    assert module.pynvml.open == 0, "NVML is closed as often as it was opened"


@pytest.mark.parametrize(
    ("name", "index", "capability"),
    [("MIG-a", 1, (9, 0)), ("MIG-b", 0, (8, 0)), ("GPU-1", 1, (9, 0)), ("1", 1, (9, 0))],
)
def test_a_slice_is_asked_about_by_its_gpus_index(platform, monkeypatch, name, index, capability):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    plugin.register()
    plugin.register()  # vLLM calls it more than once
    assert platform.device_id_to_physical_device_id(0) == index
    assert tuple(platform.get_device_capability()) == capability
