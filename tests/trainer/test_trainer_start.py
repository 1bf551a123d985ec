"""Trainer ranks wait for each other before they meet: who imports slowly is not lost."""

from types import SimpleNamespace

import pytest

from rose.comm import address
from rose.trainer import rank as trainer


def test_a_rank_may_import_as_long_as_ranks_may_start(make_config, monkeypatch, tmp_path):
    waited = []

    def gather(peers, text, deadline_s, what):
        waited.append((deadline_s, what))
        raise TimeoutError(f"not every rank arrived for {what}")

    monkeypatch.setattr(trainer, "gather_texts", gather)
    peers = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2)
    config = make_config("cluster.start_timeout_s=700")
    with pytest.raises(TimeoutError, match="cluster.start_timeout_s"):
        trainer.run(config, tmp_path, 1, None, peers, None, None, None, None, None)
    assert [deadline for deadline, _ in waited] == [700] and address.MEET_S < 700
