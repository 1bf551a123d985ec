"""The checks of co-serving for gpu_check.py: the page pool that lends KV memory; the profile; an
online server S and a rollout engine R that share the memory and the steps of one device.

Imports vLLM only within the checks.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from scripts.harness import PATHS, REPOSITORY
from tests.gpu.engine import device_used
from tests.gpu.frame import GIB, Report, check
from tests.gpu.model import folder
from tests.gpu.users import STOP_S, Rollouts, Users, until

# Share of the KV budget by which lending may raise the memory in use: some pages are shared.
BEYOND = 0.15
# Seconds beyond the time of the moves until S must have its pages again; seconds for which its
# board must show them. It shows all of the memory for some milliseconds at each move, too.
REMAP_S, STEADY_S = 5.0, 0.3
LOOSE = (10.0, 20.0, 5.0, 10.0)  # targets while S's users are measured alone, seconds
WARM_S = 3.0  # seconds of users before the first phase counts


class Pages(msgspec.Struct):
    nbytes: int


class Pair(msgspec.Struct):
    rollout: str = "gpu"  # file of conf/rollout
    dtype: str = "bfloat16"
    profile: str | None = None  # file of an earlier call; measured if null
    profile_s: float = 8.0  # seconds of measuring, after the start of both engines
    kv_gib: float = 8.0  # GiB of the device for both engines
    context: int = 2048
    turns: int = 64  # concurrent turns of R
    turn: tuple[int, int] = (512, 256)  # prompt and new tokens of one
    clients: int = 8  # concurrent requests of S
    request: tuple[int, int] = (512, 32)
    # seconds of each phase: S alone; R alone; both; both without stops; R again after it was stopped
    phase_s: float = 6.0
    slack: float = 1.2  # targets, as multiples of what S's users get alone
    within: float = 0.5  # least share of online requests within their targets
    # Least share of the memory mapped by R that the device has again when R is stopped.
    given_back: float = 0.9


GPU = Pair()
CPU = Pair(*("cpu", "float32", None, 6.0, 0.0625, 512, 4, (32, 32), 2, (32, 8)), *(3.0, 3.0, 0.2))


@check(
    "the page pool that lends KV memory: mapped, released, and seen by the device",
    "cuMemCreate and cuMemMap must work: drivers before 11.2 and some containers (gVisor) lack "
    "them",
    {"cuda": Pages(2**30), "cpu": Pages(0)},
    90.0,
    on_cpu=False,
    needs_model=False,
)
def pool(report: Report) -> None:
    import torch

    from rose.parts.lending.vllm.vmm import CudaDriver, PagePool

    torch.cuda.init()
    made = PagePool(CudaDriver(torch.cuda.current_device()), report.sizes.nbytes)
    report.figure("page", made.page / 2**20, "MiB")
    report.say(page_pool(made, lambda: torch.cuda.mem_get_info()[0]))


def page_pool(pool, free: Callable[[], int]) -> str:
    """Map, write, release, map again, close. `free`, the device's free bytes, must follow each of
    them, within a sixteenth of the pool for what the driver takes for itself."""
    half, told = pool.nbytes // 2 // pool.page * pool.page, []
    quarter = half // 2 // pool.page * pool.page

    def step(name: str, work: Callable, takes: int) -> None:
        before, began = free(), time.perf_counter()
        work()
        told.append(f"{name} {1e3 * (time.perf_counter() - began):.1f} ms")
        if abs((taken := before - free()) - takes) > pool.nbytes // 16:
            words = f"took {taken} bytes of the device instead of {takes}"
            raise RuntimeError(f"page pool, {name}: {words}")

    values = pool.tensor()
    # The pool maps its first page at the start.
    step(f"map {half >> 20} MiB", lambda: pool.map([(0, half)]), half - pool.page)
    if values[:half].any():
        raise RuntimeError("page pool: fresh pages are not zeros")
    values[:half] = 7
    step("release half of it", lambda: pool.release([(0, quarter)]), -quarter)
    if not (values[quarter:half] == 7).all():
        raise RuntimeError("page pool: pages that were kept lost their bytes")
    step("map it again", lambda: pool.map([(0, half)]), quarter)
    if values[:quarter].any():
        raise RuntimeError("page pool: pages mapped again are not zeros")
    values[:half] = 9
    if not (values[:half] == 9).all():
        raise RuntimeError("page pool: what was written is not what is read")
    del values
    step("close", pool.close, -half)
    return ", ".join(told)


# --------------------------------------------------------------------------- profile


def overrides(report: Report, targets: tuple[float, ...] = LOOSE) -> list[str]:
    """Return the overrides of a run with an engine beside an online server of the same model.
    `targets` are in seconds, in the order of serving.online.slo's keys."""
    sizes = report.sizes
    gpus = ["cluster=gpus", "cluster.gpus=2", "trainer.ranks=1"]
    cpus = ["serving.lending.revoke_after_s=20"]  # larger on a CPU, which may have other work
    names = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
    slo = ", ".join(f"{name}: {value}" for name, value in zip(names, targets, strict=True))
    words = (
        f"rollout={sizes.rollout} rollout.workers=1 rollout.max_sequences={max(32, sizes.turns)} "
        f"model.dtype={sizes.dtype} model.max_context={sizes.context} "
        f"trainer.micro_batch_tokens={max(2048, sizes.context)} serving.online.dtype={sizes.dtype} "
        f"serving.online.max_context={sizes.context} serving.online.kv_cache_gib={sizes.kv_gib} "
        "serving.online.port=0 serving.lending.priority=normal"
    )
    online = [f"serving.online.model={folder(report)}", f"serving.online.slo={{{slo}}}"]
    return [*(gpus if report.gpus else cpus), *words.split(), *online]


