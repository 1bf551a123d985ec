"""A worker's own side of a new version: what it takes of its device, with the store's reader
exchanged."""

import threading
from types import SimpleNamespace

import pytest
import torch

from rose.engine import plugin
from rose.engine.weight_transfer import RoseWeightTransferEngine, UpdateInfo
from rose.transfer import changes

pytestmark = pytest.mark.slow  # imports vLLM
ALLOWED = 2**31


class Receiver:
    """`stage` notes what it may take of the device."""

    where, lineage = ("store", None), "lineage"

    def __init__(self):
        self.device_bytes, self.released = None, 0
        counts = dict.fromkeys(("nbytes", "changed", "blocks"), 1)
        self.result = SimpleNamespace(**counts, route=[], mirrored=0, release=self._release)

    def _release(self):
        self.released += 1

    def close(self):
        pass

    def stage(self, have, want, threads, dense_bytes, timeout_s, device_bytes, *rest):
        self.device_bytes = device_bytes
        return self.result


@pytest.mark.parametrize(
    "device, shares, wanted, end",
    [
        ("cuda", True, changes.MIN_BYTES, "abandon"),
        ("cuda", False, ALLOWED, "abandon"),
        ("cpu", True, None, "reset"),
    ],
)
def test_on_a_shared_device_staging_takes_the_least(monkeypatch, device, shares, wanted, end):
    """Nor is the allocator's cache emptied: what steps need of a shared device is kept there."""
    gone = lambda: pytest.fail("the memory that steps need is gone")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "empty_cache", gone)
    if shares:
        monkeypatch.setenv(plugin.FOLDER, "boards")
    parallel = SimpleNamespace(rank=0, tensor_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine = RoseWeightTransferEngine(None, config, torch.device(device), torch.nn.Linear(2, 2))
    engine._receiver = receiver = Receiver()
    threads = set(threading.enumerate())
    engine.start_weight_update()
    engine.receive_weights(UpdateInfo(1, *Receiver.where, None, 1, 0, ALLOWED, 1, 30.0))
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert engine.status()["state"] == "staged" and receiver.device_bytes == wanted
    assert not receiver.released
    getattr(engine, end)()
    assert receiver.released == 1
