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
    """`stage` says what it was given, and ends as `result`."""

    where, lineage = ("store", None), "lineage"

    def __init__(self):
        self.device_bytes, self.released = None, 0
        self.result = SimpleNamespace(
            nbytes=1, changed=1, blocks=1, route=[], mirrored=0, release=self._release
        )

    def _release(self):
        self.released += 1

    def stage(self, have, want, threads, dense_bytes, timeout_s, device_bytes, *rest):
        self.device_bytes = device_bytes
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def made(monkeypatch):
    """made(device) -> (the worker's engine, its receiver). The allocator's cache must not be
    emptied: what steps need of a shared device is kept there."""
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: pytest.fail("the memory that steps need is gone")
    )

    def make(device: str):
        parallel = SimpleNamespace(rank=0, tensor_parallel_size=1)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        engine = RoseWeightTransferEngine(None, config, torch.device(device), torch.nn.Linear(2, 2))
        engine._receiver = Receiver()
        return engine, engine._receiver

    return make


def staged(engine) -> None:
    threads = set(threading.enumerate())
    engine.start_weight_update()
    engine.receive_weights(UpdateInfo(1, *Receiver.where, None, 1, 0, ALLOWED, 1, 30.0))
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)


@pytest.mark.parametrize(
    "device, shares, wanted",
    [("cuda", True, changes.MIN_BYTES), ("cuda", False, ALLOWED), ("cpu", True, None)],
)
def test_on_a_shared_device_staging_takes_the_least(made, monkeypatch, device, shares, wanted):
    if shares:
        monkeypatch.setenv(plugin.FOLDER, "boards")
    engine, receiver = made(device)
    staged(engine)
    assert engine.status()["state"] == "staged" and receiver.device_bytes == wanted
    assert not receiver.released
    engine.abandon()
    assert receiver.released == 1


def test_a_staging_that_fails_is_told_and_the_weights_are_those_of_before(made, monkeypatch):
    monkeypatch.setenv(plugin.FOLDER, "boards")
    engine, receiver = made("cuda")
    receiver.result = OSError("gone")
    staged(engine)
    assert engine.status() == {"state": "failed", "error": "OSError: gone", "mixture": False}
