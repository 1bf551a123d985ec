"""Replicas are refused beside what excludes them, without memory, and without this part."""

import pytest

from rose import extensions
from rose.config import ConfigError
from rose.launch import memory, plan
from rose.launch.layout import layout
from rose.parts.replicas import launch
from rose.protocol import Role
from tests.launch.test_exclusions import ALL_IDLE, GPUS, LATE, LORA, ONE, refuses
from tests.launch.test_layout_and_plan import QWEN3_8B, printed

REPLICA = "trainer.elastic_replicas=1"
# A run that each row of the part's table refuses, in the table's order.
REFUSED = (
    f"{ONE} deterministic=true {REPLICA}",
    f"colocate=true {REPLICA}",
    f"{ALL_IDLE} {REPLICA}",
    f"{REPLICA} scheduler/batching=tail_batching",
    f"trainer.elastic_replicas=2 {LATE}",
    f"{REPLICA} {LATE}",
    f"{REPLICA} cluster=dev",
    f"{REPLICA} eval.beside=true",
    f"{REPLICA} {GPUS} transfer.broadcast=nccl",
    f"{REPLICA} trainer.stream=true",
    f"{REPLICA} trainer.updates_per_step=2",
    f"{REPLICA} {LORA}",
    f"{REPLICA} trainer.router_replay=true",
    f"{REPLICA} trainer.ranks=2 trainer.sequence_parallel=2",
    f"{REPLICA} trainer.compile=true",
    f"{REPLICA} trainer.kernels=liger {GPUS}",
    f"{REPLICA} trainer.offload_optimizer=true",
    f"{REPLICA} algorithm.kl_coef=0.1",
    f"{REPLICA} {GPUS} {ONE} rollout.tensor_parallel=2",
    f"{REPLICA} model.dtype=bfloat16",
    f"{REPLICA} model.name=experts",
)


@pytest.mark.parametrize("row, overrides", [*zip(launch.EXCLUSIONS, REFUSED, strict=True)])
def test_each_row_refuses_a_run_by_the_key_of_its_feature(tree, row, overrides):
    refuses(row, tree(*overrides.split()))


def test_without_the_part_replicas_are_refused(make_config, monkeypatch):
    monkeypatch.setattr(extensions, "names", lambda: ("lending",))
    with pytest.raises(ConfigError, match="elastic_replicas=1: needs rose/parts/replicas, which"):
        make_config(REPLICA)
    make_config("trainer.elastic_replicas=0")


def test_memory_for_replicas_is_beside_engines_on_cpus_and_instead_on_gpus(make_config):
    shape = make_config(*QWEN3_8B).model.shape
    c = make_config("trainer.elastic_replicas=1", "rollout.workers=2")
    trainer, engine, each = (f(c, shape) for f in (memory.trainer, memory.rollout, launch.estimate))
    assert each.firm == pytest.approx(8 * shape.parameters / 2**30)
    assert each.host["file of the gradient"] == pytest.approx(4 * shape.parameters / 2**30)
    assert 0 < each.host["staged blocks"] <= c.transfer.stage_gib
    offloads = make_config(
        "trainer.elastic_replicas=1 trainer.offload_activations=true",
        "trainer.gradient_checkpointing=true",
    )
    more = launch.estimate(offloads, shape).host["offloaded activations"]
    assert more == memory.trainer(offloads, shape).host["offloaded activations"] > 0
    whole = trainer.total + 2 * engine.total + each.total + sum(each.host.values())
    whole += sum(memory.host_gib(c, trainer, engine))
    plan.make(c, shape, host_gib=whole + 1)
    with pytest.raises(ConfigError, match=rf"elastic_replicas=1: {whole:.1f} GiB of trainer"):
        plan.make(c, shape, host_gib=whole - 1)
    gpus = ("cluster.gpus=8", "trainer.ranks=4", "rollout.workers=4", "trainer.elastic_replicas=4")
    c = make_config(*QWEN3_8B, *gpus, "trainer.offload_optimizer=false")
    assert [r.gpus for r in layout(c) if r.role is Role.ROLLOUT] == [(4,), (5,), (6,), (7,)]
    said = " ".join(printed(plan.make(c, shape, host_gib=500.0)).split())
    assert "1, replicas that train beside 4 of them, " in said
    with pytest.raises(ConfigError, match=r"elastic_replicas=4: .* 40.0 GiB of memory"):
        plan.make(c, shape, host_gib=40.0)
    small = make_config(*QWEN3_8B, *gpus, "cluster.gpu_memory_gib=48")
    with pytest.raises(ConfigError, match="elastic_replicas=4: a replica may need"):
        plan.make(small, shape)
    full = make_config(*QWEN3_8B, *gpus, "rollout.gpu_memory_utilization=0.99")
    with pytest.raises(ConfigError, match="the replica's process keeps 1.5 GiB"):
        plan.make(full, shape)
