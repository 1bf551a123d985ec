"""Changes that are found where the weights are equal those of the blocks before and after."""

import numpy as np
import pytest
import torch

from rose.transfer import codec, updates
from rose.transfer.blocks import Tensor, cut, size, take

TENSOR = Tensor("w", (37, 24), "bfloat16")


def patterns(values):
    return values.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("window", [50, 2**22])
def test_blocks_of_any_band_have_the_payloads_of_their_values(window, monkeypatch):
    monkeypatch.setattr(updates, "WINDOW", window)
    random = torch.Generator().manual_seed(0)
    first, shards = 11, [(0, 0, 301), (1, 301, 888)]
    cuts = {"w": ([0, 10, 37], [0, 6, 24])}
    blocks = [b for b in cut([TENSOR], cuts, {"w": shards}, 2, 90) if b.owner == 1]
    comparison = updates.Comparison(torch.device("cpu"), 2)
    # This rank's values of the tensor begin at `first` in its group.
    held = torch.randn(first + 888 - 301, generator=random).bfloat16()
    before = held.clone()
    for share in (0.1, 0.4):
        chosen = torch.rand(len(held), generator=random) < share
        master = torch.where(chosen, held.float() * 1.01, held.float())
        comparison.compare(0, master, held)
        held = master.bfloat16()
    for block in blocks:
        begin = first - 301 + block.start
        moves = comparison.changes(0, begin, begin + block.stop - block.start)
        moves = updates.in_band(moves, block.start, 24, block.first, block.last)
        old, new = (
            np.concatenate([p.reshape(-1) for p in take(patterns(v)[first:], 301, block, 24)])
            for v in (before, held)
        )
        payload = codec.encode_moves(size(block, 24), 2, *moves, lambda new=new: new)
        assert np.array_equal(payload, codec.encode(new, old))


def test_windows_have_few_changes_and_all_tiles(monkeypatch):
    monkeypatch.setattr(updates, "WINDOW", 10)
    monkeypatch.setattr(updates, "SPAN", 4 * 16)
    ends = np.cumsum([3, 0, 7, 1, 30, 2, 2, 0, 0, 0, 0, 5])
    found = updates.windows_of(ends, 16)
    assert found == [(0, 3), (3, 4), (4, 5), (5, 9), (9, 12)]
