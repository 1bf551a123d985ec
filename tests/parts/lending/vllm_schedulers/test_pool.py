"""KV blocks that an engine may not use are in nobody's hands, and their memory is the system's."""

import math
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.vllm import pool as module
from rose.parts.lending.vllm.blocks import FAILED, BlockMemory, Layout
from rose.parts.lending.vllm.compact import Pages
from rose.parts.lending.vllm.pool import MAP, RELEASE, Pool
from tests.parts.lending.fatal_pages import PAGE, Device, FatalPages

pytestmark = pytest.mark.slow  # imports vLLM
KiB, MiB = 2**10, 2**20


class Engine:
    """A pool, the memory of so many workers, and requests that hold blocks."""

    def __init__(self, layout: Layout, devices: list[Device]) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.layout = layout
        self.blocks = BlockPool(layout.blocks, enable_caching=False, hash_block_size=16)
        self.requests: dict[str, list] = {}
        manager = SimpleNamespace(
            block_pool=self.blocks,
            get_block_ids=lambda name: ([b.block_id for b in self.requests[name]],),
        )
        sizes = [SimpleNamespace(size=layout.blocks * layout.block_bytes)]
        self.pool = Pool(manager, SimpleNamespace(num_blocks=layout.blocks, kv_cache_tensors=sizes))
        self.workers = [BlockMemory(FatalPages(each, layout.nbytes), layout) for each in devices]
        for worker in self.workers:
            worker.map([0])
        self.base = self.workers[0].mapped_bytes
        self.pool.begin(self.call, layout, PAGE)

    def call(self, method, ids):
        assert len(ids) == len(set(ids)) and 0 not in ids
        return [self._one(worker, method, ids) for worker in self.workers]

    @staticmethod
    def _one(worker, method, ids):  # as KvWorker
        if method == RELEASE:
            return worker.release(ids)
        assert method == MAP
        try:
            return worker.map(ids)
        except MemoryError:
            return FAILED

    def take(self, name: str, count: int) -> None:
        self.requests.setdefault(name, []).extend(self.blocks.get_new_blocks(min(count, self.free)))

    def end(self, name: str) -> None:
        self.blocks.free_blocks(reversed(self.requests.pop(name)))

    @property
    def free(self) -> int:
        return self.blocks.get_num_free_blocks()

    @property
    def held(self) -> list[int]:
        return [block.block_id for blocks in self.requests.values() for block in blocks]

    def step(self) -> None:
        """Touch the first and last byte, and one in each page, of each block that a request holds,
        and of the free ones; a page that isn't there ends this process."""
        free = [block.block_id for block in self.blocks.free_block_queue.get_all_free_blocks()]
        assert not set(free) & set(self.held)
        for worker in self.workers:
            for block in {0, *self.held, *free}:
                for start, stride in zip(self.layout.starts, self.layout.strides, strict=False):
                    low = start + block * stride
                    for byte in (*range(low, low + stride, PAGE), low + stride - 1):
                        worker.pool.touch(byte)

    @property
    def mapped(self) -> int:
        """What the device has given, beyond the null block's."""
        found = {each for w in self.workers for each in (w.pool.mapped_bytes, w.mapped_bytes)}
        assert len(found) == 1
        return found.pop() - self.base


def one_region(blocks: int, stride: int) -> Layout:
    return Layout(blocks * stride, blocks, (0,), (stride,))


