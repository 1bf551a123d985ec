"""Models of a hub: one commit for all ranks, from the network or the cache, or one clear error
before anything starts."""

import struct
from pathlib import Path

import hub_cache
import huggingface_hub
import pytest

from rose import config as configuration
from rose import front, hub
from rose.config import ConfigError
from rose.launch import local, model
from tests.made import model_folder
from tests.refusals import refused

REPOSITORY = Path(__file__).resolve().parents[1]
OTHER = "f" * 40
SMALL = [f"model.shape.{key}=64" for key in ("hidden", "intermediate", "head_dim", "vocab")]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and no network."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def files(tmp_path):
    shape = {"num_key_value_heads": 2, "vocab_size": 512}
    return model_folder(tmp_path / "made", architectures=["Qwen3ForCausalLM"], **shape)


def config(tree, tmp_path, *overrides):
    given = ("model=qwen3_8b model.path=acme/tiny model.max_context=512", f"output_dir={tmp_path}")
    return configuration.from_dict(tree(*given, *overrides))


def test_without_a_network_the_cache_is_used_and_a_revision_is_a_branch_or_a_commit(cache, files):
    assert hub_cache.add(cache, "acme/tiny", files) == hub.snapshot("acme/tiny")
    second = hub_cache.add(cache, "acme/tiny", files, commit=OTHER, ref="v2")
    assert hub.snapshot("acme/tiny", "v2") == hub.snapshot("acme/tiny", OTHER) == second


def test_neither_network_nor_cache_names_id_cache_and_remedies(cache):
    words = ["model.path='acme/none'", "revision 'v1'", str(cache), "HF_HOME"]
    remedies = ["hf download acme/none --revision v1", "model.path=/folder model.source=folder"]
    with refused(words + remedies):
        hub.snapshot("acme/none", "v1")
    with refused(["no hub id, which is owner/name"]):
        hub.snapshot("a/b/c/d")


def test_a_fault_of_the_libraries_below_is_told_in_the_same_words(cache, monkeypatch):
    """A proxy that refuses, or a server that hangs up: the HTTP library's exceptions are no
    OSError."""
    from huggingface_hub import errors

    def refused(*_, **__):
        raise errors.HTTPError("403 Forbidden by the proxy")

    assert not issubclass(errors.HTTPError, OSError)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(ConfigError, match="model.path='acme/tiny': .*HTTPError: 403 Forbidden by"):
        hub.snapshot("acme/tiny")


def test_a_hub_that_does_not_answer_is_asked_twice_in_all(cache, files, monkeypatch):
    """The library would try for half a minute; a whole model in the cache is taken."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    hub._unreachable.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "cached", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: 1 / 0)
    asked, head = [], get_session().head
    monkeypatch.setattr(get_session(), "head", lambda *a, **k: (asked.append(a), head(*a, **k)))
    for ask in (hub.snapshot, hub.configuration):
        with pytest.raises(ConfigError, match="the hub can't be reached and the cache .*refused"):
            ask("acme/tiny", None)
    assert len(asked) == hub.TRIES
    monkeypatch.setattr(hub, "cached", lambda *_: files)
    assert hub.snapshot("acme/tiny") == files


def test_licence_and_notice_are_downloaded_and_other_weights_are_not():
    there = ["LICENSE", "NOTICE.md", "config.json", "pytorch_model.bin", "original/params.json"]
    found = huggingface_hub.utils.filter_repo_objects(
        there, allow_patterns=list(hub.WANTED), ignore_patterns=list(hub.UNWANTED)
    )
    assert list(found) == there[:3]


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_snapshot_with_a_broken_link_is_refused_with_what_it_lacks(cache, files, name):
    snapshot = hub_cache.add(cache, "acme/tiny", files)
    (snapshot / name).resolve().unlink()
    with pytest.raises(ConfigError, match=f"has no {name}.*start again with network"):
        hub.snapshot("acme/tiny")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_experts": 60, "architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"decoder_sparse_step": 2, "architectures": ["Qwen3MoeForCausalLM"]}, r"some layers have"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"quantization_config": "fp8"}, r"quantised \(fp8\)"),
        ({"architectures": None}, "its architecture is unknown"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM; ROSE trains"),
    ],
)
def test_untrainable_models_are_refused_when_planned(cache, files, tree, tmp_path, change, said):
    hub_cache.add(cache, "acme/tiny", files, **change)
    with pytest.raises(ConfigError, match=f"model.path='acme/tiny': .*{said}"):
        model.shape(config(tree, tmp_path))


def test_a_model_that_is_only_served_may_be_quantised_and_one_to_train_may_not(
    cache, files, tree, tmp_path
):
    head = b'{"w.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}'
    (files / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(4))
    hub_cache.add(cache, "acme/tiny", files)
    assert hub.snapshot("acme/tiny").is_dir()
    c = config(tree, tmp_path)
    with pytest.raises(ConfigError, match="model.path='acme/tiny': .* has the type F8_E4M3"):
        model.fetch(c, c.run_dir / "config.json")


def test_a_configuration_that_was_cut_short_in_the_cache_is_named(cache, files, tree, tmp_path):
    snapshot = hub_cache.add(cache, "acme/tiny", files)
    (snapshot / "config.json").resolve().write_text('{"a": ')
    with pytest.raises(ConfigError, match="config.json is no JSON object .*remove"):
        model.shape(config(tree, tmp_path))


def test_the_real_shape_wins_over_that_of_conf(cache, files, tree, tmp_path):
    hub_cache.add(cache, "acme/tiny", files)
    c = config(tree, tmp_path)
    fetched = model.fetch(c, c.run_dir / "config.json")
    assert c.model.shape.layers == 36 and fetched.model.shape.layers == model.shape(c).layers == 2


def test_a_run_keeps_its_commit_though_the_branch_has_moved(cache, files, tree, tmp_path):
    first = hub_cache.add(cache, "acme/tiny", files)
    c = config(tree, tmp_path)
    c.run_dir.mkdir(parents=True)
    local.write_config(model.fetch(c, c.run_dir / "config.json"), c.run_dir)
    second = hub_cache.add(cache, "acme/tiny", files, commit=OTHER)
    assert model.fetch(c, c.run_dir / "config.json").model.snapshot == str(first)
    over = config(tree, tmp_path, "fresh=true")
    assert model.fetch(over, c.run_dir / "config.json").model.snapshot == str(second)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_refused_model_leaves_no_file_and_an_earlier_run(cache, tmp_path, capsys, fresh):
    """A hub that isn't reached, or has no such id: the launcher has the run's lock by then."""
    runs, kept = tmp_path / "new" / "runs", Path("earlier") / "checkpoints"
    if fresh:
        (runs / kept).mkdir(parents=True)
    asked = ["model=qwen3_8b", "model.path=acme/none", "model.max_context=512", "name=earlier"]
    asked += [f"output_dir={runs}", f"fresh={fresh}", *SMALL]
    assert front.main(REPOSITORY / "conf", asked) == 2
    assert "model.path='acme/none': the hub can't be reached" in capsys.readouterr().err
    left = {path.relative_to(runs) for path in runs.rglob("*")}
    expected = ({Path("earlier"), kept}, True) if fresh else (set(), False)
    assert (left - {Path("earlier/lock")}, runs.parent.exists()) == expected
