"""What prove_promise.py counts in a run's folder, and what it makes of it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import datetime
from pathlib import Path

import pytest

from rose.agent.envs import _ladder
from rose.coordinator import replay
from rose.coordinator.journal import Journal
from rose.protocol import Phase, Trajectory
from rose.scheduler import events as ev
from scripts import slurm_jobs
from scripts.lending import promise_count, promise_page, promise_run, prove_promise

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
        begun = ev.StepBegun(at=0.0, step=1, groups=1)
        for index in admitted:
            journal.write(begun, [ev.AdmitGroup(index, f"g{index}")])
        journal.close()
    return promise_count.count(folder, len(steps), MEMBERS)


def test_nothing_is_lost_where_a_requeued_run_trains_each_group_once(tmp_path):
    found = made(tmp_path, ["g0.0", "g0.1"], ["g1.0", "g1.1"], attempts=[[0, 1], [1, 2]])
    assert found == promise_count.Counts(trained=4, doubled=0, lost=0, replaced=0, short=0)


def test_a_group_that_is_skipped_one_trained_twice_and_a_replaced_member_are_counted(tmp_path):
    steps = ["g0.0", "g0.1r1"], ["g2.0", "g2.1", "g0.0"], ["g3.1", "g3.1r2"]
    found = made(tmp_path, *steps, attempts=[[0, 1, 2], [3, 4]])
    # g1 whole and g3.0; g0.0, and g3.1 under two names
    assert found.lost == 2 + 1 and found.doubled == 2
    assert found.replaced == 2 and found.short == 1 and found.trained == 7


def test_a_jobs_engines_are_held_in_all_of_its_attempts():
    rows = [
        "7+0|2026-11-25T10:00:00|2026-11-25T10:05:00",
        "7+1|2026-11-25T10:06:00|Unknown",
        "7+1|2026-11-25T10:00:00|2026-11-25T10:05:00",
        "7+1|Unknown|Unknown",
    ]
    start, now = (datetime(2026, 11, 25, 10, *at).timestamp() for at in ((0, 0), (7, 30)))
    found = slurm_jobs.held(rows, 1, now)
    assert found == [(start, start + 300), (start + 360, now)]
    run = {"engines": 4, "held": [[a - start, b - start] for a, b in found]}
    assert promise_count.device_hours(run) == pytest.approx(4 * 390 / 3600)
    assert promise_count.device_hours(run, at=330.0) == pytest.approx(4 * 300 / 3600)
    assert promise_count.device_hours(run, at=390.0) == pytest.approx(4 * 330 / 3600)


def test_a_curve_has_an_interval_over_the_groups_of_all_seeds():
    runs = [{"groups": [[0.1, 0.3], [0.5, 0.5]]}, {"groups": [[0.3, 0.5], [0.5, 0.7]]}]
    (first, one), (second, other) = promise_count.curve(runs, 1)
    assert (first, second) == (1.0, 2.0) and one.mean == pytest.approx(0.3)
    # 3.182 is the t of three degrees of freedom, 0.1633 the deviation of 0.1, 0.3, 0.3 and 0.5.
    assert one.high - one.mean == pytest.approx(3.182 * 0.1633 / 2, rel=1e-3)
    assert other.mean == pytest.approx(0.55)


def test_a_difference_is_paired_by_seed_and_with_one_seed_by_step():
    found = promise_count.difference([[0.2, 0.4], [0.5, 0.5]], [[0.1, 0.3], [0.4, 0.4]])
    assert found == pytest.approx((0.1, 0.1, 0.1))
    found = promise_count.difference([[0.2, 0.4]], [[0.1, 0.5]])
    assert found.mean == pytest.approx(0.0) and found.low < 0 < found.high


STEP_S = {"dedicated": 10.0, "alone": 24.0, "borrowed": 14.0}
HARM = [
    [30.0, "killed borrowed-1"],
    [60.0, "preempted borrowed-3"],
    [90.0, "killed environment host 1"],
    [120.0, "requeued the training job after step 2"],
]


def ran(side, seed):
    borrows, steps = side == "borrowed", 3 if side == "alone" else 4
    return {
        "side": side,
        "seed": seed,
        "engines": 4 if side == "dedicated" else 1,
        "held": [[2.0, 362.0]],
        "attempts": 1 + borrows,
        "at_s": [60.0, 100.0, 200.0, 300.0][:steps],
        "groups": [[0.1 + 0.01 * seed], [0.2], [0.3], [0.4]][:steps],
        "step_s": [30.0, STEP_S[side], STEP_S[side]],
        "borrowed_share": [0.0, 0.5 * borrows],
        "served_s": 300.0,
        "requests": [[6.0 * number, 0.1, 0.05, True] for number in range(50)],
        "repeated": {"trajectories_restarted": 2 * borrows, "resumed_turns": 5 * borrows},
        "harm": HARM[:] if borrows else [],
        "load": 0.5,
        "stolen": 0.01,
        "counts": {"trained": 8, "doubled": 0, "lost": 0, "replaced": 0, "short": 0},
    }


def three_sides():
    return [ran(side, seed) for seed in (1, 2, 3) for side in promise_page.SIDES]


def lines(runs, forecast=()):
    return promise_page.lines(runs, dict(forecast))


def failing(runs):
    return [line.what.partition(",")[0] for line in lines(runs) if line.holds is False]


def test_all_claims_hold_of_runs_that_are_as_promised():
    assert [line.holds for line in lines(three_sides())].count(True) == 10
    assert failing(three_sides()) == []
    told = {"step_s": 10.0, "held_s": 100.0, "borrowed_share": 0.5, "TPOT P99": 1.07}
    text = promise_page.table(lines(three_sides(), dict.fromkeys(promise_page.SIDES, told)))
    assert "| 10.0 s; 10.0 s; 10.0 s |" in text and "| 1.07 | holds |" in text


HARMED = ["harm in each seed: engines killed"]
# Name -> (a change to each run that borrows, the claims that fail then).
CHANGES = {
    "gained less": (
        # Alone a step takes 24 s, with dedicated engines 10 s: 17.5 s gains (24 - 17.5) / 14 = 46%.
        lambda run: {"step_s": [30.0, 17.5, 17.5]},
        ["50% of what one alone loses is brought back"],
    ),
    "learned less": (lambda run: {"groups": [[0.1], [0.2], [0.3], [0.29]]}, ["difference then"]),
    "learned unsteadily": (
        lambda run: {"groups": [[0.1], [0.2], [0.3], [0.4 + 0.03 * (run["seed"] - 2)]]},
        ["reward"],
    ),
    "held longer": (lambda run: {"held": [[2.0, 732.0]]}, ["dedicated engines' device-hours"]),
    "left two unanswered": (
        lambda run: {"requests": run["requests"][:48] + [[290.0, None, None, False]] * 2},
        ["online TTFT P99", "online TPOT P99"],
    ),
    "served later": (
        lambda run: {"requests": [[*one[:2], 2 * one[2], True] for one in run["requests"]]},
        ["online TPOT P50", "online TPOT P99"],
    ),
    "lost one": (lambda run: {"counts": run["counts"] | {"lost": 1}}, ["trajectories lost"]),
    "unharmed by preemption": (
        lambda run: {"harm": [one for one in HARM if not one[1].startswith("preempted")]},
        HARMED,
    ),
    "requeued twice": (lambda run: {"attempts": 3}, HARMED),
}


@pytest.mark.parametrize(("changed", "fails"), CHANGES.values(), ids=CHANGES)
def test_the_table_says_what_does_not_hold(changed, fails):
    runs = three_sides()
    for run in runs:
        if run["side"] == "borrowed":
            run |= changed(run)
    assert failing(runs) == fails
    assert "does not hold" in promise_page.table(lines(runs))


def test_only_requests_that_came_while_both_sides_ran_are_compared():
    alone, beside = ran("alone", 1), ran("borrowed", 1)
    beside["served_s"] = 150.0
    alone["requests"] = [[at, 9.0 if at >= 150 else 0.1, 0.05, 1] for at, *_ in alone["requests"]]
    beside["requests"] = [[at, 0.12, 0.05, 1] for at, *_ in beside["requests"] if at < 150]
    ttft = promise_count.ratios([(alone, beside)])[1]
    assert (ttft.name, ttft.alone, ttft.beside) == ("TTFT P99", 0.1, 0.12)
    assert ttft.ratio == ttft.low == ttft.high == pytest.approx(1.2)


def test_a_seeds_file_is_read_again_and_only_whole_seeds_are_drawn(tmp_path):
    settings = {"steps": 4, "batch": 8}
    results = prove_promise.Results(tmp_path, settings)
    for side in prove_promise.SIDES:
        results.put(ran(side, 1))
    results.put(ran("alone", 2))
    again = prove_promise.Results(tmp_path)
    assert again.settings == settings
    assert again.whole() == json.loads(json.dumps(again.whole())) == results.whole()
    assert {run["seed"] for run in again.whole()} == {1} and again.get("borrowed", 2) is None


@pytest.mark.parametrize(
    ("alone", "words"), [(None, "needs alone-1"), ({"machine": "9 cores, of wood"}, "of wood")]
)
def test_lending_needs_serving_alone_on_the_same_machine(alone, words):
    with pytest.raises(SystemExit, match=words):
        prove_promise._check_alone(alone, 1)


def test_runs_of_other_settings_and_damaged_files_are_refused(tmp_path):
    prove_promise.Results(tmp_path, {"steps": 4}).put(ran("alone", 1))
    with pytest.raises(SystemExit, match=r"seed-1.json is of other settings \(steps 4, not 5\)"):
        prove_promise.Results(tmp_path, {"steps": 5})
    (tmp_path / "seed-2.json").write_text("{")
    with pytest.raises(SystemExit, match="seed-2.json is no file of a seed"):
        prove_promise.Results(tmp_path)


def test_the_figure_is_redrawn_from_the_seeds_files_with_a_mark_for_each_harm(
    tmp_path, monkeypatch, capsys
):
    results = prove_promise.Results(tmp_path, {"steps": 4, "batch": 8})
    for run in three_sides():
        results.put(run)
    figure = tmp_path / "figure.svg"
    words = ["--redraw", "--results", str(tmp_path), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", ["prove_promise.py", *words])
    prove_promise.main()
    assert "difference then" in capsys.readouterr().out
    text = figure.read_text()
    root = ET.fromstring(text)
    assert "3 seeds, 4 steps of 8" in text and len(text) < 60_000 and root.tag.endswith("svg")
    assert text.count("<polyline") == 2 * 3
    marks = [one for one in root.iter() if one.get("class") == "mark"]
    assert len(marks) == len(promise_page.HARM) + 2 * 3 * len(HARM)


def test_the_agents_tasks_lie_as_the_ladder_says_and_its_calls_are_those_that_a_run_allows(
    tmp_path, monkeypatch
):
    # A run loads the agent as a file, whose folder is on the path.
    monkeypatch.syspath_prepend(Path(promise_run.__file__).parent)
    import promise_agent

    assert promise_agent.CALLS == promise_run.CALLS
    for seed in range(8):
        rung = _ladder.draw(seed)
        folder = tmp_path / f"task{seed}"
        words = promise_agent._laid_out(str(folder), rung.files)
        subprocess.run(["bash", "-c", f"{words}\n{rung.command}"], check=True, capture_output=True)
        for name, text in rung.files.items():
            if name != rung.target:
                assert (folder / name).read_text() == text
        if rung.target:
            assert (folder / rung.target).read_text() == rung.expected


def test_the_windows_of_a_trace_with_the_largest_bursts_come_first(tmp_path):
    file = tmp_path / "trace.csv"
    rows = [f"{at},10,5" for at in range(0, 4000, 10)]
    rows += [f"{2450 + at / 10},10,5" for at in range(40)]
    rows.sort(key=lambda row: float(row.partition(",")[0]))
    file.write_text("\n".join(["Timestamp,Request tokens,Response tokens", *rows]))
    rate = len(rows) / 3990 / 2  # as fast as it is
    plan = promise_run.Plan(Path(), Path(), Path(), 4, 16, 0.15, rate, file, 30.0)
    first, last = plan.requests(1), plan.requests(2)
    assert len(first) == 2 and sum(map(len, first)) == 120 + 40
    assert sum(map(len, last)) == 120
