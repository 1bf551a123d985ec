"""Run by test_digests.py in Triton's interpreter: the CPU's memory is the device's."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from rose.transfer import Corrupted, TransferError, codec, delta_triton, digests, updates
from rose.transfer.base import xxh3
from rose.transfer.blocks import Rectangle
from rose.transfer.digests import compare
from rose.transfer.live import Live, Place
from rose.transfer.receive import Receiver, whole
from tests.transfer.test_base import measured
from tests.transfer.worlds import World, same

ROOM = 1 << 20  # bytes of the device for changes
GENERATOR = torch.Generator().manual_seed(5)
WEIGHTS = {
    "embed": torch.randn(96, 64, generator=GENERATOR).bfloat16(),
    "layer.weight": torch.randn(40, 64, generator=GENERATOR).bfloat16(),
    "norm": torch.randn(64, generator=GENERATOR).bfloat16(),
}
CUTS = {"embed": ([0, 48, 96], []), "layer.weight": ([], [0, 32, 64])}


class OnDevice(Live):
    """`reads` are those of whole blocks."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.on_gpu, self.reads = True, []

    def read(self, place):
        self.reads.append(place)
        return super().read(place)

    def view(self, place):
        return self.read(place)


def on_device(weights):
    return OnDevice({name: tensor.clone() for name, tensor in weights.items()})


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(digests, "trust", digests._Trust())


def hashed(live, places, by_device):
    found = digests.digests(live, places, 2)
    # the first one is read to compare, and those that the device can't hash
    assert digests.trust.right and len(live.reads) == 1 + len(places) - by_device
    assert found == {number: xxh3(live.view(place)) for number, place in places.items()}


def test_each_length_around_the_ends_of_stripes_and_rounds():
    live = OnDevice({"x": torch.randint(-(2**15), 2**15, (2500,), dtype=torch.int16)})
    around = [n + d for n in (128, 512, 544, 1024) for d in (-4, 0, 4)]
    lengths = sorted({*around, 8, 120, 2500})
    places = {n: Place("x", [Rectangle(0, n, 0, 1)]) for n in lengths}
    hashed(live, places, len(places) - 2)


def test_rows_bands_runs_of_several_rectangles_and_what_is_left_to_the_host():
    a, b = torch.randn(97, 64).bfloat16(), torch.randn(33, 40)
    live = OnDevice({"a": a, "b": b})
    there = [
        Place("a", [Rectangle(0, 97, 0, 64)]),
        Place("a", [Rectangle(3, 50, 16, 48)]),
        Place("a", [Rectangle(5, 90, 60, 64)]),
        Place("b", [Rectangle(1, 2, 0, 40), Rectangle(2, 20, 0, 40)]),
        Place("a", [Rectangle(1, 2, 4, 64), Rectangle(2, 40, 0, 64), Rectangle(40, 41, 0, 8)]),
    ]
    left = [
        Place("a", [Rectangle(1, 2, 3, 64), Rectangle(2, 40, 0, 64)]),  # begins within a word
        Place("a", [Rectangle(0, 90, 0, 30)]),  # rows are no whole words
        Place("a", [Rectangle(1, 2, 8, 32), Rectangle(2, 40, 0, 32)]),  # a band and part of a row
    ]
    hashed(live, dict(enumerate(there + left)), len(there))


def version_0(folder):
    """(its world, an engine that holds it, which reads from that world's store)"""
    world = World(folder / "store", dict(WEIGHTS), CUTS, largest=2048)
    world.publish(0)
    live = on_device(world.weights)
    receiver = Receiver(str(world.store), None, None, whole, live)
    return world, live, receiver


def test_versions_are_staged_and_checked_without_reading_a_block_back(tmp_path):
    world, live, receiver = version_0(tmp_path)
    short = [p for p in whole(world.plan, live).values() if 2 * p.size <= digests.LONG]
    for version in range(1, 4):
        world.step()
        world.publish(version)
        live.reads.clear()
        staged = receiver.stage(version - 1, version, 2, 1 << 20, 60.0, ROOM)
        staged.flip()
        staged.check()
        assert same(live_tensors(live), world.weights)
        # the device's first hash is compared; blocks that are too short for it are read
        assert len([p for p in live.reads if p not in short]) == (version == 1)
    world.step()
    world.publish(4)
    staged = receiver.stage(3, 4, 2, 1 << 20, 60.0)
    staged.flip()
    embed = [piece for piece in staged.changes.pieces if piece.parameter == "embed"]
    changed = {i for piece in embed for indices, _ in piece.parts for i in indices.tolist()}
    beside = next(i for i in range(64) if i not in changed)
    live.matrices["embed"].view(-1)[beside] ^= 1  # no value that the flip wrote
    with pytest.raises(Corrupted, match="live parameter embed, block 0: .* after the flip"):
        staged.check()
    receiver.close()


def test_a_live_value_that_went_wrong_is_found_and_the_full_version_mends_it(tmp_path):
    world, live, receiver = version_0(tmp_path)
    world.step()
    world.publish(1)
    live.matrices["embed"].view(-1)[70] ^= 1
    staged = receiver.stage(0, 1, 2, 1 << 20, 60.0)
    assert staged.route == ["v000000/full", "v000001/from-000000"]
    staged.flip()
    staged.check()
    assert same(live_tensors(live), world.weights)
    receiver.close()


