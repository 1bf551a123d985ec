"""What serving kept stands in the training run's report, device by device, safe and with a link."""

import json

from rose.parts.lending import run_report
from rose.parts.report.report import build_report
from tests.observe.run_folder import write_run


def told(device):
    counts = {"made_tokens": 12345.0, "wasted_tokens": 0.0, "evicted": 7.0, "preempted": 0.0}
    attained = {"with": [99, 100], "without": [50, 50]}
    targets = {"measured": {"ttft_p99_s": 0.31}, "slo": {"ttft_p99_s": 0.5}}
    return {"device": device, "time": 0.0, "attained": attained, "stopped": ""} | targets | counts


def write(run, number, content):
    folder = run.parent / "serving" / f"{run.name}-node-{number}"
    folder.mkdir(parents=True)
    (folder / run_report.LENT).write_text(content)
    return folder


def test_each_device_has_a_row_with_both_sides(tmp_path):
    run = tmp_path / "run"
    write_run(run)
    write(run, 0, json.dumps(told("run on <node>")))
    write(run, 1, '{"device": "half wr')
    write(tmp_path / "other", 0, json.dumps(told("of another run")))
    html = build_report(run).read_text()
    assert "What serving kept" in html and "99.0%" in html and "12,345" in html
    assert "310 ms <span class=muted>of 500 ms</span>" in html
    assert "run on &lt;node&gt;" in html and "run on <node>" not in html
    assert "of another run" not in html
    assert 'href="../serving/run-node-0/report.html"' in html


def test_a_run_without_such_devices_says_nothing_of_them(tmp_path):
    write_run(tmp_path / "run")
    assert run_report.html(tmp_path / "run") == ""
    assert "What serving kept" not in build_report(tmp_path / "run").read_text()
