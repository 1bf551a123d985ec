"""Step times, memory and transfers from peak rates, whatever the efficiencies are."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml

from rose.config.model import ModelShape
from rose.parts.simulator import hardware
from rose.parts.simulator.hardware import EFFICIENCY, GPUS, SHAPES
from rose.parts.simulator.study import build

CONF = Path(__file__).parents[3] / "conf" / "model"
# model cards
PUBLISHED = {"qwen3_8b": 8.2e9, "qwen3_32b": 32.8e9, "qwen2_5_7b": 7.62e9, "qwen2_5_32b": 32.8e9}


def step_of(model, gpu, degree=1):
    return hardware.step_time(SHAPES[model], GPUS[gpu], degree, 256)


def seconds(step, prompt=0, decodes=0, context=0):
    prefill = step.c1 * prompt + step.c2 * prompt * prompt / 2
    return max(step.c0, prefill) + step.c3 * decodes + step.c4 * context


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_of_its_model_card_and_is_that_of_conf(name):
    assert SHAPES[name].parameters == pytest.approx(PUBLISHED[name], rel=0.01)
    if (file := CONF / f"{name}.yaml").exists():
        assert ModelShape(**yaml.safe_load(file.read_text())["shape"]) == SHAPES[name]
    assert set(hardware.NVLINK) == set(hardware.PCIE) == set(GPUS)


def test_a_borrowed_engine_wakes_up_in_its_own_time_and_that_of_its_weights(spec_of):
    given = "sim.serving.rate=1.0 sim.serving.args.seconds=10 sim.pool.cooperative.switch_s=1.0"
    pools = {pool.name: pool for pool in spec_of(given).pools}
    waking = hardware.wake_s(SHAPES["qwen3_8b"], GPUS["H800"], 1)
    # ROSE: 5 s, all of it, of 32B weights; each device has a bus of its own.
    large = hardware.wake_s(SHAPES["qwen3_32b"], GPUS["H800"], 1) / 4
    assert 2 * 32.8e9 / 4 / hardware.PCIE["H800"] < large < 4
    assert hardware.wake_s(SHAPES["qwen3_32b"], GPUS["H800"], 4) == large
    assert pools["cooperative"].switch_s == 1.0 + waking > 1.2
    assert pools["dedicated"].switch_s == 0


def test_nothing_is_faster_than_the_peaks():
    shape, gpu = SHAPES["qwen3_8b"], GPUS["H800"]
    step = step_of("qwen3_8b", "H800")
    read = 2 * (shape.parameters - shape.vocab * shape.hidden) / gpu.hbm_bytes_s
    assert seconds(step, decodes=1) > read
    flop = 2 * 4096 * (shape.parameters - shape.vocab * shape.hidden)
    assert seconds(step, prompt=4096) > flop / gpu.flops
    for decodes in (1, 64, 235, 256):
        assert seconds(step, decodes=decodes) > max(read, decodes * 2 * 7.5e9 / gpu.flops)


def test_decodes_are_bound_by_bandwidth_and_prefill_by_compute():
    h800, h20 = (step_of("qwen3_8b", name) for name in ("H800", "H20"))
    # 4.0 against 3.35 TB/s
    assert seconds(h20, decodes=1, context=2000) < seconds(h800, decodes=1, context=2000)
    assert seconds(h20, prompt=8192) > 6 * seconds(h800, prompt=8192)  # 148 against 989 TFLOP/s


def test_tensor_parallelism_shortens_a_step_by_less_than_the_gpus_it_takes():
    for work in (dict(prompt=8192), dict(decodes=64, context=64 * 4000)):
        two, four = (seconds(step_of("qwen3_32b", "H800", degree), **work) for degree in (2, 4))
        assert two / 2 < four < two


def test_kv_cache_is_what_weights_and_activations_leave():
    shape, gpu = SHAPES["qwen3_8b"], GPUS["H800"]
    tokens = hardware.kv_tokens(shape, gpu, 1)
    assert shape.kv_bytes_per_token == 147_456
    assert tokens * 147_456 + 2 * shape.parameters < 0.9 * gpu.memory_bytes
    expected = pytest.approx(tokens - 1000, abs=1)
    assert hardware.kv_tokens(shape, gpu, 1, others_bytes=147_456 * 1000) == expected


@pytest.mark.parametrize(
    "overrides, passes",
    [
        ([], 0.0),
        (["trainer.updates_per_step=4"], 0.75),
        (["trainer.updates_per_step=4", "sim.trainer.forward_passes=1"], 1.0),
    ],
)
def test_old_log_probabilities_cost_what_the_live_trainer_spends(make_config, overrides, passes):
    """Of its first update the update's own forward pass gives them."""
    pools = "sim.pools=[dedicated]"
    c = make_config("+experiment=rose_8b", pools, *overrides)
    trainer = build.make_spec(c, "rose", build.ours(c), 1).trainer
    bare = hardware.trainer(c.model.shape, GPUS["H800"], 8, recompute=True)
    assert c.trainer.gradient_checkpointing is None, "the layers are computed again"
    assert trainer.flops_per_token / bare.flops_per_token == pytest.approx((4 + passes) / 4)


