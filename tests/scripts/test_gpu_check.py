"""scripts/gpu_check.py: a check that goes wrong in any way is told and ends alone; every check's CPU
twin is the same code."""

import ctypes
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from rose.parts.lending.rules.predictor import Predictor
from rose.parts.lending.vllm.vmm import CudaDriver, PagePool
from rose.processes import adopt_orphans
from scripts import gpu_check
from tests import processes
from tests.gpu import coserving, frame, machine, odd
from tests.gpu.test_gpu import ALL
from tests.parts.lending.libcuda import build_libcuda

REPOSITORY = Path(__file__).resolve().parents[2]
MiB = 2**20
DEADLINE_S = 600


@pytest.fixture(scope="module", autouse=True)
def orphans_are_ours():
    adopt_orphans()


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """outcome(name) -> what run() says of a check of tests/gpu/odd.py, and its progress.

    Processes that other tests have left running are none of the check's."""
    before, children = set(processes.children(recursive=True)), processes.children

    def of_the_check(*words, **rest):
        return [one for one in children(*words, **rest) if one not in before]

    monkeypatch.setattr(processes, "children", of_the_check)
    monkeypatch.setattr(gpu_check, "LEAVE_S", 2.0)

    def run(name, device="cpu", gpus=0, sizes={}, deadline_s=DEADLINE_S):
        setup, told = frame.Setup(device, gpus, "cpu", None, str(tmp_path), None, sizes), []
        one = gpu_check.run(odd.CHECKS[name], setup, deadline_s, told.append, "odd.py")
        assert not processes.left(lambda: processes.children(recursive=True))
        return one, told

    return run


# Each starts a process with pytest, in a second or two.
def test_a_figure_outside_fails_the_check_and_the_others_are_still_told(outcome, tmp_path):
    one, told = outcome("outside")
    assert one.state == gpu_check.FAILED and one.words == "not as expected: rate"
    assert told == ["rate: 2 TFLOP/s (20 % of the bound), NOT >= 3, bound 10", "after it: yes"]
    table = gpu_check.table([one])
    assert "-> ask for a faster one" in table and "-> do this" in table
    setup = frame.Setup("cpu", 0, "cpu", None, "", None, {})
    gpu_check.write_json(tmp_path / "f.json", setup, [one])
    written = json.loads((tmp_path / "f.json").read_text())
    assert written["versions"]["torch"].startswith("2.") and "the driver" not in written["versions"]
    [figure, _] = written["checks"][0]["figures"]
    assert figure["share"] == 0.2 and not figure["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, given, state, words",
    [
        ("impossible", {}, gpu_check.IMPOSSIBLE, "no such thing here"),
        ("well", {"device": "cuda", "gpus": 1}, gpu_check.IMPOSSIBLE, "needs 2 GPUs, 1 visible"),
        ("raises", {}, gpu_check.FAILED, "ValueError: what was wrong"),
        ("killed", {}, gpu_check.FAILED, "its process ended with code -9 without a word"),
        ("hangs", {"deadline_s": 30}, gpu_check.FAILED, "no end within 30 s"),
        ("leaves", {}, gpu_check.FAILED, "left processes behind: "),
    ],
)
def test_the_end_of_a_check_is_told_and_nothing_is_left(outcome, name, given, state, words):
    one, _ = outcome(name, **given)
    assert one.state == state and one.words.startswith(words) and bool(one.words) == bool(words)
    if name == "raises":
        assert "the last words of a library" in Path(one.log).read_text()


def test_rates_are_those_of_the_device():
    def rates(name):
        return frame.Setup("cuda", 1, name, 80.0, "", None, {}).rates

    assert rates("NVIDIA H200") == (989.4e12, 4.8e12) and rates("Tesla V100") == (None, None)


