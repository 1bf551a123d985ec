"""What online users notice of rollouts on the same device, and what the rollouts gain: real vLLM,
real HTTP traffic.

    python scripts/bench_coserving.py                                   # a quarter of an hour
    python scripts/bench_coserving.py trace=AzureLLMInferenceTrace_conv_2023.csv seconds=60 seeds=5
    python scripts/bench_coserving.py scenarios=alone,naive,ours seconds=20 seeds=2

Slices of a trace (Azure's format; made by rose.sim.traces if none is given) are replayed open loop
against the online server S, with the rollout engine R beside it in a closed loop; both engines are
confined to one core, which stands for the device. The trace's lengths are scaled down to models
that a core serves, and its times so that S alone keeps the core busy for `busy` of the time. Every
seed is another slice; under it the scenarios run one after the other:
    alone     S, twice a seed: what differs between the two is the machine's noise
    naive     R beside it; the system's scheduler shares the core, each engine has all the KV memory
    static    the same, with half of the KV memory each
    priority  one engine of the same weights with vLLM's priority scheduling; rollouts have the lower one
    ours      two engines, R behind the gate
Targets are S alone's own percentiles times `slack`, from a run before the first seed, unless `slo`
gives them; before that each scenario has had a run that isn't counted, which warms its engines. On
a virtual machine a run of which the hypervisor took more than 4% is made again, twice at most. Left
out: text (prompts are random tokens, outputs have the trace's lengths), GPUs (see gpu_check.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from bench_coserving_bench import CALM, PLAN, TRIES, Bench, Options
from bench_coserving_tables import ALONE, Alone, Run, Slo, shown, table
from csv_tables import write_csv
from harness import Failed, keyed, listed
from rich.console import Console

LATE_S = 0.02  # of the client at P99: more is said


def parse(argv: list[str]) -> Options:
    """Options as key=value. Raises `Failed` naming the one that is wrong."""
    options = Options(**keyed(argv, __doc__, **vars(Options())))
    names = listed("scenarios", options.scenarios, PLAN)
    if ALONE not in names:
        raise Failed(
            f"scenarios={options.scenarios}: {ALONE} is needed, all others are compared with it"
        )
    if options.device not in os.sched_getaffinity(0) or len(os.sched_getaffinity(0)) < 2:
        raise Failed(
            f"device={options.device}: a core of {sorted(os.sched_getaffinity(0))} and one more "
            "are needed"
        )
    return options


def measure(bench: Bench, out: Path) -> list[dict]:
    """The table's rows; after each seed what was found so far is in `out`."""
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
    # each is compared with such an engine of its own, ungated
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
    """The table's rows."""
    rows = table(runs, bench.slo, alone)
    found = {
        "options": dataclasses.asdict(bench.options),
        "factor": bench.factor,
        "slo": dataclasses.asdict(bench.slo),
        "alone": dataclasses.asdict(alone),
        "table": rows,
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    (out / "bench_coserving.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    write_csv(out / "bench_coserving.csv", rows)
    return rows


def _words(run: Run, slo: Slo) -> str:
    said = (
        f"seed {run.seed} {run.scenario:18}{len(run.done):4} requests, "
        f"{len(run.done) - run.met(slo):3} missed; TTFT P50 {1e3 * run.latency('ttft_p50'):.0f} "
        f"P99 {1e3 * run.latency('ttft_p99'):.0f} ms, TPOT P50 {1e3 * run.latency('tpot_p50'):.1f} "
        f"P99 {1e3 * run.latency('tpot_p99'):.1f} ms; S busy {100 * run.busy:.0f}%, rollouts "
        f"{run.made:.0f} tokens/s"
    )
    if run.late_p99 > LATE_S:
        said += f"; the client itself was late by {1e3 * run.late_p99:.0f} ms at P99"
    if run.stolen > CALM:
        said += (
            f"; in the calmest of {TRIES} runs the hypervisor took {100 * run.stolen:.0f}% of the "
            "machine"
        )
    return said + "".join(f"\n    not done: {why}" for why in run.why)


_began = time.monotonic()


def say(words: str) -> None:
    print(f"{time.monotonic() - _began:5.0f} s  {words}", flush=True)


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exits of all context managers run
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with Bench(options) as bench:
        rows = measure(bench, out)
    Console(width=160).print(shown(rows, bench.slo))
    say(f"in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
