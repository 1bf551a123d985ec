"""Both engines' schedulers on one device whose pages kill, with steps in flight or without."""

import functools
import random
import time

import msgspec
import pytest

from rose.parts.lending import board
from rose.parts.lending.vllm import device, pool
from rose.parts.lending.vllm import online as online_scheduler
from rose.parts.lending.vllm import rollout as rollout_scheduler
from rose.parts.lending.vllm.blocks import BlockMemory, Layout
from tests.parts.lending.fatal_pages import PAGE, Device, FatalPages
from tests.parts.lending.vllm_schedulers.conftest import PROFILE, abort

pytestmark = pytest.mark.slow  # imports vLLM
BLOCKS, BLOCK_BYTES = 65, 896 * 2**10  # 16 blocks in 7 pages
BUDGET = (BLOCKS - 1) * BLOCK_BYTES


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def asynchronous(request):
    return request.param


class Running:
    """An engine's steps on the device: each writes to its requests' blocks when it runs."""

    def __init__(self, driven, gpu: Device) -> None:
        self.driven, self.gpu, self.kernels = driven, gpu, []

    def plan(self) -> None:
        if not self.driven.scheduler.has_requests():
            return
        scheduled = self.driven.plan()
        manager, pool = self.driven.scheduler.kv_cache_manager, self.driven.memory.pool
        ids = {block for name in scheduled for block in manager.get_block_ids(name)[0]}

        @functools.cache  # a kernel runs once
        def kernel() -> None:
            for low in (block * BLOCK_BYTES for block in [0, *sorted(ids)]):
                for byte in (low, low + PAGE // 4, low + BLOCK_BYTES - 1):
                    pool.touch(byte)

        self.gpu.kernels.append(kernel)
        self.kernels.append(kernel)

    def done(self) -> None:
        if self.driven.in_flight:
            self.kernels.pop(0)()
            self.driven.done()

    def turn(self, ahead: bool) -> None:
        """As vLLM's loop: with a step planned ahead, or not."""
        self.plan()
        while len(self.driven.in_flight) > int(ahead and self.driven.scheduler.has_requests()):
            self.done()


@pytest.fixture
def pair(boards, make_scheduler, monkeypatch):
    """pair(pages) -> both engines on a device with these pages beside those of the null blocks."""
    here = device.here().serving
    lending = msgspec.structs.replace(here.lending, kv_gib=BUDGET / 2**30)
    device.describe(boards.folder, msgspec.structs.replace(here, lending=lending), PROFILE)
    boards.begin("control", lend=1)

    def made(pages):
        gpu, layout = Device(pages + 2), Layout(BLOCKS * BLOCK_BYTES, BLOCKS, (0,), (BLOCK_BYTES,))
        memories = [BlockMemory(FatalPages(gpu, layout.nbytes), layout) for _ in range(2)]
        return gpu, *(
            Running(make_scheduler(f"rose.parts.lending.vllm.{side}", memory=memory), gpu)
            for side, memory in zip(("online", "rollout"), memories, strict=False)
        )

    return made


def used(*engines) -> list[int]:
    """Bytes that each has beyond its null block's page, by pool, worker and device."""
    found = []
    for engine in engines:
        pool, memory = engine.driven.scheduler.pool, engine.driven.memory
        assert pool.mapped == memory.mapped_bytes - PAGE == memory.pool.mapped_bytes - PAGE
        found.append(pool.mapped)
    return found


@pytest.mark.parametrize("missing", [0, 9], ids=["enough", "too little"])
@pytest.mark.parametrize("seed", range(2))
def test_both_live_on_one_budget_always(pair, boards, asynchronous, seed, missing, monkeypatch):
    """`missing`: pages of the budget that somebody else on the device has. With the second seed
    little changes hands at once, as it does where there is much."""
    for module in (pool, online_scheduler, rollout_scheduler) if seed else ():
        monkeypatch.setattr(module, "AT_ONCE", 6 * BLOCK_BYTES)
    dice = random.Random(seed)
    gpu, online, rollout = pair(BUDGET // PAGE - missing)
    lent = 0
    for serial in range(160):
        what = dice.random()
        if what < 0.12:
            online.driven.add(f"s{serial}", dice.randint(10, 250), dice.randint(1, 40))
        elif what < 0.3 and len(rollout.driven.scheduler.requests) < 6:
            rollout.driven.add(f"r{serial}", dice.randint(10, 100), dice.randint(20, 150))
        elif what < 0.33 and online.driven.scheduler.requests:
            name = dice.choice(list(online.driven.scheduler.requests))
            online.driven.scheduler.finish_requests(name, abort())
        elif what < 0.36:
            boards.set("control", lend=float(dice.random() < 0.7), epoch=float(serial))
        elif what < 0.38:
            boards.set("control", epoch=float(serial))
        elif what < 0.7:
            online.turn(asynchronous)
        else:
            rollout.turn(asynchronous)
        mine, others = used(online, rollout)
        assert mine + others <= BUDGET and gpu.used <= gpu.pages
        lent = max(lent, others)
    assert lent or missing  # else nothing was tried
    boards.set("control", lend=0.0)
    for _ in range(3):
        rollout.driven.scheduler.schedule()  # has nothing to run, and gives back what it has
        online.turn(False)
    assert used(rollout) == [0]
    for _ in range(200):
        if online.driven.scheduler.requests or online.driven.in_flight:
            online.turn(asynchronous)
    assert not online.driven.scheduler.requests  # whoever came was served


def test_blocks_go_back_after_the_step_that_still_writes_to_them(pair, boards, asynchronous):
    gpu, online, rollout = pair(BUDGET // PAGE)
    scheduler = online.driven.scheduler
    online.driven.add("long", prompt=250, tokens=100)
    online.turn(asynchronous)
    online.turn(asynchronous)
    boards.begin("rollout")  # now there is somebody to lend to
    had = used(online)[0]
    online.plan()  # a step with "long", which the device has yet to do
    scheduler.finish_requests("long", abort())
    online.driven.add("short", prompt=10, tokens=5)
    online.plan()
    assert used(online)[0] < had
    while online.driven.in_flight:
        online.done()


def test_a_step_in_flight_is_on_the_board_and_part_of_what_the_next_one_holds_up_for(pair, boards):
    _, _, rollout = pair(2 * BUDGET // PAGE)
    scheduler = rollout.driven.scheduler
    boards.begin("online")
    rollout.driven.add("r", prompt=60, tokens=100)
    for _ in range(3):
        rollout.turn(False)
    assert sum(rollout.driven.plan().values()) == 1
    output, work, began = scheduler._in_flight[0]
    told = board.Reader(boards.folder / "rollout", board.Rollout).read()
    assert 0 < told.step_ends <= began + 60.0
    # however slow this machine is: it just began
    scheduler._in_flight[0] = (output, work, time.monotonic() + 600.0)
    ahead = scheduler._in_flight_s(scheduler._predictor)
    assert ahead[1] == scheduler._predictor.p99(work) > 0
