"""Who runs where, and whether it fits, before anything starts."""

import pytest
from rich.console import Console

from rose.config import ConfigError
from rose.launch import memory, model, plan
from rose.launch.layout import hybrid_ranks, layout
from rose.protocol import Role
from tests.launch.test_models_at_launch import RAW
from tests.made import model_folder
from tests.refusals import refused, table

QWEN3_8B = ("model=qwen3_8b", "trainer=zero3_gpu", "rollout=gpu", "cluster=gpus", "cluster.gpus=16")
TWELVE = (
    *("model=qwen3_8b", "trainer=zero3_gpu", "rollout=gpu", "cluster=slurm", "cluster.gpus=20"),
    *("trainer.ranks=12", "trainer.batch_size=96", "cluster.slurm.trainer.nodes=2"),
)
HYBRID = "trainer.ranks=4 trainer.offload_optimizer=true rollout.hybrid=2"
HYBRID += " scheduler/provisioning=all_idle"
FOUR = "trainer.ranks=4 rollout.tensor_parallel=2 rollout.environment_hosts=1 "
FOUR += "trainer.offload_optimizer=true"
GIB = 2**30


class Planned:
    """A configuration, its model's shape, and the memory that its ranks take."""

    def __init__(self, c, shape=None):
        self.c, self.shape = c, shape or c.model.shape
        self.trainer = memory.trainer(c, self.shape)
        self.engine = memory.rollout(c, self.shape)

    def make(self, host_gib=None):
        return plan.make(self.c, self.shape, host_gib=host_gib)


@pytest.fixture
def qwen(make_config):
    """qwen("a=b", ...): Qwen3-8B on GPUs."""
    return lambda *overrides: Planned(make_config(*QWEN3_8B, *overrides))


def printed(made):
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))
    plan.show(made, console)
    return console.export_text()


def test_ranks_are_numbered_by_role_and_each_gpu_belongs_to_one_rank(qwen):
    some = "trainer.ranks=2 rollout.workers=3 rollout.tensor_parallel=2 rollout.environment_hosts=2"
    ranks = layout(qwen(some).c)
    expected = "coordinator 0 environment 0 environment 1 trainer 0 trainer 1 rollout 0 rollout 1"
    assert " ".join(f"{r.role.value} {r.index}" for r in ranks) == f"{expected} rollout 2"
    assert [r.rank for r in ranks] == list(range(8))
    assert [r.gpus for r in ranks if r.gpus] == [(0,), (1,), (2, 3), (4, 5), (6, 7)]


def test_reward_ranks_stand_behind_the_environment_hosts_also_on_slurms_nodes(make_config):
    here = layout(make_config("reward=command", "reward.args.argv=[true]", "reward.ranks=2"))
    roles = [r.role for r in here]
    assert roles[:4] == [Role.COORDINATOR, Role.ENVIRONMENT, Role.REWARD, Role.REWARD]
    assert Role.REWARD not in [r.role for r in layout(make_config())]
    c = make_config("+experiment=qwen32b cluster=slurm reward=command reward.args.argv=[true]")
    first = [r for r in layout(c) if r.component == 0]
    others = [r.role for r in first if r.role is not Role.TRAINER]
    assert others.count(Role.REWARD) == 1 and others[-1] is Role.REWARD
    assert others[0] is Role.COORDINATOR and others.count(Role.ENVIRONMENT) >= 3
    assert len({sum(r.node == n for r in first) for n in {r.node for r in first}}) == 1


def test_where_devices_are_shared_trainer_and_engine_have_the_same_ones(qwen):
    planned = qwen(FOUR, "colocate=true cluster.gpus=4 rollout.workers=2")
    ranks, made = layout(planned.c), planned.make()
    assert [r.gpus for r in ranks if r.gpus] == [(0,), (1,), (2,), (3,), (0, 1), (2, 3)]
    said, weights = " ".join(printed(made).split()), planned.engine.items["weights"]
    assert f"in host memory wait {4 * planned.trainer.firm:.1f} GiB of the trainer" in said
    assert f"{4 * weights:.1f} GiB of the engines' weights" in said and made.gpus == 4


