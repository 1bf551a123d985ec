"""The one table of features that exclude each other: each row refuses a run, with its words."""

import pytest

from rose import config as configuration
from rose.config import ConfigError
from rose.launch import exclusions
from tests.test_config import MIXTURE, shape

ONE = "rollout.workers=1"
GPUS = "cluster=gpus cluster.gpus=4"
ALL_IDLE = "rollout.hybrid=1 scheduler/provisioning=all_idle"
LATE = "algorithm=decoupled_ppo scheduler/batching=bounded_staleness"
LORA = "+trainer/lora=linear"
FUNCTION = "reward=function reward.args.path=a.py:f"
# A run that each row of the table refuses, in the table's order.
REFUSED = (
    "deterministic=true",
    f"{ONE} deterministic=true trainer.dtype=bfloat16 trainer.zero_stage=2",
    f"{ONE} deterministic=true trainer.stream=true",
    f"{ONE} deterministic=true trainer.compile=true",
    f"{ONE} deterministic=true trainer.kernels=liger {GPUS}",
    f"{ONE} deterministic=true rollout/draft=group",
    f"{ONE} deterministic=true {FUNCTION} reward.adaptive=true",
    f"{ONE} deterministic=true trainer.router_replay=true",
    f"{ONE} deterministic=true eval=beside",
    f"{ONE} deterministic=true {ALL_IDLE}",
    f"colocate=true {LATE}",
    "colocate=true eval=beside",
    "colocate=true cluster=slurm cluster.gpus=8",
    f"colocate=true {GPUS} transfer.broadcast=nccl",
    "colocate=true trainer.stream=true",
    f"colocate=true {ALL_IDLE}",
    f"{ALL_IDLE} trainer.stream=true",
    f"{ALL_IDLE} scheduler/batching=one_step_off",
    "rollout.hybrid=1",
    f"{ALL_IDLE} cluster=dev",
    f"{ALL_IDLE} {GPUS} transfer.broadcast=nccl",
    "trainer.stream=true trainer.updates_per_step=2",
    "trainer.stream=true algorithm=reinforce_pp",
    "trainer.updates_per_step=2 algorithm=rloo",
    f"trainer.kernels=liger {GPUS} trainer.compile=true",
    "trainer.compile=true trainer.ranks=2 trainer.sequence_parallel=2",
    "trainer.compile=true trainer.gradient_checkpointing=true trainer.offload_activations=true",
    "trainer.compile=true trainer.router_replay=true",
    "trainer.compile=true model.name=experts",
    "trainer.hpz=2 trainer.ranks=4 trainer.zero_stage=3 trainer.sequence_parallel=2",
    "trainer.hpz=2 trainer.ranks=4 trainer.zero_stage=3 model.name=experts",
    f"{LORA} model.name=experts",
    f"{GPUS} rollout/draft=group",
    "trainer.router_replay=true rollout.prefix_caching=false",
    "trainer.router_replay=true rollout/draft=ngram",
    "trainer.router_replay=true trainer.ranks=2 trainer.sequence_parallel=2",
    "eval=beside transfer.in_flight=finish",
    "rollout.replay=earlier eval.every=5 eval.keep_best=true",
    "rollout.replay=earlier eval.every=5 eval.stop.patience=2",
    "scheduler/provisioning=on_demand",
    "scheduler/provisioning=on_demand cluster=dev cluster/mpi=openmpi",
    "scheduler/provisioning=on_demand cluster=dev serving=none",
    f"scheduler/provisioning=on_demand cluster=dev {ONE} cluster.slurm.rollout.nodes=1 deterministic=true",
    "scheduler/provisioning=on_demand cluster=dev rollout.replay=earlier",
    "rollout.group_size=1",
    "rollout.group_size=1 algorithm=reinforce_pp algorithm.dynamic_sampling=true",
    "algorithm=turn_grpo algorithm.dynamic_sampling=true",
)


@pytest.mark.parametrize("row, overrides", [*zip(exclusions.EXCLUSIONS, REFUSED, strict=True)])
def test_each_row_refuses_a_run_by_the_key_of_its_feature(tree, row, overrides):
    c = configuration.from_dict(tree(*overrides.split()))
    known = shape(**MIXTURE) if row.other is exclusions.EXPERTS else None
    with pytest.raises(ConfigError) as refused:
        exclusions.check(c, known)
    said = row.message(configuration.to_dict(c))
    assert str(refused.value) == said and said.startswith(f"{row.feature.key}=")


def test_a_refusal_names_keys_values_reason_and_remedy(make_config):
    with pytest.raises(ConfigError) as refused:
        make_config("deterministic=true", "rollout.workers=1", "trainer.stream=true")
    assert str(refused.value) == (
        "trainer.stream=True: impossible with deterministic=true, because gradients are summed in "
        "the order in which groups finish; trainer.stream=false, or deterministic=false"
    )
    with pytest.raises(ConfigError, match="eval.beside=True: impossible with one GPU or `colocate"):
        make_config("cluster=gpus cluster.gpus=1 rollout.workers=1 eval=beside")


class Own:
    """A batching policy of another package."""

    staleness, waits_for_weights = 0, True
    begin = finished = snapshot = restore = None


def test_policies_of_other_packages_have_the_features_that_their_classes_name(tree, monkeypatch):
    own = tree("rollout.hybrid=1", "scheduler/provisioning=all_idle")
    own["scheduler"]["batching"] = {"name": f"{__name__}:Own", "args": {}}
    assert exclusions.from_dict(own).transfer.in_flight == "recompute"
    monkeypatch.setattr(Own, "waits_for_weights", False)
    with pytest.raises(ConfigError, match="batching.name='.*:Own': impossible with rollout.hybrid"):
        exclusions.from_dict(own)
