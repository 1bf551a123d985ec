"""`python launch.py`: a bad word on the command line costs nothing, a good one says what will run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rose import config as configuration
from rose.launch import front, resume

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """launch("a=b", ...) -> (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        code = front.main(CONF, list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("arguments, words", [
    (["trainer.stepz=3"], ["trainer.stepz=3", "no such key", "trainer.steps"]),
    (["+trainer.stepz=3"], ["trainer.stepz=3", "no such key", "trainer.steps"]),
    (["enve=frozen_lake"], ["enve=frozen_lake", "no such key", "env"]),
    (["~trainer.stepz"], ["trainer.stepz", "no such key"]),
    (["trainer.steps"], ["trainer.steps=VALUE"]),
    (["name=a=[b"], ["name=a=[b", "can't be read"]),
    (["+experiment=qwen9b"], ["experiment=qwen9b", "no such option", "did you mean qwen7b", "smollm"]),
    (["env=frozen"], ["env=frozen", "frozen_lake"]),
    (["experiment=qwen7b"], ["+experiment=qwen7b"]),
    (["trainer.steps=abc"], ["trainer.steps='abc'", "int"]),
    (["trainer.batch_size=63"], ["trainer.batch_size=63", "rollout.group_size=8", "try 64"]),
    (["cluster.slots=3"], ["cluster.slots=3", "5 ranks"]),
    (["+experiment=qwen7b", "rollout.tensor_parallel=3", "rollout.workers=2"],
     ["rollout.tensor_parallel=3", "28 attention"]),
    (["model.source=folder", "model.path=/nowhere"], ["model.path='/nowhere'", "no such folder"]),
    (["cluster=gpus", "cluster.gpus=2"], ["cluster.gpus=2", "needs 3"]),
    (["cluster=gpus", "cluster.gpus=8"], ["cluster.gpus=8", "this machine has"]),
    (["name=a/b"], ["name='a/b'", "letters"]),
    (["-m", "seed=1,2", "name=x,x"], ["two points of the sweep"]),
    (["-m", "trainer.batch_size=64,63"], ["trainer.batch_size=63"]),
])
def test_bad_configuration_is_one_message_and_code_2_and_nothing_is_written(launch, tmp_path, arguments, words):
    code, out, err = launch(*arguments)
    assert code == 2 and not out
    assert err.startswith("bad configuration: ") and "Traceback" not in err
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_the_plan_and_writes_nothing(launch, tmp_path):
    code, out, err = launch("+experiment=qwen32b", "cluster.dry_run=true")
    assert code == 0 and not err
    assert "qwen32b: 33 ranks, 48 GPUs" in out and "KV cache" in out
    assert not list(tmp_path.iterdir())


def test_a_sweep_plans_every_point_under_a_name_of_its_own(launch):
    code, out, _ = launch("-m", "cluster.dry_run=true", "trainer.steps=7", "seed=1,2",
                          "scheduler/routing=round_robin,least_loaded")
    assert code == 0
    for seed in (1, 2):
        for routing in ("round_robin", "least_loaded"):
            assert f"frozenlake-seed={seed},scheduler.routing={routing}: 5 ranks" in out


def test_a_finished_run_prints_its_table_again(launch, tmp_path, make_config):
    c = make_config()
    c.run_dir.mkdir(parents=True)
    configuration.save(c, c.run_dir / "config.json")
    resume.mark_finished(c.run_dir, c.trainer.steps)
    (c.run_dir / "metrics.jsonl").touch()
    code, out, _ = launch()
    assert code == 0 and "is finished (30 steps)" in out
    assert not (c.run_dir / "logs").exists(), "it was started again"


def test_the_run_of_another_configuration_is_not_continued(launch, make_config):
    c = make_config()
    c.run_dir.mkdir(parents=True)
    configuration.save(c, c.run_dir / "config.json")
    code, _, err = launch("seed=2", "trainer.optimizer.lr=0.5")
    assert code == 2
    assert "seed: 1 -> 2" in err and "trainer.optimizer.lr: 0.001 -> 0.5" in err and "fresh=true" in err
    assert json.loads((c.run_dir / "config.json").read_text())["seed"] == 1


def test_without_the_environment_it_says_what_to_do(tmp_path):
    shutil.copy(REPOSITORY / "launch.py", tmp_path)
    shutil.copytree(REPOSITORY / "rose", tmp_path / "rose")
    bare = subprocess.run([sys.executable, "-S", "-E", "launch.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60)
    assert bare.returncode == 2
    assert "is not installed" in bare.stderr and "make train" in bare.stderr
