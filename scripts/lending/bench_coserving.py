"""Measure how rollouts and online users share a device: real vLLM, real HTTP traffic.

    python scripts/lending/bench_coserving.py                                   # a quarter of an hour
    python scripts/lending/bench_coserving.py trace=AzureLLMInferenceTrace_conv_2023.csv seconds=60 seeds=5
    python scripts/lending/bench_coserving.py scenarios=alone,naive,ours seconds=20 seeds=2

Slices of a trace (Azure's format; generated if none is given), one a seed, are replayed open loop
against the online server S. The rollout engine R runs beside it in a closed loop. Both engines are
confined to one core, which stands for the device. The trace's lengths are scaled down to models
that a core can serve, and its times so that S alone keeps the core busy for `busy` of the time:
    alone     S, twice a seed: the difference between the two runs is the machine's noise
    naive     R beside S; the operating system shares the core, each engine has all the KV memory
    static    the same, with half of the KV memory each
    priority  one engine with vLLM's priority scheduling serves both; rollouts have low priority
    ours      two engines, R behind the gate
    steps     the same, but S never stops a step of R between layers (not by default)
Targets are S alone's own percentiles times `slack`, from a run before the first seed, unless `slo`
gives them. Each scenario first has an uncounted run that warms its engines. A run is repeated,
twice at most, if the hypervisor took more than 4% of the machine. Prompts are random tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.csv_tables import show, write_csv
from scripts.harness import Failed, keyed, listed
from scripts.lending.bench_coserving_bench import CALM, PLAN, TRIES, Bench, Options
from scripts.lending.bench_coserving_tables import ALONE, METRICS, Alone, Run, Slo, shown, table

# Seconds by which the client may send late at P99. A line of output names any greater lateness,
# because it is the client's fault and not the engine's.
LATE_S = 0.02


def parse(argv: list[str]) -> Options:
    """Parse key=value options. Raises `Failed` naming the option that is wrong."""
    options = Options(**keyed(argv, __doc__, **vars(Options())))
    names = listed("scenarios", options.scenarios, PLAN)
    if ALONE not in names:
        others = "all others are compared with it"
        raise Failed(f"scenarios={options.scenarios}: {ALONE} is needed, {others}")
    cores = sorted(os.sched_getaffinity(0))
    if options.device not in cores or len(cores) < 2:
        raise Failed(f"device={options.device}: a core of {cores} and one more are needed")
    return options


def measure(bench: Bench, out: Path) -> list[dict]:
    """Run all scenarios and return the table's rows. Each seed updates the results in `out`."""
    chosen = bench.options.scenarios.split(",")
    bench.start(ALONE)
    for words in bench.calibrate():
        say(words)
    bench.warm(ALONE)
    bench.slo = bench.targets()
    bench.start(*chosen)
    for scenario in chosen:
        if scenario != ALONE:
            bench.warm(scenario)
    # The harvest of each scenario is relative to its rollout engine alone, without the gate.
    sides = {PLAN[name][1] for name in chosen}
    bench.start(*["naive"] * bool(sides & {"static", "ours"}))
    runs, alone = [], Alone([], [])
    for seed in range(bench.options.seeds):
        traffic = bench.slice(seed, bench.options.seconds)
        for side, found in (("naive", alone.engine), ("priority_load", alone.server)):
            if side in bench.rollouts:
                found.append(bench.baseline(side))
        order = [*chosen, ALONE]
        turn = seed * 2 % len(order)
        for scenario in order[turn:] + order[:turn]:
            runs.append(bench.calm_run(scenario, seed, traffic, bench.options.seconds))
            say(_words(runs[-1], bench.slo))
        rows = write(bench, out, runs, alone)
    return rows


def write(bench: Bench, out: Path, runs: list[Run], alone: Alone) -> list[dict]:
    """Write all results to `out` and return the table's rows."""
    rows = table(runs, bench.slo, alone)
    parts: dict[str, Any] = {"options": bench.options, "slo": bench.slo, "alone": alone}
    found: dict[str, Any] = {key: dataclasses.asdict(part) for key, part in parts.items()}
    found |= {"factor": bench.factor, "table": rows}
    found["runs"] = [dataclasses.asdict(run) for run in runs]
    (out / "bench_coserving.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    write_csv(out / "bench_coserving.csv", rows)
    return rows


def _words(run: Run, slo: Slo) -> str:
    said = (
        f"seed {run.seed} {run.scenario:18}{len(run.done):4} requests, "
        f"{len(run.done) - run.met(slo):3} missed; {Slo(*map(run.latency, METRICS))}; "
        f"S busy {run.busy:.0%}, rollouts {run.made:.0f} tokens/s"
    )
    if run.late_p99 > LATE_S:
        said += f"; the client itself was late by {1e3 * run.late_p99:.0f} ms at P99"
    if run.stolen > CALM:
        said += f"; the hypervisor took {run.stolen:.0%} in the calmest of {TRIES} runs"
    return said + "".join(f"\n    not done: {why}" for why in run.why)


_began = time.monotonic()


def say(words: str) -> None:
    print(f"{time.monotonic() - _began:5.0f} s  {words}", flush=True)


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends all context managers
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with Bench(options) as bench:
        rows = measure(bench, out)
    show(shown(rows), f"targets: {bench.slo}")
    say(f"in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
