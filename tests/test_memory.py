"""Real memory: what is given back leaves the resident size, what is kept keeps its bytes."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.engine.blocks import BlockMemory, Layout
from rose.memory import PAGE, HostPages, release_pages, resident_bytes

MiB = 2**20


def resident(pool: HostPages) -> int:
    """Bytes of the pool in RAM, by mincore."""
    flags = np.zeros(pool.nbytes // PAGE, np.uint8)
    address = ctypes.c_void_p(pool.tensor().data_ptr())
    assert (
        ctypes.CDLL(None).mincore(
            address, ctypes.c_size_t(pool.nbytes), ctypes.c_void_p(flags.ctypes.data)
        )
        == 0
    )
    return int((flags & 1).sum()) * PAGE


@st.composite
def caches(draw) -> Layout:
    """Block-outermost and layer-outermost layouts with odd strides and gaps."""
    blocks = draw(st.integers(2, 24))
    strides = draw(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4))
    starts, at = [], 0
    for stride in strides:
        starts.append(at + draw(st.integers(0, PAGE)))
        at = starts[-1] + stride * blocks
    return Layout(at + draw(st.integers(0, PAGE)), blocks, tuple(starts), tuple(strides))


def spans_of(layout: Layout, block: int) -> list[tuple[int, int]]:
    return [
        (start + block * stride, start + (block + 1) * stride)
        for start, stride in zip(layout.starts, layout.strides, strict=False)
    ]


@settings(max_examples=60, deadline=None)
@given(caches(), st.data())
def test_kept_blocks_keep_their_bytes_and_free_pages_are_not_resident(layout, data):
    pool = HostPages(layout.nbytes)
    memory, values = BlockMemory(pool, layout), pool.tensor().numpy()
    held: set[int] = set()
    pages_mapped = 0
    for _ in range(data.draw(st.integers(1, 6))):
        ids = data.draw(st.sets(st.integers(1, layout.blocks - 1), max_size=layout.blocks))
        if data.draw(st.booleans()):
            pages_mapped += memory.map(ids)
            for block in ids - held:
                for low, high in spans_of(layout, block):
                    values[low:high] = block + 1
            held |= ids
        else:
            pages_mapped -= memory.release(ids)
            held -= ids
        needed = {
            page
            for block in held
            for low, high in spans_of(layout, block)
            for page in range(low // PAGE, -(-high // PAGE))
        }
        assert pages_mapped == memory.mapped_bytes == len(needed) * PAGE
        assert memory.held == len(held)
        # every held byte was written, so its page is resident
        assert resident(pool) == len(needed) * PAGE
        for block in held:
            assert all(
                (values[low:high] == block + 1).all() for low, high in spans_of(layout, block)
            )


def test_released_blocks_leave_the_resident_size_and_come_back_as_zeros():
    layout = Layout(64 * MiB, 64, (0,), (MiB,))
    pool = HostPages(layout.nbytes)
    memory, values = BlockMemory(pool, layout), pool.tensor()
    assert resident(pool) == 0
    memory.map(range(64))
    before = resident_bytes(os.getpid())
    values.fill_(7)
    assert resident(pool) == 64 * MiB
    full = resident_bytes(os.getpid())
    assert full - before > 60 * MiB
    assert memory.release(range(8, 64)) == 56 * MiB
    assert resident(pool) == 8 * MiB
    assert full - resident_bytes(os.getpid()) > 52 * MiB
    assert not values[8 * MiB :].any() and (values[: 8 * MiB] == 7).all()
    memory.map([9])
    values[9 * MiB : 10 * MiB] = 3
    assert (values[9 * MiB : 10 * MiB] == 3).all()


def test_the_pool_is_never_made_of_huge_pages():
    pool = HostPages(8 * MiB)
    pool.tensor().fill_(1)
    low, found = pool.tensor().data_ptr(), ""
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if part and int(part.split("-")[0], 16) <= low < int(part.split("-")[1].split()[0], 16):
            found = part
    assert re.search(r"AnonHugePages:\s+0 kB", found) and re.search(r"VmFlags:.* nh", found)


def test_suspended_memory_is_all_given_back_and_its_blocks_are_those_held_meanwhile():
    layout = Layout(16 * PAGE, 16, (0,), (PAGE,))
    pool = HostPages(layout.nbytes)
    memory = BlockMemory(pool, layout)
    memory.map(range(10))
    pool.tensor().numpy()[: 10 * PAGE] = 1
    memory.suspend()
    assert resident(pool) == 0 and memory.mapped_bytes == 0 and memory.held == 10
    memory.release(range(4, 10))
    memory.map([12])
    memory.resume()
    assert memory.held == 5 and memory.mapped_bytes == 5 * PAGE
    assert not pool.tensor().any()


@pytest.mark.parametrize("ids", [[-1], [16], [0, 99]])
def test_a_block_that_is_none_is_refused(ids):
    memory = BlockMemory(HostPages(16 * PAGE), Layout(16 * PAGE, 16, (0,), (PAGE,)))
    with pytest.raises(ValueError, match="has 0 to 15"):
        memory.map(ids)
    assert memory.held == 0


def test_the_null_block_is_never_given_back():
    memory = BlockMemory(HostPages(16 * PAGE), Layout(16 * PAGE, 16, (0,), (PAGE,)))
    memory.map([0, 1])
    with pytest.raises(ValueError, match="null block"):
        memory.release([0, 1])
    assert memory.held == 2


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
