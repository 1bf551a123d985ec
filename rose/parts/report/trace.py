"""Write the run as a Chrome trace for ui.perfetto.dev: `<run_dir>/trace.json.gz`.

Each rank is a process. Spans that overlap in time go to different threads ("lanes"), except for
spans inside one another (an env_step in its trajectory, forward_backward in train_step). An arrow
begins at each trajectory's span, on its environment host, and passes through the spans of its
turns, on the engines that generated them.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rose.files import whole
from rose.observe.recorder import RankEvents, read_events

FILE = "trace.json.gz"


class Span(NamedTuple):
    """A span in whole microseconds, so that rounding can't make nested spans cross. `key`: its
    trajectory's id, or None."""

    start: int
    end: int
    name: str
    key: str | None
    args: dict[str, Any]


def spans_of(rank: RankEvents) -> list[Span]:
    """Return the rank's spans by start, an outer span before its inner ones."""
    spans = []
    for e in (event for event in rank.events if event["kind"] == "span"):
        start, end, args = round(e["start"] * 1e6), round(e["end"] * 1e6), e["args"]
        spans.append(Span(start, max(start, end), e["name"], args.get("trajectory"), args))
    return sorted(spans, key=lambda span: (span.start, -span.end))


def assign_lanes(spans: list[Span], nest: bool = True) -> list[int]:
    """Return a lane for each span (sorted as by `spans_of`), the lowest free one: O(n log n).

    With `nest`, a span shares the lane of the open span of its trajectory if it has another name
    and fits inside. A span without a trajectory shares the lane of the latest open span without a
    trajectory. In all other cases the spans of a lane never overlap.
    """
    lanes: list[int] = []
    stacks: list[list[Span]] = []  # open spans per lane, outermost first
    free: list[int] = []
    ends: list[tuple[int, int]] = []  # (end of the outermost span, lane)
    home: dict[str | None, int] = {}  # trajectory -> lane of its latest outermost span
    for span in spans:
        while ends and ends[0][0] <= span.start:
            lane = heapq.heappop(ends)[1]
            stacks[lane].clear()
            heapq.heappush(free, lane)
        lane = home.get(span.key, -1) if nest else -1
        if lane < 0 or not _fits(stacks[lane], span):
            lane = heapq.heappop(free) if free else len(stacks)
            if lane == len(stacks):
                stacks.append([])
            heapq.heappush(ends, (span.end, lane))
            home[span.key] = lane
        stacks[lane].append(span)
        lanes.append(lane)
    return lanes


def _fits(stack: list[Span], span: Span) -> bool:
    """Drop ended spans from a lane's stack. True if `span` may go inside the innermost one left."""
    while stack and stack[-1].end <= span.start:
        stack.pop()
    return (
        bool(stack)
        and stack[0].key == span.key
        and span.end <= stack[-1].end
        and span.name != stack[-1].name
    )


def build_trace(run_dir: Path | str) -> Path:
    """Write the trace of all attempts and return its path. Only one rank at a time is in memory."""
    path = Path(run_dir) / FILE
    # trajectory -> (microseconds, span name, pid, tid)
    flows: dict[str, list[tuple[int, str, int, int]]] = {}
    pids: dict[str, int] = {}  # rank's name -> process, the same in all attempts
    with whole(path) as part, gzip.open(part, "wb", compresslevel=5) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for rank in read_events(run_dir):
            pid = pids.setdefault(rank.name, len(pids) + 1)
            separator = _write_events(file, _rank_events(rank, pid, flows), separator)
        _write_events(file, _flow_events(flows), separator)
        file.write(b"\n]}\n")
    return path


def _write_events(file, events: Iterable[dict[str, Any]], separator: bytes) -> bytes:
    """Append events to a JSON list, with `separator` before the first. Return the separator for the
    next call: it is empty only until the list has an event."""
    for event in events:
        file.write(separator + msgspec.json.encode(event))
        separator = b",\n"
    return separator


def _rank_events(rank: RankEvents, pid: int, flows: dict[str, list]) -> Iterable[dict[str, Any]]:
    """Yield the rank's part of the trace. Add its trajectories and turns to `flows`, for arrows."""
    about = {"ph": "M", "pid": pid}
    yield about | {"name": "process_name", "args": {"name": f"{rank.name} (rank {rank.rank})"}}
    yield about | {"name": "process_sort_index", "args": {"sort_index": rank.rank}}
    spans = spans_of(rank)
    lanes = assign_lanes(spans)
    for lane in range(max(lanes, default=-1) + 1):
        yield about | {"name": "thread_name", "tid": lane, "args": {"name": f"lane {lane}"}}
    for span, lane in zip(spans, lanes, strict=False):
        yield {
            "ph": "X",
            "cat": rank.role,
            "name": span.name,
            "pid": pid,
            "tid": lane,
            "ts": span.start,
            "dur": span.end - span.start,
            "args": span.args | {"run_attempt": rank.attempt},
        }
        if span.key is not None and span.name in ("trajectory", "turn"):
            flows.setdefault(span.key, []).append((span.start, span.name, pid, lane))
    for event in rank.events:
        if event["kind"] == "span":
            continue
        common = {"name": event["name"], "pid": pid, "tid": 0, "ts": round(event["time"] * 1e6)}
        if event["kind"] == "instant":
            yield common | {"ph": "i", "s": "p", "args": event["args"]}
        else:
            yield common | {"ph": "C", "args": {"value": event["value"]}}


def _flow_events(flows: dict[str, list]) -> Iterable[dict[str, Any]]:
    """Yield the arrow trajectory -> turn -> turn ... of each trajectory that has a span of its own
    and one of a turn."""
    for number, (key, stops) in enumerate(flows.items(), 1):
        if {name for _, name, _, _ in stops} != {"trajectory", "turn"}:
            continue
        stops.sort(key=lambda stop: (stop[1] != "trajectory", stop[0]))
        for i, (time, _, pid, tid) in enumerate(stops):
            phase = "s" if i == 0 else "f" if i == len(stops) - 1 else "t"
            yield {
                "ph": phase,
                "bp": "e",
                "cat": "trajectory",
                "name": key,
                "id": number,
                "pid": pid,
                "tid": tid,
                "ts": time,
            }
