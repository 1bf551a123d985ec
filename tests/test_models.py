"""Where the model is: folders are checked, recipes run once, and a failing recipe is named."""

import json
import multiprocessing
import socket
from pathlib import Path

import pytest

from rose import models, weight_files
from rose.config import ConfigError, Model


def model(source="folder", path=None, recipe=None, snapshot=None):
    plain = {"dtype": "float32", "max_context": 512, "shape": None, "chat_template_args": {}}
    given = {"source": source, "path": path, "recipe": recipe or {}, "snapshot": snapshot}
    return Model(name="m", **given, **plain)


def fill(folder: Path, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_what_ends_a_turn_is_what_any_file_of_the_folder_says_and_what_is_asked_for(tmp_path):
    """As of a base model whose chat template ends turns otherwise, fine-tuned since."""
    folder = fill(tmp_path / "m", "config.json", "tokenizer_config.json")
    with pytest.raises(ConfigError, match="no turn would end; model.end_of_turn names one"):
        models.end_tokens(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert models.end_tokens(folder) == [7, 8]
    decoder = {"9": {"content": "<|im_end|>"}, "7": {"content": "<|endoftext|>"}}
    tokenizer = {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert models.end_tokens(folder) == [7, 8, 9]
    vocabulary = {"added_tokens": [{"content": "<a>", "id": 3}], "model": {"vocab": {"b": 4}}}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert models.end_tokens(folder, ["<a>", "b", "<|im_end|>"]) == [3, 4, 7, 8, 9]
    with pytest.raises(ConfigError, match=r"model.end_of_turn=\['<c>'\]: '<c>' is no token"):
        models.end_tokens(folder, ["<c>"])


@pytest.fixture
def counting_recipe(tmp_path, monkeypatch):
    """A recipe that notes each of its runs; the real ones are tested in tests/scripts."""
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "recipe.py"
    script.write_text(f"""
import argparse, pathlib, time
p = argparse.ArgumentParser(); p.add_argument("--out", type=pathlib.Path); p.add_argument("--hole-probability")
a = p.parse_args(); time.sleep(0.5)
open({str(tmp_path / "runs")!r}, "a").write(str(a.hole_probability) + "\\n")
a.out.mkdir()
for name in ("config.json", "tokenizer_config.json"): (a.out / name).write_text("{{}}")
""")
    monkeypatch.setattr(models, "RECIPES", {"tiny": (str(script),)})
    return tmp_path / "runs"


def test_a_complete_folder_or_the_snapshot_that_the_launcher_found_is_taken_as_it_is(tmp_path):
    folder = fill(tmp_path / "m", "config.json", "tokenizer_config.json")
    assert models.resolve(model(path=str(folder))) == folder
    assert models.resolve(model("hub", "acme/tiny", snapshot=str(folder))) == folder


@pytest.mark.parametrize(
    "names, words",
    [
        (None, "no such folder"),
        ((), "no config.json"),
        (("config.json",), "no tokenizer_config.json"),
        (("adapter_config.json", "tokenizer_config.json"), "is an adapter; .* rose.export RUN"),
    ],
)
def test_an_incomplete_folder_is_named_with_what_it_lacks(tmp_path, names, words):
    folder = tmp_path / "m" if names is None else fill(tmp_path / "m", *names)
    with pytest.raises(ConfigError, match=f"model.path=.*{folder}.*{words}"):
        models.resolve(model(path=str(folder)))
    with pytest.raises(ConfigError, match="model.path=None: the hub id is needed"):
        models.resolve(model("hub"))
    lost, here = str(tmp_path / "elsewhere"), socket.gethostname()
    with pytest.raises(ConfigError, match=f"model.snapshot=.*elsewhere.*{here}.*HF_HOME"):
        models.resolve(model("hub", "acme/tiny", snapshot=lost))


def test_a_recipe_runs_once_with_its_arguments(counting_recipe):
    first = models.resolve(model("tiny", recipe={"hole_probability": 0.1}))
    assert models.resolve(model("tiny", recipe={"hole_probability": 0.1})) == first
    assert models.resolve(model("tiny", recipe={"hole_probability": 0.3})) != first
    assert counting_recipe.read_text().split() == ["0.1", "0.3"]


@pytest.mark.slow
def test_a_recipes_words_are_its_own(counting_recipe, capfd):
    """In a job's log: no progress bars, and no warning that DeepSpeed found no GPU."""
    script = Path(models.RECIPES["tiny"][0])
    script.write_text(f"""{script.read_text()}
import os, sys
from transformers.modeling_utils import logging
list(logging.tqdm(range(3), desc="bar"))
from deepspeed.accelerator import get_accelerator
print("on", get_accelerator()._name)
""")
    models.resolve(model("tiny"))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("model tiny is not in the cache yet") and lines[1:] == ["on cpu"]


def test_two_launches_at_once_build_it_once(counting_recipe):
    context = multiprocessing.get_context("fork")
    launches = [context.Process(target=models.resolve, args=(model("tiny"),)) for _ in range(2)]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join(120)
    assert [launch.exitcode for launch in launches] == [0, 0]
    assert len(counting_recipe.read_text().split()) == 1


def test_waiting_for_another_launch_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "BUILD_DEADLINE_S", 0.3)
    late = pytest.raises(ConfigError, match="held by another process for over 0 s; end the other")
    lock = tmp_path / "lock"
    with models._locked(lock), late, models._locked(lock):
        pass


def test_a_failing_recipe_is_reported_with_its_command(counting_recipe):
    with pytest.raises(ConfigError, match="ended with code 2"):
        models.resolve(model("tiny", recipe={"no_such_option": 1}))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("data", [b'{"a": ', b"[]", b"\xef\xbb\xbf{}", b"\xff"])
def test_a_damaged_file_of_a_model_is_named(tmp_path, name, data):
    folder = fill(tmp_path / "model", "config.json", "tokenizer_config.json")
    (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f": {name} is no JSON object .*; copy the file again"):
        models.check_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_a_clone_has_left_in_lfs_is_named(tmp_path, name):
    folder = fill(tmp_path / "model", "config.json", "tokenizer_config.json")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match=f"{name}: it is a pointer of Git LFS.*run git lfs pull"):
        weight_files.check_files(models.check_folder(folder), "model.path='m'", "copy it again")
