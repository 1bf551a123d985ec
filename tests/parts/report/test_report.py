"""The report's numbers, its safety and bounded size, and that a real browser draws it."""

import re
import shutil

import numpy as np
import pytest

from rose.observe.metrics import MetricsWriter
from rose.observe.status import write_failure
from rose.parts.report import curves, timeline
from rose.parts.report.report import build_report
from rose.parts.report.trace import Span
from tests.observe.run_folder import write_run
from tests.processes import ran

CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
CHROMIUM += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
CHROMIUM += ("--virtual-time-budget=4000",)


def test_long_curves_become_means_of_neighbours_and_unaccounted_time_is_other():
    took = {"time_step": 10.0, "time_rollout": 5.0, "time_train": 3.0}
    (bar,) = curves.phase_bars([{"step": 1} | took])
    phases = {"rollout": 5.0, "train": 3.0, "sync": 0.0, "idle": 0.0, "other": 2.0}
    assert bar == phases | {"first": 1, "last": 1}
    steps = [{"step": i, "success": float(i)} for i in range(1000)]
    drawn = curves.curves(steps)
    assert len(drawn["x"]) == len(drawn["success"]) == 334 <= curves.MAX_POINTS
    assert drawn["x"][0] == drawn["success"][0] == 1.0 and "loss" not in drawn


def test_histograms_with_different_edges_keep_their_mass():
    same = curves.length_histogram([{"step": 1, "response_hist": [[8, 1], [16, 3]]}])
    assert same["edges"] == [0, 8, 16] and same["sides"][0]["shares"] == [0.25, 0.75]
    steps = ([[10, 5]], [[12, 1], [24, 1]])
    mixed = [{"step": at, "response_hist": each} for at, each in enumerate(steps, 1)]
    mixed = curves.length_histogram(mixed)
    early, late = (side["shares"] for side in mixed["sides"])
    assert sum(early) == pytest.approx(1, abs=1e-3)
    assert sum(early[:10]) == pytest.approx(1, abs=1e-3)
    assert sum(late[:12]) == pytest.approx(0.5, abs=1e-3)


def test_values_have_a_bar_each_and_many_a_bar_for_a_part_of_their_range():
    few = [{"step": 1, "r": [[0.0, 3], [1.0, 1]]}, {"step": 2, "r": [[0.5, 2]]}]
    found = curves.value_histogram(few, "r")
    assert found["labels"] == ["0", "0.5", "1"]
    assert [side["shares"] for side in found["sides"]] == [[0.75, 0, 0.25], [0, 1, 0]]
    many = curves.value_histogram([{"step": 1, "r": [[v / 2 - 10, 1] for v in range(49)]}], "r")
    assert len(many["edges"]) == curves.MAX_BINS + 1
    assert (many["edges"][0], many["edges"][-1]) == (-10, 14)
    [side] = many["sides"]
    assert sum(side["shares"]) == pytest.approx(1, abs=1e-3) and min(side["shares"]) > 0
    turns = curves.value_histogram([{"step": 1, "r": [[v, 1] for v in range(1, 31)]}], "r")
    assert turns["edges"] == list(range(1, 32, 2)), "whole numbers, each part of two"
    assert set(turns["sides"][0]["shares"]) == {round(1 / 15, 5)}
    assert curves.value_histogram([{"step": 1}], "r") is None


