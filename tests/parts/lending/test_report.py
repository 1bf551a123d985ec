"""The lending report: its numbers go on over restarts, stay bounded, and a browser draws it."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from rose.parts.lending import settings
from rose.parts.lending.board import Control, Online, Rollout
from rose.parts.lending.operator import history, report
from rose.parts.lending.operator.history import History
from rose.parts.lending.operator.metrics import Boards
from tests.parts.report.test_report import drawn_by_chromium

SLO = "serving.online.slo={ttft_p50_s: 0.2, ttft_p99_s: 0.5, tpot_p50_s: 0.05, tpot_p99_s: 0.15}"


@pytest.fixture
def clock(monkeypatch):
    """clock[0]: seconds, what `history` takes for the time."""
    now = [100.0]
    monkeypatch.setattr(history.time, "monotonic", lambda: now[0])
    return now


def lived(clock, seconds):
    made = History()
    for t in range(seconds):
        clock[0] += 1.0
        counts = {"finished": 2 * t, "met": 2 * t, "finished_lending": t, "met_lending": t}
        online = Online(pid=1, kv_held=2**29, running=t % 3, **counts)
        counts = {"made_tokens": 50 * t, "open_s": 0.7 * t, "shut_s": 0.2 * t, "evicted": t // 30}
        made.add(Boards(online, Rollout(pid=2, kv_budget=2**29, **counts), Control(lend=1)))
    return made


def test_counters_go_on_over_the_restart_of_an_engine(clock):
    made = History()
    for pid, started, finished in ((1, 5, 10), (1, 5, 14), (2, 6, 3), (2, 6, 4), (2, 9, 1)):
        clock[0] += 1.0
        made.add(Boards(Online(pid=pid, pid_started=started, finished=finished), None, None))
        made.add(Boards(None, None, None))
    assert made.totals()["online.finished"] == 14 + 4 + 1
    assert made.rows["online.finished"] == [10, 14, 17, 18, 19]


def test_a_long_history_is_thinned_and_keeps_its_ends(clock, monkeypatch):
    monkeypatch.setattr(history, "MOST_ROWS", 100)
    made = lived(clock, 1000)
    t = made.rows["t"]
    assert len(t) <= 100 and {len(values) for values in made.rows.values()} == {len(t)}
    assert t[0] == 1 and t[-1] > 1000 - 2 * made.every_s
    gaps = [b - a for a, b in zip(t, t[1:], strict=False)]
    assert max(gaps) <= 2 * min(gaps)
    assert made.totals()["rollout.made_tokens"] == 50 * 999


def test_quantiles_are_interpolated_as_prometheus_does():
    registry, name = CollectorRegistry(), "vllm:time_to_first_token_seconds"
    h = Histogram(name, "x", ["model"], buckets=(0.1, 0.2, 0.4), registry=registry)
    for value in [0.05] * 50 + [0.15] * 40 + [0.3] * 10:
        h.labels("m").observe(value)
    found = report.quantiles(generate_latest(registry).decode())
    assert found == {"ttft_p50_s": pytest.approx(0.1), "ttft_p99_s": pytest.approx(0.38)}
    h.labels("m").observe(7.0)
    h.labels("m").observe(7.0)
    assert report.quantiles(generate_latest(registry).decode())["ttft_p99_s"] == 0.4
    assert report.quantiles("") == {}


def test_the_page_has_both_sides_and_escapes_what_it_is_told(clock):
    serving = settings.of_server(["serving.online.model=</script><b>x", SLO])
    measured = {"ttft_p50_s": 0.1, "ttft_p99_s": 0.6}
    events = [report.Event(0.0, "<i>died")]
    html = report.page("run", serving, lived(clock, 120), measured, "stopped by <me>", events)
    assert "</script><b>x" not in html and "<i>died" not in html and "stopped by &lt;me&gt;" in html
    assert "<b>missed</b>" in html and ">met<" in html and "500 ms" in html and "600 ms" in html
    assert "5,950" in html and "77.8%" in html  # tokens made, gate open
    assert "SLO attainment, lending</dt><dd>100.0%" in html
    assert "Nothing happened." in report.page("run", serving, History(), {}, "no profile", [])


@pytest.mark.slow
def test_a_browser_draws_the_page(clock, tmp_path):
    serving = settings.of_server(["serving.online.model=m", SLO])
    (tmp_path / "report.html").write_text(report.page("run", serving, lived(clock, 90), {}, "", []))
    dom = drawn_by_chromium(tmp_path / "report.html", tmp_path / "profile")
    assert "data-error" not in dom and dom.count("<svg") == 6
