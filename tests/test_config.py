"""The one typed tree: what is refused, and how it is said."""

import json
import os

import pytest

from rose import config as configuration
from rose import processes
from rose.config import ConfigError, ModelShape, check_model, errors, from_dict, read_shape, to_dict
from tests.conftest import CONF
from tests.made import LLAMA, model_folder
from tests.refusals import refused, table

ONE_GPU = "cluster=gpus cluster.gpus=1 trainer.ranks=1 rollout.workers=1"


def test_a_run_survives_its_folder_and_a_single_environment_is_stored_as_ever(
    make_config, tmp_path
):
    mixed, single = make_config("env=games"), make_config()
    for each in (mixed, single):
        configuration.save(each, tmp_path / "config.json")
        assert configuration.load(tmp_path / "config.json") == each
    assert mixed.env.weights == {"frozen_lake": 2.0, "calculator": 1.0}
    assert mixed.env.members["calculator"].max_turns == 4 and mixed.step_timeout_s == 10.0
    keys = "name args max_turns max_new_tokens step_timeout_s trajectory_timeout_s"
    keys += " max_failures_in_row max_failed_tasks"
    assert set(to_dict(single)["env"]) == {*keys.split()}
    assert single.env.members == {"frozen_lake": single.env}
    assert single.env.weights == {"frozen_lake": 1.0}


def test_the_name_of_a_member_can_be_a_domain(tree):
    mixed = tree("env=games")
    mixed["env"]["members"]["a b"] = mixed["env"]["members"]["calculator"]
    words = "letters, digits, _ and - only in a member's name, which is 'a b'"
    with pytest.raises(ConfigError, match=words):
        from_dict(mixed)


