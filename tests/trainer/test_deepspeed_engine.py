"""What of the DeepSpeed adapter can be said without starting it."""

import fcntl

import pytest
import torch

from rose.comm.address import Host, Place
from rose.config import ConfigError
from rose.trainer import deepspeed_engine, saving
from rose.trainer.deepspeed_engine import zero_config


@pytest.mark.parametrize(("reduced", "sent"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_bfloat16_accumulates_in_float32_and_communicates_as_asked(make_config, reduced, sent):
    keys = ("trainer.dtype=bfloat16", "trainer.zero_stage=2", f"trainer.reduce_dtype={reduced}")
    settings = zero_config(make_config(*keys).trainer, 1000)
    assert settings["bf16"]["enabled"] and settings["communication_data_type"] == sent
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("reduce_dtype=bfloat16", "reduce_dtype='bfloat16'.*needs trainer.dtype=bfloat16"),
        ("dtype=bfloat16 zero_stage=0", "zero_stage=0: trainer.dtype=bfloat16 needs 2 or 3"),
        ("dtype=bfloat16 zero_stage=1 reduce_dtype=bfloat16", "zero_stage=1: .* needs 2 or 3"),
    ],
)
def test_gradients_that_no_rank_keeps_in_float32_are_refused(make_config, keys, why):
    with pytest.raises(ConfigError, match=why):
        make_config(*(f"trainer.{key}" for key in keys.split()))


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """The lock of another builder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return lock


def test_a_dead_builders_lock_is_removed(theirs):
    with deepspeed_engine._build_lock():
        assert not theirs.exists()


def test_a_living_builder_is_waited_for_and_the_wait_ends(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_engine, "BUILD_DEADLINE_S", 0.3)
    words = "rose.lock: held by .*offload_optimizer=false"
    with (tmp_path / "rose.lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=words), deepspeed_engine._build_lock():
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
