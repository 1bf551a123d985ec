"""What a run costs, over all of its attempts."""

import functools
import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from rose import energy
from rose.launch import state
from rose.observe import cost, terminal
from rose.parts.report.report import build_report

MADE = {"dedicated": 300, "borrowed": 100}


def test_shared_devices_count_once_and_a_run_from_saved_trajectories_has_no_engines(make_config):
    for more, devices in {"trainer.ranks=1": 3, "colocate=true": 2, "rollout.replay=x": 1}.items():
        assert cost.dedicated(make_config("rollout.workers=2", more)) == devices


@pytest.fixture
def meter(make_config, tmp_path):
    def made(attempt, *overrides):
        return cost.Meter(make_config(*overrides), tmp_path, attempt, at=100.0)

    return made


def test_devices_are_counted_while_they_are_there_over_all_attempts(meter, tmp_path):
    first = meter(1, "trainer.ranks=2", "rollout.workers=3")
    first.tick(100.0 + 1800, borrowed=0, made={"dedicated": 0, "borrowed": 0})
    first.tick(100.0 + 3600, borrowed=2, made=MADE)
    first.trained(250.0)
    first.write()
    found = cost.total(cost.of_attempts(tmp_path)[0].values())
    assert found.device_hours == pytest.approx((5.0, 1.0)) and found.kwh is None
    assert (found.made, found.made_borrowed, found.trained) == (400, 100, 250)
    second = meter(2, "trainer.ranks=2", "rollout.workers=3")
    second.energy({"GPU-a": 5e6})
    second.energy({"GPU-a": 5e6 + 3.6e6})
    second.tick(100.0 + 3600, borrowed=0, made=MADE)  # which writes
    found = cost.total(cost.of_attempts(tmp_path)[0].values())
    assert found.device_hours == pytest.approx((10.0, 1.0)) and found.attempts == 2
    assert found.kwh == pytest.approx(1.0) and found.made == 800
    assert found.text() == (
        "10 device-hours dedicated, 1 borrowed; 800 tokens made (200 by borrowed engines), "
        "250 trained; 1 kWh; 2 attempts"
    )


def test_a_device_that_two_ranks_tell_counts_once_and_one_whose_driver_began_anew_goes_on(meter):
    one = meter(1)
    for counters in ({"a": 100.0}, {"a": 130.0, "b": 7.0}, {"a": 130.0}, {"a": 10.0, "b": 9.0}):
        one.energy(counters)
    assert one.cost.energy_j == pytest.approx(30.0 + 2.0)
    one.energy({"a": 15.0})
    assert one.cost.energy_j == pytest.approx(37.0)


def test_the_last_line_the_report_and_rose_state_have_it(meter, tmp_path, monkeypatch, capsys):
    one = meter(1)
    one.tick(100.0 + 7200, borrowed=0, made=MADE)
    words = io.StringIO()
    terminal.final_table(tmp_path, Console(file=words, width=120))
    assert words.getvalue().splitlines()[-1].startswith("Cost: 6 device-hours dedicated")
    page = build_report(tmp_path).read_text()
    assert "Device-hours dedicated" in page and "<th scope=row>Attempt 1</th><td>6</td>" in page
    monkeypatch.setattr(sys, "argv", ["rose state", str(tmp_path)])
    assert state.main() == 0 and "Cost: 6 device-hours" in capsys.readouterr().out
    meter(2).write()
    (tmp_path / "status" / "cost" / "attempt-002.json").write_text("{")
    page, code, said = build_report(tmp_path).read_text(), state.main(), capsys.readouterr().out
    assert "Attempt 1</th><td>6</td>" in page and "attempt-002.json is damaged" in page
    assert code == 0 and "Cost: 6 device-hours" in said and "attempt-002.json is damaged" in said
    (tmp_path / "status" / "cost" / "attempt-001.json").unlink()
    assert "Unknown:" in build_report(tmp_path).read_text()
    assert state.main() == 2 and "Cost unknown" in capsys.readouterr().out


def millijoules(handle):
    if handle == "GPU-2":
        raise RuntimeError("not supported")
    return 5000 * (1 + int(handle[-1]))


# Stands in for pynvml, as no GPU is here: two that tell, one slice that doesn't.
NVML = SimpleNamespace(
    NVMLError=RuntimeError,
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 3,
    nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
    nvmlDeviceGetHandleByUUID=str,
    nvmlDeviceGetUUID=str,
    nvmlDeviceGetTotalEnergyConsumption=millijoules,
)


TELL = [(NVML, None, {"GPU-0": 5.0, "GPU-1": 10.0}), (NVML, "1", {"GPU-1": 10.0})]
TELL += [(NVML, "GPU-0,GPU-2", {"GPU-0": 5.0}), (NVML, "", {})]
TELL += [(None, None, {})]  # pynvml is not installed


@pytest.mark.parametrize("nvml, visible, found", TELL)
def test_each_gpu_that_a_process_may_use_tells_its_joules(nvml, visible, found, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("_nvml", "_devices"):  # measured without this machine's counters
        monkeypatch.setattr(energy, name, functools.cache(getattr(energy, name).__wrapped__))
    assert energy.counters() == found
