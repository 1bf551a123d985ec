"""The Perfetto trace: every span of every rank, laid out so that a viewer can draw it."""

import gzip
import json
from collections import defaultdict

from rose.observe.recorder import read_events
from rose.parts.report.trace import Span, assign_lanes, build_trace
from tests.observe.run_folder import write_run


def test_overlapping_turns_get_different_lanes_and_free_lanes_are_used_again():
    turns = [Span(0, 10, "turn", "a", {}), Span(5, 15, "turn", "b", {})]
    turns += [Span(6, 7, "turn", "a", {}), Span(10, 12, "turn", "c", {})]
    assert assign_lanes(turns) == [0, 1, 2, 0]


def test_spans_nest_only_in_their_own_trajectory():
    spans = [Span(0, 100, "trajectory", "a", {}), Span(1, 90, "trajectory", "b", {})]
    spans += [Span(10, 20, "env_step", "b", {}), Span(30, 40, "env_step", "a", {})]
    spans += [Span(50, 120, "env_step", "a", {})]
    assert assign_lanes(spans) == [0, 1, 1, 0, 2]
    assert assign_lanes(spans[:4], nest=False) == [0, 1, 2, 2]


def traced(run):
    return json.loads(gzip.decompress(build_trace(run).read_bytes()))["traceEvents"]


def test_the_trace_holds_every_span_lanes_nest_and_an_arrow_leads_through_a_trajectory(tmp_path):
    run = write_run(tmp_path / "run", steps=4, turns=30)
    events = traced(run)
    spans = [e for e in events if e["ph"] == "X"]
    recorded = [e for rank in read_events(run) for e in rank.events if e["kind"] == "span"]
    assert len(spans) == len(recorded) > 300
    assert sum(e["name"] == "turn" for e in spans) == 4 * 2 * 30
    lanes = defaultdict(list)
    for e in spans:
        lanes[e["pid"], e["tid"]].append((e["ts"], -e["dur"]))
    for lane in lanes.values():
        open_until = []
        for start, minus in sorted(lane):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start - minus <= open_until[-1]
            open_until.append(start - minus)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    ranks = "coordinator environment-0 trainer-0 rollout-0 rollout-1".split()
    assert names == {f"{name} (rank {rank})" for rank, name in enumerate(ranks)}
    arrows = [e for e in events if e["ph"] in "stf" and e["name"] == "g1.3"]
    turns = [e for e in spans if e["name"] == "turn" and e["args"]["trajectory"] == "g1.3"]
    assert [e["ph"] for e in arrows] == ["s"] + ["t"] * (len(turns) - 1) + ["f"]
    expected = sorted((e["pid"], e["ts"]) for e in turns)
    assert sorted((e["pid"], e["ts"]) for e in arrows[1:]) == expected
    (tmp_path / "empty").mkdir()
    assert traced(tmp_path / "empty") == []
