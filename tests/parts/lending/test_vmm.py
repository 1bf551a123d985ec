"""The GPU's page pool on pages whose absence kills, and its calls against CUDA's own header."""

import faulthandler
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.vllm.blocks import BlockMemory, Layout
from rose.parts.lending.vllm.vmm import CudaDriver, CudaError, PagePool
from tests.parts.lending.fatal_pages import PAGE, Device, FatalDriver, FatalPages
from tests.parts.lending.libcuda import build_libcuda

SMALL = 4096


@settings(max_examples=50)
@given(st.integers(1, 10_000), st.integers(2, 30), st.integers(1, 3), st.data())
def test_blocks_in_use_are_always_mapped(stride, blocks, regions, data):
    starts = tuple(i * stride * blocks for i in range(regions))
    layout = Layout(stride * blocks * regions, blocks, starts, (stride,) * regions)
    device = Device(layout.nbytes // SMALL + 1, SMALL)
    pool = FatalPages(device, layout.nbytes)
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
        needed = set()
        for low in (start + block * stride for block in held for start in starts):
            for byte in {*range(low, low + stride, SMALL), low + stride - 1}:
                pool.touch(byte)
                needed.add(byte // SMALL)
        assert pool.mapped_bytes == memory.mapped_bytes == len(needed) * SMALL
        assert device.used == len(needed)
    pool.close()
    assert not device.used


def dies_of(call) -> int:
    """The signal that kills a process which does this; 0: it lives."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        call()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def test_a_fresh_page_is_zeros_and_a_mapped_one_keeps_its_bytes_until_it_is_released():
    pool = FatalPages(Device(3), 4 * PAGE)
    pool.map([(PAGE, 2 * PAGE)])
    assert pool.read(PAGE) == pool.read(2 * PAGE - 1) == 0
    pool.touch(PAGE, 5)
    pool.map([(PAGE, 3 * PAGE)])
    assert (pool.read(PAGE), pool.read(2 * PAGE)) == (5, 0)
    pool.release([(PAGE, 2 * PAGE)])
    assert dies_of(lambda: pool.read(PAGE)) == signal.SIGSEGV
    pool.map([(PAGE, 2 * PAGE)])
    assert pool.read(PAGE) == 0


def test_a_page_outlives_the_steps_in_flight_that_touch_it():
    """vLLM has freed a request's blocks while two steps that know them run, or are yet to."""
    device = Device(4)
    pool = FatalPages(device, 4 * PAGE)
    pool.map([(0, PAGE)])
    device.kernels += [lambda: pool.touch(3 * PAGE), lambda: pool.touch(PAGE)]
    pool.map([(PAGE, 4 * PAGE)])
    assert device.kernels, "mapping more waits for no step"
    pool.release([(PAGE, 4 * PAGE)])
    assert not device.kernels and device.used == 1
    # one that was submitted afterwards is nobody's to wait for
    device.kernels.append(lambda: pool.touch(3 * PAGE))
    pool.release([(PAGE, 4 * PAGE)])
    assert device.kernels and dies_of(device.run) == signal.SIGSEGV


def test_while_kernels_are_warmed_up_any_block_may_be_written_and_one_page_is_all_it_takes():
    device = Device(5)
    layout = Layout(10 * PAGE + 5, 7, (0,), (3_000_000,))
    pool = FatalPages(device, layout.nbytes)
    memory = BlockMemory(pool, layout)
    memory.map([0])  # pages 0 and 1
    pool.touch(0, 7)
    with memory.scratch():
        assert device.used == 3 and pool.read(9 * PAGE) == 0  # not the rubbish of others
        for page in range(2, 11):
            pool.touch(page * PAGE, page)
        device.kernels.append(lambda: pool.touch(10 * PAGE))  # the last step may not have ended yet
    assert not device.kernels and device.used == 2 and memory.held == 1 and pool.read(0) == 7
    assert dies_of(lambda: pool.touch(10 * PAGE)) == signal.SIGSEGV
    memory.map([6])
    assert pool.read(10 * PAGE) == 0


def test_a_device_out_of_memory_is_said_and_leaves_everything_as_it_was():
    device = Device(5)
    memory = BlockMemory(FatalPages(device, 8 * PAGE), Layout(8 * PAGE, 8, (0,), (PAGE,)))
    memory.map([0, 1, 2])
    with pytest.raises(MemoryError, match=f"no GPU memory for another page of {PAGE} bytes of KV"):
        memory.map([2, 3, 4, 5, 6])
    assert device.used == memory.held == 3 and memory.mapped_bytes == 3 * PAGE
    assert memory.map([3, 4]) == 2 * PAGE
    with pytest.raises(MemoryError, match="no GPU memory"), memory.scratch():
        pass
    assert device.used == 5


def test_a_pool_leaves_to_others_what_it_was_told_to_spare():
    device = Device(8)
    pool = FatalPages(device, 8 * PAGE, spare=3 * PAGE)
    pool.map([(0, 2 * PAGE), (4 * PAGE, 6 * PAGE)])
    with pytest.raises(MemoryError, match=f"{2 * PAGE} bytes more of KV cache would leave less"):
        pool.map([(0, 4 * PAGE)])
    assert pool.mapped_bytes == 4 * PAGE
    pool.map([(0, 3 * PAGE)])
    device.take(), device.take()  # somebody else's
    pool.map([(0, 3 * PAGE)])  # it has them


@pytest.mark.parametrize("call, at", [("map", 2), ("map", 1), ("allow", 0), ("zero", 0)])
def test_a_call_that_fails_midway_leaks_nothing(call, at, monkeypatch):
    device = Device(4)
    driver = FatalDriver(device)
    pool, works, calls = PagePool(driver, 4 * PAGE), getattr(driver, call), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > at:
            raise CudaError(call, 999, "CUDA_ERROR_UNKNOWN")
        return works(*arguments)

    monkeypatch.setattr(driver, call, failing)
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        pool.map([(0, 4 * PAGE)])
    assert not device.used and not driver.shown and pool.mapped_bytes == 0


@pytest.mark.parametrize("bad", [(0, 100), (1, PAGE), (0, 5 * PAGE), (-PAGE, 0), (2 * PAGE, PAGE)])
def test_a_range_that_is_not_of_whole_pages_inside_is_refused(bad):
    pool = FatalPages(Device(4), 4 * PAGE)
    for call in (pool.map, pool.release):
        with pytest.raises(ValueError, match="not a range of whole pages"):
            call([bad])


def test_the_calls_are_those_of_cudas_header(tmp_path):
    """The compiler holds this libcuda to CUDA's signatures and structs."""
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
    maps = re.findall(r"(?m)^([0-9a-f]+)-([0-9a-f]+) (..)", Path("/proc/self/maps").read_text())
    return next(found for low, high, found in maps if int(low, 16) <= address < int(high, 16))
