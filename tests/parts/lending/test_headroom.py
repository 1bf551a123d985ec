"""An engine beside another one on a GPU has the memory of its largest step."""

import pytest

from rose.parts.lending.vllm import headroom
from rose.parts.lending.vllm.headroom import FRAGMENTS, Headroom
from rose.parts.lending.vllm.vmm import SPARE
from tests.parts.lending.allocator import Gpu, Process

MIB = 2**20


@pytest.fixture
def start(monkeypatch):
    """start(process, weights, step, lasts) -> the `Headroom` of an engine up to its graphs."""

    def started(process: Process, weights=1000 * MIB, step=800 * MIB, lasts=50 * MIB) -> Headroom:
        monkeypatch.setattr(headroom, "torch", process)
        process.take(weights)
        room = Headroom("cuda:0")
        with room.measured():
            process.take(lasts)
            process.pass_by(step)
        process.empty_cache()  # as before graphs are captured
        return room

    return started


def test_an_engine_whose_steps_would_not_fit_refuses_to_start_and_keeps_nothing(start):
    gpu = Gpu(4000 * MIB)
    first, second = Process(gpu), Process(gpu)
    start(first).keep()
    room = start(second, step=1000 * MIB)
    gpu.free = 1100 * MIB  # the KV cache of both has the rest
    words = r"0.25 must stay free; 1.07 of 3.91 GiB .*Lower serving.online.kv_cache_gib"
    with pytest.raises(RuntimeError, match=f"steps of this engine take 1.10 GiB .*{words}"):
        room.keep()
    assert gpu.free == 1100 * MIB
    first.pass_by(800 * MIB)


def test_the_last_of_a_gpus_memory_is_for_what_nobody_counts(start):
    process = Process(Gpu(0))
    process.gpu.total = process.gpu.free = int(1050 * MIB + FRAGMENTS * 800 * MIB) + SPARE
    room = start(process)
    room.keep()
    process.gpu.free -= 1  # somebody else's
    with pytest.raises(RuntimeError, match="must stay free"):
        room.keep()
    with pytest.raises(RuntimeError, match="profile run.*too little GPU memory.*0.93 of 1.95 GiB"):
        start(Process(Gpu(2000 * MIB)), step=2000 * MIB)
