"""Measure the gain from borrowed engines and better policies, live on this machine, as ratios.

    python scripts/lending/bench_live.py                                  # about an hour
    python scripts/lending/bench_live.py --seeds 1 --steps 4              # a quick run
    python scripts/lending/bench_live.py --csv docs/results/bench_live.csv

    fixed  two dedicated engines, synchronous steps, cache-affine routing
    rose   fixed with two engines of serving devices: ROSE's provisioning and routing
    best   the devices of rose, earliest-finish routing, unfinished groups carried over to the next step

Each engine has a CPU quota of its own (live_runs.py). A serving device is one quota for two
engines: the online server, which replays a trace of bursty traffic over HTTP, and the rollout
engine behind the gate (docs/serving.md). So a borrowed engine is added compute, as a GPU would be,
limited to the part that serving leaves idle. The servers and their traffic run in all three
systems; in fixed, nothing is lent. The systems alternate within a seed, in another order each time.
A seed sets the tasks, the traffic and the engines' sampling. Counted are --steps consecutive steps
after all borrowed engines have joined: the first in which the hypervisor took less than 5% of a
virtual machine (live_runs.CALM).

Prints the mean step per system, its ratio to fixed within the same seed (median, smallest,
largest), the share of tokens that borrowed engines generated, and the latencies of the servers'
users. The figures need a machine without other load that has 4 x quota cores, and 1.5 more for
trainer, hosts and clients. Under a quota of 0.15 an engine of this size runs for too short a time
at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from rose import config as cfg
from rose.models import resolve
from rose.parts.simulator import traces
from rose.processes import die_with_parent
from scripts.csv_tables import merge, shown
from scripts.harness import PATHS, REPOSITORY, configured, free_port, stop
from scripts.lending.bench_coserving_client import Request, replay
from scripts.live_runs import LOOK_S, Live, Quota, end_in_order, wait_for_calm

DEADLINE_S = 1800.0  # seconds of one run
START_S = 600.0  # seconds for a serving device to start
TRACE_S, PIECE_S, DRAIN_S = 3600.0, 30.0, 10.0
SERVED = "chat"
BORROWED = 2  # number of serving devices
BATCH = 256  # trajectories of a step
RATE = 0.08  # online requests per second and device
SLO = "{ttft_p50_s: 1.0, ttft_p99_s: 2.0, tpot_p50_s: 0.25, tpot_p99_s: 0.5}"
# On a busy machine an engine's host has no core of its own, so ranks may be seconds late. No rank
# is lost here, so the limit is generous.
ALIKE = ("trainer.steps=1000000", "rollout.workers=2", "serving.lost_after_s=30")
SYSTEMS: dict[str, tuple[str, ...]] = {
    "fixed": ("serving=none", "scheduler/provisioning=fixed", "scheduler/routing=cache_affine"),
    "rose": ("scheduler/provisioning=rose", "scheduler/routing=rose"),
    "best": (
        "scheduler/provisioning=rose",
        "scheduler/routing=earliest_finish",
        "scheduler/batching=carry_over",
    ),
}


class Device:
    """A serving device: `python -m rose.serving` and its engines in one quota."""

    def __init__(
        self,
        folder: Path,
        number: int,
        options: argparse.Namespace,
        model: Path,
        run: str,
        profile: Path | None,
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._quota, self._lends = Quota(f"device-{number}", options.quota), profile is not None
        self.log = folder / f"{run}-device-{number}.log"
        words = [
            f"name={run}",
            f"output_dir={folder}",
            "rollout.threads=1",
            "rollout.kv_cache_gib=0.1",
            f"serving.online.model={model}",
            f"serving.online.served_name={SERVED}",
            f"serving.online.port={port}",
            "serving.online.dtype=float32",
            "serving.online.kv_cache_gib=0.1",
            "serving.online.max_context=512",
            f"serving.online.slo={SLO}",
            *([f"serving.lending.profile={profile}"] if profile else []),
        ]
        parent = os.getpid()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rose.serving", *words],
                stdout=log,
                cwd=REPOSITORY,
                stderr=subprocess.STDOUT,
                env=os.environ | PATHS,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )

    async def ready(self) -> None:
        """Wait until the device serves. Raises `SystemExit` if it does not within START_S."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            if await asyncio.to_thread(self._healthy):
                self._check_lends()
                return
            await asyncio.sleep(1.0)
        raise SystemExit(f"a serving device did not start within {START_S:g} s; see {self.log}")

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def _check_lends(self) -> None:
        """Raise `SystemExit` if the device has a profile but refuses to lend. The run would wait
        for its borrowed engines until the deadline."""
        for line in (
            self.log.read_text(errors="replace", encoding="utf-8").splitlines()
            if self._lends
            else ()
        ):
            _, refused, why = line.partition("nothing is lent: ")
            if refused:
                raise SystemExit(
                    f"the serving device of {self.log.name} lends nothing: {why}; a larger --quota?"
                )

    def look(self) -> None:
        """Confine the engines that have started. Call this often, because engines restart."""
        self._quota.add(self._process.pid)

    def limit(self) -> None:
        self.look()
        self._quota.limit()

    def close(self) -> None:
        if self._process.poll() is None:
            stop(self._process)
        self._quota.close()