def test_training_costs_six_flop_a_parameter_and_token_and_the_passes_besides():
    shape = SHAPES["qwen3_8b"]
    active = shape.parameters - shape.vocab * shape.hidden
    for recompute, passes, pairs in ((False, 0, 3), (True, 1, 5)):
        found = hardware.trainer(shape, GPUS["H800"], 8, recompute=recompute, passes=passes)
        assert found.flops_per_token == pytest.approx(2 * pairs * active)
        assert found.flops_per_pair == pairs * 4 * 36 * 32 * 128  # layers, heads and their size


def test_differences_are_smaller_on_the_link_than_whole_versions_but_a_late_joiner_needs_a_whole_one():
    shape = SHAPES["qwen3_8b"]
    dense, sparse = (hardware.link(shape, 1e9, 0.1, sparse, True) for sparse in (False, True))
    assert dense.version_bytes == pytest.approx(2 * 8.19e9, rel=0.01) == dense.full_bytes
    assert dense.version_bytes / sparse.version_bytes == pytest.approx(hardware.DELTA_RATIO)
    assert sparse.version_bytes < sparse.full_bytes < dense.full_bytes


@pytest.mark.parametrize(
    "gpus, mib, published",
    [  # us of vLLM's best, github.com/vllm-project/vllm/pull/24532 (4) and 24111 (2, 6)
        (2, 0.5, 7),
        *((4, mib, us) for mib, us in ((0.5, 10), (1.0, 14), (1.5, 19), (2.0, 21), (4.0, 28))),
        *((6, mib, us) for mib, us in ((0.5, 13), (1.0, 16), (1.5, 18), (2.0, 21), (4.0, 31))),
    ],
)
def test_an_all_reduce_takes_about_what_is_published(gpus, mib, published):
    one = msgspec.structs.replace(SHAPES["qwen3_8b"], layers=1, heads=24)
    none = replace(EFFICIENCY, nvlink=1e9)
    tokens = mib * 2**20 / (one.hidden * hardware.BF16)

    def step(efficiency, degree):
        return hardware.step_time(one, GPUS["H100"], degree, 1000, efficiency)

    # of two, in a layer
    bytes_s = (step(EFFICIENCY, gpus).c1 - step(none, gpus).c1) * tokens / 2
    ours = 1e6 * (EFFICIENCY.all_reduce_s + bytes_s)
    if gpus == 2:  # one latency for all degrees is too long for the least
        assert ours / published == pytest.approx(1.65, abs=0.01)
    else:
        assert ours == pytest.approx(published, rel=0.25)


def test_a_decode_step_waits_for_its_all_reduces_however_long_weights_take():
    shape, gpu = SHAPES["qwen3_8b"], GPUS["H800"]
    slow = replace(EFFICIENCY, nvlink=EFFICIENCY.nvlink / 10)
    for degree in (2, 8):
        mine, theirs = (hardware.step_time(shape, gpu, degree, 16, e) for e in (EFFICIENCY, slow))
        assert theirs.c3 - mine.c3 == pytest.approx(theirs.c1 - mine.c1) and theirs.c3 > mine.c3
