"""What serving kept stands in the training run's report, device by device, safe and with a link."""

import json

import pytest

from rose.parts.lending import run_report
from rose.parts.lending.board import Online, Rollout
from rose.parts.lending.operator import report
from rose.parts.lending.operator.history import History
from rose.parts.lending.operator.metrics import Boards
from rose.parts.report.report import build_report
from tests.observe.run_folder import write_run


@pytest.fixture
def told(slo):
    """told(device) -> what an operator tells of 150 requests, 100 of them beside rollouts."""
    online = Online(finished=150, met=149, finished_lending=100, met_lending=99)
    history = History()
    history.add(Boards(online, Rollout(made_tokens=12345), None))
    return lambda device: report.summary(device, {"ttft_p99_s": 0.31}, slo, history, "")


def of(run, summary):
    return json.dumps(summary | {"run": run})


def write(run, number, content):
    folder = run.parent / "serving" / f"{run.name}-node-{number}"
    folder.mkdir(parents=True)
    (folder / run_report.LENT).write_text(content)


def test_each_device_has_a_row_with_both_sides(tmp_path, told):
    run = write_run(tmp_path / "run")
    assert "What serving kept" not in build_report(run).read_text()
    write(run, 0, of("run", told("run on <node>")))
    for number, damaged in enumerate(('{"device": "half wr', "[]", '{"run": "run"}'), 1):
        write(run, number, damaged)
    for other in ("other", "run-2"):
        write(tmp_path / other, 0, of(other, told("of another run")))
    html = build_report(run).read_text()
    assert "What serving kept" in html and "99.0%" in html and "12,345" in html
    assert "310 ms <span class=muted>of 1,000 ms</span>" in html
    assert "run on &lt;node&gt;" in html and "run on <node>" not in html
    assert "of another run" not in html
    assert 'href="../serving/run-node-0/report.html"' in html
