"""Real memory: what is given back leaves the resident size, what is kept keeps its bytes."""

import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch

from rose.memory import PAGE, release_pages, resident_bytes

MiB = 2**20


def test_memory_of_others_is_given_back_by_whole_pages():
    tensor = torch.full((4 * MiB,), 5, dtype=torch.uint8)
    inner = tensor[100:-100]
    dropped = release_pages([(inner.data_ptr(), inner.numel())])
    assert 4 * MiB - 2 * PAGE - 200 <= dropped < 4 * MiB
    assert (tensor[:100] == 5).all() and (tensor[-100:] == 5).all()
    assert int(tensor.count_nonzero()) == 4 * MiB - dropped


def test_memory_mapped_from_a_file_is_left_alone(tmp_path):
    (tmp_path / "weights").write_bytes(bytes([9]) * MiB)
    with open(tmp_path / "weights", "r+b") as file:
        private = mmap.mmap(file.fileno(), MiB, flags=mmap.MAP_PRIVATE)
    values = np.frombuffer(private, np.uint8)
    values[:] = 1
    assert release_pages([(values.ctypes.data, MiB)]) == 0 and (values == 1).all()


def test_the_resident_size_of_an_ended_process_is_an_error():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert resident_bytes(child.pid) > 0
    child.communicate(b"\n")
    with pytest.raises(OSError):
        resident_bytes(child.pid)
