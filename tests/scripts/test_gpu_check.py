"""The GPU check of the page pool, against a libcuda whose memory is the host's: it passes, and finds what is wrong."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from rose.coserving.vmm import CudaDriver, PagePool
from tests.coserving.cuda_rules import build_libcuda

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_check  # noqa: E402

MiB = 2**20


class HostPool(PagePool):
    """The fake device's memory is the host's, so its tensor is one of the CPU."""

    def tensor(self):
        self.map([(0, self.page)])
        return torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.address), dtype=torch.int8)


@pytest.fixture
def device(tmp_path):
    """(pool of 32 MiB, free bytes of the device)."""
    path = build_libcuda(tmp_path, pages=64)
    library = ctypes.CDLL(path)
    return HostPool(CudaDriver(0, path), 32 * MiB), lambda: 2**30 - library.live_pages() * 2 * MiB


def test_the_pool_passes_and_its_times_are_told(device):
    assert gpu_check.page_pool(*device).startswith("map 16 MiB ")


def test_memory_that_does_not_come_back_is_found(device, monkeypatch):
    pool, free = device
    monkeypatch.setattr(type(pool), "release", lambda self, ranges: None)
    with pytest.raises(RuntimeError, match="release half of it: took 0 bytes of the device instead of -8388608"):
        gpu_check.page_pool(pool, free)


def test_pages_that_are_not_zeros_are_found(device, monkeypatch):
    pool, free = device
    monkeypatch.setattr(CudaDriver, "zero", lambda self, address, nbytes: ctypes.memset(address, 1, nbytes))
    with pytest.raises(RuntimeError, match="fresh pages are not zeros"):
        gpu_check.page_pool(pool, free)
