"""Models that users bring: what can't be loaded, or not as asked, is refused by the launcher."""

import json
import math
import shutil
import struct

import pytest

from rose import hub
from rose.config import ConfigError
from rose.launch import model, resume
from tests import made
from tests.refusals import refused, table

RAW = made.LLAMA | {"num_attention_heads": 2, "max_position_embeddings": 512}


@pytest.fixture
def folder(tmp_path):
    return made.model_folder(tmp_path / "model", **RAW)


@pytest.fixture
def shape(make_config, folder):
    given = (f"model.path={folder}", "model.source=folder")
    return lambda *more: model.shape(make_config(*given, *more))


def write(data):
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


# The header of a file with 8 bytes of values, of which the last is lacking.
HEADER = b'{"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}'
SHORT = struct.pack("<Q", len(HEADER)) + HEADER + bytes(7)


def sharded(folder, there):
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, kept in zip(names, there, strict=True):
        if kept:
            (folder / name).touch()
    weights = {f"w{n}": name for n, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


DAMAGE = {
    "has no model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    f"its header says {len(SHORT) + 1}": write(SHORT),
    "run git lfs pull": write(b"version https://git-lfs.github.com/spec/v1"),
    "its header says nothing": write(b"<html>"),
    "has 0 bytes": write(b""),
    "has no model-00002-of-00003.safetensors(?! and)": lambda f: sharded(f, (1, 0, 1)),
    "has no model-00002-of-00003.safetensors and 1 more": lambda f: sharded(f, (1, 0, 0)),
    "is unreadable": lambda f: (f / "model.safetensors.index.json").write_text("{"),
}


@pytest.mark.parametrize("words, damage", DAMAGE.items())
@pytest.mark.parametrize("dry", ["false", "true"])
def test_a_folder_whose_weights_are_not_all_there_is_refused(folder, shape, damage, words, dry):
    assert shape(f"cluster.dry_run={dry}").heads == 2
    damage(folder)
    with pytest.raises(ConfigError, match=f"model.path='.*{words}"):
        shape(f"cluster.dry_run={dry}")
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    (folder / "pytorch_model.bin").touch()  # PyTorch's own file
    assert shape().heads == 2


def tensors():
    """The tensors of `RAW`'s model as of a safetensors header: names with types and shapes."""
    layer = {"self_attn.q_proj": [64, 64], "mlp.up_proj": [128, 64], "input_layernorm": [64]}
    made = {"model.embed_tokens": [256, 64], "model.norm": [64], "lm_head": [256, 64]}
    made |= {f"model.layers.{n}.{part}": shape for n in (0, 1) for part, shape in layer.items()}
    return {f"{name}.weight": ("BF16", shape) for name, shape in made.items()}


def write_tensors(path, made):
    header, end = {}, 0
    for name, (dtype, shape) in made.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)


UP = "model.layers.1.mlp.up_proj.weight"