def test_hybrid_engines_are_on_the_trainers_gpus_and_dedicated_ones_on_their_own(qwen):
    planned = qwen(FOUR, HYBRID, "cluster.gpus=6 rollout.workers=1")
    ranks, made = layout(planned.c), planned.make()
    assert [r.gpus for r in ranks if r.role is Role.ROLLOUT] == [(4, 5), (0, 1), (2, 3)]
    assert hybrid_ranks(planned.c) == {1: ranks[-2].rank, 2: ranks[-1].rank}
    said, weights = " ".join(printed(made).split()), planned.engine.items["weights"]
    assert f"{4 * weights:.1f} GiB of the engines' weights" in said and made.gpus == 6
    assert "1 engines and 2 on the trainer's devices" in said


def test_a_machine_has_memory_for_the_trainer_and_hybrid_engines_at_once(make_config):
    shape = make_config(*QWEN3_8B).model.shape
    p = Planned(make_config("rollout.hybrid=1", "scheduler/provisioning=all_idle"), shape)
    states, staged = memory.host_gib(p.c, p.trainer, p.engine)
    states += p.c.trainer.ranks * p.trainer.total
    engines = 3 * p.engine.total + staged
    p.make(states + engines + 1)
    with pytest.raises(ConfigError, match=rf"rollout.hybrid=1: {states:.1f} GiB .* {engines:.1f}"):
        p.make(states + engines - 1)
    here = make_config("trainer.ranks=2", "colocate=true")  # on CPUs states wait in a file
    Planned(here, shape).make(0.1)


LORA = "+trainer/lora=linear trainer.lora.rank=12"
# Elements of this adapter: rank x (rows + columns) of each of the seven matrices of 36 layers.
ADAPTER = 36 * 12 * (2 * (4096 + 4096) + 2 * (1024 + 4096) + 3 * (12288 + 4096))
# Bytes of a model of p parameters and an adapter of a, on one of eight ranks or of an engine.
# DeepSpeed adds up micro-batches in float32, and page-locks by powers of two: of each rank's
# 1.02e9 gradients once the whole and once groups of 1e9. vLLM's rank above 12 is 16.
TAKEN = f"""
trainer.zero_stage=2 algorithm.kl_coef=0.01 -> weights = 2*p | reference = 2*p
    | gradients = 4*p/8 | optimizer = 12*p/8 | firm = 4*p + 16*p/8 | gathered parameters = 0
trainer.zero_stage=3 algorithm.kl_coef=0.01 -> weights = 2*p/8 | reference = 2*p/8
    | gradients = 4*p/8 | optimizer = 12*p/8 | gathered parameters = 2*10**9
trainer.zero_stage=0 trainer.dtype=float32 trainer.ranks=1
    -> optimizer = 8*p | reduced gradients = 0
trainer.zero_stage=1 trainer.dtype=float32 trainer.ranks=1
    -> optimizer = 12*p | reduced gradients = 4*p
trainer.zero_stage=2 trainer.dtype=float32 trainer.ranks=1
    -> optimizer = 12*p | reduced gradients = 0
{LORA} trainer.zero_stage=2 algorithm.kl_coef=0.01 -> weights = 2*(p + a) | gradients = 4*a/8
    | optimizer = 12*a/8 | reference = 0 | last published version = 2*a/8
{LORA} trainer.zero_stage=3 -> weights = 2*(p + a)/8 | gradients = 4*a/8 | optimizer = 12*a/8
    | engine adapter = 2*a*16/12 | engine firm = 2*p + 2*a*16/12
    | engine mirror of new versions = 2*a | engine staged blocks = 2*a
{LORA} trainer.lora.rank=16 trainer.lora.targets=[v_proj] trainer.zero_stage=2
    -> weights = 2*(p + 36*16*5120) | engine adapter = 2*36*16*(2*4096 + 2*5120)
trainer.zero_stage=3 -> changes to publish = 0.15*6*p/8 | last published version = 0
    | engine mirror of new versions = 8*2**30 | engine staged blocks = 8*2**30
model.dtype=float32 -> changes to publish = 0 | last published version = 2*p/8
trainer.offload_optimizer=true -> gradients = 0 | optimizer = 0 | last published version = 2*p/8
    | offloaded optimizer = 12*p/8 + 2**32 + 2**32 + 2**27
trainer.offload_optimizer=true trainer.ranks=1 cluster.gpus=0 -> offloaded optimizer = 20*p
trainer.offload_optimizer=true trainer.ranks=1 trainer.zero_stage=2 cluster.gpus=9
    -> offloaded optimizer = 8*p + 102.3125*2**30
"""


