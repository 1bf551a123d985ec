"""The launcher chooses what a configuration leaves open of the trainer's computation, and says why."""

import importlib.util

import msgspec
import pytest

from rose.config import ConfigError
from rose.launch import choices, plan
from rose.trainer import compilers
from tests.launch.test_layout_and_plan import printed
from tests.refusals import table

GPUS = ("model=qwen3_8b", "trainer=zero3_gpu", "rollout=gpu", "cluster=gpus", "cluster.gpus=16")
OPEN = "trainer.kernels=null trainer.gradient_checkpointing=null"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with Liger and a compiler."""
    find, there = importlib.util.find_spec, ("liger_kernel", "triton")
    found = lambda name: name if name in there else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(compilers, "no_compiler", lambda on_gpu: "")


def chosen(c):
    c, reasons = choices.made(c, c.model.shape)
    t = c.trainer
    return (t.kernels, t.gradient_checkpointing), reasons


KERNELS = """
trainer.sequence_parallel=2 -> liger | fused norms
trainer.compile=true -> none | together with trainer.compile
model.shape.type=gemma -> none | Liger has none for models of the type gemma
model.shape.type='' -> none | of the type unknown
"""


@pytest.mark.parametrize("overrides, expected", table(KERNELS))
def test_ligers_kernels_where_nothing_excludes_them(make_config, overrides, expected):
    found, reasons = chosen(make_config(*GPUS, overrides))
    assert found[0] == expected[0] and expected[1] in reasons[0], reasons


def test_what_a_machine_lacks_is_not_chosen(make_config, monkeypatch):
    monkeypatch.setattr(compilers, "no_compiler", lambda on_gpu: "no gcc here")
    found, reasons = chosen(make_config(*GPUS))
    assert found[0] == "none" and "no gcc here" in reasons[0]
    monkeypatch.setattr(compilers, "missing", lambda: "liger-kernel")
    found, reasons = chosen(make_config(*GPUS))
    assert found[0] == "none" and "pip install 'rose-rl[liger]'" in reasons[0]


def test_layers_are_computed_again_where_memory_is_too_small(make_config):
    def recomputes(*overrides):
        found, reasons = chosen(make_config(*GPUS, *overrides))
        return found[1], reasons[-1]

    kept, why = recomputes("cluster.gpu_memory_gib=139")
    assert not kept and "of 139 GiB" in why
    needed = float(why.split("needs ")[1].split(" ")[0])
    for share, again in ((choices.FITS - 0.01, False), (choices.FITS + 0.01, True)):
        kept, why = recomputes(f"cluster.gpu_memory_gib={needed / share:.2f}")
        assert kept == again, why
    assert recomputes("cluster.gpu_memory_gib=null")[0]
    kept, why = recomputes("cluster.gpu_memory_gib=139", "trainer.offload_activations=true")
    assert kept and "offload_activations" in why


def test_a_smaller_card_is_refused_only_where_the_run_does_not_fit(make_config):
    """An A10G of 24 GB has 22.2 GiB, an L40S of 48 GB 44.5."""
    large = make_config(*GPUS, "trainer.gradient_checkpointing=false")
    shape = large.model.shape
    with pytest.raises(ConfigError, match=r"=79, but the GPU of trainer 3 has 44 GiB, and without"):
        choices.check_card(large, shape, 3, 44.5)
    choices.check_card(large, shape, 3, 78.2)
    again = make_config(*GPUS, "trainer.gradient_checkpointing=true")
    choices.check_card(again, shape, 3, 44.5)
    small, _ = choices.made(c := make_config("+experiment=qwen3_0_6b"), c.model.shape)
    assert small.trainer.gradient_checkpointing is False
    choices.check_card(small, c.model.shape, 0, 22.2)
    with pytest.raises(ConfigError, match="set cluster.gpu_memory_gib=16"):
        choices.check_card(small, c.model.shape, 0, 15.8)


def test_a_mixture_that_zero_3_gathers_is_computed_again(make_config):
    """Expert weights would otherwise stay gathered until the backward pass."""
    mixture = ("model=qwen3_30b_a3b", *GPUS[1:], "cluster.gpus=64", "trainer.ranks=32")
    mixture += ("rollout.workers=8", "trainer.micro_batch_tokens=16384")
    shape = make_config(*mixture).model.shape
    found, reasons = chosen(make_config(*mixture))
    assert found[-1] is True and "without it the trainer needs" in reasons[-1]
    needed = float(reasons[-1].split("needs ")[1].split(" ")[0])
    experts = 3 * shape.layers * shape.experts * shape.hidden * shape.expert_intermediate
    assert needed > 2 * experts / 2**30  # A value has two bytes in bfloat16.
    again, _ = chosen(make_config(*mixture, f"cluster.gpu_memory_gib={1.2 * needed:.0f}"))
    assert again[-1] is False


def test_on_cpus_nothing_is_chosen_that_needs_gpus(make_config):
    assert chosen(make_config(OPEN))[0] == ("none", True)


def test_the_plan_has_every_choice_and_says_why(make_config):
    c = make_config(*GPUS)
    made = plan.make(c, c.model.shape)
    assert made.config.trainer.gradient_checkpointing is not None
    keys = [reason.partition("=")[0] for reason in made.chosen]
    assert keys == ["trainer.kernels", "trainer.gradient_checkpointing"]
    said = " ".join(printed(made).split())
    assert all(" ".join(reason.split()) in said for reason in made.chosen)
    again = plan.make(made.config, c.model.shape)
    assert again.config == made.config and not again.chosen
    unknown = msgspec.structs.replace(c, model=msgspec.structs.replace(c.model, shape=None))
    assert plan.make(unknown, None).config.trainer.gradient_checkpointing
