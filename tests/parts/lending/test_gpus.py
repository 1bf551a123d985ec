"""Which of a node's GPUs a serving task takes, before it loads anything."""

import os

import pytest

from rose.config import ConfigError
from rose.engine import plugin
from rose.launch import gpus, local
from rose.parts.lending import settings
from rose.parts.lending.operator import operate
from rose.parts.lending.rank import lender

RUN = (
    "model=qwen3_8b trainer=zero3_gpu rollout=gpu cluster=gpus rollout.workers=2 "
    "rollout.tensor_parallel=2 trainer.ranks=4"
)


@pytest.fixture
def run(make_config, tmp_path):
    """A run on GPUs that has begun, with engines over two of them."""
    (tmp_path / "run").mkdir()
    local.write_config(make_config(RUN), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def prepared(run, monkeypatch):
    """prepared(overrides) -> the CUDA_VISIBLE_DEVICES of a lender that is about to load."""
    monkeypatch.setattr(lender.start, "preload", lambda: None)
    lenders = {}

    def prepare(overrides=(), **variables):
        # what it sets is vLLM's, for the rest of a process's life
        monkeypatch.setattr(os, "environ", dict(os.environ) | variables)
        given = list(overrides)
        one = lenders.setdefault(str(given), lender.Lender(run, given))
        one._prepare(settings.of_run(run, given))
        return os.environ["CUDA_VISIBLE_DEVICES"]

    return prepare


def test_a_lender_takes_the_gpus_at_its_place_and_keeps_them(
    prepared, nvidia_smi, monkeypatch, tmp_path
):
    nvidia_smi(variable="4,5,6,7")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    kernels = [f"cluster.cache_dir={tmp_path}/kernels"]
    assert prepared(kernels) == "6,7"
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/kernels/triton"
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("nothing has changed"))
    assert prepared(kernels) == "6,7"
    # Beside a larger server: the operator has narrowed the list to the task's own.
    nvidia_smi(variable="4,5,6,7")
    assert prepared(SLURM_LOCALID="3", **{plugin.FOLDER: "/nowhere"}) == "4,5"


def test_a_lender_that_sees_too_few_says_so_before_vllm(prepared, nvidia_smi, monkeypatch):
    nvidia_smi(variable="3")
    prepared(["cluster.gpus=0", "rollout.tensor_parallel=1"])
    monkeypatch.setattr(lender.start, "preload", lambda: pytest.fail("refused first"))
    with pytest.raises(ConfigError, match="tensor_parallel=2 needs 2 GPUs.*--gpus-per-task=2"):
        prepared()


@pytest.mark.parametrize(
    ("of_run", "given", "driver", "gpus"),
    [
        (None, [], True, True),
        (None, [], False, False),
        (0, [], True, False),
        (4, [], False, True),
        (0, ["cluster.gpus=1"], False, True),
        (4, ["cluster.gpus=0"], True, False),
    ],
)
def test_a_server_is_on_a_gpu_where_its_runs_engines_are(
    make_config, tmp_path, monkeypatch, of_run, given, driver, gpus
):
    monkeypatch.setattr(operate, "DRIVER", tmp_path if driver else tmp_path / "none")
    if of_run is not None:
        local.write_config(make_config(*([RUN] if of_run else [])), tmp_path)
    assert operate.has_gpus(tmp_path, given) is gpus


def test_a_server_takes_what_its_run_needs_once_that_has_begun(run, nvidia_smi, monkeypatch):
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setattr(operate, "has_gpus", lambda *_: True)
    overrides = ["serving.online.model=m"]
    for place, visible, taken in ((run.with_name("later"), "2,3", "3"), (run, "4,5,6,7", "6,7")):
        nvidia_smi(variable=visible)
        operate.take_gpus(place, overrides, settings.of_server(overrides))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


SLURM = ("LOCALID", "GPUS_ON_NODE", "STEP_TASKS_PER_NODE", "NODEID")
OF_TWO = "serving.online.engine_args.tensor-parallel-size=2"


def step(tasks: str, total: int, local: int, node: int = 0) -> dict[str, str]:
    """A task's variables on a real cluster, by srun of these shapes."""
    said = map(str, (local, total, tasks, node))
    return {f"SLURM_{name}": each for name, each in zip(SLURM, said, strict=True)}


@pytest.mark.parametrize(
    ("slurm", "visible", "extra", "taken"),
    [
        (step("1", 2, 0), "0,1", [], "0,1"),  # --ntasks=1 --gpus-per-task=2
        (step("2", 4, 0), "0,1", [], "0,1"),  # --ntasks=2 --gpus-per-task=2
        (step("3", 6, 2), "4,5", [], "4,5"),
        (step("2(x2),1", 2, 0, 2), "0,1", [], "0,1"),  # heterogeneous, or five tasks on three nodes
        # --ntasks=2 --gres=gpu:8
        (step("2", 8, 1), "0,1,2,3,4,5,6,7", ["rollout.tensor_parallel=2"], "2,3"),
        ({"SLURM_LOCALID": "1"}, "4,5,6,7", [OF_TWO], "6,7"),
        ({}, "0,1,2", [], "0,1"),  # by hand
    ],
    ids=str,
)
def test_a_server_before_its_run_leaves_the_rollout_engine_the_gpus_that_it_will_need(
    run, prepared, nvidia_smi, monkeypatch, slurm, visible, extra, taken
):
    """The operator's view, then the lender's, in its child, when the run has begun."""
    nvidia_smi(variable=visible)
    for name in SLURM:
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(operate, "has_gpus", lambda *_: True)
    overrides = ["serving.online.model=m", *extra]
    operate.take_gpus(run.with_name("later"), overrides, settings.of_server(overrides))
    assert prepared(overrides, **{plugin.FOLDER: "/nowhere"}) == taken


def test_two_tasks_that_see_one_gpu_do_not_share_it(nvidia_smi):
    """--ntasks=2 --gres=gpu:1; and with --gpus-per-task=1 each has its own."""
    nvidia_smi()
    seen = {"CUDA_VISIBLE_DEVICES": "0"}
    assert gpus.of_task(1, "an engine", seen | step("2", 1, 0)) == {}
    shared = "number 1 on .* sees 1 in all .*, as the tasks before it do; .*-per-task=1"
    with pytest.raises(ConfigError, match=shared):
        gpus.of_task(1, "an engine", seen | step("2", 1, 1))
    assert gpus.of_task(1, "an engine", {"CUDA_VISIBLE_DEVICES": "1"} | step("2", 2, 1)) == {}


def test_a_server_that_sees_too_few_is_refused(run, nvidia_smi):
    nvidia_smi(variable="3")
    degree = "serving.online.engine_args.tensor_parallel_size=4"
    overrides = ["serving.online.model=m", degree, "cluster.gpus=8"]
    with pytest.raises(ConfigError, match="engine_args.tensor_parallel_size=4 needs 4 GPUs"):
        operate.take_gpus(run, overrides, settings.of_server(overrides))
