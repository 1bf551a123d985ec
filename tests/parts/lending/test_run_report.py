"""What serving kept stands in the training run's report, device by device, safe and with a link."""

import json

from rose.parts.lending import run_report
from rose.parts.lending.board import Online, Rollout
from rose.parts.lending.operator import report
from rose.parts.lending.operator.history import History
from rose.parts.lending.operator.metrics import Boards
from rose.parts.report.report import build_report
from tests.observe.run_folder import write_run
from tests.parts.lending.conftest import SLO


def told(run: str, device: str) -> str:
    """An operator's report of 150 requests, 100 of them beside rollouts."""
    online = Online(finished=150, met=149, finished_lending=100, met_lending=99)
    history = History()
    history.add(Boards(online, Rollout(made_tokens=12345), None))
    return json.dumps(report.summary(device, {"ttft_p99_s": 0.31}, SLO, history, "") | {"run": run})


def test_each_device_has_a_row_with_both_sides(tmp_path):
    run = write_run(tmp_path / "run")
    assert "What serving kept" not in build_report(run).read_text()
    damaged = '{"device": "half wr', "[]", '{"run": "run"}'
    of_run = [("run", each) for each in (told("run", "run on <node>"), *damaged)]
    of_others = [(name, told(name, "of another run")) for name in ("other", "run-2")]
    for number, (name, content) in enumerate([*of_run, *of_others]):
        folder = tmp_path / "serving" / f"{name}-node-{number}"
        folder.mkdir(parents=True)
        (folder / run_report.LENT).write_text(content)
    html = build_report(run).read_text()
    assert "What serving kept" in html and "99.0%" in html and "12,345" in html
    assert "310 ms <span class=muted>of 1,000 ms</span>" in html
    assert "run on &lt;node&gt;" in html and "run on <node>" not in html
    assert "of another run" not in html
    assert 'href="../serving/run-node-0/report.html"' in html
