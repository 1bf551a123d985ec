"""What the trainer ranks tell each other while they publish and tidy."""

import torch

from rose.trainer.trainer import _Peers


def test_ranks_that_say_yes_are_counted_and_not_only_whether_one_did(monkeypatch):
    """torch.distributed's sum of truth values is a truth value."""
    # of two ranks alike
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, **_: total.add_(total))
    peers = _Peers(0, 2, None)
    assert peers.sum(True) == 2 and peers.sum(False) == 0 and peers.sum(5) == 10


def test_they_speak_by_the_hosts_memory_while_the_device_is_an_engines(monkeypatch):
    said, group = [], object()
    monkeypatch.setattr(
        torch.distributed,
        "all_reduce",
        lambda total, group: said.append((total.device.type, group)),
    )
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: said.append(("barrier", group)))
    peers = _Peers(0, 2, group)
    peers.sum(1)
    peers.barrier()
    assert said == [("cpu", group), ("barrier", group)]