IMPOSSIBLE = """
trainer.batch_size=63 -> trainer.batch_size=63 | multiple of rollout.group_size=8 | 64
trainer.ranks=129 -> trainer.batch_size=128 | trainer.ranks=129
trainer.steps=0 -> trainer.steps=0 | >= 1
trainer.sequence_parallel=2 -> trainer.sequence_parallel=2 | trainer.ranks=1
trainer.offload_activations=true
    -> trainer.offload_activations=True | trainer.gradient_checkpointing=true
trainer.optimizer.lr=-1 -> trainer.optimizer.lr=-1 | > 0
trainer.optimizer.lr=.inf -> trainer.optimizer.lr=inf | finite
env.args.hole_probability=.nan -> env.args.hole_probability=nan | finite
trainer.threads=0 -> trainer.threads=0 | >= 1 | or null
scheduler.queue_depth=-0.1 -> scheduler.queue_depth=-0.1 | >= 0
trainer.optimizer.betas=[0.9,x] -> trainer.optimizer.betas[1]='x' | expected `float`
+cluster.mpi.srun=[1] -> cluster.mpi.srun[0]=1 | must be text; put it in quotes
name=1e3 -> name=1000.0 | must be text; put it in quotes | 0123 as 83
cluster.mpi.srun=[pmi2] -> cluster.mpi.srun.0='pmi2' | --mpi=pmi2
+cluster.mpi.env.A-B=x -> cluster.mpi.env.A-B='x' | name of a variable
cluster.kind=pbs -> cluster.kind='pbs' | one of local, slurm
cluster.kind=slurm -> cluster.slurm=None | use cluster=slurm
+cluster.env.A=1 -> cluster.env.A=1 | must be text | '+cluster.env.A="1"'
transfer.relay=node7:7673 -> transfer.relay='node7:7673' | http://host:port
transfer.relay=http://node7:76730 -> transfer.relay='http://node7:76730' | port below 65536
transfer.relay=http://[::1:7673 -> transfer.relay='http://[::1:7673' | http://host:port
transfer.relay=http://node7:7673 -> transfer.relay_token_file=None | asks for its token
transfer.broadcast=nccl -> transfer.broadcast='nccl' | needs GPUs
transfer.in_flight=drop -> transfer.in_flight | drop
+rollout.engine_args.speculative_config={method:ngram,num_speculative_tokens:4}
    -> rollout.engine_args.speculative_config= | wrong tokens | run on GPUs
+rollout.engine_args.spec-method='"ngram"' -> rollout.engine_args.spec-method= | wrong tokens
+rollout.engine_args.spec_tokens=4 -> rollout.engine_args.spec_tokens=4 | on GPUs
+rollout.engine_args.speculative_config.method=ngram
    -> rollout.engine_args.speculative_config= | wrong tokens
rollout/branch=tree rollout.group_size=6 trainer.batch_size=60
    -> rollout.group_size=6 | a multiple of 4 | rollout.branch.ways=[2, 2]
rollout/draft=ngram cluster.gpus=8 +rollout.engine_args.spec_tokens=4
    -> rollout.engine_args.spec_tokens=4 | leave out one of them
trainer.router_replay=true +rollout.engine_args.enable_return_routed_experts=true
    -> enable_return_routed_experts=True | is set by ROSE
rollout.branch.ways=[1] -> rollout.branch.ways=[1] | 2 or more | branch=none
rollout/branch=tree rollout.branch.at=[3] -> rollout.branch.at=[3] | each of the 2 forks | ascending
rollout/branch=tree rollout.branch.at=[3,2] -> rollout.branch.at=[3, 2]
rollout/branch=tree rollout.branch.at=[0,2] -> rollout.branch.at[0]=0 | >= 1
rollout/branch=tree rollout.branch.at=[3,10] -> rollout.branch.at=[3, 10] | below env.max_turns=10
rollout/branch=tree rollout.branch.depth=1 -> rollout.branch.depth=1 | at least 2
rollout/branch=tree env.max_turns=4 -> rollout.branch.depth=4 | below env.max_turns=4
rollout/branch=tree mode=simulate -> rollout.branch.ways=[2, 2] | rollout/branch=none
+rollout.engine_args.quantization=fp8
    -> rollout.engine_args.quantization='fp8' | trainer's bit for bit
+rollout.engine_args.logprobs_mode=processed_logprobs
    -> rollout.engine_args.logprobs_mode='processed_logprobs' | is set by ROSE
+rollout.engine_args.max-num-seqs=4
    -> rollout.engine_args.max-num-seqs=4 | from rollout.max_sequences
trainer.optimizer.schedule=cosine trainer.optimizer.warmup_steps=60
    -> trainer.optimizer.warmup_steps=60 | below 60 | trainer.steps=60 | cosine
trainer.optimizer.final_share=1.5 -> trainer.optimizer.final_share=1.5 | <= 1
eval.samples=2 eval.temperature=0 -> eval.temperature=0 | 2 greedy samples
eval.stop.patience=2 -> eval.every=0 | eval.stop.patience=2
eval.keep_best=true -> eval.every=0 | eval.keep_best=true
eval=none eval.every=5 eval.keep_best=true -> eval.episodes=0 | eval.sets
+env@eval.sets.sums=calculator -> eval.sets.sums.episodes | missing
+env@eval.sets.a.b=calculator -> eval.sets.a.b= | no such key
+env@eval.sets.frozen_lake=calculator +eval.sets.frozen_lake.episodes=1
    -> eval.sets.frozen_lake.name='calculator' | another name for the set
+env@eval.sets.sums=calculator +eval.sets.sums.episodes=1
    +eval.sets.sums.samples=2 +eval.sets.sums.temperature=0
    -> eval.sets.sums.temperature=0 | 2 greedy samples
+env@eval.sets.sums=calculator +eval.sets.sums.episodes=1 eval.sets.sums.max_new_tokens=100000
    -> eval.sets.sums.max_new_tokens=100000 | model.max_context=
+model.recipe.hidden=96 -> model.recipe.hidden=96 | multiple of 64
+model.recipe.hidden=0 -> model.recipe.hidden=0 | >= 64
+model.recipe.layers=two -> model.recipe.layers='two' | `int`
+model.recipe.experts=1 -> model.recipe.experts=1 | 0, or 2 and more
+model.recipe.env=chess -> model.recipe.env='chess' | frozen_lake, terminal
+model.recipe.hole-probability=1 -> model.recipe.hole_probability=1 | <= 0.5
+model.recipe.hidden=4096 +model.recipe.layers=8
    -> model.recipe.hidden=4096 | layers=8 | 100,000,000 at most | model.source=folder
+model.recipe.steps=1000000 -> model.recipe.steps=1000000 | batch=8 | 500,000 at most
model=smollm2 +model.recipe.dtype=float16 -> model.recipe.dtype='float16' | float32, bfloat16
trainer.optimizer.betas=[0.9] -> trainer.optimizer.betas | two numbers
trainer.zero_stage=4 -> trainer.zero_stage=4 | one of 0, 1, 2, 3
trainer.micro_batch_tokens=100 -> trainer.micro_batch_tokens=100 | model.max_context=
rollout.temperature=0 -> rollout.temperature=0 | greedy
rollout.temperature=2.5 -> rollout.temperature=2.5 | <= 2.0
rollout.top_p=1.5 -> rollout.top_p=1.5 | <= 1
env=mixture -> env.members={} | needs members | +env@env.members.more=reasoning
env=games env.members.calculator.weight=0 -> env.members.calculator.weight=0 | > 0
~env.members.calculator.weight env=games -> env.members.calculator.weight | missing
env=games env.members.calculator.max_new_tokens=768
    -> env.members.calculator.max_new_tokens=768 | must fit
env=games env.members.calculator.name=mixture
    -> env.members.calculator.name='mixture' | no mixture within a mixture
env=games +env.members.a/b.weight=1 -> env.members.a/b.name: missing
env=games +env.max_turns=3 -> env.max_turns=3 | no such key
env=games env.name=frozen_lake -> env.members= | no such key
+env.members.calculator.weight=1 -> env.members= | no such key
env.max_new_tokens=768 -> env.max_new_tokens=768 | model.max_context=
cluster.slots=4 -> cluster.slots=4 | 5 ranks
cluster.gpus=2 -> cluster.gpus=2 | needs 3
cluster.gpu_memory_gib=0 -> cluster.gpu_memory_gib=0
trainer.kernels=liger -> trainer.kernels='liger' | need GPUs
trainer.hpz=2 trainer.ranks=4 -> trainer.hpz=2 | trainer.zero_stage=3, not 1
trainer.hpz=node -> trainer.hpz='node' | trainer.zero_stage=3
trainer.hpz=3 trainer.ranks=4 trainer.zero_stage=3 -> trainer.hpz=3 | divide trainer.ranks=4
trainer.hpz=4 trainer.ranks=4 trainer.zero_stage=3 -> trainer.hpz=4 | into two groups or more
cluster=gpus rollout.tensor_parallel=2 +rollout.engine_args.sleep_mode_offload_cudagraph=true
    -> sleep_mode_offload_cudagraph=True | not tried | rollout.tensor_parallel=2
cluster=gpus cluster.gpus=1 +rollout.engine_args.enable_sleep_mode=false
    -> rollout.engine_args.enable_sleep_mode=False | true, or leave it out
rollout.hybrid=2 scheduler/provisioning=all_idle -> rollout.hybrid=2 | at most 1 | trainer.ranks=1
env=prompts env.max_new_tokens=8 env.args.data=x env.args.reward=null
    -> env.args.reward=null | reward=
reward=function reward.args.path=a.py:f reward.max_jobs=2
    -> reward.max_jobs=2 | cluster=slurm | raise reward.max_workers=2
cluster=dev reward.max_jobs=2 -> reward.max_jobs=2 | reward=environment
rollout.workers=65536 -> rollout.workers=65536 | at most 65536 ranks
rollout.turn_timeout_s=1e300 -> rollout.turn_timeout_s=1e+300 | 1e9 seconds
transfer.mirror_gib=1e308 -> transfer.mirror_gib=1e+308 | at most 1e6 GiB
trainer.threads=2147483648 -> trainer.threads=2147483648 | at most 4096
seed=9223372036854775808 -> seed=9223372036854775808 | below 2**63
algorithm.importance_cap=1e300 -> algorithm.importance_cap=1e+300 | at most 1e+15
rollout.max_sequences=4097 -> rollout.max_sequences=4097 | at most rollout.max_batched_tokens=4096
rollout/draft=group rollout.draft.tokens=129
    -> rollout.draft.tokens=129 | at most 128 | vLLM checks no longer
trainer.batch_size=80000000 -> trainer.batch_size=80000000 | at most 10000000
scheduler/batching=bounded_staleness scheduler.batching.args.eta=1000000
    -> scheduler.batching.args.eta=1000000 | at most 1000 batches at once
eval.samples=1000000 -> eval.episodes=128 | with 1000000 samples of each at most 10
model=qwen3_8b model.shape.layers=0 -> model.shape.layers=0 | >= 1
name=../up -> name='../up' | letters
+trainer.stepz=1 -> trainer.stepz=1 | no such key | trainer.steps
~trainer.steps -> trainer.steps | missing
rollout.tensor_parallel=[1,4]
    -> rollout.tensor_parallel=[1, 4]: one number;  | sim.pool.dedicated.tensor_parallel
+rollout.engine_args.max_lora_rank=64 -> engine_args.max_lora_rank=64: is set by ROSE, from
trainer.lora={rank: 513, alpha: 1, targets: [q_proj]} -> trainer.lora.rank=513: at most 512
trainer.lora={rank: 8, alpha: 0, targets: [q_proj]} -> trainer.lora.alpha=0 | > 0
trainer.lora={rank: 8, alpha: 1, targets: []}
    -> trainer.lora.targets=[]: some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj
trainer.lora={rank: 8, alpha: 1, targets: [q_proj, c_attn]}
    -> trainer.lora.targets.1='c_attn' | there are q_proj, k_proj, v_proj
trainer.lora={rank: 8, alpha: 1, targets: [q_proj, q_proj]}
    -> trainer.lora.targets.1='q_proj': is named twice
trainer.lora={rank: 8, alpha: 1} -> trainer.lora.targets: missing
+trainer/lora=linear trainer.dtype=bfloat16 trainer.zero_stage=2
    -> model.dtype='float32': bfloat16 with trainer.dtype=bfloat16
+trainer/lora=linear cluster=gpus model.dtype=float32
    -> model.dtype='float32': bfloat16: vLLM's LoRA kernels for GPUs
rollout.replay=earlier trainer.ranks=2 cluster.gpus=1
    -> cluster.gpus=1: the run needs 2 (trainer.ranks=2
cluster=gpus cluster.gpus=1 trainer.ranks=1 rollout.workers=1 colocate=false
    -> cluster.gpus=1: the run needs 2  | share them in turn: colocate=true
cluster=gpus cluster.gpus=1 trainer.ranks=1 rollout.workers=1 colocate=true rollout.workers=2
    -> cluster.gpus=1: the run needs 2 (trainer.ranks=1 or 2 engines | rollout.workers
"""


