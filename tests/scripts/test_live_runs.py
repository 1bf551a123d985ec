"""Which steps of a live run count, and how a script that started one ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import live_runs

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_step_counts_when_the_hypervisor_left_the_machine_to_us(tmp_path, monkeypatch):
    monkeypatch.setattr(live_runs, "CORES", 2)
    ran = live_runs.Ran(tmp_path, "run")
    (tmp_path / "run.stolen").write_text("[100.0, 7.0]\n[110.0, 7.0]\n[120.0, 12.0]\n")
    rows = [{"time": begin + 10.0, "time_step": 10.0} for begin in (100.0, 101.0, 103.0, 110.0)]
    monkeypatch.setattr(live_runs.Ran, "steps", lambda self, skip: rows[skip:])
    # 0, 0.5, 1.5 and 5 of 20 s
    assert ran.calm_steps(0) == rows[:2] and ran.calm_steps(1) == rows[1:2]


@pytest.mark.slow
def test_a_second_sigterm_does_not_break_off_the_end_that_the_first_one_began():
    code = (
        "import time; from scripts import live_runs; live_runs.end_in_order()\n"
        "try:\n    print('up', flush=True); time.sleep(600)\n"
        "finally:\n    print('ending', flush=True); input(); print('ended', flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, **pipes)
    for word in ("up", "ending"):
        assert process.stdout.readline().strip() == word
        process.terminate()
    said, _ = process.communicate("\n", timeout=600)
    assert said.strip() == "ended" and process.returncode == 143
