"""A burst of online requests while R holds its full budget: when S has its memory, who missed, when
R is back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
from bench_coserving_bench import Bench
from bench_coserving_engines import Operator
from bench_coserving_tables import ALONE, OURS, Run, Slo

from rose.lending import board
from rose.sim.traces import Trace

TIMES = 20  # the usual rate
# after: two training steps end within it, and each a freeze
BEGINS_S, LASTS_S, AFTER_S = (10.0, 2.0, 28.0)
LOOK_S = 0.01
BACK = 0.8  # of the tokens/s before the burst: R is back


@dataclass
class Look:
    """At both boards."""

    at: float  # seconds from the traffic's start
    wanted: float  # bytes, of S
    held: float
    lent: float  # bytes, R's budget
    made: float  # tokens by R since its start


class Watch:
    """Looks at the boards of a device all the while; a context manager."""

    def __init__(self, operator: Operator) -> None:
        self._readers = [
            board.Reader(operator.folder / "online", board.Online),
            board.Reader(operator.folder / "rollout", board.Rollout),
        ]
        self._ends, self._thread = (
            threading.Event(),
            threading.Thread(target=self._look, daemon=True),
        )
        self._seen: list[Look] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ends.set()
        self._thread.join()
        for reader in self._readers:
            reader.close()

    def seen(self, began: float) -> list[Look]:
        return [Look(**vars(look) | {"at": look.at - began}) for look in self._seen]

    def _look(self) -> None:
        while not self._ends.wait(LOOK_S):
            online, rollout = (reader.read() for reader in self._readers)
            if online and rollout:
                # of what there is: a queue may want more
                wanted = min(online.kv_wanted, online.kv_total)
                self._seen.append(
                    Look(
                        time.monotonic(),
                        wanted,
                        online.kv_held,
                        rollout.kv_budget,
                        rollout.made_tokens,
                    )
                )


def measure(bench: Bench) -> list[dict]:
    """The same burst for S alone, which may well miss targets by itself, and for ours if it takes
    part."""
    seconds = BEGINS_S + LASTS_S + AFTER_S
    base = bench.slice(3000, seconds)
    traffic = with_burst(base, len(base) / seconds, np.random.default_rng(3000))
    found = [summary(bench.run(ALONE, 3000, traffic, seconds), traffic, bench.slo, [])]
    if OURS in bench.options.scenarios.split(","):
        with Watch(bench.operator) as watch:
            run = bench.run(OURS, 3000, traffic, seconds)
        found.append(summary(run, traffic, bench.slo, watch.seen(run.began)))
    return found


def with_burst(base: Trace, rate: float, draw: np.random.Generator) -> Trace:
    """`TIMES` the rate for `LASTS_S`, with lengths of the base's requests."""
    count = round(TIMES * rate * LASTS_S)
    which = np.concatenate([np.arange(len(base)), draw.integers(0, len(base), count)])
    at = np.concatenate([base.at, BEGINS_S + draw.uniform(0, LASTS_S, count)])
    order = np.argsort(at, kind="stable")
    return Trace(at[order], base.prompt_tokens[which][order], base.output_tokens[which][order])


def summary(run: Run, traffic: Trace, slo: Slo, looks: list[Look]) -> dict:
    """Times in seconds; `memory_s` is None if S never wanted more than it had, infinite if it never
    got it."""
    missed = ~np.array(run.meets(slo), bool)
    inside = (traffic.at >= BEGINS_S) & (traffic.at < BEGINS_S + LASTS_S)
    said = {
        "scenario": run.scenario,
        "requests": len(missed),
        "burst": int(inside.sum()),
        "missed": int(missed.sum()),
        "missed_of_burst": int(missed[inside].sum()),
        "aborted": len(missed) - sum(run.done),
        "ttft_p99": run.latency("ttft_p99"),
        "evicted": run.evicted,
        "wasted": run.wasted,
    }
    if looks:
        before = [look for look in looks if look.at < BEGINS_S]
        during = [look for look in looks if look.at >= BEGINS_S]
        said |= {
            "lent_before": max((look.lent for look in before), default=0.0),
            "lent_least": min((look.lent for look in during), default=0.0),
            "memory_s": longest_want(during),
            "back_s": back(looks),
        }
    return said


def longest_want(looks: list[Look]) -> float | None:
    """The longest time for which S wanted memory that it did not have."""
    longest, since = None, None
    for look in looks:
        if look.wanted > look.held:
            since = look.at if since is None else since
        elif since is not None:
            longest, since = max(longest or 0.0, look.at - since), None
    return float("inf") if since is not None else longest


def back(looks: list[Look]) -> float | None:
    """Seconds from the burst's end until R makes `BACK` of the tokens per second that it made
    before, over a second; None if it doesn't."""
    at, made = (np.array([getattr(look, name) for look in looks]) for name in ("at", "made"))
    usual = np.interp([BEGINS_S - 5, BEGINS_S], at, made)
    wanted = BACK * (usual[1] - usual[0]) / 5
    for end in np.arange(BEGINS_S + LASTS_S + 1, at[-1], 0.1):
        low, high = np.interp([end - 1, end], at, made)
        if high - low >= wanted:
            return float(end - BEGINS_S - LASTS_S)
    return None


def lines(bursts: list[dict]) -> list[str]:
    said = (
        [f"\n{TIMES}x the usual rate for {LASTS_S:g} s, while R holds its full budget"]
        if bursts
        else []
    )
    for one in bursts:
        said.append(
            f"  {one['scenario']:18}{one['requests']} requests, {one['burst']} of them the burst's; missed "
            f"{one['missed']}, {one['missed_of_burst']} of the burst's; aborted {one['aborted']}; TTFT P99 "
            f"{1e3 * one['ttft_p99']:.0f} ms"
        )
        if "memory_s" in one:
            memory = (
                "S never wanted more than it had"
                if one["memory_s"] is None
                else f"S had its memory after {one['memory_s']:.3f} s"
            )
            returned = (
                "R was not back by the end"
                if one["back_s"] is None
                else f"R was back {one['back_s']:.1f} s after the burst"
            )
            said.append(
                f"  {'':18}{memory}; lent {one['lent_before'] / 2**20:.1f} MiB before, "
                f"{one['lent_least'] / 2**20:.1f} at least; evicted {one['evicted']}, {one['wasted']} tokens "
                f"wasted; {returned}"
            )
    return said