@pytest.mark.parametrize("override, words", table(IMPOSSIBLE))
def test_impossible_values_are_named_with_their_remedy(make_config, override, words):
    with refused(words):
        make_config(override)


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster=gpus", "cluster.gpus=8", "+rollout.engine_args.spec_method=ngram"],
        ["+rollout.engine_args.speculative_config=null"],
        ["rollout.group_size=1", "algorithm=reinforce_pp"],
        ["rollout.group_size=1", "algorithm=reinforce_pp", "env=games"],
    ],
)
def test_what_only_looks_like_it_is_not_refused(tree, overrides):
    from_dict(tree(*overrides))


@pytest.mark.parametrize("path", sorted((CONF / "algorithm").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_group_of_one_teaches_only_algorithms_with_another_baseline(make_config, path):
    overrides = [f"algorithm={path.stem}", "rollout.group_size=1"]
    if path.stem == "reinforce_pp":
        make_config(*overrides)
        overrides.append("algorithm.args.baseline=group")
    with pytest.raises(ConfigError, match="rollout.group_size=1: impossible with algorithm.name="):
        make_config(*overrides)


KEEPING = ("one_step_off", "bounded_staleness", "trajectory_async", "carry_over")


@pytest.mark.parametrize("batching", [*KEEPING, "synchronous", "dapo", "tail_batching"])
def test_requests_keep_their_cache_where_versions_come_while_they_run(make_config, batching):
    chosen = make_config(f"scheduler/batching={batching}")
    assert chosen.transfer.in_flight == ("keep" if batching in KEEPING else "recompute")
    assert from_dict(to_dict(chosen)) == chosen
    finish = make_config(f"scheduler/batching={batching}", "transfer.in_flight=finish")
    assert finish.transfer.in_flight == "finish"


@pytest.mark.parametrize(
    "cores, overrides, trainer, rollout",
    [
        (1, [], 1, 1),
        (2, [], 2, 1),
        (2, ["+experiment=smollm"], 2, 2),
        (6, ["trainer.ranks=2", "rollout.workers=4"], 3, 1),
        (64, ["rollout.workers=1"], 8, 8),
        (64, ["trainer.ranks=8", "rollout.workers=8"], 8, 8),
        (64, ["trainer.ranks=16", "rollout.workers=32"], 4, 2),
        (1, ["deterministic=true", "rollout.workers=1"], 2, 1),
        # its engines have one, whatever this says
        (64, ["deterministic=true", "rollout.workers=1"], 2, 8),
        (64, ["deterministic=true", "rollout.workers=1", "trainer.threads=3"], 3, 8),
        (64, ["trainer.threads=3", "rollout.threads=40"], 3, 40),
        (64, ["cluster=dev"], 2, 1),
        (64, ["cluster=dev", "cluster.slurm.rollout.cpus_per_task=16"], 2, 8),
        (64, ["+experiment=qwen7b", "trainer.threads=null"], None, None),
    ],
)
def test_threads_that_nobody_set_are_a_share_of_the_cores(
    make_config, monkeypatch, tmp_path, cores, overrides, trainer, rollout
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(processes, "CGROUP", tmp_path)  # no quotas
    chosen = make_config(*overrides)
    assert (chosen.trainer.threads, chosen.rollout.threads) == (trainer, rollout)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # a run's own is what was found
    assert from_dict(to_dict(chosen)) == chosen


@pytest.mark.parametrize("name", ["best", "best_sync"])
def test_a_composition_goes_beside_an_experiment(make_config, name):
    both = make_config(f"+experiment=[qwen7b,{name}]")
    assert both.model.name == "qwen2_5_7b" and both.trainer.stream == (name == "best_sync")
    with pytest.raises(ConfigError, match="colocate=true|colocate=false"):  # one GPU
        make_config(f"+experiment=[qwen3_0_6b,{name}]")


PRESETS = sorted(path.stem for path in (CONF / "cluster" / "mpi").iterdir())


@pytest.mark.parametrize("name", PRESETS)
def test_every_mpi_is_a_configuration_and_says_whether_ranks_may_join(make_config, name):
    c = make_config("cluster=slurm", f"cluster/mpi={name}")
    joins = name in ("mpich", "mpich_wheel")
    assert c.cluster.mpi.name == name and c.borrows == c.cluster.mpi.join == joins
    assert not c.cluster.mpi.join_env or c.cluster.mpi.join


def test_where_no_rank_can_join_it_is_said_unless_none_is_wanted(make_config):
    openmpi = "cluster/mpi=openmpi"
    words = make_config(openmpi).why_not_borrowed
    assert "cluster.mpi.join=false (of openmpi)" in words
    assert "2 dedicated rollout ranks only" in words
    assert make_config().why_not_borrowed == ""
    assert make_config(openmpi, "serving=none").why_not_borrowed == ""
    assert make_config(openmpi, "rollout.replay=earlier").why_not_borrowed == ""


MIXTURE = dict(experts=6, experts_per_token=2, expert_intermediate=48)


def shape(**changes):
    usual = dict(layers=2, hidden=64, intermediate=128, heads=8, kv_heads=2, head_dim=8, vocab=256)
    return ModelShape(**usual | {"tied_embeddings": True} | changes)


# Overrides and, behind `on`, changes of the model's shape.
SHAPELESS = """
rollout.tensor_parallel=3 -> rollout.tensor_parallel=3: must divide the 8 attention heads
rollout.tensor_parallel=4 on heads=12 kv_heads=3 -> tensor_parallel=4: | 3 key-value heads
rollout.tensor_parallel=2 cluster.gpus=0 -> rollout.tensor_parallel=2: needs GPUs
rollout.tensor_parallel=2 on intermediate=129
    -> tensor_parallel=2: must divide the intermediate size 129
rollout.tensor_parallel=4 on experts=6 experts_per_token=2 expert_intermediate=50
    -> tensor_parallel=4: must divide the intermediate size of an expert, 50
rollout.tensor_parallel=4 +rollout.engine_args.enable_expert_parallel=true
    on experts=6 experts_per_token=2 expert_intermediate=48
    -> tensor_parallel=4: must divide the number of experts (enable_expert_parallel), 6
trainer.router_replay=true -> trainer.router_replay=true: model tiny is dense
+trainer/lora=attention trainer.lora.rank=128 model.dtype=bfloat16 on hidden=128 head_dim=32
    -> trainer.lora.rank=128: at most 64, | of k_proj
"""


@pytest.mark.parametrize("given, words", table(SHAPELESS))
def test_what_a_models_shape_does_not_allow_is_refused(make_config, given, words):
    overrides, _, changes = given.partition(" on ")
    sizes = {name: int(size) for name, size in (each.split("=") for each in changes.split())}
    c = make_config("cluster.gpus=64", overrides)
    with refused(words):
        check_model(c, shape(**sizes))


def test_key_value_heads_are_replicated_and_a_mixture_replays_its_routes(make_config):
    gpus = "cluster.gpus=64"
    check_model(make_config(gpus, "rollout.tensor_parallel=4"), shape())
    routes = "rollout.tensor_parallel=2 trainer.router_replay=true"
    check_model(make_config(gpus, routes), shape(**MIXTURE))


def test_one_gpu_is_for_one_side_or_for_both_in_turn(make_config):
    def shares(*overrides):
        return make_config(*overrides).shares_devices

    assert shares(ONE_GPU) and shares(ONE_GPU, "colocate=true")
    assert not shares(ONE_GPU, "cluster.gpus=2") and not shares()
    four = "cluster.gpus=4 trainer.ranks=4 rollout.tensor_parallel=4"
    assert shares(ONE_GPU, "colocate=true", four)
    # A replay has no engines and no environment hosts to count.
    make_config("rollout.replay=earlier", "cluster.gpus=1", "cluster.slots=2", "deterministic=true")


def test_shape_comes_from_the_models_folder(tmp_path):
    more = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    assert read_shape(model_folder(tmp_path, **more)) == shape(type="llama")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "not json",
        '{"model_type": "clip"}',
        "[1]",
        *(json.dumps(LLAMA | {"num_attention_heads": heads}) for heads in (0, "8")),
        json.dumps(LLAMA | {"num_hidden_layers": 0}),
    ],
)
def test_a_folder_without_a_decoder_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"model.path='{tmp_path}'"):
        read_shape(tmp_path)