COMPARED = [
    ({UP: None}, {}, f"{UP} is missing, which other layers have"),
    ({UP: ("BF16", [100, 64])}, {}, rf"{UP} has the shape \[100, 64\], in other layers \[128"),
    ({UP: ("I8", [128, 64])}, {}, f"{UP} has the type I8"),
    ({}, {"num_hidden_layers": 3}, r"layers=3, and the weights have 2 layers \(0 to"),
    ({}, {"num_hidden_layers": 1}, "num_hidden_layers=1, and the weights have 2 layers"),
    ({}, {"vocab_size": 260}, r"vocab_size=260, and model.embed_tokens.weight has .*\[256, 64"),
    ({"lm_head.weight": ("BF16", [300, 64])}, {}, "vocab_size=256, and lm_head.weight has"),
    ({"lm_head.weight": None}, {"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ({"model.embed_tokens.weight": None}, {}, "model.embed_tokens.weight is missing"),
    # Good ones: a tied output matrix, buffers that only some layers have or of whole numbers,
    # classes whose layers differ.
    ({"lm_head.weight": None}, {"tie_word_embeddings": True}, ""),
    ({"model.layers.0.mask": ("BOOL", [2, 2])}, {"architectures": ["X1LMHeadModel"]}, ""),
    ({"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [16])}, {}, ""),
    ({UP: None}, {"architectures": ["OtherForCausalLM"]}, ""),
    ({}, {"unprefixed": True}, ""),
    ({}, {"time_step_limit": [0.0, math.inf]}, ""),  # transformers writes Infinity
]


@pytest.mark.parametrize("changes, config, words", COMPARED)
def test_weights_are_compared_with_the_configuration(folder, shape, changes, config, words):
    made = {name: t for name, t in (tensors() | changes).items() if t is not None}
    if config.pop("unprefixed", False):
        made = {name.removeprefix("model."): t for name, t in made.items()}
    write_tensors(folder / "model.safetensors", made)
    (folder / "config.json").write_text(json.dumps(RAW | config))
    if not words:
        assert shape().layers == 2
        return
    with pytest.raises(ConfigError, match=f"model.path='.*{words}"):
        shape()


def test_what_an_index_names_and_no_file_has_is_refused_unless_it_may_be_tied(folder, shape):
    names = [name for name in tensors() if name != "lm_head.weight"]
    place = folder / "model.safetensors.index.json"
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, some in parts.items():
        write_tensors(folder / file, {name: tensors()[name] for name in some})
    index = {name: file for file, some in parts.items() for name in some}
    (folder / "model.safetensors").unlink()
    for more in ({}, {names[0]: "b.safetensors"}, {"lm_head.weight": "b.safetensors"}):
        place.write_text(json.dumps({"weight_map": index | more}))
        assert shape().layers == 2
    bad = [(index | {UP.replace("1", "2"): "a.safetensors"}, "is in a.safetensors, and no file")]
    for wrong, words in [*bad, (index | {UP: 1}, "is unreadable"), ({}, "is unreadable")]:
        place.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ConfigError, match=words):
            shape()


OTHER_TYPES = """
config {"architectures": "LlamaForCausalLM"} -> Expected `array
config {"architectures": ["LlamaForSequenceClassification"]} -> end in ForCausalLM
config {"architectures": ["BertModel"]} -> end in ForCausalLM
config {"model_type": null} -> names no model_type
config {"dtype": "foo"} -> dtype 'foo'; there are float32
config {"eos_token_id": "2"} -> eos_token_id='2': Expected `int
generation_config {"eos_token_id": ["2"]} -> eos_token_id=['2']: Expected `int`
config {"max_position_embeddings": "512"} -> max_position_embeddings='512'
config {"rope_parameters": [1]} -> rope_parameters=[1]: Expected `object
config {"rope_scaling": {"factor": "4"}} -> rope_scaling= | Expected `float
tokenizer_config {"eos_token": 5} -> eos_token=5: Expected
"""


@pytest.mark.parametrize("given, words", table(OTHER_TYPES))
def test_values_of_other_types_are_named(folder, shape, given, words):
    file, _, value = given.partition(" ")
    path = folder / f"{file}.json"
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | json.loads(value)))
    with refused(["model.path='", *words]):
        shape()


FIT = (("default", None, 512), ("yarn", 4.0, 512), ("linear", 4.0, 128), ("dynamic", 4.0, 128))
BEYOND = (("default", None, 511), ("yarn", 4.0, 128), ("linear", 2.0, 128), ("llama3", 8.0, 128))
BEYOND += (("longrope", 4.0, 511),)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind, factor, positions", FIT + BEYOND)
def test_contexts_beyond_positions_are_refused(folder, shape, kind, factor, positions, key):
    rope = {"rope_type": kind} | ({"factor": factor} if factor else {})
    raw = RAW | {"max_position_embeddings": positions, key: rope}
    (folder / "config.json").write_text(json.dumps(raw))
    if (kind, factor, positions) in FIT:
        assert shape("model.max_context=512").heads == 2
    else:
        with pytest.raises(ConfigError, match=f"max_context=512: .*embeddings={positions}"):
            shape("model.max_context=512")


def test_a_hubs_model_alone_is_planned_by_its_config(folder, make_config, monkeypatch):
    """The weights are downloaded once the plan stands."""
    asked = []

    def download(repository, name, revision=None):
        asked.append((repository, name, revision))
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(hub, "cached", lambda *_: None)
    hub_model = ["model.source=hub model.path=acme/tiny model.revision=v2 model.shape=null"]
    assert model.shape(make_config(*hub_model)).heads == 2
    assert asked == [("acme/tiny", "config.json", "v2")]
    with pytest.raises(ConfigError, match="model.shape=None"):
        model.shape(make_config(*hub_model, "cluster.dry_run=true"))
    shutil.rmtree(folder)
    monkeypatch.setattr(hub, "snapshot", lambda *_: (_ for _ in ()).throw(ConfigError("no hub")))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match="no hub"):
        model.shape(make_config(*hub_model))


def test_a_rate_that_jumps_as_a_run_goes_on_is_said(tmp_path, make_config, monkeypatch):
    def run(steps, schedule):
        return make_config(f"trainer.steps={steps}", f"trainer.optimizer.schedule={schedule}")

    def words(before, now, schedule):
        resume.configuration.save(run(before, schedule), tmp_path / "config.json")
        return resume.other_rates(tmp_path, run(now, schedule))

    assert words(4, 8, "cosine") == ""  # nothing is trained yet
    monkeypatch.setattr(resume.checkpoint, "latest", lambda _: tmp_path / "step-000004")
    found = words(4, 8, "cosine")
    assert "trainer.steps=8, and 4 before" in found and "at step 4 and 0.000" in found
    assert words(4, 8, "linear") and not words(4, 4, "cosine") and not words(4, 8, "constant")
