"""The engines of bench_coserving.py's scenarios, the traffic, a single run and its counters."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rose.models import cache_dir
from rose.parts.lending import settings
from rose.parts.lending.operator.server import engine_args
from rose.parts.lending.vllm import device
from rose.parts.simulator import traces
from scripts import live_runs
from scripts.harness import REPOSITORY, Failed, cpu_s
from scripts.lending.bench_coserving_client import replay
from scripts.lending.bench_coserving_engines import (
    Guard,
    Operator,
    Process,
    Rollouts,
    Server,
    confine,
)
from scripts.lending.bench_coserving_tables import ALONE, METRICS, OURS, Run, Slo, percentile
from scripts.live_runs import Quota, Stolen, wait_for_calm

# scenario -> (server, rollout side)
PLAN = {
    "alone": ("plain", None),
    "naive": ("plain", "naive"),
    "static": ("static", "static"),
    "priority": ("priority", "priority_load"),
    "ours": ("ours", "ours"),
    "steps": ("ours", "ours"),
}
LENT = (OURS, "steps")  # scenarios behind the gate
# The last two values are those of conf/lending/default.yaml.
MAX_CONTEXT, MAX_SEQUENCES, MAX_BATCHED = (1024, 64, 2048)
MAX_PROMPT, MAX_OUTPUT = 800, 200
SETTLE_S, DRAIN_S, BASELINE_S = 2.0, 20.0, 8.0
CALIBRATE_S = (6.0, 12.0)  # seconds of S alone, each run at the load that the one before suggests
PROFILE_S = 20.0
# Largest share of a run's time that the hypervisor may take, and most attempts to keep it.
CALM, TRIES = 0.04, 3
SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder of engines' sockets, which a killed engine leaves
MADE = "vllm:generation_tokens_total"
STARTS = 16  # random slices, of which the one with the load nearest to the whole trace's is used


@dataclasses.dataclass
class Options:
    trace: str = ""  # file; generated if empty
    seconds: float = 25.0  # seconds of traffic in a run
    seeds: int = 3
    scenarios: str = "alone,naive,static,priority,ours"
    slack: float = 1.25  # targets, as multiples of the percentiles of S alone
    busy: float = 0.25  # share of the device's time that S alone uses
    slo: str = ""  # TTFT P50, P99, TPOT P50, P99 in seconds, separated by commas
    model: str = "512x2"  # hidden size x layers of both engines
    # Factor of the trace's prompt lengths. A prompt then costs several decode steps, as on a GPU.
    prompt_scale: float = 0.4
    output_scale: float = 0.05
    concurrency: int = 32  # concurrent turns of R
    kv_mib: float = 64.0  # MiB of KV memory of the device
    device: int = max(os.sched_getaffinity(0))  # number of a core
    priority: str = "idle"  # normal: both engines take turns, as kernels on a GPU do
    out: str = str(REPOSITORY / "outputs" / "bench_coserving")


class Bench:
    """All processes of the bench. A context manager: it ends them and removes its folders."""

    def __init__(self, options: Options) -> None:
        self.options, self._stack = options, ExitStack()
        self.device = {options.device}
        self.host = os.sched_getaffinity(0) - self.device
        self.servers: dict[str, Server] = {}
        self.rollouts: dict[str, Rollouts] = {}
        self.operator: Operator | None = None  # operator of the engines that have ROSE's schedulers
        self._lent: dict[str, str] = {}  # environment variables of those engines
        self.slo: Slo | None = None
        self.trace = traces.read(options.trace) if options.trace else traces.generate(0)
        self.trace = self.trace.tokens_scaled(options.prompt_scale, options.output_scale)
        self.trace = self.trace.clipped(MAX_PROMPT, MAX_OUTPUT)
        self.factor = 1.0  # factor of the trace's times, set by `calibrate`
        self._replays = 0

    def __enter__(self) -> Bench:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-coserving-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._stack.callback(os.sched_setaffinity, 0, self.host | self.device)
        self.guard = Guard()
        self._stack.callback(self.guard.close)
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    # ----------------------------------------------------------------- what takes part

    def start(self, *scenarios: str) -> None:
        """Start all processes that these scenarios need and that are not up, and park them."""
        # Starting takes a core several times as long.
        os.sched_setaffinity(0, self.host | self.device)
        new: list[Any] = []
        for server, rollouts in (PLAN[name] for name in scenarios):
            if server not in self.servers:
                self.servers[server] = self.server(server)
                new.append(self.servers[server])
            if rollouts and rollouts not in self.rollouts:
                self.rollouts[rollouts] = self.side(rollouts, server)
                new.append(self.rollouts[rollouts])
        for process in new:
            process.ready()
        confine(new, self.device, self.host)
        for process in new:
            if isinstance(process, Server):
                sizes = np.full(8, 100, np.int32), np.full(8, 8, np.int32)
                warm = traces.Trace(np.arange(8) * 0.1, *sizes)
                asyncio.run(replay(process.url, process.served, warm, 0, DRAIN_S))
            else:
                process.ask("start")
                time.sleep(SETTLE_S)
                process.ask("stop")
            process.park()
        os.sched_setaffinity(0, self.host)

    def server(self, kind: str, port: int | None = None) -> Server:
        config = settings.of_server(self._online(0.5 if kind == "static" else 1.0))
        args, env = engine_args(config.online, gpus=False), {SOCKETS: str(self.folder)}
        if kind == "priority":
            args["scheduling_policy"] = "priority"
        if kind == "ours":
            env |= self._lends()
        else:
            args |= {"scheduler_cls": None, "worker_extension_cls": None}
        made = Server(self.guard, f"server-{kind}", args, self.folder, port, env)
        self._stack.callback(made.end)
        return made

    def side(self, name: str, server: str) -> Rollouts:
        options = self.options
        job: dict[str, Any] = {"concurrency": options.concurrency, "group": 8, "seed": 1}
        env = {SOCKETS: str(self.folder)}
        if name.endswith("_load"):
            kind = "http"
            job |= {"url": self.servers[server].url, "served": self.servers[server].served}
        else:
            kind, engine_args = "engine", {}
            if name == "ours":
                engine_args["scheduler_cls"] = "rose.parts.lending.vllm.rollout.scheduler"
                env |= self._lends()
            kv_gib = options.kv_mib / 2**10 / (2 if name == "static" else 1)
            job |= {"model": str(model(options.model, 1)), "engine_args": engine_args}
            job["overrides"] = self._rolls(kv_gib)
        made = Rollouts(self.guard, f"rollouts-{name}", kind, job, self.folder, env)
        self._stack.callback(made.end)
        return made

    def _lends(self) -> dict[str, str]:
        """Return the environment variables of the engines on a lent device. The first call
        describes the device and starts to lend it."""
        if self.operator is None:
            profile = self.profile()
            slo = ", ".join(f"{name}_s: {seconds}" for name, seconds in vars(self.slo).items())
            own = (f"serving.online.slo={{{slo}}}", f"serving.lending.profile={profile}")
            serving = settings.of_server([*self._online(), *own])
            self.operator = Operator(f"bench-{os.getpid()}", serving.lending)
            self._stack.callback(self.operator.close)
            self._lent = device.describe(
                self.operator.folder, serving, json.loads(profile.read_text(encoding="utf-8"))
            )
        return self._lent

    def _rolls(self, kv_gib: float) -> list[str]:
        """Return the overrides of a rollout engine's configuration."""
        given = (f"model.max_context={MAX_CONTEXT}", f"rollout.kv_cache_gib={kv_gib}")
        return [*given, f"rollout.max_sequences={self.options.concurrency}"]

    def _online(self, share: float = 1.0) -> list[str]:
        """Return the overrides of a server's configuration, with this share of the KV memory."""
        given = {
            "model": model(self.options.model, 0),
            "dtype": "float32",
            "max_context": MAX_CONTEXT,
            "kv_cache_gib": share * self.options.kv_mib / 2**10,
            "max_sequences": MAX_SEQUENCES,
            "max_batched_tokens": MAX_BATCHED,
        }
        own = [f"serving.online.{key}={value}" for key, value in given.items()]
        return [*own, f"serving.lending.priority={self.options.priority}"]

    def profile(self) -> Path:
        """Return the profile of this device and these models. The first call measures it on the
        device's core, while all other processes are parked."""
        options, file = self.options, self.folder / "profile.json"
        words = [f"seconds={PROFILE_S}", f"model={model(options.model, 1)}", "cluster.gpus=0"]
        words += [*self._rolls(options.kv_mib / 2**10), *self._online()]
        none, core = Quota("none", 0), ("taskset", "-c", str(options.device))
        for _ in range(0 if file.exists() else TRIES):
            wait_for_calm(print)
            live_runs.profile(file, none, words, core)
            if json.loads(file.read_text(encoding="utf-8"))["stolen"] <= CALM:
                break
        return file

    # ----------------------------------------------------------------- one run

    def slice(self, seed: int, seconds: float) -> traces.Trace:
        """Draw several slices and return the one whose load is nearest to the whole trace's."""
        length = seconds / self.factor
        if length > self.trace.seconds:
            lasts = f"the trace lasts {self.factor * self.trace.seconds:.0f} s at this load"
            raise Failed(f"seconds={seconds:g}: {lasts}; give fewer seconds or a longer trace")
        draw = np.random.default_rng(seed)
        cuts = [
            self.trace.slice(start, length)
            for start in draw.uniform(0, self.trace.seconds - length, STARTS)
        ]
        wanted = _work(self.trace) * length / self.trace.seconds
        return min(cuts, key=lambda cut: abs(_work(cut) - wanted)).scaled(self.factor)

    def calm_run(self, scenario: str, seed: int, traffic: traces.Trace, seconds: float) -> Run:
        """Run a scenario until the hypervisor takes at most CALM of the machine, at most TRIES
        times. Return the calmest run: the host's other tenants are no property of a scenario."""
        found: list[Run] = []
        while len(found) < TRIES and (not found or found[-1].stolen > CALM):
            if found:
                wait_for_calm(print)
            before = Stolen.now()
            found.append(self.run(scenario, seed, traffic, seconds))
            found[-1].stolen = Stolen.now().share_since(before)
        return min(found, key=lambda run: run.stolen)

    def run(self, scenario: str, seed: int, traffic: traces.Trace, seconds: float) -> Run:
        server, side = self.servers[PLAN[scenario][0]], self.rollouts.get(PLAN[scenario][1])
        if self.operator is not None:
            self.operator.state.stops = float(scenario == OURS)

        async def measured() -> Run:
            await asyncio.sleep(SETTLE_S)
            before = await asyncio.to_thread(self._counts, scenario, server, side)
            # New prompts each time: a server that had the same traffic would have them in its cache.
            self._replays += 1
            sending = asyncio.create_task(
                replay(server.url, server.served, traffic, self._replays, DRAIN_S)
            )
            await asyncio.sleep(seconds)
            after = await asyncio.to_thread(self._counts, scenario, server, side)
            requests = await sending
            passed = after["at"] - before["at"]
            grown = {name: after[name] - before[name] for name in before}
            if scenario == "priority":  # engine's counter has the tokens of both sides
                grown["made"] -= sum(at <= seconds for one in requests for at in one.chunks)
            opened = grown["open_s"] + grown["shut_s"]
            latencies = [r.ttft for r in requests], [r.tpot for r in requests]
            counts = int(grown["evicted"]), int(grown["wasted"]), int(grown["preempted"])
            done, late = [r.done for r in requests], percentile([r.late for r in requests], 99)
            shares = grown["busy"] / passed, grown["made"] / passed
            gate = grown["open_s"] / opened if opened else None
            why = sorted({request.why for request in requests if request.why})
            return Run(scenario, seed, seconds, *latencies, done, late, *shares, *counts, gate, why)

        with _awake(server, side):
            return asyncio.run(measured())

    def _counts(self, scenario: str, server: Server, side: Rollouts | None) -> dict[str, float]:
        """Return counters that only grow. A run is the time between two readings."""
        found = dict.fromkeys(("made", "evicted", "wasted", "open_s", "shut_s"), 0.0)
        found |= {"at": time.monotonic(), "busy": cpu_s(psutil.Process(server.engine()))}
        if side:
            said = side.ask("count")
            found |= {name: said[name] for name in ("made", "evicted", "wasted")}
        if scenario == "priority":
            found["made"] = server.metric(MADE)
        found["preempted"] = server.metric("vllm:num_preemptions_total")
        if scenario in LENT:
            online, rollout, _ = self.operator.boards()
            if rollout:
                found |= {"open_s": rollout.open_s, "shut_s": rollout.shut_s}
            if online:
                found["preempted"] = online.preempted
        return found

    def baseline(self, name: str) -> float:
        """Return the tokens that this side generates per second of its engine's processor time,
        with nothing beside it. Processor time is the same on a machine with other load."""
        side = self.rollouts[name]
        server = self.servers["priority"] if name.endswith("_load") else None
        engine, counts = psutil.Process((server or side).engine()), []
        with _awake(server, side):
            for wait in (SETTLE_S, BASELINE_S):
                time.sleep(wait)
                made = server.metric(MADE) if server else side.ask("count")["made"]
                counts.append((cpu_s(engine), made))
        (began, first), (ended, last) = counts
        return (last - first) / (ended - began)

    # ----------------------------------------------------------------- all of them

    def calibrate(self) -> Iterator[str]:
        """Set the factor of the trace's times by which S alone is busy for `busy`. Yields text."""
        for seconds in CALIBRATE_S:
            rate = 2.0 if self.factor == 1.0 else len(self.trace) / self.trace.seconds / self.factor
            self.factor = len(self.trace) / self.trace.seconds / rate
            found = self.calm_run(ALONE, 1000, self.slice(1000 + int(seconds), seconds), seconds)
            if sum(found.done) < len(found.done) / 2:
                ended = f"ended {sum(found.done)} of {len(found.done)} requests"
                why = "; ".join(found.why)
                raise self.servers["plain"].failed(f"{ended} at {rate:.2f} a second ({why})")
            # The factor changes at most fourfold, because a short slice may be empty.
            self.factor *= float(np.clip(found.busy / self.options.busy, 0.25, 4.0))
            yield f"calibration: S's engine is busy for {found.busy:.0%} of {rate:.2f} requests/s"
        rate = len(self.trace) / self.trace.seconds / self.factor
        mean = f"{self.trace.prompt_tokens.mean():.0f} + {self.trace.output_tokens.mean():.0f}"
        yield f"the trace's times x {self.factor:.2f}: {rate:.2f} requests/s of {mean} tokens"

    def warm(self, scenario: str) -> None:
        """Make a run that isn't counted. An engine's heap grows until it has had the largest steps
        of many compositions, and a step in which the heap grows takes up to twice as long."""
        self.run(scenario, 1000, self.slice(2000, self.options.seconds), self.options.seconds)

    def targets(self) -> Slo:
        if self.options.slo:
            return Slo(*map(float, self.options.slo.split(",")))
        seconds = self.options.seconds
        alone = self.calm_run(ALONE, 1000, self.slice(2000, seconds), seconds)
        return Slo(*(self.options.slack * alone.latency(metric) for metric in METRICS))