class Measured(NamedTuple):
    system: str
    seed: int
    step_s: float  # mean, as carried-over groups make short steps follow long ones
    borrowed_share: float  # share of the tokens
    requests: int
    ttft_p99_s: float
    tpot_p99_s: float


def profile(
    folder: Path, options: argparse.Namespace, model: Path, core: int | None = None
) -> Path:
    """Measure a device with this quota. Its engines run on `core` if one is given."""
    file, quota = folder / "profile.json", Quota("profile", options.quota, core)
    command = [
        sys.executable,
        "-m",
        "rose.parts.lending.profile",
        f"out={file}",
        f"seconds={options.profile_s}",
        f"model={model}",
        "model.max_context=512",
        "rollout.threads=1",
        "rollout.kv_cache_gib=0.1",
        f"serving.online.model={model}",
        "serving.online.dtype=float32",
        "serving.online.kv_cache_gib=0.1",
        "serving.online.max_context=512",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | PATHS,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "measuring" in line:  # printed once an engine has started
            quota.add(process.pid, everybody=True)
            quota.limit()
    quota.close()
    if process.wait():
        raise SystemExit(f"the profile ended with {process.returncode}:\n{''.join(lines[-20:])}")
    return file


async def measure(
    folder: Path,
    system: str,
    seed: int,
    options: argparse.Namespace,
    overrides: list[str],
    model: Path,
    profiled: Path,
) -> Measured:
    name = f"{system}-{seed}"
    wanted = 0 if system == "fixed" else BORROWED
    live = Live(
        folder,
        name,
        [*ALIKE, f"trainer.batch_size={BATCH}", f"seed={seed}", *SYSTEMS[system], *overrides],
        options.quota,
    )
    devices, clients, over, words = [], [], asyncio.Event(), cfg.read_shape(model).vocab
    try:
        await _until(live, lambda: live.phase()[0] == "rollout", "its first step")
        devices = [
            Device(folder, number, options, model, name, profiled if wanted else None)
            for number in range(BORROWED)
        ]
        for number, device in enumerate(devices):
            await device.ready()
            device.limit()
            trace = traces.generate(
                1000 * seed + number, TRACE_S, RATE, prompt=(64.0, 0.6), output=(24.0, 0.6)
            )
            clients.append(
                asyncio.create_task(users(device.url, trace.clipped(300, 100), seed, over, words))
            )
        before = len(live.steps(0))  # steps before the traffic began
        first = await _until(
            live, lambda: _first(live, before, wanted), f"{wanted} borrowed engines", devices
        )
        rows = await _until(
            live,
            lambda: live.calm_row(first, options.steps),
            f"{options.steps} steps in a row in which the hypervisor leaves the machine to us",
            devices,
        )
        over.set()
        served = [r for requests in await asyncio.gather(*clients) for r in requests if r.done]
        return Measured(
            system,
            seed,
            statistics.mean(row["time_step"] for row in rows),
            statistics.mean(row["borrowed_token_share"] for row in rows),
            len(served),
            _p99([r.ttft for r in served]),
            _p99([r.tpot for r in served]),
        )
    finally:
        for client in clients:
            client.cancel()
        live.close()
        for device in devices:
            device.close()


async def _until(live: Live, ready, what: str, devices: Sequence[Device] = ()):
    end = time.monotonic() + DEADLINE_S
    while not (value := ready()):
        live.look()
        for device in devices:
            device.look()
        if live.over or time.monotonic() > end:
            raise SystemExit(
                f"{live.run.name}: {what} did not come; see {live.run}.log and {live.run}/logs"
            )
        await asyncio.sleep(LOOK_S)
    return value


def _first(live: Live, before: int, wanted: int) -> int:
    """Return the number of steps that don't count, or 0 while a borrowed engine is missing. They
    are the first `before`, those until the last borrowed engine had joined, and the one after."""
    having = [
        at
        for at, row in enumerate(live.steps(0))
        if at >= before and row["borrowed_workers"] >= wanted
    ]
    return having[0] + 2 if having else 0


async def users(
    url: str, trace: traces.Trace, seed: int, over: asyncio.Event, words: int
) -> list[Request]:
    """Replay the trace, piece by piece, until `over` is set or the trace ends."""
    found, begins = [], 0.0
    while not over.is_set() and begins < trace.seconds:
        piece = trace.slice(begins, PIECE_S)
        began = time.monotonic()
        # A seed for each piece: the server's prefix cache would have repeated prompts.
        found += await replay(url, SERVED, piece, 10_000 * seed + int(begins), DRAIN_S, words=words)
        if found and not any(request.done for request in found):
            raise SystemExit(f"{url} answers no request of the traffic: {found[-1].why}")
        begins += PIECE_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), max(0.0, began + PIECE_S - time.monotonic()))
    return found