def test_every_key_is_known(tree):
    """`keys`, which near matches come from, names everything that conf/ sets."""

    open_maps = {"args", "env", "join_env", "recipe", "engine_args", "chat_template_args", "shape"}
    open_maps |= {"pool", "systems", "changes"}

    def dotted(branch, prefix=""):
        for name, value in branch.items():
            yield prefix + name
            if isinstance(value, dict) and name not in open_maps or prefix + name == "env":
                yield from dotted(value, f"{prefix}{name}.")

    assert set(dotted(tree())) <= set(configuration.keys())


def test_a_set_has_the_evaluations_samples_and_temperature_unless_it_has_its_own(make_config):
    e = make_config(
        "eval.samples=4",
        "eval.temperature=0.7",
        *("+env@eval.sets.sums=calculator", "+eval.sets.sums.episodes=8"),
        *("+env@eval.sets.lake=frozen_lake", "+eval.sets.lake.episodes=8"),
        *("+eval.sets.lake.samples=1", "+eval.sets.lake.temperature=0"),
    )
    assert e.eval.of("frozen_lake") == e.eval.of("sums") == (4, 0.7)
    assert e.eval.of("lake") == (1, 0.0)
    assert {name: key for name, (key, _) in e.environments.items()} == {
        "frozen_lake": "env",
        "sums": "eval.sets.sums",
        "lake": "eval.sets.lake",
    }


def test_evaluations_are_due_before_after_and_between(make_config):
    every = make_config("eval.every=4", "trainer.steps=10").eval
    assert [step for step in range(11) if every.due(step, 10)] == [0, 4, 8, 10]
    none = make_config("eval=none", "eval.every=4").eval
    assert not any(none.due(step, 10) for step in range(11))


def test_a_name_that_is_no_text_is_told():
    said = errors.explain(
        "Expected `str`, got `int` - at `key` in `$.cluster.env`",
        {"cluster": {"env": {1: "x"}}},
        configuration.Config,
    )
    assert said == "cluster.env={1: 'x'}: its names must be text; put them in quotes"
