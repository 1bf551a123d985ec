"""Ranks that share each row's sequence (DeepSpeed's Ulysses, on gloo) equal one that has it
whole."""

import numpy as np
import pytest
from safetensors.torch import load_file

from rose.comm.address import RendezvousError, local_place
from rose.trainer import deepspeed_engine, sequence
from rose.transfer.blocks import size
from rose.transfer.edge import read_plan
from rose.transfer.receive import materialise
from rose.transfer.source import open_source
from tests.ports import free_port
from tests.trainer import tiny_world
from tests.trainer.test_stream import DAPO, GRPO, ROUNDS, WHOLE

pytestmark = pytest.mark.slow

# algorithm, its arguments, seed (even: prefix trees), kind of batch, rounds
CASES = [
    ["grpo", GRPO, 1, "pairs", WHOLE],
    ["gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, 1, "pairs", WHOLE],  # ratios of whole rows
    ["dapo", DAPO | {"overlong_filtering": True}, 2, "pairs", ROUNDS["pairs"]],
    ["tree_grpo", GRPO, 2, "forked", WHOLE],
]
LIMIT = 64
STEP_S = 150.0  # that a step may take; ranks must have met sooner
LAST = ["rounds", *CASES[0], LIMIT, "last"]
ACTIONS = [["publish", 0], ["save"]]
for number, case in enumerate(CASES):
    ACTIONS += [["load"], ["rounds", *case, LIMIT, f"case{number}"]]
ACTIONS += [["publish", 1], ["save"], LAST, ["publish", 2]]
ACTIONS += [["load"], ["turn"], LAST, ["publish", 3]]


class World:
    def __init__(self, folder, ranks=1, parts=1, stage=0, more=()):
        self.folder, self.ranks = folder, ranks
        self.settings = [*more, "algorithm.kl_coef=0.5", f"trainer.zero_stage={stage}"]
        self.settings.append(f"trainer.step_timeout_s={STEP_S:g}")
        self.model = tiny_world.save_model(folder / "model", kv_heads=1)  # repeated for each rank
        self.metrics = self.run("run", ACTIONS, parts)

    def run(self, name, actions, parts):
        """Every rank's metrics."""
        settings = [*self.settings, f"trainer.sequence_parallel={parts}"]
        job = {"name": name, "settings": settings, "actions": actions}
        reports = tiny_world.run_world(job, self.folder, self.ranks)
        assert all(set(r["limits_s"]) == {STEP_S} for r in reports)  # of every group of ranks
        return [r["metrics"] for r in reports]

    def gradient(self, case, rank=0):
        """As one vector, and its parameters' weights after the update."""
        found = np.load(self.folder / f"case{case}-{rank}.npz")
        names = sorted(name for name in found.files if not name.endswith(" after"))
        parts = [[found[f"{name}{which}"].ravel() for name in names] for which in ("", " after")]
        return [np.concatenate(part) for part in parts]

    def version(self, number):
        return {n: t.numpy() for n, t in materialise(self.folder / "run", number).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return World(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("ranks", "parts", "stage", "more"),
    [
        (2, 2, 1, ()),
        (4, 2, 3, ("trainer.gradient_checkpointing=true", "trainer.offload_activations=true")),
    ],
)
def test_ranks_that_share_rows_do_what_one_does(alone, tmp_path, ranks, parts, stage, more):
    """Rows of odd lengths, in rounds and at once, padded and in prefix trees."""
    world = World(tmp_path, ranks, parts, stage, more)
    for metrics in world.metrics:
        assert_alike(metrics, alone.metrics[0])
    for case in range(len(CASES)):
        exact, after = alone.gradient(case)
        size = np.linalg.norm(exact)
        for rank in range(ranks):
            gradient, weights = world.gradient(case, rank)
            assert size > 1e-3 and np.linalg.norm(gradient - exact) <= 1e-5 * size, CASES[case]
            np.testing.assert_allclose(weights, after, rtol=0, atol=1e-5)
    assert_published(world, alone)
    first, again = world.version(2), world.version(3)
    assert all(again[name].tobytes() == first[name].tobytes() for name in first)
    if ranks == 2:  # which then share rows no longer
        assert_alike(world.run("resumed", [["load"], LAST], 1)[0], alone.metrics[0][-1:])


def assert_alike(metrics, expected):
    for found, wanted in zip(metrics, expected, strict=True):
        for name, value in wanted.items():
            if not name.startswith("seconds_"):
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def assert_published(world, alone):
    """The model's bytes at first, then what one rank publishes, each value once and by all."""
    begin = world.version(0)
    for name, tensor in load_file(world.model / "model.safetensors").items():
        assert tensor.numpy().tobytes() == begin[name].tobytes(), name
    for version in (1, 2):
        exact = alone.version(version)
        for name, values in world.version(version).items():
            assert np.abs(values - exact[name]).max() <= 1e-5, (version, name)
    source = open_source(world.folder / "run")
    plan, _ = read_plan(source)
    source.close()
    sizes = [size(block, plan.tensors[block.tensor].columns) for block in plan.blocks]
    assert sum(sizes) == sum(values.size for values in begin.values())
    assert {block.owner for block in plan.blocks} == set(range(world.ranks))


def lonely(port, rank, said):
    """Two ranks meet; the second leaves before they would share rows."""
    cpu = deepspeed_engine.use_device(0, rank)
    deepspeed_engine.join_world(cpu, rank, 2, local_place(port), STEP_S)
    if rank == 0:
        sequence.MEET_S = 1.0
        try:
            sequence.SequenceGroup(2, cpu, STEP_S)
        except RendezvousError as error:
            said.put(str(error))


def test_ranks_that_cannot_connect_to_share_rows_say_so_before_the_first_step():
    port = free_port()
    server = tiny_world.server()
    said = server.SimpleQueue()
    ranks = [server.Process(target=lonely, args=(port, rank, said)) for rank in range(2)]
    with tiny_world.ended(ranks):
        ranks[0].join(tiny_world.DEADLINE_S)
        assert not said.empty()
        words = said.get()
    assert "trainer rank 0 on" in words and "within 1 s" in words
    assert "ranks 0 to 1, which share each row (trainer.sequence_parallel=2)" in words


LONG = 8192
EXPERIMENT = (
    f"+experiment=qwen7b_64k cluster=local cluster.gpus=0 model.max_context={LONG} "
    f"trainer.micro_batch_tokens={LONG} trainer.sequence_parallel=2 trainer.batch_size=8 "
    "trainer.threads=1 deterministic=false"
).split()


def test_the_experiment_of_64k_tokens_trains_rows_of_8k(tmp_path):
    """With its settings but for sizes, beside one rank that computes in float32."""
    tiny_world.save_model(tmp_path / "model")
    job = {"lengths": [LONG, LONG - 1, 5000], "actions": [["train", 1, LONG, 1, 1]]}
    names = ("shared", EXPERIMENT, 2), ("alone", ["trainer.zero_stage=0"], 1)
    found, exact = (
        tiny_world.run_world(job | {"name": name, "settings": settings}, tmp_path, ranks)[0]
        for name, settings, ranks in names
    )
    [found], [exact] = found["metrics"], exact["metrics"]
    assert found["tokens"] == exact["tokens"] > LONG
    # not the loss, a sum that all but cancels
    for name, close in (("grad_norm", 0.05), ("entropy", 2e-3), ("mismatch_abs", 2e-3)):
        assert found[name] == pytest.approx(exact[name], rel=close), name
