"""Real memory of blocks: what is released leaves the resident size, what is held keeps its bytes."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.memory import PAGE
from rose.parts.lending.vllm.blocks import BlockMemory, Layout
from rose.parts.lending.vllm.host_pages import HostPages


def resident(pool: HostPages) -> int:
    """Bytes of the pool in RAM, by mincore."""
    flags = np.zeros(pool.nbytes // PAGE, np.uint8)
    address, found = map(ctypes.c_void_p, (pool.tensor().data_ptr(), flags.ctypes.data))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(pool.nbytes), found) == 0
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
    regions = zip(layout.starts, layout.strides, strict=True)
    return [(start + block * stride, start + (block + 1) * stride) for start, stride in regions]


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
        spans = [span for block in held for span in spans_of(layout, block)]
        needed = {page for low, high in spans for page in range(low // PAGE, -(-high // PAGE))}
        assert pages_mapped == memory.mapped_bytes == len(needed) * PAGE
        assert memory.held == len(held)
        # every held byte was written, so its page is resident
        assert resident(pool) == len(needed) * PAGE
        for block in held:
            for low, high in spans_of(layout, block):
                assert (values[low:high] == block + 1).all()


def test_the_pool_is_never_made_of_huge_pages():
    pool = HostPages(8 * 2**20)
    pool.tensor().fill_(1)
    low, smaps = pool.tensor().data_ptr(), Path("/proc/self/smaps").read_text()
    ranges = re.findall(r"(?ms)^([0-9a-f]+)-([0-9a-f]+) (.*?VmFlags.*?)$", smaps)
    [found] = [text for first, end, text in ranges if int(first, 16) <= low < int(end, 16)]
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


def test_a_block_that_is_none_is_refused_and_the_null_block_is_never_given_back():
    memory = BlockMemory(HostPages(16 * PAGE), Layout(16 * PAGE, 16, (0,), (PAGE,)))
    for ids in ([-1], [16], [0, 99]):
        with pytest.raises(ValueError, match="has 0 to 15"):
            memory.map(ids)
        assert memory.held == 0
    memory.map([0, 1])
    with pytest.raises(ValueError, match="null block"):
        memory.release([0, 1])
    assert memory.held == 2