def test_each_task_has_its_successes_early_late_and_held_out(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    assert '<h2 id="tasks">' not in build_report(run).read_text()
    metrics = MetricsWriter(run, tensorboard=False)
    for step, solved in ((1, 1), (2, 0), (3, 4)):
        metrics.write(step, {"task_successes": {"<b>: row 1": [solved, 4], "b: row 2": [4, 4]}})
    for step in (0, 3):
        row = {"kind": "eval", "eval_n": 8, "eval_successes": step, "eval_success": step / 8}
        metrics.write(step, row | {"eval_task_successes": {"b: row 9": [step, 8]}})
    metrics.close()
    html = build_report(run).read_text()
    first, second, third = re.findall(r"<th scope=row>([^<]*: row .)</th>(.*?)</tr>", html)
    assert first == ("b: row 9", "<td>–</td><td>–</td><td>3 of 8</td>")
    assert second == ("&lt;b&gt;: row 1", "<td>1 of 8</td><td>4 of 4</td><td>–</td>")
    assert third == ("b: row 2", "<td>8 of 8</td><td>4 of 4</td><td>–</td>")


def test_a_long_run_keeps_whole_steps_within_the_budget_or_the_beginning_of_one(
    tmp_path, monkeypatch
):
    spans = [Span(0, 10, "turn", "a", {}), Span(5, 10, "turn", "b", {})]
    spans += [Span(0, 20, "load_version", None, {})]
    assert timeline.occupancy(spans, 0, 20, 4) == [1.0, 2.0, 0.0, 0.0]
    monkeypatch.setattr(timeline, "MAX_MARKS", 500)
    data = timeline.build_timeline(write_run(tmp_path / "run", steps=30, turns=40))
    assert 3 <= len(data["kept"]) < 30 and len(data["steps"]) == 30
    starts = np.array(data["marks"]["start"])
    turns = np.array(data["marks"]["kind"]) == data["marks"]["kinds"].index("turn")
    for low, high in data["kept"]:
        assert np.sum(turns & (starts >= low) & (starts <= high)) == 80
    assert turns.sum() == 80 * len(data["kept"])
    monkeypatch.setattr(timeline, "MAX_MARKS", 50)
    data = timeline.build_timeline(write_run(tmp_path / "one", steps=1, turns=200))
    rows = {data["rows"][row]["name"] for row in data["marks"]["row"]}
    assert 40 <= len(data["marks"]["row"]) <= 60 and {"rollout-0", "rollout-1"} <= rows


def test_the_report_of_a_mixture_has_a_row_and_a_curve_for_each_environment(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    assert "By environment" not in build_report(run).read_text(), "one environment is the whole run"
    metrics = MetricsWriter(run, tensorboard=False)
    for step, wins in ((1, 0.25), (2, 0.75)):
        row = {"success": wins, "trajectories/lake": 8, "success/lake": wins}
        row |= {"reward_mean/lake": 0.5, "turns_mean/lake": 4.0, "trajectories/sums": 0}
        metrics.write(step, row | {"response_tokens_mean/lake": 40.0})
    for step, wins in ((0, 10), (2, 30)):
        row = {"kind": "eval", "eval_n": 60, "eval_successes": wins, "eval_n/lake": 40}
        metrics.write(step, row | {"eval_successes/lake": wins, "eval_reward/lake": 0.1})
    metrics.close()
    html = build_report(run).read_text()
    assert re.search(
        r"<th scope=row>lake</th><td>16</td><td>75\.0%</td><td>0\.500</td><td>4\.0</td><td>40</td>"
        r"<td>25\.0% \(14% to 40%, 10 of 40\)</td><td>75\.0% \(60% to 86%, 30 of 40\)</td>",
        html,
    )
    assert "<th scope=row>sums</th><td>0</td>" + 6 * "<td>–</td>" in html
    assert '"members":{"x":[1.0,2.0],"names":["lake"],"y":[[0.25,0.75]]}' in html


def test_the_report_tells_what_drafts_and_hybrid_engines_did(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    before = build_report(run).read_text()
    assert "Drafts" not in before and "rollout.hybrid" not in before
    metrics = MetricsWriter(run, tensorboard=False)
    for step, accepted, each, used in ((1, 300, 4.0, 0.5), (2, 100, 2.0, 0.0)):
        row = {"drafted_tokens": 1000, "accepted_tokens": accepted, "tokens_per_engine_step": each}
        row |= {"hybrid_idle_used": used, "device_seconds_hybrid": 60 * used, "hybrid_delay": 0.01}
        metrics.write(step, row | {"hybrid_token_share": 0.2, "starts_broken_off": step - 1})
    metrics.close()
    html = build_report(run).read_text()
    for words in (
        "2,000 tokens, 20% of them accepted; 3.00 tokens in a step of an engine",
        "for 25% of the time in which these had nothing to train (30.0 s of devices)",
        "generated 20% of the tokens",
        "cancelled for it: 1.</p>",
    ):
        assert words in html


def test_text_of_the_run_cannot_become_markup(tmp_path):
    html = build_report(write_run(tmp_path / "a<b>&run", steps=4)).read_text()
    assert "<img" not in html and "&lt;img src=x" in html and "<b>lost" not in html
    assert "<title>a&lt;b&gt;&amp;run" in html and html.count("</script>") == 2


def test_a_large_run_stays_below_five_megabytes(tmp_path):
    path = build_report(write_run(tmp_path / "run", steps=300, engines=8, turns=30))
    assert path.stat().st_size < 5e6


def drawn_by_chromium(path, profile) -> str:
    """The page's DOM after its scripts ran, from file:// in headless Chromium."""
    browser = shutil.which("chromium")
    assert browser, "the report needs a browser: apt-get install chromium fonts-dejavu-core"
    command = [browser, *CHROMIUM, f"--user-data-dir={profile}", "--window-size=1280,2000"]
    command += ["--dump-dom", path.as_uri()]
    return ran(command, timeout=300, check=True).stdout


@pytest.mark.slow
def test_chromium_draws_every_figure_offline(tmp_path):
    path = build_report(write_run(tmp_path / "run", steps=12))
    elsewhere = r"""(src|href)\s*=\s*["']?(https?:)?//|url\(|@import|fetch\(|XMLHttp"""
    assert not re.search(elsewhere, path.read_text())
    dom = drawn_by_chromium(path, tmp_path / "profile")
    assert "data-error" not in dom, re.search(r'data-error="[^"]*"', dom)
    figures = dict(re.findall(r'<figure id="(fig-\w+)">(.*?)</figure>', dom, re.S))
    drawn = "success reward throughput tokens mismatch ratio clipped staleness entropy grad lr"
    for name in drawn.split():
        lines = re.findall(r'class="line[^"]*" d="([^"]*)"', figures[f"fig-{name}"])
        assert lines and all(line.count("L") >= 11 for line in lines), name
    assert figures["fig-success"].count('class="held-out"') == 2
    assert len(re.findall(r"<rect[^>]*style=\"fill", figures["fig-phases"])) == 12 * 5
    for name, bars in (("lengths", 10), ("rewards", 3), ("turnshares", 20)):
        assert len(re.findall(r"<rect[^>]*style=\"fill", figures[f"fig-{name}"])) == bars * 2
    drawn = int(re.search(r'data-drawn="(\d+)"', figures["fig-timeline"]).group(1))
    assert drawn >= 80 + 3 and figures["fig-timeline"].count("<option") >= 12
    assert "NaN" not in re.sub(r"<script.*?</script>", "", dom, flags=re.S)


@pytest.mark.slow
def test_chromium_opens_the_report_of_a_run_that_has_not_begun(tmp_path):
    (tmp_path / "run").mkdir()
    dom = drawn_by_chromium(build_report(tmp_path / "run"), tmp_path / "profile")
    assert "data-error" not in dom and dom.count("Nothing was recorded yet.") >= 8
    assert "No held-out evaluation has finished yet." in dom


def test_a_failed_run_says_so_first_and_why(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    html = build_report(run).read_text(encoding="utf-8")
    assert "This run failed" not in html
    (run / "status" / "attempt-001").mkdir(parents=True)
    (run / "status" / "attempt-002").mkdir()
    write_failure(run, 2, "rank 3 ended: <b>out of memory</b>\x1b[31m")
    html = build_report(run).read_text(encoding="utf-8")
    first = html.index("This run failed")
    assert first < html.index(">Result<")
    assert "&lt;b&gt;out of memory&lt;/b&gt;" in html and "\x1b" not in html
    for number in (999, 1000):
        (run / "status" / f"attempt-{number}").mkdir()
        write_failure(run, number, "the newest" if number == 1000 else "an older one")
    assert "the newest" in build_report(run).read_text(encoding="utf-8")
    (run / "status" / "attempt-1001").mkdir()
    assert "This run failed" not in build_report(run).read_text(encoding="utf-8"), "it goes on"
