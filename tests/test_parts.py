"""A training run needs none of the parts: the folders of rose/parts may be removed."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from rose import checks, extensions
from rose.agent import envs
from rose.observe.metrics import read_metrics, rows_of
from tests.processes import ran
from tests.refusals import refused, table

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = """
name=run trainer.steps=1 trainer.batch_size=8 rollout.group_size=4 rollout.workers=1
rollout.kv_cache_gib=0.1 eval.episodes=4 observe.terminal=false
""".split()
SECONDS = 600


def checkout(folder, without):
    """Copy what a run reads of this checkout, but for the parts `without`."""
    junk = shutil.ignore_patterns("__pycache__")
    for name in ("rose", "conf", "scripts", "slurm"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=junk)
    shutil.copy(REPOSITORY / "launch.py", folder)
    for part in without:
        shutil.rmtree(folder / "rose" / "parts" / part)


def launch(folder, *arguments):
    environ = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "launch.py", *arguments]
    return ran(command, cwd=folder, env=environ, timeout=SECONDS)


@pytest.mark.slow
def test_the_default_run_trains_without_any_part(tmp_path):
    checkout(tmp_path, extensions.names())
    done = launch(tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = rows_of(read_metrics(tmp_path / "outputs" / "run"), "step")
    assert step["version"] == 1
    assert "Take the model home" in done.stdout and "Report:" not in done.stdout
    assert not (tmp_path / "outputs" / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", extensions.names())
def test_a_run_is_planned_without_this_part(part, tmp_path):
    checkout(tmp_path, [part])
    done = launch(tmp_path, *SMALL, "cluster.dry_run=true")
    assert done.returncode == 0, done.stdout + done.stderr


UNKNOWN = """
mode=simulate -> mode='simulate': no such mode; there are train
scheduler/routing=seer -> scheduler.routing.name='seer': no such routing policy
+experiment=terminal -> env.name='terminal': no such environment
rollout/draft=group -> rollout.draft.method='group': one of none, ngram
serving.online.port=1 -> serving.online.port=1: no such key
"""


@pytest.mark.slow
def test_what_a_missing_part_would_add_is_named_as_unknown(tmp_path):
    checkout(tmp_path, extensions.names())
    for argument, [words] in table(UNKNOWN):
        done = launch(tmp_path, argument)
        assert done.returncode == 2 and words in done.stderr.replace("\n", " "), done.stderr


NEEDED = """
rollout.hybrid=1 scheduler/provisioning=all_idle -> rollout.hybrid=1: needs rose/parts/hybrid, which
reward=function reward.args.path=a.py:f -> reward.name='function': needs rose/parts/rewards, which
observe.wandb.project=p -> observe.wandb.project='p': needs rose/parts/trackers, which
observe.mlflow.uri=u -> observe.mlflow.uri='u': needs rose/parts/trackers, which
transfer.relay=http://n:80 -> transfer.relay='http://n:80': needs rose/parts/relay, which is missing
scheduler/provisioning=on_demand cluster=dev
    -> scheduler.provisioning.name='on_demand': needs rose/parts/lending, which is missing
algorithm=dapo -> algorithm.name='dapo': no such algorithm
env=calculator -> env.name='calculator': no such environment
"""


@pytest.mark.parametrize("overrides, words", table(NEEDED))
def test_what_needs_a_missing_part_is_refused_before_the_start(tree, monkeypatch, overrides, words):
    given = tree(overrides)
    monkeypatch.setattr(extensions, "modules", lambda name: {})
    monkeypatch.setattr(extensions, "names", lambda: ())
    monkeypatch.setattr(envs, "_modules", envs._modules.__wrapped__)  # uncached
    with refused(words):
        checks.check(given)