@check(
    "python -m rose.parts.lending.profile: step times of both engines, alone and together",
    "the log has both engines' words; memory: --set profile.kv_gib=2",
    {"cuda": GPU, "cpu": CPU},
)
def profile(report: Report) -> None:
    """Run rose.parts.lending.profile as an operator does in the documented first step."""
    out = report.folder / "profile.json"
    if out.exists():  # written by another check
        out.unlink()
    module, seconds = "rose.parts.lending.profile", f"seconds={report.sizes.profile_s:g}"
    words = [sys.executable, "-m", module, f"out={out}", seconds, f"model={folder(report)}"]
    words += overrides(report)
    began = time.monotonic()
    env = os.environ | PATHS
    done = subprocess.run(words, cwd=REPOSITORY, env=env, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}; its words are in the log")
    report.figure("the whole command", time.monotonic() - began, "s")
    found = json.loads(out.read_text(encoding="utf-8"))
    for side in ("online", "rollout"):
        predictor, name = found[side]["predictor"], f"{side}: mean error of predicted steps"
        report.figure(f"{side}: steps measured", predictor["samples"], least=1)
        remedy = "other work on the device, or too short: --set profile.profile_s=60"
        report.figure(name, 100 * predictor["mape"], "%", most=60.0, remedy=remedy)
    name = "a rollout step holds a concurrent online step up, P99"
    report.figure(name, 100 * found["interference"]["hold_p99"], "% of its time")


# --------------------------------------------------------------------------- an online server and a
# rollout engine


@check(
    "an online server and a rollout engine on one device: HTTP, memory and steps change hands",
    "the log and online.log beside it have the engines' words; docs/serving.md",
    {"cuda": GPU, "cpu": CPU},
    360.0,  # includes the profile if this check runs alone
)
async def coserving(report: Report) -> None:
    path = Path(report.sizes.profile or report.folder / "profile.json")
    if not path.exists():
        report.say("no profile yet: it is measured")
        profile.work(report)
    await _coserving(report, Both(report, json.loads(path.read_text(encoding="utf-8"))))


