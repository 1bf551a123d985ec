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
from rose.sim.study.gains import Interval

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import promise_agent
import promise_count
import promise_page
import promise_run

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


STEP_S = {"dedicated": 10.0, "alone": 24.0, "borrowed": 14.0}
HARM = ["killed borrowed-1", "preempted borrowed-3", "killed environment host 1", "requeued"]


def ran(side, seed):
    borrows = side == "borrowed"
    return {
        "side": side,
        "seed": seed,
        "engines": 4 if side == "dedicated" else 1,
        "held_s": 360.0,
        "attempts": 1 + borrows,
        "rewards": [0.1 * seed, 0.2, 0.3, 0.4][: 3 if side == "alone" else 4],
        "step_s": [30.0, STEP_S[side], STEP_S[side]],
        "borrowed_share": [0.0, 0.5 * borrows],
        "requests": 50,
        "unanswered": 0,
        "ttft_s": [0.1] * 50,
        "tpot_s": [0.05] * 50,
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
    assert [line.holds for line in lines(three_sides())].count(True) == 7
    assert failing(three_sides()) == []
    told = {"step_s": 10.0, "held_s": 100.0, "ttft_p99_s": 0.5, "tpot_p99_s": 0.1}
    forecast = dict.fromkeys(promise_page.SIDES, told | {"borrowed_share": 0.5})
    assert "0.50 s; 0.50 s; 0.50 s" in promise_page.table(lines(three_sides(), forecast))


def gained_less(run):
    run["step_s"] = [30.0, 17.5, 17.5]  # of 24 and 10: 46%


def learned_less(run):
    run["rewards"] = [0.1 * run["seed"] - 0.05, 0.1, 0.2, 0.3]


def held_longer(run):
    run["held_s"] = 730.0


def unanswered(run):
    run["ttft_s"], run["tpot_s"], run["unanswered"] = [0.1] * 48, [0.05] * 48, 2


def lost_one(run):
    run["counts"]["lost"] = 1


def unharmed_by_preemption(run):
    run["harm"].pop(1)


def requeued_twice(run):
    run["attempts"] = 3


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (gained_less, ["borrowed engines bring back 50% of what one alone loses"]),
        (learned_less, ["reward"]),
        (held_longer, ["dedicated engines' device-hours"]),
        (unanswered, ["online TTFT P99 (target 2 s)", "online TPOT P99 (target 0.5 s)"]),
        (lost_one, ["trajectories lost"]),
        (unharmed_by_preemption, ["harm in each seed: engines killed"]),
        (requeued_twice, ["harm in each seed: engines killed"]),
    ],
)
def test_the_table_says_what_does_not_hold(change, fails):
    runs = three_sides()
    for run in runs:
        if run["side"] == "borrowed":
            change(run)
    assert failing(runs) == fails
    assert "does not hold" in promise_page.table(lines(runs))


def test_one_seed_without_harm_is_told_though_the_others_had_it():
    runs = three_sides()
    runs[-1]["harm"] = []
    assert failing(runs) == ["harm in each seed: engines killed"]


def test_what_difference_of_rewards_would_be_seen_is_told():
    runs = three_sides()
    for run in runs:
        if run["side"] == "borrowed":
            run["rewards"] = [r + 0.1 * (run["seed"] - 2) for r in run["rewards"]]
    [line] = [one for one in lines(runs) if "would be seen" in one.what]
    assert line.holds and "where 0.248 would be seen" in line.what  # 4.303 x 0.1 / sqrt 3


def test_the_figure_is_small_and_well_formed():
    text = promise_page.figure(json.loads(json.dumps(three_sides())), "1 < 2")
    assert len(text) < 60_000 and ET.fromstring(text).tag.endswith("svg")
    assert text.count("polyline") == 3


class Victims:
    """A training and its serving devices, of which `there` are to be harmed."""

    def __init__(self, there):
        self.there, self.id, self.struck, self.rows = there, "1", [], []

    def amid(self):
        return True

    def steps(self):
        return self.rows

    def ranks(self, _role):
        return []

    def kill(self):
        return "killed" if self.there else ""

    def preempt(self, _seconds):
        return "preempted"


def test_the_agents_tasks_lie_as_the_ladder_says_and_its_calls_are_those_that_a_run_allows(
    tmp_path,
):
    assert (promise_agent.TASKS, promise_agent.CALLS) == (promise_run.TASKS, promise_run.CALLS)
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


def test_a_victim_that_never_comes_is_skipped(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(promise_run.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(promise_run, "command", lambda *words: said.append(words[1]))
    plan = promise_run.Plan(Path(), Path(), Path(), 4, 16, 0.15, 0.1, None, 30.0)
    training, gone, there = Victims(True), Victims(False), Victims(True)
    storm = promise_run.Storm(plan, training, [gone, there], there, said.append)
    for second in range(200):
        now[0] = float(second)
        training.rows = [{}] * (second // 50)
        storm.look()
    assert said == [
        "skipped n3: not there",
        "preempted",
        "requeue",
        "requeued the training job after step 2",
        "skipped host: not there",
        "killed",
    ]


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
