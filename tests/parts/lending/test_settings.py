"""A serving rank's settings: the run's, with what may differ over it."""

import json
import os
import signal
import sys

import pytest

from rose import config as configuration
from rose import front, models, places, processes
from rose.config import ConfigError
from rose.launch import local
from rose.parts.lending import settings
from rose.parts.lending.config import hours_of
from rose.parts.lending.rank.lender import Lender
from tests.parts.lending.conftest import folder
from tests.processes import ran


@pytest.fixture
def config(make_config):
    return make_config()


@pytest.fixture
def run_dir(tmp_path, config):
    (tmp_path / "run").mkdir()
    configuration.save(config, tmp_path / "run" / "config.json")
    return tmp_path / "run"


def test_the_runs_own_with_what_differs_over_it(run_dir):
    given = "rollout.threads=2 serving.lost_after_s=3.5 cluster.env.X=a"
    c = settings.of_run(run_dir, given.split())
    assert c.rollout.threads == 2 and c.serving.lost_after_s == 3.5 and c.cluster.env["X"] == "a"
    assert c.seed == settings.of_run(run_dir, []).seed


def test_an_engine_elsewhere_has_no_more_threads_than_cores(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "CGROUP", tmp_path)  # no quotas
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    configuration.save(make_config("rollout.workers=1"), tmp_path / "config.json")
    assert settings.of_run(tmp_path, []).rollout.threads == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # of slurm/serving.sbatch
    assert settings.of_run(tmp_path, []).rollout.threads == 2
    assert settings.of_run(tmp_path, ["rollout.threads=3"]).rollout.threads == 3
    configuration.save(make_config("+experiment=qwen7b"), tmp_path / "config.json")
    assert settings.of_run(tmp_path, []).rollout.threads is None  # on GPUs the libraries' choice


def test_a_node_that_cannot_see_the_runs_hub_cache_gives_a_folder_of_its_own(tmp_path, make_config):
    own, gone = folder(tmp_path / "own"), "/elsewhere/snapshots/c0ffee"
    c = make_config(f"model.source=hub model.path=acme/tiny +model.snapshot={gone}")
    configuration.save(c, tmp_path / "config.json")
    assert models.resolve(settings.of_run(tmp_path, [f"model.path={own}"]).model) == own
    with pytest.raises(ConfigError, match=f"model.snapshot='{gone}': no such folder"):
        models.resolve(settings.of_run(tmp_path, []).model)


def test_a_home_folder_is_written_out_and_texts_stay_texts(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = "name=0512 output_dir=2026-02-30 out=~/p.json serving.online.model=~ seconds=0x10"
    texts = {"name": "0512", "output_dir": "2026-02-30", "out": "/home/me/p.json"}
    expected = texts | {"serving.online.model": None, "seconds": 16}
    assert settings.parse(given.split()) == expected
    quoted = settings.parse(["name='2024'", 'output_dir="/data/a b"', "model='", "out=\"it's'"])
    assert list(quoted.values()) == ["2024", "/data/a b", "'", "\"it's'"]


@pytest.mark.parametrize(
    "argument, words",
    [
        ("rollout.temperature=0.5", "is the run's"),
        ("seed=4", "is the run's"),
        ("rollout.threds=2", "no such key"),
        ("rollout.threads.x=2", "no such key"),
        ("rollout.threads=two", "rollout.threads"),
        ("nonsense", "must be key=value"),
        ("rollout.threads=[", "no YAML"),
        ("serving.online.served_name=2026-02-30", "no YAML; a text may be quoted"),
        ("serving.lost_after_s=0.1", "at least twice"),
    ],
)
def test_what_may_not_differ_or_is_no_value_is_named(run_dir, argument, words):
    with pytest.raises(ConfigError, match=words):
        settings.of_run(run_dir, [argument])


def test_a_folder_without_a_run_is_named(tmp_path):
    other, no_run = '{"a": 1}', "no configuration of a run"
    for text, words in ((None, no_run), ("{", "damaged"), ("[]", "damaged"), (other, no_run)):
        if text:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"config.json: .*{words}"):
            settings.of_run(tmp_path, [])


@pytest.mark.slow
def test_the_command_refuses_bad_arguments_and_waits_for_a_run_that_needs_it(run_dir, config):
    (run_dir / "status").mkdir()
    (run_dir / "status" / "finished.json").write_text(json.dumps({"steps": config.trainer.steps}))
    for arguments, code, words in (
        ("output_dir=.", 2, "name is missing"),
        (f"name= output_dir={run_dir.parent}", 2, "name='': is no run's name"),
        (f"name=.. output_dir={run_dir.parent}", 2, "is no run's name"),
        (f"name=a output_dir={run_dir}/none", 2, "no such folder"),
        (f"name=a output_dir={run_dir.parent} serving.wait_s=1", 0, "no run to serve"),
        (f"name={run_dir.name} output_dir={run_dir.parent}", 0, "is finished"),
    ):
        done = ran([sys.executable, "-m", "rose", "serve", *arguments.split()], timeout=60)
        assert done.returncode == code and words in done.stdout + done.stderr


