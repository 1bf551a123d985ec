"""What vLLM is started with."""

import importlib.util
import os
import tempfile
import tomllib
import uuid
from pathlib import Path

import msgspec
import pytest

from rose import scratch
from rose.config import ConfigError, Lora
from rose.config.checks import engines
from rose.engine import arguments
from rose.engine.start import engine_args, environment
from rose.parts.lending import settings
from rose.parts.lending.vllm import device

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "gpus, lent, expected", [(True, True, True), (True, False, None), (False, True, None)]
)
def test_sleep_mode_on_a_gpu(gpus, lent, expected, rollout, model_config, tmp_path, monkeypatch):
    monkeypatch.delenv("ROSE_COSERVING", raising=False)
    if lent:
        for name, value in device.describe(tmp_path, settings.of_server([]), None).items():
            monkeypatch.setenv(name, value)
    args = engine_args(Path("m"), rollout, model_config, False, 0, gpus)
    assert args.get("enable_sleep_mode") is expected
    if expected:
        assert args["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
        assert args["max_num_batched_tokens"] == args["max_cudagraph_capture_size"] == 512
        own = {"enable_chunked_prefill": False, "cudagraph_capture_sizes": [1, 2]}
        rollout = msgspec.structs.replace(rollout, engine_args=own)
        args = engine_args(Path("m"), rollout, model_config, False, 0, gpus)
        assert args["max_num_batched_tokens"] == rollout.max_batched_tokens
        assert (
            args["cudagraph_capture_sizes"] == [1, 2] and "max_cudagraph_capture_size" not in args
        )
    else:
        assert "compilation_config" not in args
    assert ("VLLM_KV_CACHE_LAYOUT" in environment(gpus, 1, lent)) is bool(expected)


def test_an_engine_on_a_gpu_starts_without_nvcc_unless_the_user_wants_its_sampler(monkeypatch):
    """vLLM's warm-up samples with top-k and top-p; FlashInfer builds that with a CUDA toolkit."""
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    assert environment(True, None)[name] == "0"
    monkeypatch.setenv(name, "1")
    assert environment(True, None)[name] == "1"


def test_an_engine_has_memory_for_one_adapter_of_the_next_rank_that_vllm_has(rollout, model_config):
    lora = Lora(rank=17, alpha=32.0, targets=["q_proj", "v_proj", "down_proj"])
    args = engine_args(Path("m"), rollout, model_config, False, 0, lora=lora)
    assert args["enable_lora"] and (args["max_loras"], args["max_lora_rank"]) == (1, 32)
    assert args["lora_target_modules"] == ["down_proj", "qkv_proj"]
    bare = engine_args(Path("m"), rollout, model_config, False, 0)
    assert not [name for name in bare if "lora" in name]


def test_arguments_are_those_that_vllms_source_has(rollout, model_config):
    known = arguments.names()
    lora = Lora(rank=8, alpha=16.0, targets=["q_proj"])
    started = engine_args(Path("m"), rollout, model_config, True, 0, True, lora, routing=True)
    refused = {*engines.OTHER_WEIGHTS, *engines.OWN, *engines.FIXED}
    assert {*started, *refused, "enable_sleep_mode", "speculative_config"} <= known
    assert "not_one" not in known and len(known) > 100


def test_the_longest_draft_is_vllms():
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    source = (folder / "v1/sample/rejection_sampler.py").read_text()
    assert f"\nMAX_SPEC_LEN = {engines.MOST_DRAFTED}\n" in source


@pytest.mark.parametrize("gpus", [True, False])
def test_vllms_sockets_have_room_for_their_names(monkeypatch, gpus):
    """A Unix socket's path has 107 bytes, of which vLLM takes 37 for a slash and a UUID."""

    def no_place(*_):
        raise OSError("no space")

    name = "VLLM_RPC_BASE_PATH"
    monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="x" * 17, dir="/tmp") as longest:  # 30 bytes
        for folder, base in (("/tmp", "/tmp"), (longest, longest), (f"{longest}y", "/tmp")):
            monkeypatch.setattr(tempfile, "tempdir", folder)
            found = Path(environment(gpus, 1)[name])
            assert found.is_dir() and found.parent == Path(base)
            assert len(str(found / str(uuid.uuid4()))) <= 107
    monkeypatch.setattr(scratch, "folder", no_place)
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 69)
    assert environment(gpus, 1)[name] == "/" + "x" * 69
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 70)
    with pytest.raises(ConfigError, match="TMPDIR=/xxx.*no space.*VLLM_RPC_BASE_PATH"):
        environment(gpus, 1)
    monkeypatch.setenv(name, "/short")
    assert environment(gpus, 1)[name] == "/short"


@pytest.mark.parametrize("allowed", ["", "mine", "mine,rose"])
def test_plugins_that_a_user_allows_do_not_shut_roses_out(monkeypatch, allowed):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    environment(False, 1)
    assert "VLLM_PLUGINS" not in os.environ, "then vLLM loads all"
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    for _ in range(2):
        environment(False, 1)
        found = os.environ["VLLM_PLUGINS"].split(",")
    own = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    expected = {*own["vllm.general_plugins"], *filter(None, allowed.split(","))}
    assert sorted(found) == sorted(expected)
