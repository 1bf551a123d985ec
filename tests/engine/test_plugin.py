"""vLLM's entry point into ROSE, in an engine that shares no device."""

import gc
import sys

import pytest

from rose.engine import plugin
from tests.processes import ran


@pytest.mark.parametrize("has_tiles", [True, False])
def test_every_engine_asks_for_the_amx_tiles_that_its_cpu_has(monkeypatch, has_tiles):
    import torch

    asked = []
    monkeypatch.delenv(plugin.FOLDER, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    plugin.register()
    assert asked == [True] * has_tiles


def test_an_engine_that_ends_collects_nothing_and_its_process_does_later():
    class Core:
        def shutdown(self):
            self.found = gc.collect()

    plugin.end_quickly(Core)
    plugin.end_quickly(Core)
    circle = []
    circle.append(circle)
    del circle
    core = Core()
    core.shutdown()
    assert core.found == 0 < gc.collect()


# Steps, each with somewhat larger buffers: glibc maps what is larger than all that it has seen.
# The page faults of all steps, of two processes that share torch's import. A small allocation in
# between may divide the memory of one step, so that a single step shows little.
STEPS = """
import os, resource
import torch
for who in ("ours", "glibc's"):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    if who == "ours":
        from rose.engine import plugin
        plugin.register()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in range(8, 17):  # MiB
        buffers = [torch.ones(size << 18) for _ in range(8)]
        buffers.clear()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_an_engine_on_a_cpu_keeps_the_memory_of_a_step_for_the_next():
    done = ran([sys.executable, "-c", STEPS], check=True, timeout=120)
    ours, glibcs = map(int, done.stdout.split())
    assert ours < glibcs / 2, (ours, glibcs)
