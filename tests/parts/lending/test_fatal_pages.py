"""The GPU's page pool on pages whose absence kills: what steps in flight, warm-up and a full device
do to it."""

import faulthandler
import os
import signal

import pytest

from rose.parts.lending.vllm.blocks import BlockMemory, Layout
from tests.parts.lending.fatal_pages import PAGE, Device, FatalPages


def dies_of(call) -> int:
    """The signal that kills a process which does this; 0: it lives."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        call()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def test_an_unmapped_page_kills_and_a_mapped_one_is_zeros():
    pool = FatalPages(Device(2), 4 * PAGE)
    assert dies_of(lambda: pool.read(0)) == signal.SIGSEGV
    pool.map([(PAGE, 2 * PAGE)])
    assert pool.read(PAGE) == pool.read(2 * PAGE - 1) == 0
    pool.touch(PAGE, 5)
    assert (
        dies_of(lambda: pool.touch(2 * PAGE))
        == dies_of(lambda: pool.touch(PAGE - 1))
        == signal.SIGSEGV
    )
    pool.release([(PAGE, 2 * PAGE)])
    assert dies_of(lambda: pool.read(PAGE)) == signal.SIGSEGV
    pool.map([(PAGE, 2 * PAGE)])
    assert pool.read(PAGE) == 0


def test_a_page_outlives_the_steps_in_flight_that_touch_it():
    """vLLM has freed a request's blocks while two steps that know them run, or are yet to."""
    device = Device(4)
    pool = FatalPages(device, 4 * PAGE)
    pool.map([(0, 4 * PAGE)])
    device.kernels += [lambda: pool.touch(3 * PAGE), lambda: pool.touch(PAGE)]
    pool.release([(PAGE, 4 * PAGE)])
    assert not device.kernels and device.used == 1
    # one that was submitted afterwards is nobody's to wait for
    device.kernels.append(lambda: pool.touch(3 * PAGE))
    assert dies_of(device.run) == signal.SIGSEGV


def test_mapping_more_waits_for_no_step():
    device = Device(4)
    pool = FatalPages(device, 4 * PAGE)
    pool.map([(0, PAGE)])
    device.kernels.append(lambda: pool.touch(0))
    pool.map([(PAGE, 4 * PAGE)])
    assert device.kernels


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


def test_a_device_without_that_page_says_so_and_leaks_nothing():
    device = Device(1)
    memory = BlockMemory(FatalPages(device, 4 * PAGE), Layout(4 * PAGE, 4, (0,), (PAGE,)))
    memory.map([0])
    with (
        pytest.raises(MemoryError, match="no GPU memory for another page of 2097152 bytes"),
        memory.scratch(),
    ):
        pass
    assert device.used == 1