@pytest.mark.parametrize("overrides, items", table(TAKEN))
def test_states_take_what_the_papers_say(qwen, overrides, items):
    planned = qwen(overrides)
    trainer, engine = planned.trainer, planned.engine
    found = trainer.items | trainer.host | {"firm": trainer.firm}
    of_engine = engine.items | engine.host | {"firm": engine.firm}
    found |= {f"engine {name}": gib for name, gib in of_engine.items()}
    sizes = {"p": planned.shape.parameters, "a": ADAPTER}
    for item, _, size in (each.partition(" = ") for each in items):
        assert found.get(item, 0) == pytest.approx(eval(size, sizes) / GIB), item


def test_compiled_layers_are_gathered_whole_and_give_all_their_gradients_at_once(qwen):
    def items(*more):
        return qwen("trainer.zero_stage=3 trainer.micro_batch_tokens=131072", *more).trainer.items

    layer = 192_937_984  # 4 matrices of attention, 3 of the MLP
    # Liger's layers keep as much for the backward pass.
    before, now = items("trainer.kernels=liger"), items("trainer.compile=true")
    for item in ("gathered parameters", "a layer at work"):
        assert now[item] - before[item] == pytest.approx(2 * layer / GIB), item
    adapter, frozen = items(LORA, "trainer.compile=true"), items(LORA, "trainer.kernels=liger")
    assert adapter["gathered parameters"] == now["gathered parameters"]
    assert 0 < adapter["a layer at work"] - frozen["a layer at work"] < 0.02 * layer / GIB


def test_ranks_that_share_rows_have_their_part_of_the_activations(qwen):
    long = "trainer.micro_batch_tokens=65536 trainer.gradient_checkpointing=false"
    parallel = [f"trainer.sequence_parallel={parts}" for parts in (1, 4, 8)]
    one, four, eight = (qwen(long, each).trainer.items for each in parallel)
    assert one["activations"] == pytest.approx(4 * four["activations"])
    again = qwen(long, "trainer.gradient_checkpointing=true").trainer.items
    assert one["activations"] > 10 * again["activations"], "one vector per token and layer is kept"
    assert one["optimizer"] == four["optimizer"], "ZeRO shares over all ranks"
    # each of sixteen has a whole key-value head, and there are eight
    sixteen = qwen(long, "trainer.ranks=16 cluster.gpus=24 trainer.sequence_parallel=16")
    assert eight["activations"] / 2 < sixteen.trainer.items["activations"] < eight["activations"]


def test_the_second_copy_of_the_weights_is_within_a_node_and_estimated(make_config):
    second, alone = Planned(make_config(*TWELVE, "trainer.hpz=node")), Planned(make_config(*TWELVE))
    assert second.c.trainer.hpz == 6
    gib = 2 * alone.shape.parameters / GIB
    assert second.trainer.items["second weights"] == pytest.approx(gib / 6)
    assert second.trainer.total == pytest.approx(alone.trainer.total + gib / 6)
    between = [memory.moments(each.c, each.shape)["between steps"] for each in (second, alone)]
    assert between[0] == between[1]
    assert make_config(*TWELVE, "trainer.hpz=3").trainer.hpz == 3
    one_node = "cluster.slurm.trainer.nodes=1 cluster.slurm.trainer.gpus_per_node=12"
    assert make_config(*TWELVE, one_node, "trainer.hpz=node").trainer.hpz is None


