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
def expressions():
    file = Path(__file__).parents[3] / "slurm/grafana/rose-coserving.json"
    panels = json.loads(file.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_it_names_every_metric_that_is_exported_with_its_labels_and_no_other(expressions):
    assert set(re.findall(r"\brose_\w+", " ".join(expressions))) == EXPORTED
    labels = {name: set(asked) for name, asked, *_ in FAMILIES}
    for board, fields in FIELDS.items():
        labels |= {name: {"who"} if board == "engine" else set() for name, _ in fields.values()}
    for name, asked in re.findall(r"\b(rose_\w+)\{([^}]*)\}", " ".join(expressions)):
        there = labels.get(name, {"latency", "quantile"})
        assert set(re.findall(r"(\w+)=", asked)) - {"job", "instance"} <= there


def test_latencies_are_vllms_own_histograms_beside_their_targets(expressions):
    assert set(re.findall(r"vllm:\w+", " ".join(expressions))) == {
        f"{name}_bucket" for _, name in LATENCIES.values()
    }
    targets = " ".join(e for e in expressions if "rose_slo_target_seconds" in e)
    for latency in LATENCIES:
        for quantile in ("0.5", "0.99"):
            assert f'latency="{latency}",quantile="{quantile}"' in targets.replace(" ", "")
