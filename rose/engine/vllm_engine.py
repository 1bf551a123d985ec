"""One vLLM engine, in a process of its own, as seen by the rank that owns it.

    engine = await Engine.start(folder, rollout, model, deterministic=False, gpus=False)
    async for chunk in engine.generate("g0.0.t0", tokens, sampling): ...
    await engine.load_version(manifest)
    await engine.shutdown()

What it leaves out: text (token ids in, token ids out; no tokenizer is loaded), routing, restarts.

Start-up on a CPU is kept short by forking the engine from this process after vLLM is imported (3 s
instead of 20) and by running vLLM's worker inside the engine process. Two rules follow: the owner
must not have run a multi-threaded torch operation before `start` (libgomp's pool doesn't survive a
fork), and the owner's `start` runs in a thread that lives as long as the process, because the
engine dies with that thread.

A new version is staged while the old one serves, and put in place during a short pause. Requests in
flight meet it as `Transfer.in_flight` says: "recompute" stops them, delivers their tokens under the
old version and continues them after the flip with the KV cache recomputed (as in AReaL); "keep"
lets them run on with the KV cache of the old version (as in PipelineRL); "finish" waits for their
end. Every token carries the version that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

from rose.config import ConfigError, Lora, Model, Rollout, Transfer
from rose.engine import plugin
from rose.engine.activation import Activation
from rose.engine.adapter import adapter_request
from rose.engine.drafts import PROPOSER
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

STOP_TIMEOUT_S = 5.0  # a healthy engine is down in about 1 s
REAP_S = 60.0  # until a killed process has given its memory back, on a busy machine
BROKEN_OFF_S = 60.0  # a start that is broken off may have to import vLLM before its process comes
END_LOOK_S = 0.05  # between two looks for it

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-starter")


class Stats(NamedTuple):
    running: int
    waiting: int
    kv_usage: float  # 0..1
    generated_tokens: int  # since start
    prompt_tokens: int
    cached_tokens: int
    steps: int  # with requests, since start
    drafted: int  # tokens, by speculative decoding
    accepted: int  # of them


class Loaded(NamedTuple):
    nbytes: int  # of payloads read
    changed: int  # values
    route: list[str]  # edges of the store
    mirrored: int  # of them, read from this node's memory
    stage_s: float
    flip_s: float
    pause_s: float  # without generation


class Engine(Activation, Generation, Staging):
    """See the module's docstring. Built by `start`."""

    def __init__(
        self,
        llm,
        latest: Latest,
        ends: list[int],
        max_context: int,
        turn_timeout_s: float,
        threads: int,
    ):
        self._llm = llm
        self._latest = latest
        self._stop_tokens = ends
        self._max_context, self._turn_timeout_s = max_context, turn_timeout_s
        self._threads = threads
        self._turns: dict[str, Turn] = {}
        self._serial = 0
        self._open = asyncio.Event()  # clear while weights change
        self._open.set()
        self._loading = asyncio.Lock()
        # see `_settled`: state of a new version -> how long the last one was in it
        self._took_s: dict[str, float] = {}
        self.active, self._activations = True, 0
        self._generated = self._prompted = self._cached = 0
        config = llm.vllm_config
        self._adapter = adapter_request() if config.lora_config is not None else None
        self._takes_seeds = (
            config.device_config.device_type != "cpu"
            or not config.scheduler_config.enable_chunked_prefill
        )
        self.version = -1  # the folder's own weights
        self._process = llm.engine_core.resources.engine_manager.processes[0]
        self._died = asyncio.get_running_loop().create_future()
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
        """Start the engine process and wait until it serves. `seed`, of turns without one, must
        differ between engines, or they draw alike. With `lora` versions are an adapter's; with
        `routing` turns come with the experts that their tokens were sent to. Raises
        `EngineError` with the cause, or after `rollout.engine_start_timeout_s`; no process is left
        then."""
        folder = await asyncio.to_thread(local_folder, folder)
        try:
            ends = end_tokens(folder, model.end_of_turn)
        except ConfigError as error:
            raise EngineError(str(error)) from None
        threads, shares = 1 if deterministic else rollout.threads, plugin.FOLDER in os.environ
        for name, value in environment(gpus, threads, shares).items():
            os.environ.setdefault(name, value)
        begin = (rollout.draft.adaptive, rollout.draft.memory_mib * 2**20)
        before = set(multiprocessing.active_children())
        building = asyncio.get_running_loop().run_in_executor(
            _starter,
            build,
            engine_args(folder, rollout, model, deterministic, seed, gpus, lora, routing),
            gpus,
        )
        try:
            async with asyncio.timeout(rollout.engine_start_timeout_s):
                llm, latest = await asyncio.shield(building)
            # Asked once and kept by vLLM; from here a request is known to vLLM before the loop runs
            # anything else, which `load_version` relies on.
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await llm.get_supported_tasks()
                if lora is not None:
                    await llm.collective_rpc("rose_adapter")
                if routing and not gpus:
                    await llm.collective_rpc("rose_record_routing")
                if llm.vllm_config.speculative_config is not None:
                    await llm.collective_rpc("rose_begin_drafts", args=begin)
        except BaseException as error:
            await _end(building, before)
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"engine for {folder} not up after {rollout.engine_start_timeout_s:g} s "
                    "(rollout.engine_start_timeout_s)"
                ) from error
            if isinstance(error, Exception):
                raise EngineError(f"engine for {folder} did not start: {error}") from error
            raise
        threads = rollout.threads or usable_threads()
        return cls(llm, latest, ends, model.max_context, rollout.turn_timeout_s, threads)

    # ------------------------------------------------------------------ drafts

    @property
    def drafts_of_groups(self) -> bool:
        """Whether its drafts come from what groups say (rollout/draft=group)."""
        speculative = self._llm.vllm_config.speculative_config
        return speculative is not None and speculative.model == PROPOSER

    async def learn_siblings(self, spans: list[tuple[str, int, bytes, bytes]], ended: list[str]):
        """Take what siblings' turns have got on other engines, as `GroupProposer.feed` has it, and
        forget the groups `ended`. However long it takes: no engine is ended over drafts."""
        await self._worker("rose_siblings", None, spans, ended)

    # ------------------------------------------------------------------ weights

    async def load_version(
        self, version: int, store: str, transfer: Transfer, mirror: str | None = None
    ) -> Loaded:
        """Put a version of `store` (a folder or a relay's URL) into the live weights and verify it
        there. `mirror`: folder of what was broadcast to this node.

        Raises `TransferError` naming file or block (the old weights go on serving), `EngineDied`,
        also when the weights are neither the old nor the new ones: no such engine lives; or
        `EngineError` after `transfer.load_timeout_s` seconds. After each, and after a cancellation,
        the next version can be loaded.
        """
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
            self._check_weights()
            async with self._session(timeout_s):
                await self._worker("start_weight_update", RPC_TIMEOUT_S)
                await self._worker("update_weights", RPC_TIMEOUT_S, update)
                staged = await self._settled("staging", timeout_s + RPC_TIMEOUT_S)
                paused, resumed = await self._flip(version, transfer)
                checked = await self._settled("checking", timeout_s)
        return Loaded(
            max(s["nbytes"] for s in staged),
            sum(s["changed"] for s in staged),
            staged[0]["route"],
            staged[0]["mirrored"],
            max(s["stage_s"] for s in staged),
            max(s["flip_s"] for s in checked),
            resumed - paused,
        )

    async def _flip(self, version: int, transfer: Transfer) -> tuple[float, float]:
        """(when the pause began, when it ended), monotonic."""
        core = self._llm.engine_core  # AsyncLLM's own pause sleeps 20 ms beside this call
        self._open.clear()
        try:
            paused = time.monotonic() if self.asleep else await self._pause(transfer.in_flight)
            await self._flipped(transfer.load_timeout_s)
            self.version = version
            # sent before "resume", and done in this order, but not waited for while nothing is
            # generated
            labelled = asyncio.ensure_future(core.set_weight_version_async(str(version)))
        finally:
            if self.alive and not self.asleep:
                await self._call(core.resume_scheduler_async(), RPC_TIMEOUT_S)
            resumed = time.monotonic()
            if not self.asleep:
                self._open.set()
        await self._call(labelled, RPC_TIMEOUT_S)
        return paused, resumed

    async def _pause(self, in_flight: str) -> float:
        """Since when nothing is generated, monotonic."""
        mode = {"recompute": "abort", "keep": "keep", "finish": "wait"}[in_flight]
        await self._call(
            self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False),
            self._turn_timeout_s if mode == "wait" else RPC_TIMEOUT_S,
        )
        paused = time.monotonic()
        if mode == "abort":
            # Requests that reached vLLM after the pause are still queued there, under the old
            # version's label.
            await self._abort_requests()
        return paused

    async def _abort_requests(self) -> None:
        await self._call(
            self._llm.abort([t.request for t in self._turns.values() if t.request]), RPC_TIMEOUT_S
        )

    async def _worker(self, method: str, timeout_s: float | None, *args) -> list:
        """The workers' answers, one per tensor-parallel rank. Raises `TransferError` with what one
        of them raised."""
        try:
            return await self._call(self._llm.collective_rpc(method, args=args), timeout_s)
        except EngineError:
            raise
        except Exception as error:  # vLLM makes a bare Exception of what a worker raised
            raise TransferError(str(error)) from error

    async def checksum(self) -> list[dict[str, str]]:
        """xxh3-128 of every live parameter, one dictionary per tensor-parallel rank."""
        self._check_weights()
        return await self._worker("rose_checksum", RPC_TIMEOUT_S)

    # ------------------------------------------------------------------ state

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def open(self) -> bool:
        """Whether turns are begun at once: not while new weights are put in place."""
        return self._open.is_set()

    @property
    def alive(self) -> bool:
        return not self._died.done()

    @property
    def died(self) -> asyncio.Future:
        """Done once the engine process is gone; await it through `asyncio.shield`."""
        return self._died

    @property
    def hardware(self) -> str:
        """The device's name, as "H800"; "cpu"."""
        from vllm.platforms import current_platform

        return current_platform.get_device_name().removeprefix("NVIDIA ")

    @property
    def kv_tokens(self) -> int:
        """KV-cache capacity, tokens."""
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
        """End the engine process and every iterator; killed after `STOP_TIMEOUT_S`."""
        if self._llm is None:
            return
        if self.alive:
            self._on_death()
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it logs the end of the process as an error
        stopping = asyncio.ensure_future(asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S))
        await asyncio.wait([stopping], timeout=STOP_TIMEOUT_S + 1)
        if self._process.exitcode is None:
            self._process.kill()
        await asyncio.to_thread(self._process.join, REAP_S)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDied(f"engine process {self.pid} is gone")

    def _on_death(self) -> None:
        """The process is gone (its sentinel became readable), or will be: end every iterator."""
        from vllm.v1.engine.exceptions import EngineDeadError

        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._died.set_result(None)
        self._open.set()  # turns that wait for it see that it is gone
        self._llm.output_processor.propagate_error(EngineDeadError())

    async def _call(self, coroutine, timeout_s: float | None):
        """Await a call into the engine, but not beyond its death or `timeout_s`: a process that
        hangs so long is ended, as another one can be started in its place. Raises `EngineDied`, or
        what the engine raised."""
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait(
            {task, self._died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if task.done() and task.exception() is None:
            return task.result()
        self._check_alive()
        if task.done():
            raise task.exception()
        task.cancel()
        self._process.kill()
        raise EngineDied(
            f"engine process {self.pid} was ended, as it did not answer within {timeout_s:g} s"
        )


async def _end(building: asyncio.Future, before: set) -> None:
    """End the processes that a start has made beside those `before`, or makes until it is over.
    Returns when they and their workers, which die with them, have given their memory back."""
    deadline, killed, workers = time.monotonic() + BROKEN_OFF_S, set(), []
    while True:
        for process in set(multiprocessing.active_children()) - before - killed:
            with contextlib.suppress(psutil.Error):
                workers += psutil.Process(process.pid).children(recursive=True)
            process.kill()
            killed.add(process)
        if building.done() or time.monotonic() > deadline:
            break
        await asyncio.wait([building], timeout=END_LOOK_S)
    for process in killed:
        await asyncio.to_thread(process.join, REAP_S)
    await asyncio.to_thread(psutil.wait_procs, workers, REAP_S)
