"""The boards of a device as Prometheus metrics: what serving attained, and what was lent.

They are in two places: on the operator's HTTP server (rose/parts/lending/operator/web.py), and in
the online engine's own /metrics beside vLLM's `vllm:*`, where `register_if_serving` puts them. The
boards are read at each scrape. A board that is absent, damaged, or whose writer has ended has only
one sample, a `rose_board_up` of 0. Counters restart at 0 with the process that writes their board.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.parts.lending import board
from rose.parts.lending.board import Control, Online, Rollout
from rose.parts.lending.config import Slo
from rose.parts.lending.rules.gate import Reason
from rose.parts.lending.vllm import device

FILES = {"online": Online, "rollout": Rollout, "control": Control}

Samples = Iterable[tuple[tuple[str, ...], float]]  # (label values, value)


class Boards(NamedTuple):
    """The states of a device's boards; None for a board that can't be read or has no writer."""

    online: Online | None
    rollout: Rollout | None
    control: Control | None


def read(folder: Path, living: bool = True) -> Boards:
    """Read the boards in `folder`. With `living`, ignore boards whose writer has ended."""
    return Boards(*(_read(folder / name, kind, living) for name, kind in FILES.items()))


def _read(path: Path, kind: type[board.State], living: bool) -> board.State | None:
    try:
        reader = board.Reader(path, kind)
    except (OSError, ValueError):
        return None
    try:
        state = reader.read()
        return state if state is not None and (not living or board.is_alive(state)) else None
    finally:
        reader.close()


def _engines(b: Boards) -> list[tuple[str, Online | Rollout]]:
    """Return (name, board) of each engine whose board could be read."""
    both = (("online", b.online), ("rollout", b.rollout))
    return [(who, engine) for who, engine in both if engine is not None]


def attainment(o: Online) -> dict[str, tuple[float, float]]:
    """Count the requests that met both P99 targets and all that finished, with and without lending:
    {"with": (met, finished), "without": (met, finished)}."""
    return {
        "with": (o.met_lending, o.finished_lending),
        "without": (o.met - o.met_lending, o.finished - o.finished_lending),
    }


# Each of these functions returns the samples of one metric; FAMILIES has the metric's help text.


def _gate_ratio(b: Boards) -> Samples:
    total = b.rollout.open_s + b.rollout.shut_s if b.rollout else 0.0
    return [((), b.rollout.open_s / total)] if total else []


def _shut_reasons(b: Boards) -> Samples:
    reasons = [reason for reason in Reason if reason is not Reason.OPEN] if b.rollout else []
    return [((reason.name.lower(),), float(b.rollout.shut_by == reason)) for reason in reasons]


def _requests_met_or_not(b: Boards) -> Samples:
    for lending, (met, finished) in attainment(b.online).items() if b.online else ():
        yield (lending, "yes"), met
        yield (lending, "no"), finished - met


def _attainment_shares(b: Boards) -> Samples:
    found = attainment(b.online) if b.online else {}
    return [((lending,), met / total) for lending, (met, total) in found.items() if total]


def _seconds_of_slack(b: Boards) -> Samples:
    if b.online and math.isfinite(b.online.hold_until):
        yield (), b.online.hold_until - time.monotonic()


def _kv_bytes(b: Boards) -> Samples:
    kinds = {"online": ("total", "used", "held", "wanted"), "rollout": ("total", "used", "budget")}
    for who, engine in _engines(b):
        for kind in kinds[who]:
            yield (who, kind), getattr(engine, f"kv_{kind}")


def _requests_now(b: Boards) -> Samples:
    for who, engine in _engines(b):
        yield from (((who, state), getattr(engine, state)) for state in ("running", "waiting"))


def _boards_up(b: Boards) -> Samples:
    return [((name,), float(getattr(b, name) is not None)) for name in FILES]


def _tokens(engine: Online | Rollout | None) -> Samples:
    return [(("prompt",), engine.prompt_tokens), (("made",), engine.made_tokens)] if engine else []


def _gate_seconds(b: Boards) -> Samples:
    return [(("open",), b.rollout.open_s), (("shut",), b.rollout.shut_s)] if b.rollout else []


# Board ("engine": both engines) -> field -> (metric, help text). Metrics in _total are counters.
FIELDS: dict[str, dict[str, tuple[str, str]]] = {
    "rollout": {
        "wasted_tokens": (
            "rose_wasted_tokens_total",
            "Tokens of evicted rollouts, to be computed again.",
        ),
        "evicted": ("rose_evictions_total", "Rollout requests evicted for memory or time."),
        "open": ("rose_gate_open", "1 while the gate lets rollout steps begin."),
        "frozen": ("rose_frozen", "1: memory was revoked in this training step; no budget grows."),
    },
    "online": {
        "aborted": ("rose_online_aborted_total", "Requests aborted, by clients or for memory."),
        "preempted": ("rose_online_preemptions_total", "Times a running request lost its memory."),
        "prompt_share": ("rose_online_prompt_share", "Part of step_share that keeps ttft_p50_s."),
        "lends": (
            "rose_online_lends",
            "0: lends nothing, as when it misses its targets by itself.",
        ),
    },
    "engine": {
        "busy_s": ("rose_busy_seconds_total", "Time in engine steps."),
        "steps": ("rose_steps_total", "Engine steps."),
        "step_error": ("rose_step_prediction_error", "Mean error of predicted times, as a share."),
        "step_p99": ("rose_step_prediction_p99_ratio", "P99 of measured over predicted time."),
    },
    "control": {
        "lend": ("rose_lending", "1 while the operator lets the device be lent."),
        "share": ("rose_lending_share", "Share of what could be lent, at this hour."),
        "epoch": (
            "rose_lending_epoch",
            "Rollout engine's policy version; a new one ends a freeze.",
        ),
    },
}
# (metric, labels, help text, samples)
FAMILIES: tuple[tuple[str, tuple[str, ...], str, Callable[[Boards], Samples]], ...] = (
    (
        "rose_board_up",
        ("board",),
        "1 while the process that writes this board lives and the board is whole.",
        _boards_up,
    ),
    (
        "rose_lent_tokens_total",
        ("kind",),
        "Tokens that lent compute processed for rollouts: of prompts, or generated (made).",
        lambda b: _tokens(b.rollout),
    ),
    (
        "rose_gate_open_ratio",
        (),
        "Share of the time with rollouts waiting in which the gate was open, since start.",
        _gate_ratio,
    ),
    (
        "rose_gate_seconds_total",
        ("state",),
        "Time with rollouts to compute, with the gate open and shut.",
        _gate_seconds,
    ),
    (
        "rose_gate_shut",
        ("reason",),
        "1 for the reason for which the gate is shut now.",
        _shut_reasons,
    ),
    (
        "rose_online_requests_total",
        ("lending", "met"),
        "Online requests that ended, by whether anything was lent meanwhile and whether both "
        "latencies met their P99 targets.",
        _requests_met_or_not,
    ),
    (
        "rose_slo_attainment",
        ("lending",),
        "Share of the online requests that met both P99 targets, since start, with and "
        "without lending.",
        _attainment_shares,
    ),
    (
        "rose_online_tokens_total",
        ("kind",),
        "Tokens processed for online requests: of prompts, or generated (made).",
        lambda b: _tokens(b.online),
    ),
    (
        "rose_online_slack_seconds",
        (),
        "How long the device could be kept from the online engine now with every request "
        "still meeting its target; absent without requests.",
        _seconds_of_slack,
    ),
    (
        "rose_kv_bytes",
        ("who", "kind"),
        "KV cache: of the whole pool, used by requests, held, wanted (online), budget (rollout).",
        _kv_bytes,
    ),
    ("rose_requests", ("who", "state"), "Requests in an engine now.", _requests_now),
)


def _family(metric: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """Build a counter if the metric's name ends in _total, else a gauge. `text`: its help text."""
    kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
    family = kind(metric, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


class BoardCollector(Collector):
    """Collects the metrics of the boards in `folder`, and latency targets unless `slo` is None."""

    def __init__(self, folder: Path, slo: Slo | None) -> None:
        self.folder, self.slo = folder, slo

    def describe(self) -> Iterable[Metric]:
        """Describe the metrics without reading a board."""
        return self._families(Boards(None, None, None))

    def collect(self) -> Iterable[Metric]:
        return self._families(read(self.folder))

    def _families(self, boards: Boards) -> Iterable[Metric]:
        for name, fields in FIELDS.items():
            states = _engines(boards) if name == "engine" else [("", getattr(boards, name))]
            for field, (metric, text) in fields.items():
                values = [((w,) if w else (), getattr(s, field)) for w, s in states if s]
                yield _family(metric, text, ("who",) if name == "engine" else (), values)
        for metric, labels, text, samples in FAMILIES:
            yield _family(metric, text, labels, samples(boards))
        targets = GaugeMetricFamily(
            "rose_slo_target_seconds",
            "Latency targets of the online model.",
            labels=("latency", "quantile"),
        )
        for latency in ("ttft", "tpot") if self.slo else ():
            for quantile, name in (("0.5", "p50"), ("0.99", "p99")):
                targets.add_metric((latency, quantile), getattr(self.slo, f"{latency}_{name}_s"))
        yield targets


_registered: BoardCollector | None = None


def register_if_serving() -> None:
    """Add the boards to this process's default registry, once. Does nothing in an engine that
    doesn't share its device."""
    global _registered
    if _registered is None and (found := device.here()) is not None:
        _registered = BoardCollector(found.folder, found.serving.online.slo)
        REGISTRY.register(_registered)
