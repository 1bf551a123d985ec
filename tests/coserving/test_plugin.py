"""vLLM's entry point into ROSE, in an engine that shares no device."""

import pytest

from rose.coserving import names, plugin


@pytest.mark.parametrize("has_tiles", [True, False])
def test_every_engine_asks_for_the_amx_tiles_that_its_cpu_has(monkeypatch, has_tiles):
    import torch

    asked = []
    monkeypatch.delenv(names.FOLDER, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    plugin.register()
    assert asked == [True] * has_tiles
