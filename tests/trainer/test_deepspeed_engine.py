"""What of the DeepSpeed adapter can be said without starting it."""

import fcntl

import pytest
import torch

from rose.comm.address import Host, Place
from rose.config import ConfigError
from rose.trainer import deepspeed_engine, saving
from rose.trainer.deepspeed_engine import zero_config
from rose.trainer.model import load
from tests.trainer import tiny_world


def test_buckets_are_no_larger_than_the_model(make_config):
    zero = zero_config(make_config().trainer, parameters=500_000)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 500_000


def test_bfloat16_accumulates_and_communicates_in_float32(make_config):
    settings = zero_config(
        make_config("trainer.dtype=bfloat16", "trainer.zero_stage=2").trainer, 1000
    )
    assert settings["bf16"]["enabled"] and settings["communication_data_type"] == "fp32"
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    narrow = zero_config(
        make_config(
            "trainer.dtype=bfloat16 trainer.zero_stage=2 trainer.reduce_dtype=bfloat16"
        ).trainer,
        1000,
    )
    assert narrow["communication_data_type"] == "bf16"
    assert narrow["data_types"] == {"grad_accum_dtype": "fp32"}


def test_gradients_are_added_up_in_bfloat16_only_where_they_are_kept_in_float32(make_config):
    with pytest.raises(ConfigError, match="reduce_dtype='bfloat16'.*needs trainer.dtype=bfloat16"):
        make_config("trainer.reduce_dtype=bfloat16")


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("reduced", ["float32", "bfloat16"])
def test_stages_that_keep_no_float32_gradients_are_refused_in_bfloat16(make_config, stage, reduced):
    with pytest.raises(
        ConfigError, match=f"zero_stage={stage}: trainer.dtype=bfloat16 needs 2 or 3"
    ):
        make_config(
            "trainer.dtype=bfloat16",
            f"trainer.zero_stage={stage}",
            f"trainer.reduce_dtype={reduced}",
        )


def test_zero_3_gathers_a_layer_ahead(make_config, tmp_path):
    trainer = make_config("trainer.zero_stage=3").trainer
    assert (
        zero_config(trainer, 10**9, 233_057_792)["zero_optimization"]["stage3_prefetch_bucket_size"]
        == 233_057_792
    )
    assert (
        zero_config(trainer, 10**9)["zero_optimization"]["stage3_prefetch_bucket_size"]
        == 50_000_000
    )
    policy = load(tiny_world.save_model(tmp_path), torch.float32, False)
    layers = policy.hf.config.num_hidden_layers
    inside = sum(p.numel() for name, p in policy.named_weights() if ".layers." in name)
    assert policy.largest_layer() == inside // layers > 0


def test_a_dead_builders_lock_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    stale = tmp_path / "cpu_adam" / "lock"
    stale.parent.mkdir()
    stale.touch()
    with deepspeed_engine._build_lock():
        assert not stale.exists()


def test_a_living_builder_is_waited_for_and_the_wait_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed_engine, "BUILD_DEADLINE_S", 0.3)
    theirs = tmp_path / "cpu_adam" / "lock"
    theirs.parent.mkdir()
    theirs.touch()
    with (tmp_path / "rose.lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with (
            pytest.raises(TimeoutError, match="rose.lock: held by .*offload_optimizer=false"),
            deepspeed_engine._build_lock(),
        ):
            pass
    assert theirs.exists()


def test_random_states_come_back(tmp_path):
    cpu = torch.device("cpu")
    torch.save(saving._random_states(cpu), tmp_path / "random.pt")
    expected = torch.rand(3)
    torch.rand(7)
    saving._restore_random_states(saving.loaded(tmp_path / "random.pt"), cpu)
    assert torch.equal(torch.rand(3), expected)


def test_ranks_of_a_second_copy_on_two_hosts_are_named():
    hosts = [Host(name, name, []) for name in ("n1", "n2", "n1", "n2")]
    words = r"(?s)trainer.hpz=2: .*trainer.hpz=null.*rank 0 on n1.*rank 3 on n2"
    with pytest.raises(ValueError, match=words):
        deepspeed_engine.check_second_copies(2, Place("", 1, None, None, hosts))
    deepspeed_engine.check_second_copies(None, Place("", 1, None, None, hosts))
    deepspeed_engine.check_second_copies(2, Place("", 1, None, None, sorted(hosts, key=str)))