LAYOUTS = [
    one_region(33, 896 * KiB),  # Qwen2.5-7B: 16 blocks make 7 pages
    one_region(40, 200 * KiB + 12),
    one_region(17, 3 * MiB),
    one_region(12, 4 * MiB),
    Layout(4 * 24 * 300 * KiB, 24, tuple(i * 24 * 300 * KiB for i in range(4)), (300 * KiB,) * 4),
]  # by layers


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(1, 2), st.integers(0, 2**32), st.data())
def test_no_page_is_touched_that_is_not_there_and_limits_are_kept(layout, workers, seed, data):
    dice, pages = random.Random(seed), -(-layout.nbytes // PAGE)
    room = data.draw(st.integers(pages // 3, pages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RETRY_S", 0.0)
        engine = Engine(layout, [Device(room + 12) for _ in range(workers)])
        pool = engine.pool
        assert engine.free == pool.mapped == 0, "nothing is used before it is said how much"
        for serial in range(30):
            what = dice.random()
            if what < 0.4:
                wanted = dice.randint(0, pool.total)
                most = dice.choice((pool.total + PAGE, dice.randint(0, pool.total)))
                before, had = pool.mapped, pool.limit_bytes
                at_once = dice.choice((math.inf, 3 * pool.block_bytes))
                reached = pool.limit(wanted, most, at_once)
                assert reached <= max(most, pages_of(engine, engine.held)) or reached < before
                least = max(wanted, len(engine.held) * pool.block_bytes)
                assert pool.limit_bytes <= (least if before > most else max(least, had - at_once))
                if wanted < had and before <= most:
                    whole = least // pool.block_bytes * pool.block_bytes
                    assert pool.limit_bytes >= min(whole, had - at_once)
            elif what < 0.7:
                engine.take(f"r{serial}", dice.randint(1, layout.blocks // 3))
            elif engine.requests:
                engine.end(dice.choice(list(engine.requests)))
            usable = np.flatnonzero(pool._usable)[1:]
            assert pool.mapped == engine.mapped == pages_of(engine, usable)
            assert pool.used == len(engine.held) * pool.block_bytes
            assert pool.free == pool.limit_bytes - pool.used
            engine.step()
        for name in list(engine.requests):
            engine.end(name)
        assert pool.limit(0) == engine.mapped == 0 and engine.free == 0


def pages_of(engine: Engine, ids) -> int:
    used = np.zeros(engine.layout.blocks, bool)
    used[list(ids)] = True
    cells = Pages(engine.layout, PAGE)
    if cells.page != PAGE:
        return int(used[1:].sum()) * cells.page
    return cells.nbytes(used)


def test_a_device_without_memory_withholds_blocks_and_they_come_when_it_has_some(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 4 * MiB)
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    short, enough = Device(8), Device(100)
    engine = Engine(LAYOUTS[0], [enough, short])
    reached = engine.pool.limit(engine.pool.total)
    assert 4 * PAGE <= reached == engine.mapped <= 7 * PAGE and not engine.pool.can_map
    assert enough.used == short.used  # no worker keeps what another couldn't have
    engine.take("a", 100)
    engine.step()
    short.pages += 30
    short._free += range(8, 38)
    os.ftruncate(short._file, 38 * PAGE)
    assert engine.pool.limit(engine.pool.total) == reached  # not with every step
    clock[0] += 2.0
    assert engine.pool.can_map
    assert engine.pool.limit(engine.pool.total) == engine.mapped == 14 * PAGE and engine.free > 0
    engine.step()


def test_a_strewn_pool_settles_in_parts_and_has_as_many_blocks_meanwhile():
    engine = Engine(LAYOUTS[0], [Device(100)])
    pool = engine.pool
    pool.limit(pool.total)
    engine.take("below", 20)
    engine.take("above", 8)
    engine.end("below")
    pool.limit(8 * pool.block_bytes)
    engine.take("more", 2)
    assert pool.scattered
    engine.end("above")
    for _ in range(3 * module.SETTLE):
        before = engine.workers[0]._held.copy()
        pool.limit(10 * pool.block_bytes, math.inf, pool.block_bytes)
        assert (before & ~engine.workers[0]._held).sum() <= 1
        assert pool.limit_bytes >= 8 * pool.block_bytes
        engine.step()


def test_as_requests_come_and_go_what_is_used_moves_to_few_pages():
    """A seventh of the blocks, strewn by a burst that ended; then traffic of the same amount."""
    engine = Engine(one_region(1601, 896 * KiB), [Device(1)])
    engine.workers = [Counted(engine.layout)]  # 1.4 GiB are counted, not touched
    pool, dice = engine.pool, random.Random(0)
    pool.limit(pool.total)
    for at in range(200):
        engine.take(f"old{at}", 1)
        engine.take(f"burst{at}", 7)
    for at in range(200):
        engine.end(f"burst{at}")
    assert engine.free == 1400
    share = [pool.limit(220 * pool.block_bytes) / engine.layout.nbytes]
    for at in range(600):  # one comes for each that goes
        engine.end(dice.choice(list(engine.requests)))
        engine.take(f"new{at}", 1)
        pool.limit(220 * pool.block_bytes)
        if at % 200 == 199:
            share.append(pool.mapped / engine.layout.nbytes)
    # 220 / 1600 = 0.1375
    assert share[0] < 0.45 and share == sorted(share, reverse=True) and share[-1] < 0.17
    for name in list(engine.requests):
        engine.end(name)
    assert pool.limit(220 * pool.block_bytes) < 0.14 * engine.layout.nbytes and not pool.scattered


class Counted(BlockMemory):
    def __init__(self, layout):
        none, nbytes = lambda ranges: None, -(-layout.nbytes // PAGE) * PAGE
        super().__init__(SimpleNamespace(page=PAGE, nbytes=nbytes, map=none, release=none), layout)
        self.map([0])


def test_the_fewest_requests_end_that_must_for_the_pages_of_the_others_to_fit():
    engine = Engine(LAYOUTS[0], [Device(20)])
    pool = engine.pool
    pool.limit(pool.total)
    for name in "abcdefgh":
        engine.take(name, 4)
    assert pool.excess(14 * PAGE, list("abcdefgh")) == 0

    def pages_without(count: int) -> int:
        kept = "hgfedcba"[count:]
        return pages_of(engine, [b.block_id for name in kept for b in engine.requests[name]])

    for wanted in range(13):
        count = pool.excess(wanted * PAGE, list("hgfedcba"))
        assert pages_without(count) <= wanted * PAGE < pages_without(count - 1)
    for name in "hgf":
        engine.end(name)
    assert pool.limit(pool.total, 9 * PAGE) == engine.mapped <= 9 * PAGE
    engine.step()
