"""A DeepSpeed checkpoint of every ZeRO stage gives what its store gives, and damage is named."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rose.export.folder import write_shards
from rose.export.weights import CheckpointWeights, sources
from rose.transfer import versions
from rose.transfer.errors import Corrupted, Missing, TransferError
from rose.transfer.receive import materialise
from tests.trainer.tiny_world import run_world, save_model
from tests.transfer.worlds import same

pytestmark = pytest.mark.slow

RANKS = 2
TRAIN = [["publish", 0], ["train", 1, 64, 1, 1.0], ["publish", 1], ["save"]]


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def run(request, tmp_path_factory):
    """A run's folder with a store and a checkpoint of step 1; `run.name` ends with the stage."""
    stage = request.param
    folder = tmp_path_factory.mktemp(f"zero-{stage}")
    save_model(folder / "model", tied=stage % 2 == 0)
    (folder / "checkpoint").mkdir()
    dtype = "float32" if stage < 2 else "bfloat16"
    settings = [f"trainer.zero_stage={stage}", f"trainer.dtype={dtype}", "model.dtype=bfloat16"]
    settings += ["deterministic=false"]
    run_world({"name": "store", "settings": settings, "actions": TRAIN}, folder, RANKS)
    (folder / "checkpoints").mkdir()
    (folder / "weights").mkdir()
    (folder / "checkpoint").rename(folder / "checkpoints" / "step-000001")
    (folder / "store").rename(folder / "weights" / "attempt-001")
    return folder


def test_a_checkpoint_and_the_store_give_the_same_folder(run, tmp_path):
    step, found = sources(run, 1)
    assert step == 1 and [type(w).__name__ for w in found] == ["StoreWeights", "CheckpointWeights"]
    wanted = materialise(run / "weights" / "attempt-001", 1)
    before = materialise(run / "weights" / "attempt-001", 0)
    assert not same(wanted, before), "the step changed something"
    for weights in found:
        out = tmp_path / type(weights).__name__
        out.mkdir()
        shards, blocks = write_shards(weights, out, 9000)
        assert shards > 3 and blocks >= len(wanted)
        values = {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}
        assert same(values, wanted)
        tied = int(run.name[5]) % 2 == 0
        assert ("lm_head.weight" in values) is not tied, "tied weights are there once"


def test_damage_to_a_checkpoint_is_named(run, tmp_path):
    whole = run / "checkpoints" / "step-000001"
    copy = tmp_path / "checkpoints" / "step-000001"
    shutil.copytree(whole, copy)
    weights = CheckpointWeights(copy)
    path = Path(weights.culprit(versions.read_hashes(copy, RANKS, 1)[1]["model.norm.weight"][0][0]))
    data = bytearray(path.read_bytes())
    # the last bit of an exponent in the middle of the values, which are most of the file
    start = data.find(_values(weights, path))
    assert start > 0
    data[start + 3] ^= 1
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(Corrupted, match=f"{path.name}: .*the file is damaged"):
        write_shards(weights, tmp_path / "out", 2**20)
    path.write_bytes(bytes(data[: len(data) // 2]))
    with pytest.raises(Corrupted, match=f"{path.name}: unreadable"):
        write_shards(weights, tmp_path / "out", 2**20)
    path.unlink()
    with pytest.raises(Missing, match=f"{path.name}: not there"):
        write_shards(weights, tmp_path / "out", 2**20)


def _values(weights: CheckpointWeights, path: Path) -> bytes:
    """The first values of the model in that file, as they stand in it."""
    import torch

    from rose.trainer.saved_states import _states, mapped

    if weights.stage == 3:
        return _states(path)["fp32_flat_groups"][0][:64].clone().numpy().tobytes()
    first = mapped(path)["module"]["hf.model.embed_tokens.weight"].reshape(-1)[:64].clone()
    return first.view(torch.uint8).numpy().tobytes()


def test_hashes_that_are_gone_or_of_another_version_are_said(run, tmp_path):
    copy = tmp_path / "checkpoints" / "step-000001"
    shutil.copytree(run / "checkpoints" / "step-000001", copy)
    versions.hashes_file(copy, 1).unlink()
    with pytest.raises(TransferError, match="weights-00001.json: not there"):
        sources(tmp_path, 1)
    shutil.copyfile(versions.hashes_file(copy, 0), versions.hashes_file(copy, 1))
    with pytest.raises(TransferError, match="weights-00001.json: has blocks of another rank than"):
        sources(tmp_path, 1)
    copy.rename(copy.with_name("step-000002"))
    with pytest.raises(TransferError, match="of version 1, expected 2"):
        sources(tmp_path, 2)
