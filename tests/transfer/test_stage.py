"""Staging touches nothing, a flip happens whole or is taken back, and each engine rank gets its own
part."""

import tracemalloc

import pytest
import torch

from rose.config import ModelShape
from rose.engine import layout
from rose.transfer import TransferError, changes
from rose.transfer.edge import Edge, read_plan
from rose.transfer.live import Live
from rose.transfer.receive import whole
from rose.transfer.source import Folder
from rose.transfer.stage import place_blocks, stage
from rose.transfer.store import FULL
from tests.engine import shapes
from tests.trainer.test_allocated import Meter
from tests.transfer.worlds import SHAPES, World, same

ALL = 1 << 30


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}


def staged(store, route, live, dense_bytes=ALL, places=whole, device_bytes=None):
    """The last version of `route` [(version, base)...] staged from a store."""
    source = Folder(store)
    plan, digest = read_plan(source)
    edges = [Edge(source, *step, plan, digest) for step in route]
    rest = (edges, route[0][1] is not FULL, 2, dense_bytes)
    return stage(live, plan, places(plan, live), *rest, device_bytes=device_bytes)


class Breaking(Live):
    """Some write fails in its middle, as that of a device may; later ones work again, or none
    does."""

    def __init__(self, parameters, at: int, mended: bool = True):
        super().__init__(parameters)
        self._left, self._mended = at, mended

    def write(self, place, values):
        self._left -= 1
        if self._left == 0 or (self._left < 0 and not self._mended):
            half = len(values) // 2
            super().write(place, torch.cat([values[:half], torch.zeros_like(values[half:])]))
            raise RuntimeError("device lost")
        super().write(place, values)


@pytest.fixture
def two(tmp_path):
    """Versions 0 and 1, between which the embeddings change everywhere and the rest a little; their
    weights."""
    world = World(tmp_path / "store")
    world.publish(0)
    zero = dict(world.weights)
    world.step(0.05)
    world.weights["embed"] = torch.randn(50, 12).bfloat16()
    world.publish(1)
    return world.store, zero, dict(world.weights)


def copy(weights):
    return {name: tensor.clone() for name, tensor in weights.items()}


def test_staging_touches_nothing_and_the_flip_changes_exactly_what_differs(two):
    store, zero, one = two
    live = copy(zero)
    made = staged(store, [(1, 0)], Live(live))
    assert same(live, zero)
    made.flip()
    assert same(live, one)
    made.check()
    # Else torch could not resize a trainer's storages, whose values `unsigned` reads the same way.
    assert all(tensor.untyped_storage().resizable() for tensor in live.values())
    assert made.changed == sum(
        int((zero[n].view(torch.int16) != one[n].view(torch.int16)).sum()) for n in zero
    )


@pytest.mark.parametrize("dense_bytes", [0, 300, ALL])
def test_blocks_that_there_was_no_room_for_are_computed_once_more(two, dense_bytes):
    store, zero, one = two
    for route, before in (([(1, 0)], zero), ([(0, FULL), (1, 0)], zeros())):
        live = copy(before)
        made = staged(store, route, Live(live), dense_bytes)
        assert made.dense_bytes <= dense_bytes
        made.flip()
        made.check()
        assert same(live, one)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_flip_that_breaks_off_in_a_dense_block_is_taken_back_and_can_be_tried_again(two, at):
    store, zero, one = two
    live = copy(zero)
    made = staged(store, [(1, 0)], Breaking(live, at))
    with pytest.raises(TransferError, match="the flip failed, and was undone: device lost"):
        made.flip()
    assert same(live, zero)
    made.flip()
    made.check()
    assert same(live, one)


def test_a_flip_that_breaks_off_among_sparse_values_is_taken_back(two):
    store, zero, one = two
    live = copy(zero)
    made = staged(store, [(1, 0)], Live(live))
    largest = max(made.changes.pieces, key=lambda piece: piece.count)
    indices, differences = largest.parts[-1]
    largest.parts[-1] = indices, differences[:-1]  # fewer differences than places
    with pytest.raises(TransferError, match="was undone"):
        made.flip()
    assert same(live, zero)


def test_a_flip_that_can_t_be_taken_back_says_that_the_weights_are_a_mixture(two):
    store, zero, _ = two
    for mended, dense_bytes in ((False, ALL), (True, 0)):
        live = Breaking(copy(zero), 2, mended)
        with pytest.raises(TransferError, match="the weights are a mixture now: device lost"):
            staged(store, [(1, 0)], live, dense_bytes).flip()


