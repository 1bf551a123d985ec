"""The Grafana dashboard: loadable, of metrics that exist, nothing exported but not shown."""

import json
import re
from pathlib import Path

import pytest

from rose.parts.lending.operator.metrics import FAMILIES, FIELDS
from rose.parts.lending.operator.report import LATENCIES

EXPORTED = (
    {name for name, *_ in FAMILIES}
    | {name for fields in FIELDS.values() for name, _ in fields.values()}
    | {"rose_slo_target_seconds"}
)


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((Path(__file__).parents[3] / "slurm/grafana/rose-coserving.json").read_text())


@pytest.fixture(scope="module")
def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_it_names_every_metric_that_is_exported_and_no_other(expressions):
    assert set(re.findall(r"\brose_\w+", " ".join(expressions))) == EXPORTED


def test_latencies_are_vllms_own_histograms_beside_their_targets(expressions):
    assert set(re.findall(r"vllm:\w+", " ".join(expressions))) == {
        f"{name}_bucket" for _, name in LATENCIES.values()
    }
    shown = [e for e in expressions if "rose_slo_target_seconds" in e]
    assert {
        (re.search(r'latency="(\w+)"', e)[1], re.search(r'quantile="([\d.]+)"', e)[1])
        for e in shown
    } == {(latency, q) for latency in LATENCIES for q in ("0.5", "0.99")}


def test_labels_that_are_asked_for_exist(expressions):
    labels = {name: set(asked) for name, asked, *_ in FAMILIES}
    for board, fields in FIELDS.items():
        labels |= {name: {"who"} if board == "engine" else set() for name, _ in fields.values()}
    for expression in expressions:
        for name, asked in re.findall(r"\b(rose_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", asked)) - {"job", "instance"} <= labels.get(
                name, {"latency", "quantile"}
            )


def test_every_panel_asks_the_chosen_data_source(dashboard):
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    shown = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    for asks in (each for panel in shown for each in (panel, *panel["targets"])):
        assert asks["datasource"]["uid"] == "${datasource}"