def test_offloaded_activations_wait_on_the_host(make_config, qwen):
    away = qwen("trainer.offload_activations=true").trainer
    assert "activations" not in away.items
    assert away.host["offloaded activations"] == qwen().trainer.items["activations"]
    # 28 layers of 112 MiB, page-locked by powers of two
    odd = Planned(make_config("+experiment=qwen7b_64k", "trainer.offload_activations=true"))
    assert odd.trainer.host["offloaded activations"] == 28 / 8


UNSHARED = [
    ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window=4096"),
    ({"layer_types": ["sliding_attention"]}, "layers of the kind sliding_attention"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "positions of the kind dynamic"),
]


@pytest.mark.parametrize("change, words", UNSHARED)
def test_a_model_whose_rows_ranks_cannot_share_is_refused(make_config, tmp_path, change, words):
    raw = RAW | {"sliding_window": 4096, "use_sliding_window": False}
    raw |= {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    model_folder(tmp_path, **raw)
    shared = ("trainer.ranks=2", "trainer.sequence_parallel=2", f"model.path={tmp_path}")
    assert model.shape(make_config(*shared)).heads == 2
    model_folder(tmp_path, **raw | change)
    assert model.shape(make_config(*shared, "trainer.sequence_parallel=1")).heads == 2
    with pytest.raises(ConfigError, match=f"trainer.sequence_parallel=2: .*{words}"):
        model.shape(make_config(*shared))
    model_folder(tmp_path, **raw | {"rope_scaling": None})
    with pytest.raises(ConfigError, match="model.max_context=512: .* has 256 positions"):
        model.shape(make_config(*shared))


def test_kv_cache_is_split_over_heads_but_never_below_one_head(qwen):
    one = "rollout.workers=1 rollout.kv_cache_gib=9 cluster.gpus=24"
    split = {tp: qwen(one, f"rollout.tensor_parallel={tp}") for tp in (1, 8, 16)}
    tokens = {tp: each.engine.kv_tokens for tp, each in split.items()}
    assert tokens[1] == 9 * GIB // (2 * 2 * 36 * 8 * 128)
    assert tokens[8] == tokens[16] == 8 * tokens[1]


TOO_LARGE = """
trainer.zero_stage=0 trainer.dtype=float32 -> cluster.gpu_memory_gib=79.0: | zero_stage
trainer.ranks=2 cluster.gpu_memory_gib=16 -> cluster.gpu_memory_gib | trainer.ranks
rollout.kv_cache_gib=70 -> rollout.tensor_parallel=1 | rollout.kv_cache_gib
rollout.kv_cache_gib=1 -> rollout.kv_cache_gib=1: has room for 7281 | raise it
rollout.max_batched_tokens=2000000 -> max_batched_tokens=2000000 tokens | (168.2 GiB)
model.max_context=400000 trainer.micro_batch_tokens=400000 -> model.max_context=400000
rollout.tensor_parallel=3 cluster.gpus=32 -> rollout.tensor_parallel=3 | 32 attention heads
trainer.sequence_parallel=7 trainer.ranks=7 -> sequence_parallel=7 | 32 attention heads
trainer.sequence_parallel=8 model.shape.kv_heads=6 -> a multiple of, the 6 key-value heads
colocate=true trainer.ranks=8 rollout.gpu_memory_utilization=0.99 -> 0.981 of a GPU's 79
cluster.gpus=1 trainer.ranks=1 rollout.workers=1 -> gpu_memory_gib=79.0: | 77.5 GiB on each
cluster.gpus=0 rollout.kv_cache_gib=2 -> kv_cache_gib=2: has room for 14563 tokens, and
"""


@pytest.mark.parametrize("overrides, words", table(TOO_LARGE))
def test_what_cannot_fit_is_refused_with_key_and_remedy(qwen, overrides, words):
    with refused(words):
        qwen(overrides).make()


ON_ONE_GPU = ["colocate=None (one GPU): 11.1 GiB of", " 8.0 GiB"]


WAITING = [((*QWEN3_8B, HYBRID), 64, 400, ["rollout.hybrid=2: ", " 64.0 GiB of memory"])]
WAITING += [(("+experiment=qwen3_0_6b", "colocate=null"), 8, 32, ON_ONE_GPU)]


@pytest.mark.parametrize("overrides, least, most, words", WAITING)
def test_host_memory_has_to_hold_what_waits_there(make_config, overrides, least, most, words):
    planned = Planned(make_config(*overrides))
    planned.make(most)
    with refused(words):
        planned.make(least)


def test_what_engines_hold_beside_their_share_takes_nothing_from_it(qwen):
    beside = ([], ["transfer.broadcast=nccl"], ["rollout/draft=ngram"])
    made = [qwen(*more).make() for more in beside]
    engines = [each.memory[Role.ROLLOUT] for each in made]
    assert len({engine.kv_tokens for engine in engines}) == 1
    assert engines[1].total == pytest.approx(engines[0].total + memory.RUNTIME_GIB)
    # of 256 sequences 8 drafted tokens each, the first of which vLLM's profile knows
    checked = 256 * 7 * 151936 * (2 * 2 + 3 * 4) / GIB
    assert engines[2].total == pytest.approx(engines[0].total + checked)
    assert not any("an engine may need" in word for each in made for word in each.warnings)


TIGHT = """
rollout/draft=ngram rollout.draft.tokens=32 -> 18.0 of them beside its share
    | rollout.draft.tokens=32 or rollout.max_sequences=256
trainer.gradient_checkpointing=false trainer.micro_batch_tokens=65536
    -> set trainer.gradient_checkpointing=true or lower
trainer.micro_batch_tokens=131072 model.max_context=131072
    -> ; lower trainer.micro_batch_tokens=131072 with model.max_context=131072 or
    | raise trainer.sequence_parallel=1 or raise trainer.ranks
"""


@pytest.mark.parametrize("overrides, words", table(TIGHT))
def test_memory_that_may_be_too_small_is_a_warning_with_what_is_not_so_yet(qwen, overrides, words):
    _, warning = qwen(overrides).make().warnings  # The first is about cluster.gpus=16.
    assert all(word in warning for word in words), warning


SHORT = "trainer.micro_batch_tokens=1024 model.max_context=1024 env.max_new_tokens=512"
# Gradients of a deep model are copied for the update, up to DeepSpeed's 1e9.
DEEP = "trainer.ranks=1 trainer.micro_batch_tokens=2048 model.max_context=2048 "
DEEP += "env.max_new_tokens=512 model.shape.vocab=8192 model.shape.layers=72"


WORST = [("trainer.gradient_checkpointing=false", "logits at work")]
WORST += [("trainer.micro_batch_tokens=65536 model.shape.vocab=32768", "a layer at work")]
WORST += [(SHORT, "largest gradient"), (DEEP, "copy of gradients")]


@pytest.mark.parametrize("overrides, worst", WORST)
def test_the_worst_moment_of_a_step_counts(qwen, overrides, worst):
    planned = qwen(overrides)
    items = planned.trainer.items
    assert list(items)[-2:] == [worst, "runtime"]
    assert {moment for _, moment in WORST} & items.keys() == {worst}
    total = sum(gib for name, gib in items.items() if name != "runtime")
    most = max(memory.moments(planned.c, planned.shape).values())
    assert total == pytest.approx(most / GIB)


def test_threads_that_a_rank_has_no_cpus_for_are_named(make_config):
    slurm = [o for o in QWEN3_8B if o != "cluster=gpus"] + ["cluster=slurm"]
    slurm += ["trainer.threads=16", "rollout.threads=12"]
    c = make_config(*slurm, "rollout.tensor_parallel=2 rollout.workers=4")
    made = plan.make(c, c.model.shape)
    (warning,) = made.warnings
    # As for a model of a hub, whose shape is known later.
    assert plan.make(c, c.model.shape, made.doubts).warnings == made.warnings
    assert "trainer.threads=16 is more than" in warning and "slurm.trainer.cpus_per_task" in warning
    assert "trainer: 1 node with 10 ranks x 8 CPUs = 80" in printed(made)
    assert "rollout: 1 node with 4 ranks x 12 CPUs = 48" in printed(made)


def test_ranks_that_share_something_are_on_one_node_where_it_has_so_many(make_config):
    for nodes, parts in ((2, 2), (2, 3), (2, 6), (2, 12), (3, 4), (6, 4)):
        nodes = f"cluster.slurm.trainer.nodes={nodes}"
        make_config(*TWELVE, nodes, f"trainer.sequence_parallel={parts}")
    said = "sequence_parallel=4: the 6 trainer ranks", "hpz=4: must divide the 6 trainer ranks"
    for words in said:
        with refused([words]):
            make_config(*TWELVE, f"trainer.{words.partition(':')[0]}")


def test_rank_0_has_all_experts_in_host_memory_as_it_reads_them(make_config, qwen):
    item = "experts merged as rank 0 reads them"
    host = Planned(make_config("+experiment=qwen3_30b_a3b")).trainer.host
    assert host[item] == 48 * 128 * 3 * 2048 * 768 * 2 / GIB == 54
    assert item not in qwen().trainer.host


# Parameters as model cards have them: 134.5M, 7.62B, 8.2B, 32.8B, 30.5B (3.3B active).
EXPERIMENTS = """
smollm -> 4 | 0 | 134.52M
qwen3_0_6b -> 4 | 1 | 596.04M
qwen7b -> 10 | 8 | 7.62B
qwen7b_lora -> 4 | 1 | 7.62B
qwen7b_64k -> 10 | 8 | 7.62B
qwen8b_frozenlake -> 18 | 16 | 8.19B
qwen32b -> 28 | 48 | 32.76B
qwen3_30b_a3b -> 24 | 24 | 30.53B parameters, 3.35B of them active (8 of 128 experts)
rose_8b -> 18 | 16 | 8.19B
rose_32b -> 28 | 48 | 32.76B
"""


@pytest.mark.parametrize("experiment, expected", table(EXPERIMENTS))
def test_experiments_fit_and_print_their_plan(make_config, experiment, expected):
    ranks, gpus, parameters = int(expected[0]), int(expected[1]), expected[2]
    c = make_config(f"+experiment={experiment}", "cluster.dry_run=true")
    made = plan.make(c, c.model.shape)
    assert (len(made.ranks), made.gpus) == (ranks, gpus)
    assert ["on one machine" in warning for warning in made.warnings] == [True] * (gpus > 8)
    if gpus > 8:
        on_nodes = make_config(f"+experiment={experiment}", "cluster=slurm", "cluster.dry_run=true")
        assert not plan.make(on_nodes, c.model.shape).warnings
    text = printed(made)
    said = (f"{c.name}: {ranks} ranks", parameters, "weights", "gradients", "optimizer")
    assert [words for words in (*said, "KV cache") if words not in text] == []


def test_a_missing_time_limit_and_memory_of_whole_nodes_are_doubts(make_config, monkeypatch):
    monkeypatch.delenv("SBATCH_TIMELIMIT", raising=False)

    def doubts(*overrides):
        return " ".join(plan._check_limits(make_config("cluster=slurm", *overrides)))

    bare = doubts()
    assert "cluster.slurm.trainer.time=null" in bare and "cluster.slurm.rollout.mem=0" in bare
    for given in ("rollout.mem=64G", "rollout.exclusive=true"):
        assert "mem=0" not in doubts(f"cluster.slurm.{given}")
    for given in ("time='1-00:00:00'", "sbatch=[--time=2-0]"):
        assert "time=null" not in doubts(f"cluster.slurm.trainer.{given}")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "60")
    assert "time=null" not in doubts()
