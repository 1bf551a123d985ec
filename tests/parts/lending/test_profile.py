"""A device's profile: what is refused, what interference is, and two tiny models for real."""

import functools
import json
import random
import sys
from pathlib import Path

import pytest

from rose import config as configuration
from rose.config import ConfigError
from rose.engine.start import EngineError
from rose.parts.lending import device_profile, profile, settings
from rose.parts.lending.measure import FEWEST, LEAST_HOLD, Step, interference
from rose.parts.lending.operator import operate
from rose.parts.lending.rules.predictor import Predictor, Work
from tests.parts.lending.conftest import folder
from tests.processes import ran

DECODE = Work((), 1, 100)
PREDICTOR = Predictor((0.01, 1e-4, 0, 0, 0))  # a decode takes 10 ms


def own(model):
    return ["model.source=folder", f"model.path={model}"]


@pytest.fixture
def model(tmp_path):
    return folder(tmp_path / "model")


@pytest.fixture
def config(model):
    return settings.composed([*own(model), f"serving.online.model={model}"])


@pytest.fixture
def found(config, model):
    """A whole profile of this device."""
    found = device_profile.fingerprint(config, model)
    for side in ("online", "rollout"):
        found[side] = found[side] | {"model": str(model), "predictor": PREDICTOR.to_dict()}
    found["interference"] = found["interference"] | {"hold_p99": 0.2, "hold_mean": 0.1}
    return {"format": device_profile.FORMAT, "seconds": 60.0} | found


def test_it_survives_its_file_and_says_at_once_all_that_differs(tmp_path, found, model, config):
    path, other = tmp_path / "profile.json", folder(tmp_path / "other", layers=2)
    path.write_text(json.dumps(found))
    assert device_profile.load(path) == found
    device_profile.check(device_profile.load(path), path, config, model)
    changed = "serving.online.dtype=bfloat16 rollout.threads=40 serving.lending.priority=normal"
    found["device"] = {"cpu": "Z80", "cores": 1}
    changed = settings.composed([*own(model), f"serving.online.model={other}", *changed.split()])
    with pytest.raises(ConfigError) as said:
        device_profile.check(found, "p.json", changed, model)
    for words in (
        "p.json",
        "device.cpu was 'Z80'",
        "online.model_digest",
        "online.dtype was 'auto' and is now 'bfloat16'",
        f"rollout.threads was {config.rollout.threads} and is now 40",
        "interference.priority was 'idle'",
        "rose.parts.lending.profile",
    ):
        assert words in str(said.value)


@pytest.mark.parametrize(
    "keys, value, words",
    [
        (("format",), 2, "format 2"),
        (("device",), None, "'device' is missing"),
        (("online", "predictor", "coefficients"), [1], "six finite numbers"),
        (("interference", "hold_p99"), float("nan"), "hold_p99=nan"),
        (("rollout",), [], "list"),
    ],
)
def test_a_damaged_profile_is_named_with_what_is_wrong(tmp_path, found, keys, value, words):
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match=f"{path}.*No such file"):
        device_profile.load(path)
    *parents, last = keys
    branch = functools.reduce(dict.get, parents, found)
    branch[last] = value
    if value is None:
        del branch[last]
    text = json.dumps(found)
    for written, wrong in ((text, words), (text[:9], "no profile")):
        path.write_text(written)
        with pytest.raises(ConfigError, match=f"{path}.*{wrong}"):
            device_profile.load(path)


def made(slower, count=400, noise=0.0, covered=1.0):
    """Online steps, every second one beside a rollout step that makes it `slower` times."""
    dice, now, online, rollout = random.Random(0), 0.0, [], []
    for at in range(count):
        seconds = 0.01 * dice.lognormvariate(0, noise) * (slower if at % 2 else 1)
        online.append(Step(now, now + seconds, DECODE))
        if at % 2:
            rollout.append(Step(now, now + covered * seconds, DECODE))
        now += seconds
    return online, rollout


def test_interference_is_the_share_of_the_time_that_both_run_and_no_noise_that_both_have():
    measured = interference(*made(2.0), PREDICTOR, PREDICTOR)
    halves = [measured[name] for name in ("hold_mean", "hold_p99", "progress")]
    assert halves == pytest.approx([0.5] * 3)  # progress: a decode of 10 ms in 20 ms
    assert (measured["steps_alone"], measured["steps_beside"]) == (200, 200)
    measured = interference(*made(1.0, 4000, noise=0.3), PREDICTOR, PREDICTOR)
    assert measured["hold_mean"] < 0.05 and LEAST_HOLD <= measured["hold_p99"] < 0.15
    measured = interference(*made(1.25, covered=0.6), PREDICTOR, PREDICTOR)
    assert measured["hold_mean"] == pytest.approx(0.2 / 0.6)
    with pytest.raises(EngineError, match=f"{FEWEST} of each"):
        interference(*made(2.0, 2 * FEWEST - 2), PREDICTOR, PREDICTOR)


