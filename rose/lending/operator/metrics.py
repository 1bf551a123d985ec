"""The boards of a device as Prometheus metrics: what serving kept, what was lent.

In two places: the operator's HTTP server (rose/lending/operator/web.py), and the online engine's own
/metrics beside vLLM's `vllm:*`, where `register_if_serving` puts them. Read at each scrape; a board
that is absent, damaged, or left behind by a process that is gone has no samples but `rose_board_up`
0. Counters begin anew with the process that counts.
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

from rose.config import Slo
from rose.lending import board
from rose.lending.board import Control, Online, Rollout
from rose.lending.rules.gate import Reason
from rose.lending.vllm import device

FILES = {"online": Online, "rollout": Rollout, "control": Control}

Samples = Iterable[tuple[tuple[str, ...], float]]  # (label values, value)


class Boards(NamedTuple):
    """What can be read now; None of a board that can't, or whose writer is gone."""

    online: Online | None
    rollout: Rollout | None
    control: Control | None


def read(folder: Path, living: bool = True) -> Boards:
    """`living`: only boards of processes that are there."""
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


class _Family(NamedTuple):
    name: str
    counts: bool
    text: str
    labels: tuple[str, ...]
    samples: Callable[[Boards], Samples]


def _counter(
    name: str, text: str, labels: tuple[str, ...], samples: Callable[[Boards], Samples]
) -> _Family:
    return _Family(name, True, text, labels, samples)


def _gauge(
    name: str, text: str, labels: tuple[str, ...], samples: Callable[[Boards], Samples]
) -> _Family:
    return _Family(name, False, text, labels, samples)


def _engines(b: Boards) -> list[tuple[str, Online | Rollout]]:
    return [
        (who, engine)
        for who, engine in (("online", b.online), ("rollout", b.rollout))
        if engine is not None
    ]


def attainment(o: Online) -> dict[str, tuple[float, float]]:
    """{"with" lending: (met, finished), "without": ...}, requests; both latencies within their P99
    targets."""
    return {
        "with": (o.met_lending, o.finished_lending),
        "without": (o.met - o.met_lending, o.finished - o.finished_lending),
    }


def _online(*fields: tuple[str, Callable[[Online], float]]) -> Callable[[Boards], Samples]:
    """Samples of one label (none of a single field named "")."""
    return lambda b: (
        [((label,) if label else (), value(b.online)) for label, value in fields]
        if b.online
        else []
    )


def _rollout(*fields: tuple[str, Callable[[Rollout], float]]) -> Callable[[Boards], Samples]:
    return lambda b: (
        [((label,) if label else (), value(b.rollout)) for label, value in fields]
        if b.rollout
        else []
    )


def _control(value: Callable[[Control], float]) -> Callable[[Boards], Samples]:
    return lambda b: [((), value(b.control))] if b.control else []


def _both(value: Callable[[Online | Rollout], float]) -> Callable[[Boards], Samples]:
    return lambda b: [((who,), value(engine)) for who, engine in _engines(b)]


def _gate_ratio(b: Boards) -> Samples:
    total = b.rollout.open_s + b.rollout.shut_s if b.rollout else 0.0
    return [((), b.rollout.open_s / total)] if total else []


def _shut(b: Boards) -> Samples:
    reasons = [reason for reason in Reason if reason is not Reason.OPEN] if b.rollout else []
    return [((reason.name.lower(),), float(b.rollout.shut_by == reason)) for reason in reasons]


def _requests(b: Boards) -> Samples:
    for lending, (met, finished) in attainment(b.online).items() if b.online else ():
        yield (lending, "yes"), met
        yield (lending, "no"), finished - met


def _attained(b: Boards) -> Samples:
    return [
        ((lending,), met / finished)
        for lending, (met, finished) in (attainment(b.online).items() if b.online else ())
        if finished
    ]


def _slack(b: Boards) -> Samples:
    return (
        [((), b.online.hold_until - time.monotonic())]
        if b.online and math.isfinite(b.online.hold_until)
        else []
    )


def _kv(b: Boards) -> Samples:
    for who, engine in _engines(b):
        kinds = (
            ("total", "used", "held", "wanted") if who == "online" else ("total", "used", "budget")
        )
        for kind in kinds:
            yield (who, kind), getattr(engine, f"kv_{kind}")


