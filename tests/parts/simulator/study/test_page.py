"""The pages in a real browser: every figure is drawn, offline."""

import re
import shutil

import pytest
from rich.console import Console

from rose.parts.simulator.config import from_dict
from rose.parts.simulator.study import front
from tests.parts.simulator.study.test_front import SMALL
from tests.processes import ran


@pytest.mark.slow
def test_chromium_draws_every_figure_of_a_comparison_and_of_a_sweep(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = [f"sim.n_serving={n} name=x-sim.n_serving={n}" for n in (1, 2)]
    points = [from_dict(tree(f"{SMALL} mode=simulate", each)) for each in chosen]
    console = Console(file=open(tmp_path / "said", "w"))
    assert front.main(points, console, "python launch.py ...") == 0
    browser = shutil.which("chromium")
    assert browser, "pages are checked in a real one: apt-get install chromium fonts-dejavu-core"
    for page, figures in (
        ("x-sim.n_serving=2/report.html", ("gains", "phases", "timeline", "load", "slo")),
        ("x-sweep.html", ("gains", "phases", "timeline", "sweep-step", "sweep-rate")),
    ):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--window-size=1280,2000", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'profile'}"]
        command += [(tmp_path / "outputs" / page).as_uri()]
        dom = ran(command, timeout=300, check=True).stdout
        assert "data-error" not in dom, re.search(r'data-error="[^"]*"', dom)
        drawn = dict(re.findall(r'<figure id="fig-([\w-]+)">(.*?)</figure>', dom, re.S))
        for name in figures:
            assert "<svg" in drawn[name] and "NaN" not in drawn[name], name
