"""A vLLM engine in a process of its own, as seen by the rank that owns it.

    engine = await Engine.start(folder, rollout, model, deterministic=False, gpus=False)
    async for chunk in engine.generate("g0.0.t0", tokens, sampling): ...
    await engine.load_version(version, store, transfer)
    await engine.shutdown()

It takes and returns token ids and loads no tokenizer. Its owner restarts it after its death.

On a CPU the engine starts in 3 s instead of 20, for two reasons. It is forked from this process
after vLLM is imported, and vLLM's worker runs inside the engine process. Two rules follow:
1. The owner must not run a multi-threaded torch operation before `start`, as libgomp's thread pool
   doesn't survive a fork.
2. `start` forks in a thread that lives as long as the owner, as the engine dies with that thread.

A new version is staged while the old one serves, and put in place during a short pause. By
`Transfer.in_flight`, running requests recompute their KV cache after the pause (as in AReaL), keep
their cache (as in PipelineRL), or end before the pause. Every token carries the version that
generated it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from rose.config import ConfigError, Lora, Model, Rollout, Transfer
from rose.engine import plugin
from rose.engine.activation import Activation
from rose.engine.adapter import adapter_request
from rose.engine.generation import Generation, Turn
from rose.engine.staging import Staging
from rose.engine.start import (
    RPC_TIMEOUT_S,
    EngineDied,
    EngineError,
    Latest,
    build,
    engine_args,
    environment,
    local_folder,
)
from rose.models import end_tokens
from rose.processes import usable_threads
from rose.transfer import TransferError

STOP_TIMEOUT_S = 5.0  # limit of an orderly shutdown; a healthy engine takes about 1 s
# Bounds the wait for a killed process, which has to release its memory, on a busy machine.
REAP_S = 60.0
# Bounds the search for the processes of a cancelled start. The start may have to import vLLM before
# it forks the engine.
CANCELLED_START_S = 60.0
CANCELLED_POLL_S = 0.05  # seconds between two searches for these processes

# The list of hundreds of names in vLLM's error about a model's architecture.
ARCHITECTURES = re.compile(r" Supported architectures: \w*\(?\[[^\]]*\]\)?")

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-starter")


class Stats(NamedTuple):
    """An engine's load now, and its sums since the start."""

    running: int  # turns
    waiting: int  # turns
    kv_usage: float  # share of the KV cache in use, 0 to 1
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    steps: int  # engine steps with requests
    drafted: int  # tokens drafted by speculative decoding
    accepted: int  # drafted tokens that were accepted


class Loaded(NamedTuple):
    """Figures of the load of a version."""

    nbytes: int  # payload bytes read by the worker that read most
    changed: int  # values changed in all workers
    route: list[str]  # edges of the store that were read; each leads from one version to another
    mirrored: int  # number of these edges read from this node's mirror
    stage_s: float
    pause_s: float  # seconds without generation


