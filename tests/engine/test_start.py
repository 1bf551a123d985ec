"""What vLLM is started with."""

from pathlib import Path

import pytest

from rose.engine.start import engine_args, environment


@pytest.mark.parametrize(
    "gpus, lent, expected", [(True, True, True), (True, False, None), (False, True, None)]
)
def test_an_engine_that_shares_a_gpu_can_give_back_its_weights(
    gpus, lent, expected, rollout, model_config, tmp_path, monkeypatch
):
    monkeypatch.delenv("ROSE_COSERVING", raising=False)
    if lent:
        monkeypatch.setenv("ROSE_COSERVING", str(tmp_path))
    assert (
        engine_args(Path("m"), rollout, model_config, False, 0, gpus).get("enable_sleep_mode")
        is expected
    )
    assert ("VLLM_KV_CACHE_LAYOUT" in environment(gpus, 1, lent)) is bool(expected)
