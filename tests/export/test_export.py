"""A model's folder out of a run: bit for bit what the engines had, whole or not there."""

import json
import os
import re
import resource
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rose import config as configuration
from rose.export import __main__ as command
from rose.export import adapter, folder
from rose.export.folder import divide, export
from rose.export.weights import ranges
from rose.observe.metrics import MetricsWriter
from rose.transfer import versions
from rose.transfer.blocks import Tensor
from rose.transfer.errors import Corrupted, Missing
from rose.transfer.receive import materialise
from scripts.make_tiny_model import demonstrations, make_tokenizer
from tests.made import model_folder
from tests.processes import ran
from tests.refusals import refused
from tests.transfer.worlds import World, same

REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 2**20


def loaded(out: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.fixture
def main(capsys):
    """main(WORD, ...) -> (exit code, output, complaint) of `python -m rose.export`."""

    def call(*arguments) -> tuple[int, str, str]:
        code = command.main([str(a) for a in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_folder_has_the_weights_of_the_step_in_shards_with_an_index(run, tmp_path, main):
    out, killed = tmp_path / "home", tmp_path / ".home.part"
    killed.mkdir()  # left by an export that was killed
    (killed / "model.safetensors").write_text("half")
    code, said, _ = main(run.run, "--step", 2, "--out", out, "--shard-gib", 700 / 2**30)
    assert code == 0 and f"{out}: step 2 from the weight store {run.store}" in said, said
    assert same(loaded(out), run.weights_of[2])
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert names == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.loads((out / adapter.INDEX).read_text())
    assert index["weight_map"].keys() == run.weights.keys()
    assert set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in run.weights.values())
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "home"}
    with folder.whole_folder(tmp_path / "two"), refused(["another export is writing it"]):
        export(run.run, 3, tmp_path / "two", MIB)


def test_servers_draw_as_training_did(run, base, tmp_path):
    """vLLM's defaults are those of generation_config.json."""
    theirs = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [1, 2]}
    (base / "generation_config.json").write_text(json.dumps(theirs))
    done = export(run.run, None, tmp_path / "home", MIB)
    made = json.loads((done.out / "generation_config.json").read_text())
    rollout = configuration.load(run.run / "config.json").rollout
    sampling = {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k")}
    assert sampling.items() <= made.items() and made["do_sample"] is True
    assert made["eos_token_id"] == [1, 2] and "repetition_penalty" not in made


def test_a_template_that_ignores_tools_is_exported_as_training_wrote_it(run, tmp_path):
    model = configuration.load(run.run / "config.json", checked=False).model
    out = tmp_path / "exported"
    out.mkdir()
    shown, _ = demonstrations(30, {"size": 4, "hole_probability": 0.2}, 0.5, 1)
    make_tokenizer(shown).save_pretrained(out)
    (out / "config.json").write_text('{"vocab_size": 999, "model_type": "llama"}')
    plain = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    )
    plain += "{%- endfor %}{{- '<|im_start|>assistant\n' }}"
    template = out / "chat_template.jinja"
    template.write_text(plain)
    folder._write_template(out, model)
    once = template.read_text(encoding="utf-8")
    assert once.endswith(plain) and "To call a tool" in once
    folder._write_template(out, model)
    assert template.read_text(encoding="utf-8") == once


def test_one_file_needs_no_index_and_the_newest_step_is_the_default(run, tmp_path):
    done = export(run.run, None, tmp_path / "home", MIB)
    assert done.step == 3 and same(loaded(done.out), run.weights_of[3])
    assert (done.out / "model.safetensors").is_file() and not (done.out / adapter.INDEX).exists()
    assert done.blocks == len(run.plan.blocks)


