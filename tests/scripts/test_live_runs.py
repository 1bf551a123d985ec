"""What validate_sim.py reads out of live runs: tails, the ways to an engine and back, and which
steps count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rose.scheduler import events as ev

REPOSITORY = Path(__file__).resolve().parents[2]

from scripts import live_runs
from scripts.lending import bench_live
from scripts.simulator import validate_sim


def test_a_tail_is_of_the_groups_admitted_in_a_step_whenever_they_end():
    tail = live_runs.Durations(from_step=1)
    tail.write(ev.StepBegun(at=0.0, step=0, groups=1), [ev.AdmitGroup(0, "g0")])
    tail.write(
        ev.StepBegun(at=10.0, step=1, groups=1), [ev.AdmitGroup(1, "g1"), ev.AdmitGroup(2, "g2")]
    )
    for group, trajectory, at in (("g0", "g0.0", 20.0), ("g1", "g1.0", 13.0), ("g2", "g2.0", 43.0)):
        tail.write(
            ev.TurnRequested(
                at=at - 1,
                turn=f"{trajectory}.t0",
                trajectory=trajectory,
                group=group,
                context_tokens=1,
                max_new_tokens=1,
            ),
            [],
        )
        tail.write(ev.TrajectoryEnded(at=at, trajectory=trajectory, tokens=5), [])
    assert tail.p95 == {1: pytest.approx(3.0 + 0.95 * 30)}


def test_a_step_counts_when_the_hypervisor_left_the_machine_to_us(tmp_path, monkeypatch):
    monkeypatch.setattr(live_runs, "CORES", 2)
    ran = live_runs.Ran(tmp_path, "run")
    (tmp_path / "run.stolen").write_text("[100.0, 7.0]\n[110.0, 7.0]\n[120.0, 12.0]\n")
    rows = [{"time": begin + 10.0, "time_step": 10.0} for begin in (100.0, 101.0, 103.0, 110.0)]
    monkeypatch.setattr(live_runs.Ran, "steps", lambda self, skip: rows[skip:])
    # 0, 0.5, 1.5 and 5 of 20 s
    assert ran.calm_steps(0) == rows[:2] and ran.calm_steps(1) == rows[1:2]


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


def step(start, end, decodes=1, prefill=()):
    return {"start": start, "wall": end, "decodes": decodes, "prefill": list(prefill)}


class Turns:
    """A run of two seats whose rollout rank saw these turns: name -> (span's end, tokens)."""

    def __init__(self, folder, turns):
        self.run = folder
        self.turns = turns

    def events(self, _run):
        spans = [
            {
                "kind": "span",
                "name": "turn",
                "end": end,
                "args": {"turn": turn, "attempt": 1, "tokens": tokens},
            }
            for turn, (end, tokens) in self.turns.items()
        ]
        return [type("Rank", (), {"role": "rollout", "events": spans})]


def test_ways_lie_between_decisions_and_the_engines_own_steps(tmp_path, monkeypatch):
    turns = {
        "a": (1.32, 3),
        "b": (2.05, 1),
        "full": (3.05, 1),
        "idle": (5.15, 1),
        "outside": (9.0, 1),
    }
    live = Turns(tmp_path, turns)
    config = type("C", (), {"rollout": type("R", (), {"max_sequences": 2})})
    monkeypatch.setattr(validate_sim, "read_events", live.events)
    monkeypatch.setattr(validate_sim.cfg, "load", lambda path: config)
    steps = [
        step(0.9, 1.0),
        step(1.0, 1.1),
        step(1.1, 1.2),
        step(1.2, 1.3),
        step(1.9, 2.0, 0, [[5, 0]]),
        step(2.0, 2.9, 2),
        step(2.9, 3.0),
        step(5.0, 5.1),
        step(8.9, 8.95),
    ]
    assigned = {"a": 0.94, "b": 1.85, "full": 2.5, "idle": 4.98, "outside": 8.0}
    known = {"a": 1.34, "b": 2.06, "full": 3.06, "idle": 5.2, "outside": 9.0}
    entries = [(ev.Tick(at=at), [ev.AssignTurn(turn, "w", 1)]) for turn, at in assigned.items()]
    entries += [(ev.TurnEnded(at=at, turn=turn), []) for turn, at in known.items()]
    there, back = validate_sim.ways(live, entries, steps, [validate_sim.Window(0.0, 7.0)])
    assert back == pytest.approx([0.04, 0.06, 0.06, 0.1])
    # a: came between 0.94 and the step at 1.0; b and idle: the engine had stood still; full: both
    # seats were taken
    assert there == pytest.approx([0.03, 0.05, 0.02])


def test_the_log_of_a_window_has_what_lay_between_its_steps_of_decodes(tmp_path):
    def line(began, ended, decodes):
        return {
            "began": began,
            "ended": ended,
            "start": began,
            "wall": ended,
            "decodes": decodes,
            "prefill": [],
        }

    steps = [
        line(0.0, 0.1, 1),
        line(0.11, 0.2, 1),
        line(0.23, 0.3, 1),
        line(5.0, 5.1, 0),
        line(9.0, 9.1, 1),
    ]
    validate_sim.between_included(steps, [validate_sim.Window(0.1, 6.0)], tmp_path / "out")
    rows = [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()]
    # the last: the median of 0.01 and 0.03
    assert [row["began"] for row in rows] == pytest.approx([0.1, 0.2, 4.98])


def test_the_rows_of_other_seeds_stay_in_the_csv_of_bench_live(tmp_path):
    row = bench_live.Measured("rose", 0, 25.5, 0.3, 33, 0.4, 0.2)
    bench_live.save([row, row._replace(system="fixed")], tmp_path / "live.csv")
    bench_live.save([row._replace(seed=1), row._replace(step_s=24.0)], tmp_path / "live.csv")
    lines = (tmp_path / "live.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in lines[1:]] == [
        ["fixed", "0", "25.5"],
        ["rose", "0", "24"],
        ["rose", "1", "25.5"],
    ]
