"""The boards as Prometheus sees them."""

import os
import sys
import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rose.parts.lending.board import Control, Online, Rollout, Writer
from rose.parts.lending.config import Slo
from rose.parts.lending.operator.metrics import FAMILIES, FIELDS, BoardCollector
from tests.processes import ran

SLO = Slo(ttft_p50_s=0.2, ttft_p99_s=0.5, tpot_p50_s=0.05, tpot_p99_s=0.15)


def write(folder, name, kind, **fields):
    writer = Writer(folder / name, kind)
    vars(writer.state).update(fields)
    writer.write()
    return writer


def scraped(folder, slo=SLO):
    """{(name, labels): value}, as a scrape's text says."""
    registry = CollectorRegistry()
    registry.register(BoardCollector(folder, slo))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *sorted(s.labels.items())): s.value for s in samples}


ONLINE = {"finished": 10, "met": 8, "finished_lending": 6, "met_lending": 5, "aborted": 1}
ONLINE |= {"preempted": 2, "kv_total": 100.0, "kv_used": 40.0}
ROLLOUT = {"open_s": 3, "shut_s": 1, "prompt_tokens": 7, "made_tokens": 9, "evicted": 2}
ROLLOUT |= {"wasted_tokens": 30, "kv_budget": 50.0, "frozen": 1, "step_error": 0.1, "shut_by": 8}


def test_every_family_has_its_samples(tmp_path):
    write(tmp_path, "online", Online, hold_until=time.monotonic() + 1000, **ONLINE)
    write(tmp_path, "rollout", Rollout, **ROLLOUT)
    write(tmp_path, "control", Control, lend=1, share=0.5)
    found = scraped(tmp_path)
    fields = [metric for board in FIELDS.values() for metric in board.values()]
    assert {name for name, *_ in [*FAMILIES, *fields]} <= {name for name, *_ in found}
    for key, value in {
        ("rose_lent_tokens_total", ("kind", "made")): 9,
        ("rose_gate_open_ratio",): 0.75,
        ("rose_online_requests_total", ("lending", "with"), ("met", "no")): 1,
        ("rose_online_requests_total", ("lending", "without"), ("met", "yes")): 3,
        ("rose_slo_attainment", ("lending", "without")): 0.75,
        ("rose_gate_shut", ("reason", "slack")): 1,
        ("rose_gate_shut", ("reason", "hour")): 0,
        ("rose_kv_bytes", ("kind", "budget"), ("who", "rollout")): 50,
        ("rose_lending_share",): 0.5,
        ("rose_slo_target_seconds", ("latency", "tpot"), ("quantile", "0.99")): 0.15,
    }.items():
        assert found[key] == value, key
    assert 500 < found["rose_online_slack_seconds",] <= 1000


def test_what_is_not_known_is_not_said(tmp_path):
    boards = ("online", "rollout", "control")
    assert scraped(tmp_path, None) == {("rose_board_up", ("board", name)): 0 for name in boards}
    write(tmp_path, "online", Online)
    found = scraped(tmp_path, None)
    assert found["rose_board_up", ("board", "online")] == 1
    assert ("rose_online_slack_seconds",) not in found
    assert not any(name == "rose_slo_attainment" for name, *_ in found)  # of no requests


def test_the_board_of_a_dead_process_or_a_damaged_one_is_not_believed(tmp_path):
    writer = write(tmp_path, "online", Online, finished=4)
    child = ran([sys.executable, "-c", "import os; print(os.getpid())"])
    writer.state.pid = float(child.stdout)
    writer.write()
    assert scraped(tmp_path)["rose_board_up", ("board", "online")] == 0
    write(tmp_path, "control", Control)
    with open(tmp_path / "control", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    assert scraped(tmp_path)["rose_board_up", ("board", "control")] == 0
    (tmp_path / "rollout").write_bytes(b"short")
    assert scraped(tmp_path)["rose_board_up", ("board", "rollout")] == 0
