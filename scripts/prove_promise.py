"""The promise, shown on one machine: as good a policy with a quarter of the dedicated engines.

    python scripts/prove_promise.py                                      # three seeds, 50 minutes
    python scripts/prove_promise.py --seeds 1 --steps 8 --every 20       # a look
    python scripts/prove_promise.py --trace AzureLLMInferenceTrace_conv_2023.csv

An agent that knows no trainer (promise_agent.py) learns in sandboxes, over the gateway, as a job of
a real Slurm whose virtual nodes are this machine (slurm/dev_cluster.sh). Each engine, and each
serving device, has the same CPU quota; trainer, environment hosts and clients have none.

    dedicated  four dedicated engines; two devices serve users beside, and lend nothing
    alone      one dedicated engine and the same devices, which lend nothing; half of the steps and 2
    borrowed   one dedicated engine; the devices lend what serving leaves idle, a spare engine joins.
               Every --every seconds the next of them is killed or preempted, or an environment
               host is killed; at half of the steps Slurm requeues the training job

The simulator's forecast of all is made before them. Printed: a table with a verdict for each
claim, and a figure, promise.svg. Users come as in a public trace (--trace), whose time is stretched
to --rate: 18 times for Azure's conversations of 2023. That keeps the shape of its bursts and not
their seconds. Taken are the 20 minutes with the largest bursts in the first four, a seed each; they
are busier than --rate. A request that isn't answered counts as infinitely late; what would come
after a run's end isn't sent. A killed host's sandboxes are not restored: an agent that is a program
of its own has no checkpoints, so it is run again, and gets the answers that its first run got until
then.

What is done is kept in --out: an interrupted proof goes on there. All that it starts it ends, also
after Ctrl-C. Needs root, Slurm's packages (slurm/dev_cluster.sh install) and a machine that does
nothing else: 4 x quota cores and two more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

import promise_page
from bench_live import profile
from harness import REPOSITORY, configured
from live_runs import Quota, end_in_order, wait_for_calm
from promise_cluster import cluster
from promise_forecast import forecast
from promise_run import GROUP, MODEL, SIDES, Plan, run

from rose.files import write_whole
from rose.models import resolve
from rose.sandbox import SandboxError
from rose.sandbox.probe import choose
from rose.sim.traces import TraceError, read

KEYS = ("steps", "batch", "quota", "rate", "trace", "every", "overrides")


def checked(args: argparse.Namespace) -> None:
    """What would fail later. Raises `SystemExit` with one line."""
    if os.geteuid():
        raise SystemExit("prove_promise: needs root, for virtual nodes and CPU quotas")
    if args.batch % GROUP or args.batch < GROUP or args.steps < 4 or args.seeds < 1:
        raise SystemExit(
            f"prove_promise: --batch {args.batch}: a multiple of {GROUP}; --steps {args.steps}: 4 "
            f"or more; --seeds {args.seeds}: 1 or more"
        )
    try:
        if args.trace is not None:
            read(args.trace)
        choose()
    except (OSError, TraceError, SandboxError) as error:
        raise SystemExit(f"prove_promise: {error}") from None
    Quota("check", args.quota).close()


def planned(args: argparse.Namespace, overrides: list[str]) -> Plan:
    """Raises `SystemExit` if the folder has runs of other settings."""
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: str(getattr(args, key)) for key in KEYS[:-1]} | {"overrides": overrides}
    file = folder / "settings.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else settings
    if known != settings:
        other = {key: known.get(key) for key in settings if known.get(key) != settings[key]}
        raise SystemExit(f"prove_promise: {folder} has runs with {other}; give another --out")
    write_whole(file, json.dumps(settings, indent=1).encode())
    return Plan(
        folder,
        resolve(configured(*MODEL).model),
        folder / "profile.json",
        args.steps,
        args.batch,
        args.quota,
        args.rate,
        args.trace,
        args.every,
        overrides,
    )


def prove(plan: Plan, args: argparse.Namespace) -> list[dict]:
    """What is not there yet, in order; the figures of all runs."""
    if not plan.profile.exists():
        _say("profile of a serving device")
        wait_for_calm(_say)
        profile(plan.folder, args, plan.model)
    _say("forecast")
    _say(json.dumps(forecast(plan)))
    wanted = [
        (side, seed)
        for seed in range(1, args.seeds + 1)
        for side in (list(SIDES) if seed % 2 else reversed(SIDES))  # in turn
    ]
    files = {one: plan.folder / f"{one[0]}-{one[1]}.json" for one in wanted}
    missing = [one for one in wanted if not files[one].exists()]
    if missing:
        with cluster(plan.folder / "slurm"):
            for side, seed in missing:
                name = f"{side}, seed {seed}"
                wait_for_calm(_say)
                found = asyncio.run(
                    run(plan, side, seed, lambda words, name=name: _say(f"{name}: {words}"))
                )
                write_whole(files[side, seed], json.dumps(found).encode())
    return [json.loads(files[one].read_text(encoding="utf-8")) for one in wanted]


def _say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--batch", type=int, default=16, help="trajectories of a step")
    parser.add_argument("--quota", type=float, default=0.15, help="cores of each engine and device")
    parser.add_argument("--rate", type=float, default=0.15, help="online requests/s of a device")
    parser.add_argument("--trace", type=Path, help="of online requests; else one is made")
    parser.add_argument("--every", type=float, default=40.0, help="seconds between two kills")
    parser.add_argument("--profile-s", type=float, default=40.0, help="of a serving device")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "outputs" / "promise")
    args, overrides = parser.parse_known_args()
    end_in_order()
    checked(args)
    plan = planned(args, overrides)
    runs = prove(plan, args)
    found = promise_page.lines(runs, forecast(plan))
    words = f"{args.seeds} seed{'s' * (args.seeds > 1)}, {args.steps} steps of {args.batch}"
    figure = promise_page.figure(runs, f"The promise: {words} trajectories")
    write_whole(plan.folder / "promise.svg", figure.encode())
    text = promise_page.table(found)
    write_whole(plan.folder / "promise.md", f"{text}\n".encode())
    print(f"\n{text}\n\n{plan.folder}/promise.svg")


if __name__ == "__main__":
    main()