def test_beside_the_weights_is_what_the_base_model_has(run, base, tmp_path):
    out = export(run.run, 3, tmp_path / "home", MIB).out
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    own = "config.json generation_config.json tokenizer.json tokenizer_config.json LICENSE "
    own += f"README.md model.safetensors chat_template.jinja {folder.TEMPLATES}/tools.jinja"
    assert found == {*own.split()}
    config = json.loads((out / "config.json").read_text())
    assert config == {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    mask = os.umask(0)
    os.umask(mask)
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_run_that_this_release_would_refuse_to_start_is_still_exported(run, tmp_path):
    stored = run.run / "config.json"
    tree = json.loads(stored.read_text())
    tree["rollout"]["engine_args"] = {"enable_prefix_caching": True}
    stored.write_text(json.dumps(tree))
    with pytest.raises(configuration.ConfigError):
        configuration.load(stored)
    assert same(loaded(export(run.run, 2, tmp_path / "home", MIB).out), run.weights_of[2])


def test_the_card_says_what_it_is_and_what_it_can_by_that_step(run, base, tmp_path):
    card = (export(run.run, 2, tmp_path / "home", MIB).out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# lakes, step 2\n" in card
    assert "| step 0 | 25.0% | 10.2% to 49.5% | 4 of 16 | 0.250 |" in card
    assert "| step 2 | 75.0% | 50.5% to 89.8% | 12 of 16 | 0.750 |" in card and "step 3" not in card
    assert f"| base model | {base} |" in card and f"--model {tmp_path / 'home'} --served" in card
    assert "```sh\npython launch.py name=lakes 'env=games'\n```" in card
    assert f"python -m rose.export {run.run} --step 2 --out" in card


def test_the_best_step_is_that_with_the_highest_held_out_reward(run, tmp_path, main):
    metrics = MetricsWriter(run.run, tensorboard=False)
    metrics.write(3, {"kind": "eval", "eval_n": 16, "eval_successes": 9, "eval_reward": 9 / 16})
    code, said, _ = main(run.run, "--best", "--out", tmp_path / "best")
    assert code == 0 and "step 2 is the best of 3 evaluations: mean reward 0.750" in said
    assert same(loaded(tmp_path / "best"), run.weights_of[2])
    best = {"eval_successes": 1, "eval_reward": 1.0, "eval_versions_later": 2}
    metrics.write(7, {"kind": "eval", "eval_n": 1} | best)
    code, said, err = main(run.run, "--best", "--out", tmp_path / "gone")
    assert "reward 1.000, of weights up to 2 versions newer" in said
    assert code == 1 and "step 7 can't be had" in err and "eval.keep_best=true" in err
    metrics.truncate(after_step=0)
    metrics.close()
    code, _, err = main(run.run, "--best", "--out", tmp_path / "none")
    assert code == 2 and "no held-out evaluation after a training step" in err
    code, _, err = main(tmp_path / "nowhere", "--best", "--out", tmp_path / "none")
    assert code == 2 and f"{tmp_path / 'nowhere'}: no run there" in err
    for wrong in (["--best", "--step", "2"], ["--shard-gib", "inf"], ["--shard-gib", "nan"]):
        with pytest.raises(SystemExit):
            command.main([str(run.run), *wrong, "--out", str(tmp_path / "x")])


def test_a_step_that_is_not_there_names_those_that_are(run, tmp_path, main):
    code, _, err = main(run.run, "--step", 7, "--out", tmp_path / "home")
    assert code == 1
    assert f"step 7 can't be had; there are: the weight store {run.store}: 0 to 3" in err
    assert not (tmp_path / "home").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((run.run / "config.json").read_bytes())
    code, _, err = main(empty, "--out", tmp_path / "home")
    assert code == 1 and "no version of the weights" in err
    assert ranges([7, 1, 2, 3, 9, 10]) == "1 to 3, 7, 9 to 10"


def test_a_folder_with_something_in_it_is_refused_and_an_empty_one_filled(run, tmp_path, main):
    out = tmp_path / "home"
    out.mkdir()
    (out / "mine").touch()
    code, _, err = main(run.run, "--out", out)
    assert code == 2 and f"--out {out}: exists and is no empty folder" in err
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    assert main(run.run, "--out", out)[0] == 0 and (out / "model.safetensors").is_file()
    code, _, err = main(run.run, "--out", tmp_path / "no" / "home")
    assert code == 2 and f"no folder {tmp_path / 'no'}" in err
    code, _, err = main(tmp_path, "--out", tmp_path / "new")
    assert code == 2 and f"{tmp_path}: no config.json there; give a run's folder" in err


def test_a_models_folder_is_no_run_and_a_base_of_other_sizes_is_refused(run, base, tmp_path, main):
    code, _, err = main(base, "--out", tmp_path / "home")
    assert code == 2 and f"{base}: is a model's folder; give that of a run" in err
    (tmp_path / "config.json").write_text("[1]")
    code, _, err = main(tmp_path, "--out", tmp_path / "home")
    assert code == 2 and f"{tmp_path / 'config.json'}: is damaged (no JSON object" in err
    other = model_folder(tmp_path / "other", num_hidden_layers=7)
    tree = configuration.stored(run.run / "config.json")
    tree["model"]["shape"] = msgspec.to_builtins(configuration.read_shape(other)) | {"layers": 2}
    (run.run / "config.json").write_text(json.dumps(tree))
    code, _, err = main(run.run, "--out", tmp_path / "home", "--base", other)
    assert code == 2 and "layers=7, and the run's model 2; give --base" in err
    assert not (tmp_path / "home").exists()


def test_a_damaged_file_is_named_and_leaves_nothing(run, tmp_path, main):
    edge = run.store / "v000000" / "full"
    path = edge / "rank-00001.h5"
    data = bytearray(path.read_bytes())
    manifest = json.loads((edge / "manifest.json").read_text().partition("\n")[0])
    data[manifest["files"][1]["data_offset"]] ^= 1
    path.write_bytes(data)
    code, _, err = main(run.run, "--step", 1, "--out", tmp_path / "home")
    assert code == 1 and re.search(f"{path}: the payload of block \\d+ is damaged", err), err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_said_in_a_line(run, tmp_path):
    limit = 1024  # bytes of a file, which is fewer than the weights have
    limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
    command = [sys.executable, "-m", "rose.export", str(run.run), "--out", str(tmp_path / "home")]
    own = {"env": os.environ | {"PYTHONPATH": str(REPOSITORY)}, "preexec_fn": limited}
    done = ran(command, **own, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"model\.safetensors: .*File too large", done.stderr), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_what_was_written_is_compared_not_what_was_read(run, tmp_path, monkeypatch):
    save = folder.save_file

    def careless(values, path, metadata):
        values["norm"].view(torch.int16)[3] ^= 1
        save(values, path, metadata)

    monkeypatch.setattr(folder, "save_file", careless)
    with pytest.raises(Corrupted, match="norm, values 0 to 6, are not those that the engines had"):
        export(run.run, 3, tmp_path / "home", MIB)


def train_on(world):
    """Publish versions 4 to 19, and let the store remove what it may."""
    for version in range(4, 20):
        world.step()
        world.publish(version)
        world.tidy()


def test_a_copy_of_links_keeps_versions_that_the_trainer_removes(trained_on, tmp_path):
    kept = versions.linked(trained_on.store, tmp_path / "kept", 1)
    assert kept == tmp_path / "kept" and versions.readable(kept) == [0, 1, 2, 3]
    train_on(trained_on)
    assert 1 not in versions.readable(trained_on.store)
    assert 19 in versions.readable(trained_on.store)
    with pytest.raises(Missing, match="step 1 can't be had; there are: .*19"):
        export(trained_on.run, 1, tmp_path / "home", MIB)
    done = export(trained_on.run, 1, tmp_path / "home", MIB, store=kept)
    assert same(loaded(done.out), trained_on.weights_of[1])
    for version in versions.readable(trained_on.store):
        materialise(trained_on.store, version)  # what is said to be readable is


def test_without_links_or_the_wanted_version_among_them_the_store_itself_is_read(
    run, tmp_path, monkeypatch
):
    link = os.link

    def some(source, *arguments, **named):
        if "v000003" in str(source):  # it was removed in this moment
            raise FileNotFoundError(2, "No such file or directory")
        link(source, *arguments, **named)

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", some)
    assert versions.linked(run.store, tmp_path / "two", 2) == tmp_path / "two"
    assert versions.linked(run.store, tmp_path / "three", 3) == run.store
    monkeypatch.setattr(os, "link", refuse)
    assert versions.linked(run.store, tmp_path / "kept", 1) == run.store


def test_a_version_stays_while_it_is_exported(trained_on, tmp_path, monkeypatch):
    """The command takes links, too: between two files the trainer removes the version."""
    write = folder._write_shard

    def then_go_on(*arguments):
        compared = write(*arguments)
        if 19 not in versions.readable(trained_on.store):
            train_on(trained_on)
        return compared

    monkeypatch.setattr(folder, "_write_shard", then_go_on)
    done = export(trained_on.run, 1, tmp_path / "home", 700)
    assert done.shards > 1 and 1 not in versions.readable(trained_on.store)
    assert same(loaded(done.out), trained_on.weights_of[1])
    assert [path.name for path in trained_on.store.parent.iterdir()] == [trained_on.store.name]


def test_out_may_be_the_current_folder_or_a_link_to_an_empty_one(run, tmp_path, monkeypatch):
    here, link = tmp_path / "here", tmp_path / "link"
    here.mkdir()
    monkeypatch.chdir(here)
    assert export(run.run, 3, Path("."), MIB).out == here
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / "empty")
    export(run.run, 3, link, MIB)
    assert same(loaded(tmp_path / "empty"), run.weights_of[3])
    assert same(loaded(here), run.weights_of[3])


def test_shards_are_full_and_a_large_tensor_has_its_own():
    sizes = [3, 3, 3, 20, 1, 1]
    tensors = [Tensor(str(n), (size,), "bfloat16") for n, size in enumerate(sizes)]
    assert [[t.size for t in shard] for shard in divide(tensors, 12)] == [[3, 3], [3], [20], [1, 1]]


@pytest.mark.slow
def test_memory_is_for_a_shard_and_not_for_the_model(tmp_path):
    """The process may have 192 MiB more than it has after its imports; the model has 384 MiB."""
    weights = {f"layer.{n}": torch.full((8 * MIB,), n / 8, dtype=torch.bfloat16) for n in range(24)}
    world = World(tmp_path / "store", weights, cuts={}, largest=MIB // 2)
    world.publish(0)
    program = f"""
import resource, sys
from pathlib import Path
from rose.export.folder import write_shards
from rose.export.weights import StoreWeights
import rose.transfer.codec as codec
codec.compile_all()
taken = int([l for l in open("/proc/self/status") if l.startswith("VmData")][0].split()[1]) * 1024
limit = taken + 192 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
size = (16 if sys.argv[2] == "shard" else 400) * 2**20
Path(sys.argv[1]).mkdir()
print(write_shards(StoreWeights(Path({str(tmp_path / "store")!r}), 0), Path(sys.argv[1]), size))
"""
    own = {"env": os.environ | {"PYTHONPATH": str(REPOSITORY), "MALLOC_ARENA_MAX": "1"}}
    command = [sys.executable, "-c", program]
    done = {
        s: ran([*command, str(tmp_path / s), s], **own, timeout=300) for s in ("shard", "model")
    }
    assert done["shard"].returncode == 0 and done["shard"].stdout.startswith("(24, "), done
    assert done["model"].returncode != 0, "the limit would stop one that holds the model"
    assert re.search("alloc|memory", done["model"].stderr), done["model"].stderr
    found = load_file(tmp_path / "shard" / "model-00024-of-00024.safetensors")
    assert torch.equal(found["layer.23"], weights["layer.23"])