def test_an_adapters_base_is_compared_where_it_lies():
    base = measured(WEIGHTS, cuts=CUTS)
    live = on_device(WEIGHTS)
    given = base, whole(base, live), live, 2, "/models/mine", lambda: True, np.inf
    compare(*given)
    live.matrices["embed"].view(-1)[-1] ^= 1
    with pytest.raises(TransferError, match="another base model: 1 of .* embed"):
        compare(*given)


def test_a_device_that_hashes_wrongly_is_found_out_and_said_once(monkeypatch, caplog):
    right = digests._lanes
    monkeypatch.setattr(digests, "_lanes", lambda *args: right(*args) ^ np.uint64(1))
    live = on_device(WEIGHTS)
    places = {0: Place("embed", [Rectangle(0, 96, 0, 64)])}
    for _ in range(2):
        assert digests.digests(live, places, 1) == {0: xxh3(live.view(places[0]))}
    (said,) = [record.message for record in caplog.records]
    assert "cpu hashes a block of embed to" in said and "read back" in said


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("count", [0, 1, 1023, 3000])
def test_differences_are_added_and_taken_back_as_the_host_does(width, count):
    dtype = {2: torch.int16, 4: torch.int32}[width]
    for indices in (torch.int32, torch.int64):
        live = random_patterns(4000, dtype)
        before, wanted = live.clone(), live.clone()
        at = torch.randperm(4000, generator=GENERATOR)[:count].to(indices)
        by = random_patterns(count, dtype)
        codec.move(wanted.numpy(), at.numpy(), by.numpy(), 1)
        delta_triton.move(live, at, by, 1, count=0)
        assert torch.equal(live, before)
        delta_triton.move(live, at, by, 1)
        assert torch.equal(live, wanted)
        delta_triton.move(live, at, by, -1)
        assert torch.equal(live, before)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("size", [1, 4095, 4097, 20000])
def test_what_an_update_changes_is_found_as_the_host_does(size, share):
    held = torch.randn(size, generator=GENERATOR).bfloat16()
    moved = held.float() + torch.randn(size, generator=GENERATOR) * 0.01
    chosen = torch.rand(size, generator=GENERATOR) < share
    # halves of a step, which round to even ones
    master = torch.where(chosen, moved, held.float() * (1 + 2.0**-9))
    new, held = (values.view(torch.int16) for values in (master.bfloat16(), held))
    counts = delta_triton.compare(master, held)
    ends = counts.cumsum(0)
    positions, differences = codec.differences(*(x.numpy().view(np.uint16) for x in (new, held)))
    assert int(ends[-1]) == len(positions)
    found, split = [], len(counts) // 2
    for first, last in ((0, split), (split, len(counts))):
        before, after = (int(ends[tile - 1]) if tile else 0 for tile in (first, last))
        there = delta_triton.compact(master, held, ends, (first, last), (before, after))
        found.append((there[0].numpy() + first * delta_triton.TILE, there[1].numpy()))
    assert np.array_equal(np.concatenate([at for at, _ in found]), positions)
    assert np.array_equal(np.concatenate([by for _, by in found]), differences)


class NoEvent:
    """An event of a device that has done everything at once."""

    def record(self):
        pass

    wait = synchronize = record


@pytest.mark.parametrize("window", [100, 3000, 2**22])
def test_changes_arrive_in_windows_and_add_up(monkeypatch, window):
    empty = torch.empty
    monkeypatch.setattr(updates, "WINDOW", window)
    monkeypatch.setattr(updates, "SPAN", 4 * delta_triton.TILE)
    monkeypatch.setattr(updates, "WAITING", 2)
    monkeypatch.setattr(updates, "LOCKED", 2)
    for name, value in (("Event", NoEvent), ("Stream", lambda device: NoEvent())):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    there = updates.Comparison(torch.device("cuda"), 2)
    here = updates.Comparison(torch.device("cpu"), 2)
    held = torch.randn(60_000, generator=GENERATOR).bfloat16()
    for update in range(2):
        chosen = torch.rand(len(held), generator=GENERATOR) < (0.02, 0.5)[update]
        noise = torch.randn(len(held), generator=GENERATOR)
        master = torch.where(chosen, held.float() * (1 + 0.01 * noise), held.float())
        for comparison in (there, here):
            comparison.compare(3, master, held)
        held = master.bfloat16()
        for begin, end in ((0, 60_000), (0, 1), (4096, 8192), (20_001, 45_003), (59_999, 60_000)):
            found = there.changes(3, begin, end)
            for ours, twin in zip(found, here.changes(3, begin, end), strict=True):
                assert np.array_equal(ours, twin)
            assert len(found[0]) or end - begin == 1


def random_patterns(count, dtype):
    bounds = torch.iinfo(dtype)
    drawn = torch.randint(bounds.min, bounds.max, (count,), generator=GENERATOR)
    return drawn.to(dtype)


def live_tensors(live):
    return {
        name: matrix.view(torch.bfloat16).reshape(WEIGHTS[name].shape)
        for name, matrix in live.matrices.items()
    }