class Both:
    """S, R and the operator's board, all started by this process."""

    def __init__(self, report: Report, measured: dict[str, Any]) -> None:
        from rose.parts.lending import board, settings
        from rose.parts.lending.operator.control import ControlBoard
        from rose.parts.lending.operator.server import OnlineServer
        from rose.parts.lending.vllm import device

        self.report, self.measured = report, measured
        self.config = config = settings.composed(self._overrides(LOOSE))
        self.boards = board.folder(f"gpu-check-{os.getpid()}")
        self.variables = device.describe(self.boards, config.serving, measured)
        self.control = ControlBoard(self.boards, config.serving.lending, "", report.say)
        log, threads = report.folder / "online.log", None if report.gpus else 1
        self.server = OnlineServer(config.serving, self.boards, log, report.gpus, threads)
        self.tasks: list[asyncio.Task] = []
        self.users = Users(report, self.server, config.serving.online.model)
        self.turns = Rollouts(report, None)
        self._last_made = 0.0  # R's tokens when its board was last read

    def _overrides(self, targets: tuple[float, ...]) -> list[str]:
        model = ["model.source=folder", f"model.path={folder(self.report)}"]
        return [*overrides(self.report, targets), *model]

    async def start_online(self) -> None:
        """Start S, as rose.parts.lending.operator.operate starts it."""
        works = self.control.beat(), self.server.run(self.report.say)
        self.tasks = [asyncio.create_task(work) for work in works]
        await self._serves()
        self.users.begin(self.report.sizes.clients)

    async def restart_online(self, targets: tuple[float, ...]) -> None:
        """Kill S, which is started again with these targets."""
        from rose.parts.lending import settings
        from rose.parts.lending.vllm import device

        await self.users.end()
        self.config = settings.composed(self._overrides(targets))
        device.describe(self.boards, self.config.serving, self.measured)
        self.server.up = False
        os.killpg(self.server._process.pid, signal.SIGKILL)
        await self._serves()

    async def _serves(self) -> None:
        with self.report.took("start of S"):
            seconds = self.config.serving.online.start_timeout_s
            await self.until(lambda: self.server.up, seconds, "the online server")

    async def start_rollouts(self) -> None:
        """Start R beside S, as rose.parts.lending.operator.operate starts it."""
        from rose.engine.vllm_engine import Engine
        from rose.parts.lending.operator import operate
        from rose.parts.lending.operator.server import FREE_SHARE

        own: dict[str, Any] = {"engine_args": {"scheduler_cls": operate.SCHEDULER}}
        own["kv_cache_gib"] = self.report.sizes.kv_gib
        if self.report.gpus:
            own["gpu_memory_utilization"] = FREE_SHARE
        os.environ.update(self.variables)
        rollout, model = msgspec.structs.replace(self.config.rollout, **own), folder(self.report)
        own = {"gpus": self.report.gpus, "seed": 1}
        self.turns.engine = await Engine.start(model, rollout, self.config.model, **own)
        self.report.say("the rollout engine is up beside it")

    async def until(self, condition: Callable[[], object], seconds: float, what: str) -> float:
        """Wait as tests.gpu.users does, with both boards in the error."""

        def words() -> str:
            return f"{what}; S's board: {self.board('online')}; R's: {self.board('rollout')}"

        tasks = [*self.tasks, *self.users.tasks, *self.turns.tasks]
        return await until(condition, seconds, words, tasks)

    async def rate(self, seconds: float) -> float:
        """Return R's tokens a second, while all tasks are watched. R's board counts each step's
        tokens. Its turns get theirs many at once (rollout.stream_interval)."""
        before, began = self._made(), time.monotonic()
        await self.until(lambda: time.monotonic() - began > seconds, math.inf, "")
        return (self._made() - before) / (time.monotonic() - began)

    def _made(self) -> float:
        if (board := self.board("rollout")) is not None:
            self._last_made = board.made_tokens
        return self._last_made

    def board(self, name: str) -> Any:
        from rose.parts.lending.operator import metrics

        return getattr(metrics.read(self.boards), name)

    async def mapped(self) -> int:
        """Return the bytes of R's KV cache that have memory."""
        return (await self.turns.engine._llm.collective_rpc("rose_kv_layout"))[0]["mapped_bytes"]

    async def close(self) -> None:
        await self.users.end()
        await self.turns.end()
        if self.turns.engine is not None:
            await self.turns.engine.shutdown()
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks, timeout=STOP_S)
        await self.server.stop()
        self.control.close()
        shutil.rmtree(self.boards, ignore_errors=True)


async def _coserving(report: Report, both: Both) -> None:
    sizes = report.sizes
    try:
        await both.start_online()
        alone = await _users_alone(both)
        await both.restart_online(tuple(sizes.slack * value for value in alone))
        await both.start_rollouts()
        both.turns.begin(sizes.turns)
        took = await both.until(
            lambda: both.turns.made, 60.0, "the first token of R: is anything lent?"
        )
        report.figure("first token of R after", took, "s")
        report.figure("R, S idle", await both.rate(sizes.phase_s), "token/s")
        lent = both.board("rollout").kv_budget / GIB
        report.figure("lent to R", lent, "GiB", least=0.1 * sizes.kv_gib)
        report.figure("mapped by R", await both.mapped() / GIB, "GiB")
        both.users.begin(sizes.clients)
        await both.rate(WARM_S)
        before = both.board("online")
        await _beside(both, True, alone)
        online = both.board("online")
        # The phase without stops comes last: what it makes S's decodes miss would keep R out of
        # S's steps for a while.
        await _beside(both, False, alone)
        both.control.state.stops = 1.0
        both.control.write()
        await _stopped(report, both)
        await _rested(report, both)
        report.figure("R again, lent anew", await both.rate(sizes.phase_s), "token/s", least=0.1)
        users = both.users
        await both.users.end()
        report.figure("users' requests answered", len(users.took), least=sizes.clients)
        refused, remedy = len(users.refused), "; ".join(users.refused[:2])
        report.figure("users' requests refused or short", refused, most=0, remedy=remedy)
        share = (online.met - before.met) / max(1.0, online.finished - before.finished)
        remedy = "the profile is of another load: measure it longer; docs/serving.md"
        report.figure("within their targets", share, least=sizes.within, remedy=remedy)
        report.figure("turns given back by R", both.turns.evicted)
        remedy = "lending ended the online server: its log is online.log in the scratch folder"
        starts = both.server.starts
        report.figure("the online server started", starts, "times", equal=2, remedy=remedy)
    finally:
        with suppress(asyncio.CancelledError):
            await both.close()