@pytest.mark.parametrize("given, seen", [("", 0), ("2,3", 2), ("GPU-aa,GPU-bb", 2), ("-1", 0)])
def test_visible_devices_are_counted(monkeypatch, given, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert machine.visible(4) == seen


@pytest.mark.parametrize("words", [["nosuch"], ["--set", "engine.nosuch=1"], ["--set", "nosuch=1"]])
def test_a_wrong_command_line_is_refused(words):
    with pytest.raises(SystemExit) as refused:
        gpu_check.main(words)
    assert refused.value.code == 2


@pytest.mark.slow
def test_without_a_gpu_it_fails_and_says_so(capsys, monkeypatch, tmp_path, outcome):
    monkeypatch.setattr(gpu_check, "SMI", ("false",))
    monkeypatch.setattr(gpu_check, "TORCH", "pass")
    assert gpu_check.main(["machine", "colocated", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "machine: FAILED" in said and "colocated" in said and "machine failed" in said


def test_no_check_hides_another_of_its_name():
    assert len(gpu_check.CHECKS) == len(ALL)


# --------------------------------------------------------------------------- the page pool


class HostPool(PagePool):
    """The fake device's memory is the host's, so its tensor is one of the CPU."""

    def tensor(self):
        self.map([(0, self.page)])
        memory = (ctypes.c_char * self.nbytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.int8)


@pytest.mark.parametrize("broken, said", [("", "map 16 MiB "), ("release", "bytes of the device")])
def test_memory_that_does_not_come_back_to_the_device_is_found(tmp_path, monkeypatch, broken, said):
    path = build_libcuda(tmp_path, pages=64)
    library = ctypes.CDLL(path)
    pool = HostPool(CudaDriver(0, path), 32 * MiB)
    if broken:
        monkeypatch.setattr(HostPool, broken, lambda self, ranges: None)
    try:
        words = coserving.page_pool(pool, lambda: 2**30 - library.live_pages() * 2 * MiB)
    except RuntimeError as error:
        words = str(error)
    assert said in words and ("took 0" in words) == bool(broken)


# --------------------------------------------------------------------------- the twins on a CPU

# Not here: `precision` is `engine`'s code, whose twin runs in float32 (tp2 needs GPUs for it);
# `profile` is a command that tests/parts/lending/test_profile.py runs; `nccl` is the doctor's; `job` is
# `colocated` with fewer words, `mixture`, `long` and `hybrid` are it with more; their runs are
# those of tests/job/test_gpu_experiments.py, tests/trainer/test_sequence.py and
# tests/job/test_hybrid_job.py. `experts` reads a model as tests/trainer/test_mixture.py does.
# `compile` and `hpz` are steps of `trainer` with an option, as tests/trainer/test_kernels.py's and
# test_hpz.py's.
TWINS = "machine model delta digests trainer engine sleep lora drafts stops coserving colocated"
TWINS = TWINS.split()
PREDICTOR = {"predictor": Predictor((0.01, 1e-4, 0, 0, 0)).to_dict()}  # a step takes 10 ms
HELD_UP = {"hold_p99": 0.1, "hold_mean": 0.05}
PROFILE = {"online": PREDICTOR, "rollout": PREDICTOR, "interference": HELD_UP}


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """check -> its part of the JSON file, of one call with all of them; and the call's words."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    figures, env = folder / "figures.json", os.environ | {"PYTHONPATH": str(REPOSITORY)}
    given = ["engine.dtype=float32", "lora.dtype=float32"]
    given += [f"coserving.profile={folder / 'profile.json'}"]
    # Speeds are no matter here: another test may have the cores.
    given += ["coserving.slack=300.0", "coserving.within=0.0", "stops.slower=1000.0"]
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--device", "cpu"]
    command += ["--json", str(figures), "--folder", str(folder)]
    command += [word for each in given for word in ("--set", each)]
    ran = processes.ran([*command, *TWINS], timeout=5 * DEADLINE_S, env=env)
    found = json.loads(figures.read_text())["checks"]
    return {one["name"]: one for one in found}, ran


@pytest.mark.slow
@pytest.mark.timeout(3300)  # The first one runs all of them.
@pytest.mark.parametrize("name", TWINS)
def test_the_twin_of_each_check_is_ok_on_a_cpu(twins, name):
    found, ran = twins
    assert found[name]["state"] == gpu_check.OK, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert found[name]["figures"]


@pytest.mark.slow
def test_twins_leave_nothing_and_print_the_table(twins):
    _, ran = twins
    assert ran.returncode == 0 and ran.stdout.rstrip().endswith("no GPUs (cpu): all ok")
    assert "largest |difference|, new weights" in ran.stdout and "<= 0.001 (float32)" in ran.stdout


def test_a_figure_that_is_not_a_number_fails_its_bounds_and_is_shown():
    figure = frame.Figure("gradient norm", float("nan"), most=1.0)
    assert not figure.ok and figure.measured == "nan" and figure.expected == "<= 1"