FAMILIES = (
    _gauge(
        "rose_board_up",
        "1 while the process that writes this board lives and the board is whole.",
        ("board",),
        lambda b: [((name,), float(getattr(b, name) is not None)) for name in FILES],
    ),
    # what was lent
    _counter(
        "rose_lent_tokens",
        "Tokens computed for rollouts by lent compute, of prompts or made.",
        ("kind",),
        _rollout(("prompt", lambda r: r.prompt_tokens), ("made", lambda r: r.made_tokens)),
    ),
    _counter(
        "rose_wasted_tokens",
        "Tokens computed for evicted rollouts, to be computed again elsewhere.",
        (),
        _rollout(("", lambda r: r.wasted_tokens)),
    ),
    _counter(
        "rose_evictions",
        "Rollout requests aborted and handed back for their memory.",
        (),
        _rollout(("", lambda r: r.evicted)),
    ),
    _gauge(
        "rose_gate_open",
        "1 while the gate lets rollout steps begin.",
        (),
        _rollout(("", lambda r: r.open)),
    ),
    _gauge(
        "rose_gate_open_ratio",
        "Share of the time with rollouts waiting in which the gate was open, since start.",
        (),
        _gate_ratio,
    ),
    _counter(
        "rose_gate_seconds",
        "Time with rollouts to compute, with the gate open and shut.",
        ("state",),
        _rollout(("open", lambda r: r.open_s), ("shut", lambda r: r.shut_s)),
    ),
    _gauge(
        "rose_gate_shut", "1 for the reason for which the gate is shut now.", ("reason",), _shut
    ),
    _gauge(
        "rose_frozen",
        "1: memory was revoked in this training step; the rollout engine's budget may not grow.",
        (),
        _rollout(("", lambda r: r.frozen)),
    ),
    # what serving kept
    _counter(
        "rose_online_requests",
        "Online requests that ended, by whether anything was lent meanwhile and whether "
        "both latencies met their P99 targets.",
        ("lending", "met"),
        _requests,
    ),
    _gauge(
        "rose_slo_attainment",
        "Share of the online requests that met both P99 targets, since start, with and "
        "without lending.",
        ("lending",),
        _attained,
    ),
    _counter(
        "rose_online_aborted",
        "Online requests aborted, by clients or for want of memory.",
        (),
        _online(("", lambda o: o.aborted)),
    ),
    _counter(
        "rose_online_preemptions",
        "Times that a running online request lost its memory.",
        (),
        _online(("", lambda o: o.preempted)),
    ),
    _counter(
        "rose_online_tokens",
        "Tokens computed for online requests, of prompts or made.",
        ("kind",),
        _online(("prompt", lambda o: o.prompt_tokens), ("made", lambda o: o.made_tokens)),
    ),
    _gauge(
        "rose_online_slack_seconds",
        "How long the device could be kept from the online engine now with every "
        "request still meeting its target; absent without requests.",
        (),
        _slack,
    ),
    _gauge(
        "rose_online_prompt_share",
        "Part of lending.step_share that keeps the median TTFT at ttft_p50_s.",
        (),
        _online(("", lambda o: o.prompt_share)),
    ),
    _gauge(
        "rose_online_lends",
        "0: the online engine lends nothing, as when it misses its targets by itself.",
        (),
        _online(("", lambda o: o.lends)),
    ),
    # both
    _gauge(
        "rose_kv_bytes",
        "KV cache: of the whole pool, used by requests, held, wanted (online), budget (rollout).",
        ("who", "kind"),
        _kv,
    ),
    _gauge(
        "rose_requests",
        "Requests in an engine now.",
        ("who", "state"),
        lambda b: [
            ((who, state), getattr(engine, state))
            for who, engine in _engines(b)
            for state in ("running", "waiting")
        ],
    ),
    _counter("rose_busy_seconds", "Time in engine steps.", ("who",), _both(lambda e: e.busy_s)),
    _counter("rose_steps", "Engine steps.", ("who",), _both(lambda e: e.steps)),
    _gauge(
        "rose_step_prediction_error",
        "Mean absolute error of predicted step times, as a share.",
        ("who",),
        _both(lambda e: e.step_error),
    ),
    _gauge(
        "rose_step_prediction_p99_ratio",
        "99th percentile of measured over predicted step time.",
        ("who",),
        _both(lambda e: e.step_p99),
    ),
    # the operator's word
    _gauge(
        "rose_lending",
        "1 while the operator lets the device be lent.",
        (),
        _control(lambda c: c.lend),
    ),
    _gauge(
        "rose_lending_share",
        "Share of what could be lent, at this hour.",
        (),
        _control(lambda c: c.share),
    ),
    _gauge(
        "rose_lending_epoch",
        "Policy version of the rollout engine; a new one ends a freeze.",
        (),
        _control(lambda c: c.epoch),
    ),
)


class BoardCollector(Collector):
    """`slo`: if known, `rose_slo_target_seconds`."""

    def __init__(self, folder: Path, slo: Slo | None) -> None:
        self.folder, self.slo = folder, slo

    def describe(self) -> Iterable[Metric]:
        """Registering reads no board."""
        return self._families(Boards(None, None, None))

    def collect(self) -> Iterable[Metric]:
        return self._families(read(self.folder))

    def _families(self, boards: Boards) -> Iterable[Metric]:
        for f in FAMILIES:
            family = (CounterMetricFamily if f.counts else GaugeMetricFamily)(
                f.name, f.text, labels=f.labels
            )
            for labels, value in f.samples(boards):
                family.add_metric(labels, value)
            yield family
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
    """Put the boards into this process's default registry, once; nothing outside of co-serving."""
    global _registered
    if _registered is None and (found := device.here()) is not None:
        _registered = BoardCollector(found.folder, found.serving.online.slo)
        REGISTRY.register(_registered)