class Engine(Activation, Generation, Staging):
    """A running vLLM engine; created by `start`. See the module's docstring."""

    def __init__(
        self,
        llm,
        latest: Latest,
        ends: list[int],
        max_context: int,
        turn_timeout_s: float,
        threads: int,
        description: list[str],
    ):
        self._llm = llm
        self._latest = latest
        self._stop_tokens = ends
        self._max_context, self._turn_timeout_s = max_context, turn_timeout_s
        self._threads = threads
        self._turns: dict[str, Turn] = {}
        self._serial = 0
        self._open = asyncio.Event()  # set while turns may begin
        self._open.set()
        self._loading = asyncio.Lock()
        # State of a version (a key of staging.DURATION_KEYS) -> seconds that the last spent in it.
        self._took_s: dict[str, float] = {}
        self._generated = self._prompted = self._cached = 0
        config = llm.vllm_config
        self._adapter = adapter_request() if config.lora_config is not None else None
        self._takes_seeds = (
            config.device_config.device_type != "cpu"
            or not config.scheduler_config.enable_chunked_prefill
        )
        self.version = -1  # the weights in the model's folder
        # A line about vLLM's choices, and one for each of its warnings.
        self.description = description
        self._process = llm.engine_core.resources.engine_manager.processes[0]
        # Done once the engine process is gone; await it through `asyncio.shield`.
        self.died = asyncio.get_running_loop().create_future()
        self._killed = False
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_death)

    @classmethod
    async def start(
        cls,
        folder: str | Path,
        rollout: Rollout,
        model: Model,
        deterministic: bool = False,
        gpus: bool = False,
        seed: int = 0,
        lora: Lora | None = None,
        routing: bool = False,
    ) -> Engine:
        """Start the engine process and wait until it serves.

        `seed` is for turns without a seed of their own. It must differ between engines; otherwise
        they draw the same samples. With `lora`, versions are those of an adapter. With `routing`,
        turns return the experts that their tokens were routed to. Raises `EngineError` with the
        cause, or after `rollout.engine_start_timeout_s`; then no process is left."""
        folder = await asyncio.to_thread(local_folder, folder)
        try:
            ends = end_tokens(folder, model.end_of_turn)
        except ConfigError as error:
            raise EngineError(str(error)) from None
        threads, shares = 1 if deterministic else rollout.threads, plugin.FOLDER in os.environ
        for name, value in environment(gpus, threads, shares).items():
            os.environ.setdefault(name, value)
        before = set(multiprocessing.active_children())
        args = engine_args(folder, rollout, model, deterministic, seed, gpus, lora, routing)
        building = asyncio.get_running_loop().run_in_executor(_starter, build, args, gpus)
        try:
            async with asyncio.timeout(rollout.engine_start_timeout_s):
                llm, latest = await asyncio.shield(building)
            async with asyncio.timeout(RPC_TIMEOUT_S):
                # vLLM caches this answer. Afterwards `generate` registers a request without
                # yielding to the event loop, which `load_version` relies on.
                await llm.get_supported_tasks()
                description = (await llm.collective_rpc("rose_description"))[0]
                if lora is not None:
                    await llm.collective_rpc("rose_adapter")
                if routing and not gpus:
                    await llm.collective_rpc("rose_record_routing")
                if llm.vllm_config.speculative_config is not None:
                    draft = msgspec.to_builtins(rollout.draft)
                    await llm.collective_rpc("rose_begin_drafts", args=(draft,))
        except BaseException as error:
            await _kill_start(building, before)
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"engine for {folder} not up after {rollout.engine_start_timeout_s:g} s "
                    "(rollout.engine_start_timeout_s)"
                ) from error
            if isinstance(error, Exception):
                text = ARCHITECTURES.sub("", str(error))
                raise EngineError(f"engine for {folder} did not start: {text}") from error
            raise
        threads = rollout.threads or usable_threads()
        limits = model.max_context, rollout.turn_timeout_s
        return cls(llm, latest, ends, *limits, threads, description)

    # ------------------------------------------------------------------ weights

    async def load_version(
        self, version: int, store: str, transfer: Transfer, mirror: str | None = None
    ) -> Loaded:
        """Load a version of `store`, a folder or a relay's URL, and verify the live weights.

        `mirror` is the folder of files that were broadcast to this node. Raises
        - `TransferError`, naming the file or block; the old weights keep serving;
        - `EngineError` after `transfer.load_timeout_s` seconds;
        - `EngineDied` when the process died, or was killed because its weights were neither the old
          nor the new ones.

        After an error or a cancellation, the next version can be loaded if the engine lives."""
        timeout_s = transfer.load_timeout_s
        update = {
            "version": version,
            "store": store,
            "mirror": mirror,
            "token_file": transfer.relay_token_file,
            "threads": transfer.threads or self._threads,
            "dense_bytes": int(transfer.stage_gib * 2**30),
            "device_bytes": int(transfer.stage_device_gib * 2**30),
            "verify_every": transfer.verify_every,
            "timeout_s": timeout_s,
        }
        async with self._loading:
            self._check_weights_here()
            async with self._session(timeout_s):
                await self._worker("start_weight_update", RPC_TIMEOUT_S)
                await self._worker("update_weights", RPC_TIMEOUT_S, update)
                staged = await self._wait_while("staging", timeout_s + RPC_TIMEOUT_S)
                paused, resumed = await self._flip(version, transfer)
                await self._wait_while("checking", timeout_s)
        return Loaded(
            max(s["nbytes"] for s in staged),
            sum(s["changed"] for s in staged),
            staged[0]["route"],
            staged[0]["mirrored"],
            max(s["stage_s"] for s in staged),
            resumed - paused,
        )

    async def _flip(self, version: int, transfer: Transfer) -> tuple[float, float]:
        """Put the staged version in place. Returns the monotonic times at which the pause of
        generation began and ended."""
        # AsyncLLM's own `pause` would also sleep for 20 ms.
        core = self._llm.engine_core
        self._open.clear()
        try:
            paused = time.monotonic() if self.asleep else await self._pause(transfer.in_flight)
            await self._flip_staged(transfer.load_timeout_s)
            self.version = version
            # The engine handles this call before the resume below. So await it after the pause.
            labelled = asyncio.ensure_future(core.set_weight_version_async(str(version)))
        finally:
            if self.alive and not self.asleep:
                await self._call(core.resume_scheduler_async(), RPC_TIMEOUT_S)
            resumed = time.monotonic()
            if not self.asleep:
                self._open.set()
        await self._call(labelled, RPC_TIMEOUT_S)
        return paused, resumed

    async def _pause(self, in_flight: str, clear_cache: bool = False) -> float:
        """Pause generation; return the monotonic time at which it stopped."""
        mode = {"recompute": "abort", "keep": "keep", "finish": "wait"}[in_flight]
        await self._call(
            self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache),
            self._turn_timeout_s if mode == "wait" else RPC_TIMEOUT_S,
        )
        paused = time.monotonic()
        if mode == "abort":
            # Requests that reached vLLM after the pause are queued, labelled with the old version.
            requests = [turn.request for turn in self._turns.values() if turn.request]
            await self._call(self._llm.abort(requests), RPC_TIMEOUT_S)
        return paused

    async def _worker(self, method: str, timeout_s: float | None, *args) -> list:
        """Call `method` in the workers; return the answers, one per tensor-parallel rank. Raises
        `TransferError` with a worker's error, `EngineDied` after `timeout_s` seconds."""
        try:
            return await self._call(self._llm.collective_rpc(method, args=args), timeout_s)
        except EngineError:
            raise
        except Exception as error:  # vLLM's form of a worker's error, a bare Exception
            raise TransferError(str(error)) from error

    async def call_workers(self, method: str, *args) -> None:
        """Call a method that a part's worker extension adds. There is no timeout, as a slow answer
        is no reason to kill an engine."""
        await self._worker(method, None, *args)

    async def checksum(self) -> list[dict[str, str]]:
        """Return the xxh3-128 of every live parameter, a dictionary per tensor-parallel rank."""
        self._check_weights_here()
        return await self._worker("rose_checksum", RPC_TIMEOUT_S)

    # ------------------------------------------------------------------ state

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def drafts(self) -> bool:
        """True if the engine decodes speculatively."""
        return self._llm.vllm_config.speculative_config is not None

    @property
    def open(self) -> bool:
        """True if turns begin at once; false while weights change and while the engine sleeps."""
        return self._open.is_set()

    @property
    def alive(self) -> bool:
        return not self.died.done()

    @property
    def lost(self) -> bool:
        """True after `kill`, and once vLLM reports that the engine process failed. The process may
        live for some time after either, because it releases its memory."""
        return self._killed or (self._llm is not None and self._llm.errored)

    def kill(self) -> None:
        """Kill the engine process, so that its owner can start another once `died` is done."""
        self._killed = True
        self._process.kill()

    @property
    def hardware(self) -> str:
        """The device's name, for example "H800" or "cpu"."""
        from vllm.platforms import current_platform

        return current_platform.get_device_name().removeprefix("NVIDIA ")

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        cache = self._llm.vllm_config.cache_config
        return cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size

    def stats(self) -> Stats:
        scheduler = self._latest.scheduler
        active = len(self._turns)
        running = min(scheduler.num_running_reqs, active) if scheduler else 0
        return Stats(
            running,
            active - running,
            scheduler.kv_cache_usage if scheduler and active else 0.0,
            self._generated,
            self._prompted,
            self._cached,
            self._latest.steps,
            self._latest.drafted,
            self._latest.accepted,
        )

    async def shutdown(self) -> None:
        """End the engine process and all turns. Kills the process after `STOP_TIMEOUT_S`."""
        if self._llm is None:
            return
        if self.alive:
            self._on_death()
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            # It would log the end of the process as an error.
            llm.output_handler.cancel()
        stopping = asyncio.ensure_future(asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S))
        await asyncio.wait([stopping], timeout=STOP_TIMEOUT_S + 1)
        if self._process.exitcode is None:
            self.kill()
        await asyncio.to_thread(self._process.join, REAP_S)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDied(f"engine process {self.pid} is gone")

    def _on_death(self) -> None:
        """End all turns. Called when the process has ended (its sentinel became readable) or is
        about to be ended."""
        from vllm.v1.engine.exceptions import EngineDeadError

        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self.died.set_result(None)
        self._open.set()  # wakes waiting turns, which then find the engine dead
        self._llm.output_processor.propagate_error(EngineDeadError())

    async def _call(self, coroutine, timeout_s: float | None):
        """Await a call into the engine, until the engine dies or `timeout_s` seconds have passed.
        An engine process that doesn't answer in time is killed, so that the owner can start
        another. Raises `EngineDied`, or the error of the call."""
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait(
            {task, self.died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if task.done() and task.exception() is None:
            return task.result()
        self._check_alive()
        if task.done():
            raise task.exception()
        task.cancel()
        self.kill()
        raise EngineDied(
            f"engine process {self.pid} was ended, as it did not answer within {timeout_s:g} s"
        )


async def _kill_start(building: asyncio.Future, before: set) -> None:
    """Kill the processes of the cancelled start `building`: all child processes that are not in
    `before`. Returns when they and their workers, which die with them, have ended."""
    deadline = time.monotonic() + CANCELLED_START_S
    killed = set()
    workers = []
    while True:
        for process in set(multiprocessing.active_children()) - before - killed:
            with contextlib.suppress(psutil.Error):
                workers += psutil.Process(process.pid).children(recursive=True)
            process.kill()
            killed.add(process)
        if building.done() or time.monotonic() > deadline:
            break
        await asyncio.wait([building], timeout=CANCELLED_POLL_S)
    for process in killed:
        await asyncio.to_thread(process.join, REAP_S)
    await asyncio.to_thread(psutil.wait_procs, workers, REAP_S)
