"""The mpiexec line, the ranks' environment, with its folders for compiled kernels, and the run's
folder."""

import json
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest

from rose import files, models
from rose.config import ConfigError
from rose.launch import caches, local, model, resume
from rose.launch.layout import layout
from tests.launch.conftest import no_permission
from tests.made import model_folder
from tests.processes import ran


def test_one_block_per_environment_in_the_order_of_the_ranks(make_config, tmp_path):
    c = make_config("rollout.workers=3", "trainer.threads=2", "rollout.threads=1")
    words = " ".join(local.mpiexec_argv(layout(c), tmp_path, 4, ["rank"]))
    assert words.split("-keep ")[1].split(" : ") == [
        f"-n {ranks} -env OMP_NUM_THREADS {threads} rank --run {tmp_path} --attempt 4"
        for ranks, threads in ((2, 1), (1, 2), (3, 1))
    ]
    on_gpus = "model=qwen3_8b trainer=zero3_gpu rollout=gpu cluster=gpus trainer.ranks=2"
    c = make_config(on_gpus, "rollout.workers=2 rollout.tensor_parallel=2")
    argv = local.mpiexec_argv(layout(c), tmp_path, 1, given=["1", "3", "4", "5", "6", "7"])
    found = re.findall(r"CUDA_VISIBLE_DEVICES (\S+)", " ".join(argv))
    assert found == ["1", "3", "4,5", "6,7"]


def test_ranks_have_the_sites_settings_find_rose_and_meet_on_loopback(
    make_config, tmp_path, monkeypatch
):
    for name in ("HF_HUB_OFFLINE", "FI_TCP_IFACE"):
        monkeypatch.delenv(name, raising=False)
    env = local.environment(
        make_config("model=qwen3_8b trainer=zero3_gpu", "+cluster.env.MINE=mine")
    )
    expected = {"MINE": "mine", "FI_PROVIDER": "tcp;ofi_rxm", "OMP_WAIT_POLICY": "passive"}
    expected |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    assert expected.items() <= env.items() and env["FI_TCP_IFACE"] == "lo"
    done = ran([sys.executable, "-m", "rose.main", "--help"], cwd=tmp_path, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("FI_TCP_IFACE", "eth7")
    assert local.environment(make_config())["FI_TCP_IFACE"] == "eth7"
    named = make_config("cluster.interface=ib0")
    assert local.environment(named)["FI_TCP_IFACE"] == "ib0", "the configuration wins"


def test_a_run_that_never_began_leaves_no_folder_and_one_that_did_stays(tmp_path):
    run = tmp_path / "runs" / "run"
    with pytest.raises(ConfigError, match="refused"), local.locked(run):
        assert (run / "lock").exists()
        raise ConfigError("refused")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="refused"), local.locked(run):
        (run / "config.json").touch()
        raise ConfigError("refused")
    assert sorted(path.name for path in run.iterdir()) == ["config.json", "lock"]


def test_a_folder_that_may_not_be_searched_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as hidden:
        for name in ("stat", "mkdir"):
            hidden.setattr(Path, name, no_permission)
        said = "output_dir=.*run can't be made, locked or written .Permission denied"
        with pytest.raises(ConfigError, match=said), local.locked(tmp_path / "run"):
            pass


