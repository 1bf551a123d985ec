"""The tiny model's recipe: a tokenizer that loses nothing, labels on the policy's own tokens, equal
files by seed."""

import random

import msgspec
import pytest

from rose.config import recipes
from scripts import make_smollm2
from scripts import make_tiny_model as recipe

LAKE = {"size": 4, "hole_probability": 0.2}


def call(direction):
    return f'<tool_call>\n{{"name": "move", "arguments": {{"direction": "{direction}"}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def shown():
    return recipe.demonstrations(200, LAKE, 0.6, seed=1)[0]


@pytest.fixture(scope="module")
def tokenizer(shown):
    return recipe.make_tokenizer(shown)


@pytest.mark.parametrize(
    "text", ["move right", 'héllo ☃\n\t\x00 {"a": [1]}', "P  F\nH", "<tool_call>x</tool_call>"]
)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_call_is_six_tokens_and_a_prompt_is_short(tokenizer, shown):
    assert len(tokenizer.encode(call("down") + "<|im_end|>")) == 6
    messages, tools = shown[0]
    given = {"tools": tools, "add_generation_prompt": True}
    assert len(tokenizer.apply_chat_template(messages[:2], **given)["input_ids"]) < 80


def test_directions_share_no_token_with_what_surrounds_them(tokenizer):
    calls = [tokenizer.encode(call(d)) for d in recipe.DIRECTIONS]
    assert [len({call[i] for call in calls}) for i in range(len(calls[0]))].count(4) == 1


def test_the_vocabulary_suits_vllm_and_ends_turns_with_im_end(tokenizer):
    assert len(tokenizer) <= recipe.VOCABULARY and recipe.VOCABULARY % 64 == 0
    assert tokenizer.eos_token == "<|im_end|>"


def test_labels_are_exactly_the_assistant_turns(tokenizer, shown):
    tokens, labels = recipe.encode(tokenizer, shown[:20])
    for conversation, ids, row in zip(shown, tokens, labels, strict=False):
        assert (ids[row != -100] == row[row != -100]).all()
        calls = [m["tool_calls"][0]["function"] for m in conversation[0] if "tool_calls" in m]
        said = [call(each["arguments"]["direction"]) + "<|im_end|>" for each in calls]
        assert tokenizer.decode(row[row != -100]) == "".join(said)


def test_the_demonstrator_never_steps_into_a_hole_and_without_noise_takes_a_shortest_path():
    picture = "P H F\nF H F\nF F G\nleft wall down F right H up wall"
    rng = random.Random(0)
    assert {recipe.demonstrate(picture, 0.0, rng) for _ in range(20)} == {"down"}
    assert {recipe.demonstrate(picture, 1.0, rng) for _ in range(100)} == {"down", "left", "up"}


def test_demonstration_maps_come_from_seeds_that_no_run_can_use(monkeypatch):
    seeds, reset = [], recipe.FrozenLake.reset
    noted = lambda self, seed: seeds.append(seed) or reset(self, seed)  # noqa: E731
    monkeypatch.setattr(recipe.FrozenLake, "reset", noted)
    recipe.demonstrations(20, LAKE, 0.6, seed=1)
    assert len(seeds) == 20 and min(seeds) >= 2**63


@pytest.mark.slow
def test_the_same_seed_makes_bit_identical_files_and_another_seed_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        recipe.main(["--seed", str(seed), "--steps", "3", "--out", str(tmp_path / name)])
    made = {
        folder.name: {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in tmp_path.iterdir()
    }
    assert made.keys() == {"a", "b", "c"}
    files = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert made["a"] == made["b"] and made["a"].keys() >= files
    assert made["a"]["model.safetensors"] != made["c"]["model.safetensors"]


def test_an_existing_folder_is_never_overwritten(tmp_path):
    with pytest.raises(SystemExit, match="exists already"):
        recipe.main(["--out", str(tmp_path)])


def test_the_launcher_knows_the_options_of_each_recipe_and_their_defaults(tmp_path):
    tiny = vars(recipe.parse(["--out", "m"]))
    del tiny["out"]
    assert tiny == msgspec.to_builtins(recipes.Tiny())
    for name, value in msgspec.to_builtins(recipes.SmolLM2()).items():
        with pytest.raises(SystemExit, match="exists already"):  # its options are taken
            make_smollm2.main(["--out", str(tmp_path), f"--{name}", value])


def test_a_recipes_parameters_are_counted_before_it_makes_them():
    args = recipe.parse(["--out", "m", "--hidden", "128", "--layers", "3", "--experts", "4"])
    wanted = recipes.Tiny(hidden=128, layers=3, experts=4).parameters
    made = recipe.make_model(recipes.VOCABULARY, 1, args).num_parameters()
    assert made == pytest.approx(wanted, rel=0.01)  # norms of heads are left out
