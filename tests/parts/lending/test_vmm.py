"""The GPU's page pool against a driver that enforces CUDA's rules, and its calls against CUDA's own
header."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.vllm.blocks import BlockMemory, Layout
from rose.parts.lending.vllm.vmm import CudaDriver, CudaError, PagePool
from tests.parts.lending.cuda_rules import StrictDriver, build_libcuda

PAGE = 4096


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20_000), st.integers(2, 30), st.integers(1, 3), st.data())
def test_blocks_in_use_are_always_mapped(stride, blocks, regions, data):
    driver = StrictDriver()
    layout = Layout(
        stride * blocks * regions,
        blocks,
        tuple(i * stride * blocks for i in range(regions)),
        (stride,) * regions,
    )
    pool = PagePool(driver, layout.nbytes)
    memory = BlockMemory(pool, layout)
    held: set[int] = set()
    for _ in range(data.draw(st.integers(1, 8))):
        ids = data.draw(st.sets(st.integers(1, blocks - 1)))
        if data.draw(st.booleans()):
            memory.map(ids)
            held |= ids
        else:
            memory.release(ids)
            held -= ids
        for block in held:
            for start in layout.starts:
                low = start + block * stride
                for byte in {low, low + stride - 1, *range(low, low + stride, PAGE)}:
                    driver.write(pool.address + byte, 1)
        needed = {
            (start + block * stride + byte) // PAGE
            for block in held
            for start in layout.starts
            for byte in {*range(0, stride, PAGE), stride - 1}
        }
        assert len(driver.mapped) == len(driver.created) == len(needed)
        assert pool.mapped_bytes == memory.mapped_bytes == len(needed) * PAGE
    pool.close()
    assert not driver.created and not driver.mapped and not driver.reserved


def test_fresh_pages_are_zeros_and_mapped_ones_keep_their_bytes():
    driver = StrictDriver()
    pool = PagePool(driver, 8 * PAGE)
    pool.map([(0, 2 * PAGE)])
    driver.write(pool.address, 5)
    pool.map([(0, 4 * PAGE)])
    assert [driver.read(pool.address + i * PAGE) for i in range(4)] == [5, 0, 0, 0]
    pool.release([(0, PAGE)])
    pool.map([(0, PAGE)])
    assert driver.read(pool.address) == 0


def test_memory_is_unmapped_only_after_the_device_has_finished_with_it():
    driver = StrictDriver()
    pool = PagePool(driver, 4 * PAGE)
    pool.map([(0, 4 * PAGE)])
    driver.write(pool.address + PAGE, 1)
    pool.release([(PAGE, 2 * PAGE)])
    waits = driver.waits
    pool.release([(PAGE, 2 * PAGE)])  # nothing is there: nobody is kept waiting
    assert driver.waits == waits and pool.mapped_bytes == 3 * PAGE


def test_a_device_out_of_memory_is_said_and_leaves_everything_as_it_was():
    driver = StrictDriver(pages=5)
    layout = Layout(8 * PAGE, 8, (0,), (PAGE,))
    memory = BlockMemory(PagePool(driver, layout.nbytes), layout)
    memory.map([0, 1, 2])
    with pytest.raises(MemoryError, match="no GPU memory for another page of 4096 bytes of KV"):
        memory.map([2, 3, 4, 5, 6])
    assert len(driver.created) == 3 and memory.held == 3 and memory.mapped_bytes == 3 * PAGE
    assert memory.map([3, 4]) == 2 * PAGE


def test_a_pool_leaves_to_others_what_it_was_told_to_spare():
    driver = StrictDriver(pages=8)
    pool = PagePool(driver, 8 * PAGE, spare=3 * PAGE)
    pool.map([(0, 2 * PAGE), (4 * PAGE, 6 * PAGE)])
    with pytest.raises(MemoryError, match="8192 bytes more of KV cache would leave less than"):
        pool.map([(0, 4 * PAGE)])
    assert pool.mapped_bytes == 4 * PAGE
    pool.map([(0, 3 * PAGE)])
    driver.pages -= 2  # somebody else's
    pool.map([(0, 3 * PAGE)])  # it has them


@pytest.mark.parametrize("call, at", [("map", 2), ("map", 1), ("allow", 0), ("zero", 0)])
def test_a_call_that_fails_midway_leaks_nothing(call, at, monkeypatch):
    driver = StrictDriver()
    pool = PagePool(driver, 4 * PAGE)
    works, calls = getattr(driver, call), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > at:
            raise CudaError(call, 999, "CUDA_ERROR_UNKNOWN")
        return works(*arguments)

    monkeypatch.setattr(driver, call, failing)
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        pool.map([(0, 4 * PAGE)])
    assert not driver.created and not driver.mapped and pool.mapped_bytes == 0


@pytest.mark.parametrize("bad", [(0, 100), (1, PAGE), (0, 5 * PAGE), (-PAGE, 0), (2 * PAGE, PAGE)])
def test_a_range_that_is_not_of_whole_pages_inside_is_refused(bad):
    pool = PagePool(StrictDriver(), 4 * PAGE)
    for call in (pool.map, pool.release):
        with pytest.raises(ValueError, match="not a range of whole pages"):
            call([bad])


def test_the_calls_are_those_of_cudas_header(tmp_path):
    """A libcuda written against cuda.h, which the compiler holds to CUDA's signatures and
    structs."""
    driver = CudaDriver(0, build_libcuda(tmp_path))
    page = driver.granularity
    assert page == 2**21
    pool = PagePool(driver, 5 * page - 1)
    assert pool.nbytes == 5 * page
    assert pool.__cuda_array_interface__["data"][0] == pool.address > 2**32
    pool.map([(page, 4 * page)])
    assert rights(pool.address + page) == "rw" and rights(pool.address) == "--"
    assert driver.available() == 0
    with pytest.raises(MemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        pool.map([(0, page)])
    pool.release([(page, 2 * page)])
    assert rights(pool.address + page) == "--" and rights(pool.address + 2 * page) == "rw"
    pool.map([(0, page)])
    pool.close()
    with pytest.raises(CudaError, match=r"cuMemAddressFree: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.free(1, page)


def rights(address: int) -> str:
    """Of this process to `address`: the fake's memory is the host's."""
    for low, high, found in re.findall(
        r"(?m)^([0-9a-f]+)-([0-9a-f]+) (..)", Path("/proc/self/maps").read_text()
    ):
        if int(low, 16) <= address < int(high, 16):
            return found
    return ""


def test_a_machine_without_cuda_says_so():
    with pytest.raises(OSError, match="libcuda-none"):
        CudaDriver(0, "libcuda-none.so.1")
