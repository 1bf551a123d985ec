"""Which steps of a live run count, and how a script that started one ends."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

from scripts import live_runs


def test_steps_in_a_row_count_together_so_that_long_ones_are_not_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(live_runs, "CORES", 2)
    ran = live_runs.Ran(tmp_path, "run")
    (tmp_path / "run.stolen").write_text(
        "[100.0, 0.0]\n[110.0, 4.0]\n[120.0, 4.0]\n[160.0, 8.0]\n[200.0, 8.0]\n"
    )
    rows = [
        {"time": end, "time_step": took}
        for end, took in ((110.0, 10.0), (120.0, 10.0), (160.0, 40.0), (170.0, 10.0))
    ]
    monkeypatch.setattr(live_runs.Ran, "steps", lambda self, skip: rows[skip:])
    assert ran.calm_steps(0) == [rows[1], rows[3]]
    # 4 of 40, 4 of 100; 4 of 120 s
    assert ran.calm_row(0, 2) == rows[1:3] and ran.calm_row(0, 3) == rows[1:4]
    assert ran.calm_row(0, 4) == [] == ran.calm_row(2, 3)


@pytest.mark.slow
def test_a_second_sigterm_does_not_break_off_the_end_that_the_first_one_began():
    code = (
        "import sys, time; from scripts import live_runs; "
        "live_runs.end_in_order()\n"
        "try:\n    print('up', flush=True); time.sleep(600)\n"
        "finally:\n    print('ending', flush=True); input(); print('ended', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    for word in ("up", "ending"):
        assert process.stdout.readline().strip() == word
        process.terminate()
    said, _ = process.communicate("\n", timeout=600)
    assert said.strip() == "ended" and process.returncode == 143
