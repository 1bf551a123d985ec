"""A trainer rank's memory goes to the host and comes back: every tensor is the same object with the
same values."""

import numpy as np
import pytest
import torch

from rose.trainer.offload import Offload

CPU = torch.device("cpu")


@pytest.fixture
def share(tmp_path):
    return Offload(CPU, tmp_path)


def test_views_of_one_buffer_and_gradients_come_back_as_they_were(share, tmp_path):
    flat = torch.arange(300_000, dtype=torch.float32)
    part, whole = flat[1000:2000].view(10, 100), flat.view(100, -1)
    weight = torch.nn.Parameter(torch.ones(200, 200, dtype=torch.bfloat16))
    weight.grad = torch.full((200, 200), 3.0, dtype=torch.bfloat16)
    pointers = [flat, whole, weight, weight.grad]
    share.give_back()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in pointers)
    assert share.nbytes >= 300_000 * 4 + 2 * 40_000 * 2
    assert list(tmp_path.iterdir()) == [], "on a CPU the host memory is a file without a name"
    share.take()
    assert torch.equal(flat, torch.arange(300_000, dtype=torch.float32))
    assert bool((weight.grad == 3).all())
    flat += 1  # the views are views still
    assert part[0, 0] == 1001 and whole[0, 0] == 1 and bool((weight == 1).all())


def test_it_can_be_done_again_with_other_tensors_in_the_same_host_memory(share):
    first = torch.randn(100_000)
    for turn in range(3):
        other = torch.full((50_000,), float(turn))
        kept = first.clone()
        share.give_back()
        share.give_back()  # asked twice, as after an order that broke off
        share.take()
        share.take()
        assert torch.equal(first, kept) and bool((other == turn).all())
    assert len(share._chunks) == 1


def test_states_larger_than_a_chunk_go_over_several(share):
    share._chunk_bytes = 4096 * 5
    states = [torch.randn(n) for n in (3000, 20_000, 1500)]
    kept = [state.clone() for state in states]
    share.give_back()
    share.take()
    assert all(torch.equal(a, b) for a, b in zip(states, kept, strict=False))
    assert len(share._chunks) > 3


def test_what_numpy_shares_stays_where_it_is(share):
    array = np.arange(50_000.0)
    shared, viewed = torch.from_numpy(array), torch.ones(50_000)
    view = viewed.numpy()
    share.give_back()
    assert shared.sum() == array.sum() and view.sum() == 50_000
    share.take()


def test_the_trainers_own_memory_goes_also_where_it_is_not_torchs(tmp_path):
    mapped = torch.from_numpy(np.arange(50_000.0))
    share = Offload(CPU, tmp_path, lambda: [mapped])
    share.give_back()
    assert share.nbytes >= 400_000 and mapped[10_000:40_000].sum() == 0, "its pages are given back"
    share.take()
    assert torch.equal(mapped, torch.arange(50_000, dtype=torch.float64))


def test_a_device_without_room_is_named_with_what_is_wanted(share):
    class Full:
        def nbytes(self):
            return 0

        def resize_(self, nbytes):
            raise RuntimeError("out of memory")

    share.give_back()  # `take` below takes all of it again
    gone, share._gone = share._gone, [(Full(), 3 * 2**30)]
    with pytest.raises(RuntimeError, match=r"the trainer's states need 3.0 GiB of cpu, which has"):
        share.take()
    share._gone = gone
    share.take()
