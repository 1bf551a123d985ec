"""Messages of trainer ranks to each other before they meet, and while they publish and tidy."""

from types import SimpleNamespace

import pytest
import torch

from rose.comm import address
from rose.trainer import rank as trainer
from rose.trainer.trainer import _Peers


def test_a_rank_may_import_as_long_as_ranks_may_start(make_config, monkeypatch, tmp_path):
    waited = []

    def gather(peers, text, deadline_s, what):
        waited.append(deadline_s)
        raise TimeoutError(what)

    monkeypatch.setattr(trainer, "gather_texts", gather)
    peers = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2)
    config = make_config("cluster.start_timeout_s=700")
    with pytest.raises(TimeoutError, match="cluster.start_timeout_s"):
        trainer.run(config, tmp_path, 1, None, peers, *[None] * 5)
    assert waited == [700] and address.MEET_S < 700


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