def test_a_lock_is_closed_before_its_folder_goes(tmp_path, monkeypatch):
    """As NFS wants it, which gives a removed file that is open another name in its folder."""

    def rmdir(folder):
        paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        opened = [os.readlink(path) for path in paths if os.path.islink(path)]
        assert not [name for name in opened if name.startswith(str(folder))]
        os.rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    with pytest.raises(ConfigError, match="refused"), local.locked(tmp_path / "run"):
        raise ConfigError("refused")
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_moved_aside_stay_and_take_no_lock_of_another_launch_with_them(tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        with local.locked(run):
            (run / "config.json").touch()
            resume.move_aside(run)
            run.mkdir()
            (run / "lock").touch()  # the other launch holds it now
        assert (run / "lock").exists()
    assert all((tmp_path / f"run.old-{n}" / "config.json").exists() for n in (1, 2))


def test_a_lock_that_its_holder_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """Whoever opened it before would hold a file that nobody else looks at."""

    def removed_first(file):
        (tmp_path / "run" / "lock").unlink()
        lock_now(file)

    lock_now = files.lock_now
    monkeypatch.setattr(files, "lock_now", removed_first)
    refused = pytest.raises(ConfigError, match="in use by another launch")
    with refused, local.locked(tmp_path / "run"):
        pass
    monkeypatch.undo()
    refused = pytest.raises(ConfigError, match=rf"another launch \(process {os.getpid()} on ")
    with local.locked(tmp_path / "run"), refused, local.locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("key", ["store", "local"])
def test_a_folder_for_checkpoints_that_can_not_be_used_is_named(make_config, tmp_path, key):
    (tmp_path / "file").touch()
    used, here = "sandbox.checkpoints=files", f"sandbox.{key}={tmp_path}"
    with pytest.raises(ConfigError, match=rf"sandbox.{key}='.*/file/x': .*Not a directory"):
        local.check_sandbox_folders(make_config(used, f"{here}/file/x"))
    local.check_sandbox_folders(make_config(f"{here}/file/x"))
    local.check_sandbox_folders(make_config(used, f"{here}/new/x"))
    assert list((tmp_path / "new" / "x").iterdir()) == []


LONGER = "trainer.steps=90 rollout.workers=1 eval.episodes=8 eval=beside eval.stop.patience=3 "
LONGER += "+env@eval.sets.sums=calculator +eval.sets.sums.episodes=64 observe.trace=false "
LONGER += "cluster.stop_timeout_s=1 rollout/draft=group trainer.step_timeout_s=9000 name=renamed"
GPUS = "trainer=zero3_gpu rollout=gpu cluster=gpus cluster.gpus=16"


SAME = [("", LONGER), (GPUS, "trainer.compile=true"), (GPUS, "trainer.kernels=liger")]


@pytest.mark.parametrize("stored, more", SAME)
def test_longer_and_faster_is_still_the_same_run(make_config, tmp_path, stored, more):
    local.write_config(make_config(*stored.split()), tmp_path)
    resume.check(tmp_path / "config.json", make_config(*stored.split(), *more.split()))
    resume.mark_finished(tmp_path, 30)
    finished = [resume.is_finished(tmp_path, make_config(f"trainer.steps={n}")) for n in (30, 31)]
    assert finished == [True, False]


def test_other_trainer_ranks_continue_the_run_and_that_is_said(make_config, tmp_path):
    local.write_config(make_config("trainer.ranks=2", "trainer.zero_stage=2"), tmp_path)
    other = make_config("trainer.ranks=3", "trainer.zero_stage=3")
    resume.check(tmp_path / "config.json", other)
    assert resume.other_shape(tmp_path, other) == "", "there is no checkpoint yet"
    step = tmp_path / "checkpoints" / "step-000005"
    (step / "deepspeed").mkdir(parents=True)
    saved = {"updates": 5, "ranks": 2, "zero_stage": 2, "dtype": "float32"}
    (step / "trainer.json").write_text(json.dumps(saved))
    for rank in range(2):
        (step / "deepspeed" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert resume.other_shape(tmp_path, other) == (
        f"{step}: saved by 2 trainer ranks with ZeRO 2, continued by 3 trainer ranks with ZeRO 3"
    )
    with pytest.raises(ConfigError, match=f"{step}: .*set trainer.zero_stage=2"):
        resume.check(tmp_path / "config.json", make_config("trainer.zero_stage=0"))


OTHER = "seed=2 trainer.batch_size=32 env.max_turns=3 algorithm=dapo rollout.temperature=0.7 "
OTHER += "rollout.top_k=5 model.recipe.seed=2 +env.args.more=1"


@pytest.mark.parametrize("override", OTHER.split())
def test_what_changes_the_training_is_another_run(make_config, tmp_path, override):
    local.write_config(make_config(), tmp_path)
    with pytest.raises(ConfigError, match=override.split("=")[0].lstrip("+")):
        resume.check(tmp_path / "config.json", make_config(override))


def test_another_model_folder_is_another_run_and_another_cache_is_not(make_config, tmp_path):
    a, b = (f"model.path={model_folder(tmp_path / name)}" for name in "ab")
    local.write_config(make_config("model.source=folder", a), tmp_path)
    same = make_config("model.source=folder", f"model.path={tmp_path}/b/../a")
    resume.check(tmp_path / "config.json", same)
    with pytest.raises(ConfigError, match="model.path: .*/a' -> .*/b'"):
        resume.check(tmp_path / "config.json", make_config("model.source=folder", b))
    local.write_config(make_config(a), tmp_path)
    resume.check(tmp_path / "config.json", make_config())


def test_a_model_that_is_not_made_yet_has_no_shape(make_config, monkeypatch, tmp_path):
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path))
    c = make_config()
    assert model.shape(c) is None
    folder = models.recipe_folder("tiny", c.model.recipe)
    model_folder(folder)
    assert model.shape(c).layers == 2
    prepared = model.prepare(c)
    assert (prepared.model.path, prepared.model.shape.head_dim) == (str(folder), 16)


def cached(make_config, kind, folder):
    c = make_config().cluster
    return msgspec.structs.replace(c, kind=kind, cache_dir=folder and str(folder))


def test_slurm_ranks_compile_on_their_nodes_disk(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path))
    found = caches.variables(cached(make_config, "slurm", None), {"TRITON_CACHE_DIR": "/mine"})
    assert set(found) == set(caches.FOLDERS) - {"TRITON_CACHE_DIR"}
    [home] = tmp_path.iterdir()
    assert all(value.startswith(str(home)) for value in found.values())
    assert home.stat().st_mode & 0o777 == 0o700
    assert caches.variables(cached(make_config, "local", None), {}) == {}
    mine = caches.variables(cached(make_config, "local", tmp_path / "k"), {})
    assert mine["VLLM_CACHE_ROOT"] == str(tmp_path / "k/vllm")
    (tmp_path / "file").touch()
    assert caches.variables(cached(make_config, "slurm", tmp_path / "file" / "below"), {}) == {}
    monkeypatch.setattr(caches.os, "geteuid", lambda: 12345)  # the folder is somebody else's
    assert caches.variables(cached(make_config, "slurm", tmp_path), {}) == {}