async def _users_alone(both: Both) -> tuple[float, ...]:
    """Measure the latencies of S's users without R; return them as serving.online.slo has them."""
    await both.rate(WARM_S)
    both.users.forget()
    await both.rate(both.report.sizes.phase_s)
    return both.users.figures("alone")


async def _beside(both: Both, stops: bool, alone: tuple[float, ...]) -> None:
    """Measure S's users and what R harvests beside them, with stops between layers or without, as
    the operator switches them by serving.lending.stops."""
    report, phase = both.report, f"beside R {'with' if stops else 'without'} stops"
    both.control.state.stops = float(stops)
    both.control.write()
    await both.rate(1.0)
    both.users.forget()
    before = both.board("online"), both.board("rollout")
    report.figure(f"R's tokens, S {phase}", await both.rate(report.sizes.phase_s), "token/s")
    online, rollout = both.board("online"), both.board("rollout")
    both.users.figures(phase, alone)
    busy, shared = online.busy_s - before[0].busy_s, online.shared_s - before[0].shared_s
    took = 100 * busy / report.sizes.phase_s
    report.figure(f"S {phase}: its steps took", took, "% of the time")
    share = 100 * shared / max(1e-9, busy)
    report.figure(f"S {phase}: steps shared with R", share, "% of their time")
    gate = [getattr(rollout, name) - getattr(before[1], name) for name in ("open_s", "shut_s")]
    report.figure(f"S {phase}: gate open", 100 * gate[0] / max(1e-9, sum(gate)), "%")


async def _stopped(report: Report, both: Both) -> None:
    """Stop lending under load: R must stop in time, and the device must have the memory again."""
    from rose.parts.lending.vllm.online import MOVE_EVERY_S
    from rose.parts.lending.vllm.pool import IN_FLIGHT

    revoke_s = both.config.serving.lending.revoke_after_s
    had, lent = await both.mapped(), _used(report)
    both.control.stop("gpu_check")

    def stopped() -> bool:
        return not both.board("rollout").kv_budget and not both.board("rollout").open

    since = math.inf

    def whole() -> bool:
        nonlocal since
        held, now = both.board("online").kv_held >= both.board("online").kv_total, time.monotonic()
        since = min(since, now) if held else math.inf
        return now - since > STEADY_S

    took = await both.until(stopped, 2 * revoke_s + 5, "R to stop")
    expected = {"most": revoke_s, "source": "serving.lending.revoke_after_s"}
    report.figure("R is off, told under load, after", took, "s", **expected)
    left = await both.mapped()
    expected = {"least": report.sizes.given_back * had / GIB, "source": "what it had mapped"}
    report.figure("KV memory that R has given back", (had - left) / GIB, "GiB", **expected)
    moves_s = had / IN_FLIGHT * MOVE_EVERY_S  # S is under load, and maps a piece at a time
    took = await both.until(whole, moves_s + REMAP_S, "S to have all of its memory again")
    report.figure("S has mapped the memory again after", took, "s")
    if lent is not None:  # R and S share one budget
        most = BEYOND * report.sizes.kv_gib * GIB
        name, apart = "the device's memory in use, lent and not, differs by", lent - _used(report)
        remedy = "S keeps memory mapped that it has lent: its KV layout must be BLHNC"
        report.figure(name, apart / GIB, "GiB", most=most / GIB, remedy=remedy)


async def _rested(report: Report, both: Both) -> None:
    """Deactivate and activate R, as when nothing is lent for long: R releases its weights and reads
    them again, while S is under load."""
    both.turns.rests, before = True, _used(report)
    with report.took("R, inactive, has given its weights back after"):
        await both.turns.engine.deactivate()
    report.figure("KV memory of an inactive R", await both.mapped() / GIB, "GiB", most=0.0)
    if before is not None:
        back = (before - _used(report)) / GIB
        report.figure("memory of the device that R gives back by it", back, "GiB", least=0.1)
    both.control.start("gpu_check")  # S may lend again before R has read its weights
    with report.took("R is active again after"):
        await both.turns.engine.activate()
    both.turns.rests = False
    await both.until(lambda: both.board("rollout").kv_budget, 60.0, "R to be lent memory again")


def _used(report: Report) -> int | None:
    return device_used() if report.gpus else None