def _p99(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, 99)) if known else float("nan")


def save(found: list[Measured], file: Path) -> None:
    """Merge the results into `file`. Its rows of other seeds and systems stay."""
    merge(
        file,
        [m._asdict() for m in found],
        lambda row: (row["system"], int(row["seed"])),
        lambda row: (int(row["seed"]), list(SYSTEMS).index(row["system"])),
    )


def show(found: list[Measured], console: Console, options: argparse.Namespace) -> None:
    fixed, rows = {m.seed: m.step_s for m in found if m.system == "fixed"}, []
    for system in dict.fromkeys(m.system for m in found):
        of = [m for m in found if m.system == system]
        ratios = [fixed[m.seed] / m.step_s for m in of if m.seed in fixed] or [float("nan")]
        rows.append(
            {
                "system": system,
                "step, s": statistics.median(m.step_s for m in of),
                "faster than fixed": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "tokens by borrowed": statistics.mean(m.borrowed_share for m in of),
                "TTFT P99, s": statistics.mean(m.ttft_p99_s for m in of),
                "TPOT P99, s": statistics.mean(m.tpot_p99_s for m in of),
                "requests": sum(m.requests for m in of),
            }
        )
    title = f"2 dedicated engines, {BORROWED} serving devices, {options.quota:g} cores each"
    console.print(shown(rows, title))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quota", type=float, default=0.15, help="cores of each engine and device; 0: no quota"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="that count, of each run")
    parser.add_argument("--profile-s", type=float, default=60.0)
    parser.add_argument("--csv", type=Path, help="rows that it has of other seeds and systems stay")
    parser.add_argument(
        "--keep", type=Path, help="leave the runs in this folder; a profile there is used again"
    )
    args, overrides = parser.parse_known_args()
    end_in_order()
    console, found = Console(width=120), []
    with tempfile.TemporaryDirectory(prefix="rose-bench-live-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        # The run's own model, which the online servers serve too.
        model = resolve(configured(*overrides).model)
        file = folder / "profile.json"
        if not file.exists():
            wait_for_calm(console.print)
            profile(folder, args, model)
        names = list(SYSTEMS)
        for seed in range(args.seeds):
            for system in names[seed % len(names) :] + names[: seed % len(names)]:
                wait_for_calm(console.print)
                found.append(
                    asyncio.run(measure(folder, system, seed, args, overrides, model, file))
                )
                console.print(
                    f"{system}, seed {seed}: {found[-1].step_s:.2f} s a step", highlight=False
                )
                if args.csv:
                    save(found, args.csv)
    show(found, console, args)


if __name__ == "__main__":
    main()
