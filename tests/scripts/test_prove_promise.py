"""What prove_promise.py counts in a run's folder, and what it makes of it."""

import json
import sys
import xml.etree.ElementTree as ET
from datetime import datetime
from pathlib import Path

import pytest

from rose.coordinator import replay
from rose.coordinator.journal import Journal
from rose.protocol import Phase, Trajectory
from rose.scheduler import events as ev
from rose.sim.study.gains import Interval

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import promise_count
import promise_page

MEMBERS = 2


def trajectory(name):
    group = name.rpartition(".")[0]
    nothing = {field: b"" for field in ("tokens", "mask", "logprobs", "versions")}
    told = {"reward": 1.0, "success": True, "turns": 1, "response_tokens": 0}
    return Trajectory(id=name, group=group, phase=Phase.TRAIN, **nothing, **told)


def made(folder, *steps, attempts):
    """A run's folder: names of the trajectories of each step, groups admitted in each attempt."""
    for number, names in enumerate(steps, 1):
        groups = {}
        for name in names:
            groups.setdefault(name.rpartition(".")[0], []).append(trajectory(name))
        replay.save(folder, number, list(groups.values()))
    for number, admitted in enumerate(attempts, 1):
        journal = Journal(folder / "journal" / f"attempt-{number:03d}.jsonl", {})
        for index in admitted:
            journal.write(
                ev.StepBegun(at=0.0, step=1, groups=1), [ev.AdmitGroup(index, f"g{index}")]
            )
        journal.close()
    return promise_count.count(folder, len(steps), MEMBERS)


def test_nothing_is_lost_where_a_requeued_run_trains_each_group_once(tmp_path):
    found = made(tmp_path, ["g0.0", "g0.1"], ["g1.0", "g1.1"], attempts=[[0, 1], [1, 2]])
    assert found == promise_count.Counts(trained=4, doubled=0, lost=0, replaced=0, short=0)


def test_a_group_that_is_skipped_one_trained_twice_and_a_replaced_member_are_counted(tmp_path):
    found = made(
        tmp_path,
        ["g0.0", "g0.1r1"],
        ["g2.0", "g2.1", "g0.0"],
        ["g3.1", "g3.1r2"],
        attempts=[[0, 1, 2], [3, 4]],
    )
    # g1 whole and g3.0; g0.0, and g3.1 under two names
    assert found.lost == 2 + 1 and found.doubled == 2
    assert found.replaced == 2 and found.short == 1 and found.trained == 7


def test_a_group_that_the_policy_dropped_is_not_lost():
    admitted = {"g0": 0, "g1": 1, "g2": 2}
    found = promise_count.tally([["g0.0"], ["g2.0"]], admitted, {"g1"}, 1)
    assert found.lost == 0
    assert promise_count.tally([["g0.0"], ["g2.0"]], admitted, set(), 1).lost == 1


def test_a_name_with_an_r_of_its_own_keeps_it():
    assert promise_count.first_name("g12r1.3r2") == "g12r1.3"
    assert promise_count.first_name("g12.3") == "g12.3"


def test_missing_rollouts_are_named(tmp_path):
    made(tmp_path, ["g0.0", "g0.1"], attempts=[[0]])
    with pytest.raises(ValueError, match="step-000002"):
        promise_count.count(tmp_path, 2, MEMBERS)


def test_a_jobs_engines_are_held_in_all_of_its_attempts():
    rows = [
        "7+0|2026-11-25T10:00:00|2026-11-25T10:05:00",
        "7+1|2026-11-25T10:00:00|2026-11-25T10:05:00",
        "7+1|2026-11-25T10:06:00|Unknown",
        "7+1|Unknown|Unknown",
    ]
    now = datetime(2026, 11, 25, 10, 7, 30)
    assert promise_count.elapsed_s(rows, 1, now) == 300 + 90


def test_a_curve_has_an_interval_over_seeds_and_with_one_seed_over_steps():
    of_two = promise_count.curve([[0.1, 0.3, 0.5], [0.3, 0.5, 0.7]], 2)
    assert [middle for middle, _ in of_two] == [1.5, 3.0]
    assert of_two[0][1].mean == pytest.approx(0.3) and of_two[0][1].low < 0.2
    [(_, one)] = promise_count.curve([[0.1, 0.3]], 2)
    assert one.mean == pytest.approx(0.2) and one.low < 0.1 < 0.3 < one.high


def test_a_difference_is_paired_by_seed_and_with_one_seed_by_step():
    found = promise_count.difference([[0.2, 0.4], [0.5, 0.5]], [[0.1, 0.3], [0.4, 0.4]])
    assert found == pytest.approx((0.1, 0.1, 0.1))
    found = promise_count.difference([[0.2, 0.4]], [[0.1, 0.5]])
    assert found.mean == pytest.approx(0.0) and found.low < 0 < found.high


def test_curves_are_apart_where_their_intervals_do_not_meet():
    def points(*bounds):
        return [(at, Interval((a + b) / 2, a, b)) for at, (a, b) in enumerate(bounds)]

    ours, theirs = points((0.1, 0.2), (0.4, 0.5)), points((0.15, 0.3), (0.6, 0.7))
    assert promise_count.apart(ours, theirs) == [1]
    nan = float("nan")
    assert promise_count.apart([(0, Interval(0.2, nan, nan))], points((0.1, 0.3))) == []


def ran(side, seed, **changes):
    counts = {"trained": 8, "doubled": 0, "lost": 0, "replaced": 0, "short": 0}
    return {
        "side": side,
        "seed": seed,
        "engines": 4 if side == "dedicated" else 1,
        "held_s": 360.0,
        "rewards": [0.1 * seed, 0.2, 0.3, 0.4],
        "step_s": [5.0, 6.0],
        "borrowed_share": [0.0, 0.5],
        "ttft_s": [0.1, 0.2],
        "tpot_s": [0.05],
        "harm": [] if side == "dedicated" else ["killed borrowed-1", "requeued the training job"],
        "counts": counts | changes,
    }


def verdicts(runs, forecast):
    return {line.what: line.holds for line in promise_page.lines(runs, forecast)}


def test_the_table_says_what_does_not_hold():
    runs = [ran(side, seed) for side in promise_page.SIDES for seed in (1, 2)]
    found = verdicts(runs, {})
    assert {None, True} == set(found.values())
    assert found["dedicated engines' device-hours"]
    runs[-1]["counts"]["lost"] = 1
    runs[-1]["ttft_s"] = [9.0]
    runs[-1]["held_s"] = runs[-2]["held_s"] = 1000.0
    found = verdicts(runs, {})
    assert [what for what, holds in found.items() if holds is False] == [
        "dedicated engines' device-hours",
        "online TTFT P99 (target 2 s)",
        "trajectories lost, counted twice",
    ]
    assert "does not hold" in promise_page.table(promise_page.lines(runs, {}))


def test_the_figure_is_small_and_well_formed():
    runs = [ran(side, seed) for side in promise_page.SIDES for seed in (1, 2)]
    text = promise_page.figure(json.loads(json.dumps(runs)), "1 < 2")
    assert len(text) < 60_000 and ET.fromstring(text).tag.endswith("svg")
    assert text.count("polyline") == 2
