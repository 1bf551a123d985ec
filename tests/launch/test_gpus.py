"""The GPUs that a launcher, a Slurm step or a serving task was given, by index, UUID and MIG
name."""

import pytest

from rose.config import ConfigError
from rose.launch import gpus
from tests.conftest import EIGHT_GPUS as EIGHT
from tests.refusals import refused

# As nvidia-smi -L prints it where the second GPU is cut into slices.
SLICED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa3b4c5d-1111-2222-3333-444455556666)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-ab3b4c5d-7777-8888-9999-aaaabbbbcccc)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.40gb     Device  1: (UUID: MIG-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0)
"""
SLICE = "MIG-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
OLD_NAME = "MIG-GPU-ab3b4c5d-7777-8888-9999-aaaabbbbcccc/1/0"
UUID = "GPU-%dc89852c-8ec8-92b7-dd3b-1ebe33b02c5%d"  # pattern of the eight GPUs' UUIDs
FOUR = ("model=qwen3_8b", "trainer=zero3_gpu", "rollout=gpu", "cluster=gpus", "cluster.gpus=4")
FOUR += ("trainer.ranks=2", "trainer.batch_size=64", "rollout.workers=2")


def test_a_listing_has_every_gpu_and_its_slices():
    assert [(d.index, d.name) for d in gpus.parse(EIGHT)] == [(i, "NVIDIA H200") for i in range(8)]
    whole, cut = gpus.parse(SLICED)
    assert whole.slices == () and whole.uuid == "GPU-aa3b4c5d-1111-2222-3333-444455556666"
    assert [name[:12] for name in cut.slices] == ["MIG-c6d4f1ef", "MIG-0f1e2d3c"]
    assert gpus.parse("NVIDIA-SMI has failed because it couldn't communicate with it.\n") == ()


GIVEN = [
    (EIGHT, None, tuple("01234567")),
    (EIGHT, "4,5,6,7", ("4", "5", "6", "7")),
    (EIGHT, " 7, 2 ", ("7", "2")),
    (EIGHT, "", ()),
    (EIGHT, "-1", ()),
    (EIGHT, "NoDevFiles", ()),
    (EIGHT, f"GPU-3c8,{UUID % (1, 1)}", (UUID % (3, 3), UUID % (1, 1))),
    (SLICED, None, ("0", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", SLICE)),
    (SLICED, SLICE, (SLICE,)),
    (SLICED, OLD_NAME, (OLD_NAME,)),
    ("", "0,1", ()),
    (None, "2,GPU-3", ("2", "GPU-3")),  # nvidia-smi can't tell
    (None, None, ()),
]


@pytest.mark.parametrize("listing, variable, names", GIVEN)
def test_the_variable_is_read_as_cuda_reads_it(listing, variable, names):
    assert gpus.given(listing if listing is None else gpus.parse(listing), variable) == names


WRONG = [(EIGHT, "1,1", ["names 1 twice"]), (SLICED, "GPU-a", ["2 GPUs begin with GPU-a"])]
WRONG += [(EIGHT, f"0,{name}", [f"no GPU is called '{name}'"]) for name in ("GPU-ffff", "")]
WRONG += [(EIGHT, "4,8", ["CUDA_VISIBLE_DEVICES=4,8", "no GPU is called '8'", "7 (GPU-7c89852c"])]


@pytest.mark.parametrize("listing, variable, words", WRONG)
def test_a_name_that_cuda_would_stumble_over_is_refused(listing, variable, words):
    with refused(words):
        gpus.given(gpus.parse(listing), variable)


def test_a_launcher_hands_out_what_it_was_given(make_config, nvidia_smi):
    nvidia_smi(EIGHT, "4,5,6,7")
    assert gpus.for_launcher(make_config(*FOUR)) == ("4", "5", "6", "7")
    assert gpus.own((2, 3), ("4", "5", "6", "7")) == "6,7"
    assert gpus.for_launcher(make_config()) == ()


FEW = [(EIGHT, "4,5", "CUDA_VISIBLE_DEVICES=4,5 gives this launcher 2; lower it")]
FEW += [(EIGHT, "", "CUDA_VISIBLE_DEVICES= gives this launcher 0")]
FEW += [(SLICED, None, "this machine has 3"), ("", "0,1,2,3", "this machine has 0")]


@pytest.mark.parametrize("listing, variable, words", FEW)
def test_too_few_are_refused(make_config, nvidia_smi, listing, variable, words):
    nvidia_smi(listing, variable)
    with refused([f"cluster.gpus=4: {words}"]):
        gpus.for_launcher(make_config(*FOUR))


def test_slices_are_for_single_ranks(make_config, nvidia_smi):
    nvidia_smi(SLICED)
    two = ("cluster.gpus=2", "rollout.workers=1")
    with pytest.raises(ConfigError, match="trainer.ranks=2: MIG-c6d4f1ef.*NCCL"):
        gpus.for_launcher(make_config(*FOUR, "cluster.gpus=3", "rollout.workers=1"))
    assert gpus.for_launcher(make_config(*FOUR, *two, "trainer.ranks=1"))[1].startswith("MIG-")


# A site sets nothing, or all of the node's, or those that Slurm has bound the rank to.
STEPS = {None: "2,3", "0,1,2,3": "2,3", "4,5,6,7": "6,7", "0,1": "0,1"}
STEPS |= {"GPU-a,GPU-b,GPU-c,GPU-d": "GPU-c,GPU-d"}


@pytest.mark.parametrize("variable, mine", STEPS.items())
def test_a_rank_of_a_slurm_step_takes_its_places_of_the_steps_list(variable, mine):
    assert gpus.of_step((2, 3), variable, "rank 5") == mine


@pytest.mark.parametrize("variable", ["0", "0,1,2", "", "NoDevFiles"])
def test_a_step_that_shows_too_few_is_named(variable):
    with pytest.raises(RuntimeError, match="rank 5 is to use GPU 2, 3 of its"):
        gpus.of_step((2, 3), variable, "rank 5")


TASKS = [
    ("3", "2", 1, None),  # bound to its own: --gpus-per-task=1
    ("0,1", None, 2, None),
    ("0,1,2,3", "0", 2, "0,1"),
    ("0,1,2,3", "1", 2, "2,3"),
    ("4,5,6,7", "3", 1, "7"),
    (None, "7", 1, "7"),
    ("GPU-3c8,GPU-1c8", "1", 1, UUID % (1, 1)),
]


@pytest.mark.parametrize("variable, local, count, mine", TASKS)
def test_serving_tasks_take_their_places(nvidia_smi, monkeypatch, variable, local, count, mine):
    nvidia_smi(EIGHT, variable)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    if local is not None:
        monkeypatch.setenv("SLURM_LOCALID", local)
    expected = {} if mine is None else {gpus.VARIABLE: mine}
    assert gpus.of_task(count, "rollout.tensor_parallel") == expected


@pytest.mark.parametrize(
    "variable, local", [("3", "0"), ("", "0"), ("0,1,2", "1"), ("0,1,2,3", "2")]
)
def test_a_serving_task_that_sees_too_few_is_refused(nvidia_smi, monkeypatch, variable, local):
    nvidia_smi(EIGHT, variable)
    monkeypatch.setenv("SLURM_LOCALID", local)
    words = ["rollout.tensor_parallel=2 needs 2 GPUs", f"number {local} ", "--gpus-per-task=2"]
    with refused(words):
        gpus.of_task(2, "rollout.tensor_parallel=2")
