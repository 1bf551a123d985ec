"""An adapter's store: hashes of the base below it, and versions that begin with zeros."""

import math

import pytest
import torch

from rose.trainer.adapter import base_of
from rose.transfer import TransferError
from rose.transfer.digests import compare
from rose.transfer.edge import read_plan
from rose.transfer.live import Live
from rose.transfer.receive import Receiver, materialise, whole
from rose.transfer.source import Folder
from rose.transfer.store import FORMAT, INITIAL, Plan, edge_name
from tests.transfer.worlds import CUTS, SHAPES, World, same

GENERATOR = torch.Generator().manual_seed(3)
BELOW = {name: torch.randn(shape, generator=GENERATOR) for name, shape in SHAPES.items()}


def measured(weights, dtype=torch.bfloat16, cuts=CUTS):
    parameters = [(name, torch.nn.Parameter(values)) for name, values in weights.items()]
    return base_of(
        parameters, lambda p: p.detach().clone(), dtype, lambda n, _: cuts.get(n, ((), ()))
    )


def compared(base, weights, wanted=lambda: True, end=math.inf, threads=2) -> None:
    live = Live({name: values.to(torch.bfloat16) for name, values in weights.items()})
    plan = Plan(FORMAT, "", 1, base.tensors, base.blocks)
    compare(base, whole(plan, live), live, threads, "/models/mine", wanted, end)


def test_a_base_is_known_by_its_bits_in_the_engines_dtype():
    base = measured(BELOW)
    compared(base, BELOW)
    compared(base, {name: values.to(torch.bfloat16).float() for name, values in BELOW.items()})
    for name, values in BELOW.items():
        other = BELOW | {name: values.clone()}
        other[name].reshape(-1)[-1] += 1.0
        why = f"another base model: 1 of .*/models/mine.* {name}"
        with pytest.raises(TransferError, match=why):
            compared(base, other)


def test_a_comparison_ends_once_nobody_wants_it_or_its_time_is_up(monkeypatch):
    base, view, reads = measured(BELOW), Live.view, []
    monkeypatch.setattr(Live, "view", lambda *args: reads.append(args) or view(*args))
    compared(base, BELOW)
    assert len(reads) == len(base.blocks) > 3
    reads.clear()
    answers = iter([True, True])
    with pytest.raises(TransferError, match="/models/mine with the trainer's base .* not wanted"):
        compared(base, BELOW, wanted=lambda: next(answers, False), threads=1)
    assert len(reads) == 2
    with pytest.raises(TransferError, match="/models/mine was not compared .*load_timeout_s"):
        compared(base, BELOW, end=-math.inf)
    assert len(reads) == 2


def test_its_fingerprint_is_the_same_however_it_is_cut():
    base, uncut = measured(BELOW), measured(BELOW, cuts={})
    assert base.fingerprint == uncut.fingerprint and len(base.blocks) > len(uncut.blocks)
    changed = BELOW | {"norm": BELOW["norm"] + 1}
    assert measured(changed).fingerprint != base.fingerprint
    assert [block.tensor for block, _ in base.digests()["layer.weight"]] == [1, 1]


def test_readers_of_an_adapter_begin_with_zeros(tmp_path):
    world = World(tmp_path / "store", base=measured(BELOW))
    world.publish(0)
    first = dict(world.weights)
    world.step()
    world.publish(1)
    plan, _ = read_plan(Folder(world.store))
    assert plan.base == measured(BELOW)
    live = {name: torch.zeros_like(values) for name, values in world.weights.items()}
    receiver = Receiver(str(world.store), None, None, whole, Live(live))
    staged = receiver.stage(INITIAL, 0, 1, 2**30, 30.0)
    assert staged.route == [edge_name(0, INITIAL)]
    staged.flip()
    assert same(live, first)
    receiver.stage(0, 1, 1, 2**30, 30.0).flip()
    receiver.close()
    assert same(live, world.weights) and same(materialise(world.store, 1), world.weights)