def test_the_check_names_a_parameter_that_is_not_what_it_should_be(two):
    store, zero, _ = two
    wrong = r"live parameter layer.weight, block \d+: xxh3-128 \w{32} after the flip, expected"
    for before, route in ((zero, [(1, 0)]), (zeros(), [(0, FULL)])):
        live = copy(before)
        made = staged(store, route, Live(live))
        made.flip()
        live["layer.weight"] += 1
        with pytest.raises(TransferError, match=wrong):
            made.check()


def changed_by(share: float, tmp_path, dtype=torch.bfloat16):
    """A store of versions 0 and 1, so large a share of the values apart; the weights of both."""
    weights = {"w": torch.randn(40, 100).to(dtype), "v": torch.randn(3000).to(dtype)}
    world = World(tmp_path / "store", weights, cuts={}, size=2, largest=500)
    world.publish(0)
    zero = copy(world.weights)
    world.weights = {
        name: torch.where(torch.rand(t.shape) < share, t * 1.5, t) for name, t in zero.items()
    }
    world.publish(1)
    return world.store, zero, dict(world.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.01, 0.15])  # few enough that no block of 500 is kept whole
@pytest.mark.parametrize("room", [1, 300, 3000, 10**6])
def test_the_device_gives_no_more_than_its_budget(tmp_path, room, share, dtype):
    store, zero, one = changed_by(share, tmp_path, dtype)
    live = copy(zero)
    made = staged(store, [(1, 0)], Live(live), device_bytes=room)
    with Meter() as meter:
        made.changes._added = added_again(made)
        made.changes.upload(room)
        made.flip()
        assert same(live, one)
        made.check()
        made.changes.put(-1)
        assert same(live, zero)
    least = changes.VALUE_BYTES + 2 * changes.ALIGNMENT  # bytes for one value
    assert meter.peak <= max(room, least)
    assert made.changes.device_bytes <= max(room, least)
    resident = sum(piece.resident is not None for piece in made.changes.pieces)
    assert resident == (len(made.changes.pieces) if room == 10**6 else 0 if room == 1 else resident)
    made.release()
    assert made.changes.device_bytes == 0 and not made.changes.pieces


def added_again(made) -> dict:
    """What was added to the changes, of what is left of it: to bring it to the device under the
    eyes of `Meter`."""
    added = {}
    for piece in made.changes.pieces:
        resident = [] if piece.resident is None else [piece.resident]
        parts = piece.parts or [tuple(array.numpy().copy() for array in part) for part in resident]
        added.setdefault(piece.parameter, []).extend(parts)
    return added


def test_a_device_that_has_less_than_it_said_gives_smaller_pieces(tmp_path, monkeypatch):
    store, zero, one = changed_by(0.2, tmp_path)
    live, empty, asked = copy(zero), torch.empty, []

    def scarce(size, **options):
        if options.get("device") is not None:
            asked.append(size)
            if size > 3600:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(size, **options)

    monkeypatch.setattr(changes, "MIN_BYTES", 4000)
    monkeypatch.setattr(torch, "empty", scarce)
    made = staged(store, [(1, 0)], Live(live), device_bytes=10**6)
    assert max(asked) > 3600 and made.changes.device_bytes <= 4000
    made.flip()
    made.check()
    assert same(live, one)
    monkeypatch.setattr(changes, "MIN_BYTES", 10**6)
    with pytest.raises(TransferError, match="staging a version needs .* MiB of cpu, which has not"):
        staged(store, [(1, 0)], Live(copy(zero)), device_bytes=10**6)


def test_of_a_device_what_is_free_less_a_reserve_is_taken_and_never_more_than_allowed(monkeypatch):
    live = Live(zeros())
    assert changes.budget(live, None) is None and changes.budget(live, 77) == 77
    live.device = torch.device("cuda")
    cases = ((10 * 2**30, None, 10 * 2**30 - changes.RESERVE_BYTES), (10 * 2**30, 2**30, 2**30))
    cases += ((2**28, 2**30, changes.MIN_BYTES), (2**28, None, changes.MIN_BYTES))
    for free, most, wanted in cases:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, f=free: (f, 80 * 2**30))
        assert changes.budget(live, most) == wanted


SIZES = {"layers": 2, "hidden": 16, "intermediate": 24, "heads": 8, "head_dim": 4}


def shape_of(kv_heads: int, tied: bool) -> ModelShape:
    """A vocabulary of 150 is padded to 192: with 4 ranks the last holds 6 rows."""
    return ModelShape(**SIZES, kv_heads=kv_heads, vocab=150, tied_embeddings=tied)


