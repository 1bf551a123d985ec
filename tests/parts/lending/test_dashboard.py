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


def test_every_panel_asks_the_chosen_data_source_and_has_a_place_of_its_own(dashboard):
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert all(
                s["datasource"]["uid"] == "${datasource}" for s in [panel, *panel["targets"]]
            )
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
