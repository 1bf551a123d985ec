"""A LoRA run through a dead engine and a power failure: it learns bit for bit what an uninterrupted
run learns, its engines agree with its trainer, only the adapter travels, and what is exported
computes what the engines recorded."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rose.transfer.edge import read_plan
from rose.transfer.receive import materialise
from rose.transfer.source import Folder
from tests.job.job import Held, Job
from tests.job.test_export_job import agrees, exported, without_store
from tests.job.test_interrupted_job import assert_same, saved
from tests.parts.play import commands
from tests.transfer.worlds import same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 3
LORA = ("deterministic=true", f"trainer.steps={STEPS}", "+trainer/lora=linear")
LORA += ("trainer.lora.rank=4", "trainer.optimizer.lr=5e-3", "trainer.checkpoint_every=2")


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    made = Held(tmp_path_factory.mktemp("held"), STEPS)
    made.release(*range(1, STEPS + 1))
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory, held):
    made = Job(tmp_path_factory.mktemp("lora"), *LORA, *held.overrides)
    assert made.wait() == 0, made.said + made.logs()
    return made


def base_of(job: Job) -> Path:
    return Path(json.loads((job.run / "config.json").read_text())["model"]["path"])


def test_engines_agree_with_the_trainer_and_only_the_adapter_travels(whole):
    (store,) = (whole.run / "weights").iterdir()
    plan, _ = read_plan(Folder(store))
    size = sum(t.nbytes for t in plan.tensors)
    stored = load_file(base_of(whole) / "model.safetensors")
    assert {t.name for t in plan.base.tensors} == stored.keys()
    assert size < sum(t.nbytes for t in stored.values()) / 5
    for row in whole.steps():
        assert row["publish_bytes"] < 1.1 * size
        assert row["mismatch_max_ratio"] - 1 < 1e-4 and row["mismatch_abs"] < 1e-5
    # not each step: all members of each of its groups may have got the same reward
    assert any(row["grad_norm"] > 0 for row in whole.steps())


def test_peft_and_the_merged_model_compute_what_the_engine_recorded(whole, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    before = STEPS - 1  # the last step's trajectories are of the version before
    done = exported(whole, "--step", before, "--out", tmp_path / "adapter")
    assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(base_of(whole))
    agrees(whole, PeftModel.from_pretrained(base, tmp_path / "adapter"), before, atol=1e-4)
    (store,) = (whole.run / "weights").iterdir()
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model."): t for name, t in written.items()}
    assert same(names, materialise(store, before))
    done = exported(whole, "--step", before, "--merge", "--out", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    agrees(whole, merged, before, atol=1e-4)


def test_store_and_checkpoint_give_the_same_bits_and_another_base_is_refused(whole, tmp_path):
    at = ("--step", STEPS - 1, "--out")
    for kind, more in (("adapter", ()), ("merged", ("--merge",))):
        assert exported(whole, *at, tmp_path / kind, *more).returncode == 0
        with without_store(whole):
            done = exported(whole, *at, tmp_path / f"{kind}-2", *more)
        assert done.returncode == 0 and "from the checkpoint" in done.stdout, done.stderr
        files = [next((tmp_path / name).glob("*.safetensors")) for name in (kind, f"{kind}-2")]
        assert same(*map(load_file, files))
    other = exported(whole, *at, tmp_path / "no", "--merge", "--base", tmp_path / "merged")
    assert other.returncode == 1 and "it is for another base model" in other.stderr
    assert not (tmp_path / "no").exists()


def test_it_learns_the_same_through_a_dead_engine_and_a_power_failure(whole, held, tmp_path):
    """An engine that is started late reads the base from its disk, and the adapter from zeros."""
    held.hold(2, 3)
    powerless = Job(tmp_path, *LORA, *held.overrides)
    held.until(powerless, 2)
    with powerless.trainer_stopped():
        held.release(2)
        powerless.until(lambda: powerless.phase() == ("train", 2), "the next step's training")
        powerless.engine().kill()
    held.until(powerless, 3)
    powerless.until(lambda: saved(powerless) == 2, "the checkpoint")
    powerless.until(lambda: powerless.steps()[-1]["step"] == 2, "the second step's row")
    assert powerless.steps()[-1]["engine_restarts"] == 1
    powerless.kill_everything()
    held.release(3)
    last = Job(tmp_path, *LORA, *held.overrides)
    assert last.wait() == 0, last.said + last.logs()
    assert last.orphans() == []
    assert_same(whole, last)


def test_it_plays_without_the_adapter_and_then_with_it(whole, tmp_path):
    done = commands.play(whole.run, "--before", "--task", 3, temporary=tmp_path / "tmp")
    assert done.returncode == 0 and done.stderr == "", done
    one = r"(success|failure) after \d+ turns?"
    said = done.stdout.splitlines()[-1]
    assert re.match(
        rf"Held-out task 3: before training {one}; after {STEPS} training steps {one}", said
    )