def test_a_run_that_takes_no_borrowed_ranks_is_not_waited_for(
    tmp_path, make_config, capsys, monkeypatch
):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    local.write_config(make_config("serving=none", f"output_dir={tmp_path}", "name=run"), tmp_path)
    assert Lender(tmp_path, []).run() == 1
    assert "takes no borrowed ranks: serving.borrow=false" in capsys.readouterr().out


def test_an_online_server_has_its_settings_before_there_is_a_run_and_a_rank_the_same(run_dir):
    default = settings.of_server([])
    assert default.online.model is None and default.lending.hours == {}
    targets = {"ttft_p50_s": 0.2, "ttft_p99_s": 0.5, "tpot_p50_s": 0.05, "tpot_p99_s": 0.1}
    s = settings.of_server(
        ["rollout.threads=1", "serving.online.model=/models/a", "serving.lending.hours.22-06=0.5"]
        + ["serving.online.engine_args.seed=3"]
        + [f"serving.online.slo.{name}={value}" for name, value in targets.items()]
    )
    assert s.online.model == "/models/a" and s.online.slo.ttft_p99_s == 0.5
    assert s.online.engine_args == {"seed": 3} and s.lending.hours == {"22-06": 0.5}
    whole = ", ".join(f"{name}: {value}" for name, value in targets.items())
    whole = [f"serving.online.slo={{{whole}}}", "serving.lending.hours.22-06=0"]
    assert settings.of_server(whole).online.slo == s.online.slo
    of_run = settings.of_run(run_dir, whole).serving
    assert of_run.online.slo == s.online.slo and of_run.lending.hours == {"22-06": 0}
    assert hours_of("22-02") == [22, 23, 0, 1] and hours_of("00-24") == list(range(24))
    assert hours_of("20-24") == [20, 21, 22, 23] and hours_of("24-02") == []


LOOSE_P50 = "online.slo={ttft_p50_s: 1, ttft_p99_s: 0.5, tpot_p50_s: 1, tpot_p99_s: 1}"


@pytest.mark.parametrize(
    "argument, words",
    [
        ("online.prt=1", r"conf/serving and conf/lending; did you mean serving.online.port\?"),
        ("online.port=-1", "serving.online.port=-1"),
        ("online.port=70000", "below 65536"),
        ("online.slo.ttft_p9_s=1", "ttft_p9_s=1: .*; did you mean serving.online.slo.ttft_p99_s"),
        ("online.slo.ttft_p99_s=1", "serving.online.slo.*: missing"),
        (LOOSE_P50, "ttft_p50_s=1.*at most"),
        ("online.engine_args.port=1", "is set by ROSE"),
        ("online.engine_args={tensor-parallel-size: null}", "size=None: must be a whole number"),
        ("online.engine_args.tensor_parallel_size=auto", "size='auto': must be a whole number"),
        ("online.engine_args.tensor_parallel_size=true", "size=True: must be a whole number"),
        ("online.max_batched_tokens=8", "each takes one"),
        ("lending.control_port=8000", "is serving.online.port too"),
        ("lending.reserve=0.95", "below"),
        ("lending.kv_gib=0.5", "which is part of it"),
        ("lending.stale_after_s=0.01", "at least 0.1"),
        ("lending.hours.8-20=1", 'must be written as "08-20"'),
        ("lending.hours.08-20=1.5", "0 to 1"),
        ("lending.hours={20-25: 1}", "from 00 to 24"),
        ("lending.hours={22-06: 1, 05-07: 0}", "hour 05 is in '22-06' too"),
        ("lending.hours={08-20: -1}", "hours.*>= 0"),
    ],
)
def test_what_an_online_server_cannot_have_is_named(argument, words):
    with pytest.raises(ConfigError, match=words):
        settings.of_server([f"serving.{argument}"])


@pytest.mark.parametrize(
    "given", ["serving.online.port=1", "+serving.online.port=1", "serving.lending.reserve=0.2"]
)
def test_a_training_run_names_the_command_of_a_lenders_key(tmp_path, monkeypatch, capsys, given):
    monkeypatch.chdir(tmp_path)
    assert front.main(places.CONF, [given]) == 2
    assert "a key of `rose serve`" in capsys.readouterr().err