def weights_of(shape: ModelShape, bias: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {n: torch.randn(extent).bfloat16() for n, extent in shapes.tensors(shape, bias).items()}


def parameters_of(shape: ModelShape, bias: bool, tp_size: int) -> dict[str, torch.Tensor]:
    """vLLM's, of one rank, zeros."""
    extents = shapes.parameters(shape, bias, tp_size)
    return {name: torch.zeros(extent, dtype=torch.bfloat16) for name, extent in extents.items()}


def expected(weights, shape: ModelShape, bias: bool, rank: int, tp_size: int) -> dict:
    """What one rank should hold: the slices of whole tensors."""
    made = parameters_of(shape, bias, tp_size)
    for name, tensor in weights.items():
        place = layout.slices(name, tuple(tensor.shape), shape, rank, tp_size)
        if place is not None:
            made[place.parameter][place.destination] = tensor[place.source]
    return made


def placed(shape: ModelShape, rank: int, tp_size: int):
    return lambda plan, live: place_blocks(
        plan, lambda name, extent: layout.slices(name, extent, shape, rank, tp_size), live
    )[0]


def cuts_for(weights, shape: ModelShape, degrees) -> dict:
    return {n: layout.cuts(n, tuple(t.shape), shape, degrees) for n, t in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "bias, kv_heads, tied",
    [(True, 2, True), (False, 4, False), (False, 1, True)],
    ids=["qwen2", "llama-untied", "one-key-value-head"],
)
def test_servers_of_every_degree_get_exactly_their_parts(tmp_path, bias, kv_heads, tied):
    shape = shape_of(kv_heads, tied)
    weights = weights_of(shape, bias)
    cuts = cuts_for(weights, shape, (1, 2, 4))
    world = World(tmp_path / "store", weights, cuts, size=3, largest=70)
    initial = dict(world.weights)
    world.publish(0)
    world.step(0.3)
    world.publish(1)
    for tp_size in (1, 2, 4):
        for rank in range(tp_size):
            empty = parameters_of(shape, bias, tp_size)
            fresh = expected(initial, shape, bias, rank, tp_size)
            for live, route in ((empty, [(0, FULL), (1, 0)]), (fresh, [(1, 0)])):
                made = staged(world.store, route, Live(live), places=placed(shape, rank, tp_size))
                made.flip()
                made.check()
                right = expected(world.weights, shape, bias, rank, tp_size)
                assert same(live, right), (tp_size, rank, route)


def test_a_server_of_a_degree_that_the_trainer_did_not_cut_for_is_told_which_key_to_set(tmp_path):
    shape = shape_of(2, True)
    weights = weights_of(shape, True)
    cuts = cuts_for(weights, shape, (1, 2))
    world = World(tmp_path / "store", weights, cuts, size=1, largest=10**6)
    placed(shape, 0, 2)(world.plan, Live(parameters_of(shape, True, 2)))
    with pytest.raises(TransferError, match="lies half in this engine's"):
        placed(shape, 0, 4)(world.plan, Live(parameters_of(shape, True, 4)))


def test_tensors_that_do_not_fit_the_engine_are_named(tmp_path):
    world = World(tmp_path / "store")

    def whole_tensor(name, extent):
        return layout.LocalSlice(name, *[tuple(slice(0, size) for size in extent)] * 2)

    for name, tensor, why in (
        ("norm", torch.zeros(12), "'norm' is bfloat16, the engine's parameter norm has"),
        ("embed", torch.zeros(49, 12).bfloat16(), r"'embed' \(50, 12\) doesn't fit the engine's"),
    ):
        with pytest.raises(TransferError, match=why):
            place_blocks(world.plan, whole_tensor, Live(zeros() | {name: tensor}))
    with pytest.raises(TransferError, match="live parameter embed is torch.float8_e4m3fn:"):
        Live({"embed": torch.zeros(50, 12).to(torch.float8_e4m3fn)})
    with pytest.raises(TransferError, match="live parameter embed is not contiguous"):
        Live({"embed": torch.zeros(12, 50).t()})


def test_staging_holds_a_few_blocks_at_once_however_many_are_fetched_together(tmp_path):
    # 64 blocks of 32 KiB, all in one batch
    weights = {"big": torch.zeros(64 * 2**14, dtype=torch.bfloat16)}
    world = World(tmp_path / "store", weights, cuts={}, size=1, largest=2**14)
    world.publish(0)
    before = copy(world.weights)
    world.weights["big"] = world.weights["big"].clone()
    world.weights["big"][:: 2**12] = 1.0
    world.publish(1)
    live = Live(before)
    staged(world.store, [(1, 0)], live)  # what is made at first use
    tracemalloc.start()
    staged(world.store, [(1, 0)], live)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**15 / 4