@contextmanager
def _awake(server: Server | None, side: Rollouts | None) -> Iterator[None]:
    """Continue parked processes, with turns running on the rollout side, and park them again."""
    processes: list[Process] = [one for one in (server, side) if one]
    for process in processes:
        process.wake()
    try:
        if side:
            side.ask("start")
        yield
    finally:
        if side:
            side.ask("stop")
        for process in processes:
            process.park()


def _work(trace: traces.Trace) -> float:
    """Return the trace's work in prompt tokens. A generated token takes as long as ten."""
    return float(trace.prompt_tokens.sum() + 10 * trace.output_tokens.sum())


def model(shape: str, seed: int) -> Path:
    """Return the folder of a random model of this shape, created in the cache if missing."""
    script = Path(__file__).with_name("bench_coserving_model.py")
    sizes = shape.split("x")
    if len(sizes) != 2 or not all(map(str.isdecimal, sizes)):
        raise Failed(f"model={shape}: give HIDDENxLAYERS, as 512x2")
    digest = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
    folder = cache_dir() / "models" / f"bench-coserving-{shape}-{seed}-{digest}"
    if not folder.exists():
        module = f"scripts.lending.{script.stem}"
        command = [sys.executable, "-m", module, str(folder), *sizes, str(seed)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=300)
    return folder