@pytest.fixture
def tiny(tmp_path):
    """A folder with the shape of a decoder: 8 KiB of KV cache a token."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 300, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return folder(tmp_path / "tiny", num_hidden_layers=16, **sizes, **heads)


def test_the_rollout_engine_is_measured_with_what_a_lender_starts_it_with(tiny, monkeypatch):
    monkeypatch.setattr(device_profile, "_device", lambda gpus: {"gpu": "H"})
    gpu = (
        f"serving.online.model={tiny} cluster=gpus rollout=gpu trainer=zero3_gpu rollout.workers=1 "
        "trainer.ranks=1 serving.online.kv_cache_gib=8 serving.lending.kv_gib=10 "
        "model.max_context=2048"
    ).split()
    config, _ = profile.configured(gpu, {"model": str(tiny)})
    sides = profile.online_side(config), profile.rollout_side(config, tiny)
    for side in sides:
        assert side.args["gpu_memory_utilization"] == operate.FREE_SHARE
        # Both take their memory for good here, and no more than the budget that they will share.
        assert side.args["kv_cache_memory_bytes"] == 5 * 2**30
    assert sides[1].environment["VLLM_KV_CACHE_LAYOUT"] == "BLHNC"
    mine, _ = profile.configured([*gpu, "rollout.kv_cache_gib=2"], {"model": str(tiny)})
    assert profile.rollout_side(mine, tiny).args["kv_cache_memory_bytes"] == 2 * 2**30


def test_one_request_fits_into_either_engine_also_where_the_budget_is_small(config, tiny):
    shape = configuration.read_shape(tiny)
    assert profile.kv_part(config, shape, 2**40, 2048) == 2**29  # half of 1 GiB
    assert profile.kv_part(config, shape, 2**40, 2**20) >= 8192 * 2**20
    assert profile.kv_part(config, shape, 2**28, 2048) == 2**28


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["seconds=9"], "out is missing"),
        (["out=/none/p.json"], "no such folder"),
        (["out=/proc"], "out='/proc': is a folder; give a file"),
        (["out=/proc/p.json"], "out='/proc/p.json': /proc: No such file"),
        (["out=p.json", "seconds=1"], "seconds=1: must be a number from 5"),
        (["out=p.json"], "name or model is missing"),
        (["out=p.json", "model=/m", "name=a"], "give one of them"),
        (["out=p.json", "model=/m"], "serving.online.model=None"),
        (["out=p.json", "model=/m", "serving.online.model=/m"], "model.path='/m': no such folder"),
        (["out=p.json", "model=/m", "serving.onlin.model=/m"], "no such key"),
        (["out=p.json", "name=none"], "no configuration of a run"),
    ],
)
def test_bad_arguments_are_refused(capsys, arguments, words):
    assert profile.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_tiny_models_are_measured_for_real_and_their_profile_suits_them(tmp_path):
    from tests.engine.conftest import make_model

    tiny, path = tmp_path / "tiny", tmp_path / "profile.json"
    make_model("Qwen3").save_pretrained(tiny)
    (tiny / "tokenizer_config.json").write_text("{}")
    given = (
        "serving.online.max_context=512 serving.online.max_sequences=8 rollout.max_sequences=8 "
        "serving.online.dtype=float32 serving.online.kv_cache_gib=0.1 "
        f"serving.online.model={tiny}"
    ).split()
    command = [sys.executable, "-m", "rose.parts.lending.profile", f"out={path}", "seconds=10"]
    done = ran([*command, f"model={tiny}", *given], timeout=800, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "P99 residual" in done.stdout and str(path) in done.stdout
    found = device_profile.load(path)
    config = settings.composed([*own(tiny), *given])
    device_profile.check(found, path, config, tiny)
    for side in ("online", "rollout"):
        predictor = Predictor.from_dict(found[side]["predictor"])
        assert predictor.samples >= FEWEST and predictor.seconds(DECODE) > 0
        long, short = (predictor.seconds(Work(((tokens, 0),), 0, 0)) for tokens in (500, 2))
        assert long >= short
    assert found["interference"]["hold_p99"] > 0 and found["interference"]["priority"] == "idle"
