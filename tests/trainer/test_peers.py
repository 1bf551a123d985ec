"""What the trainer ranks tell each other while they publish and tidy."""

import torch

from rose.trainer.trainer import _Peers


def test_ranks_are_counted_by_the_hosts_memory_while_the_device_is_an_engines(monkeypatch):
    """The sum counts True as 1: torch.distributed's sum of truth values is a truth value."""
    said, group = [], object()

    def all_reduce(total, group):
        said.append((total.device.type, group))
        total.add_(total)  # sum over two ranks with the same value

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: said.append(("barrier", group)))
    peers = _Peers(0, 2, group)
    assert peers.sum(True) == 2 and peers.sum(False) == 0 and peers.sum(5) == 10
    peers.barrier()
    assert said == [("cpu", group)] * 3 + [("barrier", group)]
