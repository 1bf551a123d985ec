"""The folder of a LoRA run: PEFT's adapter with the engines' bits, or the model with it inside."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.config import ConfigError
from rose.export import adapter
from rose.export.folder import export
from rose.export.weights import StoreWeights
from rose.trainer.adapter import base_of
from rose.transfer import TransferError
from tests.export.conftest import run_folder
from tests.transfer.worlds import World, same

MIB = 2**20
GENERATOR = torch.Generator().manual_seed(5)
QUERIES = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
BELOW = {f"{query}.weight": (8, 6) for query in QUERIES}
BELOW |= {"model.layers.0.mlp.down_proj.weight": (6, 10), "model.norm.weight": (6,)}
ADAPTER = {f"{query}.lora_A.weight": (2, 6) for query in QUERIES}
ADAPTER |= {f"{query}.lora_B.weight": (8, 2) for query in QUERIES}


def drawn(shapes) -> dict[str, torch.Tensor]:
    return {n: torch.randn(s, generator=GENERATOR).bfloat16() for n, s in shapes.items()}


@pytest.fixture
def lora_run(tmp_path, base, make_config):
    """Of two versions."""
    lora = "trainer.lora={rank: 2, alpha: 6.0, targets: [q_proj]}"
    lakes = run_folder(tmp_path, base, make_config, lora)
    (base / "model.safetensors.index.json").unlink()
    below = drawn(BELOW)
    save_file(below, base / "model.safetensors")
    parameters = [(name, torch.nn.Parameter(values)) for name, values in below.items()]
    hashes = base_of(parameters, lambda p: p.detach(), torch.bfloat16, lambda *_: ([], []))
    world = World(lakes / "weights" / "attempt-001", drawn(ADAPTER), {}, base=hashes)
    world.publish(0)
    world.weights = drawn(ADAPTER)
    world.publish(1)
    world.run, world.below = lakes, below
    return world


def test_the_adapter_is_written_as_peft_has_them(lora_run, tmp_path):
    done = export(lora_run.run, None, tmp_path / "home", MIB)
    assert done.step == 1 and done.adapter
    written = load_file(done.out / "adapter_model.safetensors")
    assert same(written, {f"base_model.model.{n}": t for n, t in lora_run.weights.items()})
    config = json.loads((done.out / "adapter_config.json").read_text())
    # B is as engines had it, times alpha / rank: the scale is 1
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 2, ["q_proj"])
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    assert not (done.out / "config.json").exists() and (done.out / "LICENSE").exists()
    card = (done.out / "README.md").read_text()
    assert "library_name: peft\n" in card and "--enable-lora --max-lora-rank 8" in card
    assert "rank 2, alpha 6, beside q_proj" in card


@pytest.mark.parametrize("shard_bytes", [MIB, 100])
def test_merged_matrices_are_computed_in_float32(lora_run, tmp_path, shard_bytes, monkeypatch):
    reads, read = [], StoreWeights.read
    monkeypatch.setattr(StoreWeights, "read", lambda *args: reads.append(args) or read(*args))
    done = export(lora_run.run, 1, tmp_path / "home", shard_bytes, merge=True)
    merged = {}
    for query in QUERIES:
        a, b = (lora_run.weights[f"{query}.lora_{kind}.weight"].float() for kind in "AB")
        name = f"{query}.weight"
        merged[name] = (lora_run.below[name].float() + b @ a).bfloat16()
    found = {n: t for path in done.out.glob("*.safetensors") for n, t in load_file(path).items()}
    assert same(found, lora_run.below | merged)
    assert len(reads) == 1, "the adapter is read once, whatever the matrices and shards"
    assert json.loads((done.out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (done.out / "tokenizer.json").exists() and not done.adapter
    assert (done.shards == 1) is (shard_bytes == MIB)


def test_an_adapter_is_not_merged_into_another_base_which_is_said_once(lora_run, tmp_path, capsys):
    path = tmp_path / "model" / "model.safetensors"
    save_file(lora_run.below | {"model.norm.weight": torch.ones(6).bfloat16()}, path)
    with pytest.raises(TransferError, match="model.norm.weight is not what .* for another base"):
        export(lora_run.run, 1, tmp_path / "home", MIB, merge=True)
    assert not (tmp_path / "home").exists() and capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_of_the_base_is_named(lora_run, tmp_path, text):
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(TransferError, match="index.json: no index of weights .*--base"):
        export(lora_run.run, 1, tmp_path / "home", MIB, merge=True)


def test_an_adapter_beside_a_recipes_model_names_the_folder_of_that(make_config, tmp_path):
    config = make_config("trainer.lora={rank: 2, alpha: 6.0, targets: [q_proj]}")
    adapter.write_config(config, tmp_path, tmp_path / "model")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "model")


def test_there_is_nothing_to_merge_where_all_weights_were_trained(run, tmp_path):
    with pytest.raises(ConfigError, match="--merge: the run trained all weights"):
        export(run.run, 1, tmp_path / "home", MIB, merge=True)
