"""One vLLM engine, in a process of its own, as seen by the rank that owns it.

    engine = await Engine.start(folder, rollout, model, deterministic=False, gpus=False)
    async for chunk in engine.generate("g0.0.t0", tokens, sampling): ...
    await engine.load_version(manifest)
    await engine.shutdown()

What it leaves out: text (token ids in, token ids out; no tokenizer is loaded), routing, restarts.

Start-up on a CPU is kept short by forking the engine from this process after vLLM is imported (3 s instead
of 20) and by running vLLM's worker inside the engine process. Two rules follow: the owner must not have run
a multi-threaded torch operation before `start` (libgomp's pool doesn't survive a fork), and the owner's
`start` runs in a thread that lives as long as the process, because the engine dies with that thread.

A new version never meets a running request: those in flight are stopped, their tokens delivered under the
old version, and continued after the flip from these tokens with the KV cache recomputed (as in AReaL).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rose import protocol
from rose.config import Model, Rollout
from rose.engine.start import EngineError, Latest, build, engine_args, environment, local_folder, stop_tokens
from rose.transfer import TransferError, open_version

STOP_TIMEOUT_S = 5.0  # a healthy engine is down in about 1 s
RPC_TIMEOUT_S = 30.0  # pause and resume answer within one engine step

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-starter")


class EngineDied(EngineError):
    """The engine process is gone; everything it held is lost."""


class Chunk(NamedTuple):
    """Tokens since the last chunk. `logprobs` are of the model's own distribution at temperature 1, before
    top-p and top-k (vLLM's `raw_logprobs`)."""

    tokens: list[int]
    logprobs: list[float]
    version: int  # policy version that made them
    finish: protocol.FinishReason | None
    cached_tokens: int  # of the prompt, found in the prefix cache


class Stats(NamedTuple):
    running: int
    waiting: int
    kv_usage: float  # 0..1
    generated_tokens: int  # since start
    prompt_tokens: int
    cached_tokens: int


class Loaded(NamedTuple):
    version: int
    nbytes: int
    seconds: float  # whole call
    pause_s: float  # without generation


@dataclass
class _Turn:
    request: str
    aborted: bool = False


class Engine:
    """See the module's docstring. Built by `start`."""

    def __init__(self, llm, latest: Latest, folder: Path, max_context: int):
        self._llm = llm
        self._latest = latest
        self._stop_tokens = stop_tokens(folder)
        self._max_context = max_context
        self._turns: dict[str, _Turn] = {}
        self._serial = 0
        self._open = asyncio.Event()  # clear while weights change
        self._open.set()
        self._loading = asyncio.Lock()
        self._generated = self._prompted = self._cached = 0
        config = llm.vllm_config
        self._takes_seeds = config.device_config.device_type != "cpu" \
            or not config.scheduler_config.enable_chunked_prefill
        self.version = -1  # the folder's own weights
        self._process = llm.engine_core.resources.engine_manager.processes[0]
        self._died = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_death)

    @classmethod
    async def start(cls, folder: str | Path, rollout: Rollout, model: Model, deterministic: bool = False,
                    gpus: bool = False, seed: int = 0) -> Engine:
        """Start the engine process and wait until it serves.

        `seed`, of the turns without one; it must differ between engines, or they draw alike.

        Raises `EngineError` with the cause, or after `rollout.engine_start_timeout_s`; no process is left then.
        """
        folder = await asyncio.to_thread(local_folder, folder)
        stop_tokens(folder)
        for name, value in environment(gpus, 1 if deterministic else rollout.threads).items():
            os.environ.setdefault(name, value)
        before = set(multiprocessing.active_children())
        building = asyncio.get_running_loop().run_in_executor(
            _starter, build, engine_args(folder, rollout, model, deterministic, seed), gpus)
        try:
            llm, latest = await asyncio.wait_for(asyncio.shield(building), rollout.engine_start_timeout_s)
            # Asked once and kept by vLLM; from here a request is known to vLLM before the loop runs anything else,
            # which `load_version` relies on.
            await asyncio.wait_for(llm.get_supported_tasks(), RPC_TIMEOUT_S)
        except BaseException as error:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            await asyncio.wait([building], timeout=STOP_TIMEOUT_S)
            if isinstance(error, TimeoutError):
                raise EngineError(f"engine for {folder} not up after {rollout.engine_start_timeout_s:g} s "
                                  "(rollout.engine_start_timeout_s)") from error
            if isinstance(error, Exception):
                raise EngineError(f"engine for {folder} did not start: {error}") from error
            raise
        return cls(llm, latest, folder, model.max_context)

    # ------------------------------------------------------------------ turns

    async def generate(self, turn_id: str, tokens: bytes, sampling: protocol.Sampling) -> AsyncIterator[Chunk]:
        """Continue `tokens` (int32, packed); the last chunk has `finish`.

        The sampler's seed is a function of `sampling.seed` and the number of tokens, so that a turn continued
        from partial tokens doesn't draw the same numbers again.
        Raises `EngineDied`; `EngineError` if `turn_id` is already running here, or has a seed that would kill
        this engine: vLLM on CPU cannot prefill a seeded prompt in parts.
        """
        if turn_id in self._turns:
            raise EngineError(f"turn {turn_id} is already running on this engine")
        if sampling.seed is not None and not self._takes_seeds:
            raise EngineError(f"turn {turn_id} has a sampling seed, which vLLM on CPU takes only without chunked "
                              "prefill; use deterministic=true or rollout.engine_args.enable_chunked_prefill=false")
        turn = self._turns[turn_id] = _Turn("")
        prompt = protocol.unpack_tokens(tokens).tolist()
        end = min(len(prompt) + sampling.max_new_tokens, self._max_context)
        try:
            finish = None
            while finish is None:
                await self._open.wait()
                self._check_alive()
                if turn.aborted or len(prompt) >= end:
                    finish = protocol.FinishReason.ABORT if turn.aborted else protocol.FinishReason.LENGTH
                    yield Chunk([], [], self.version, finish, 0)
                    return
                async for chunk in self._stream(turn, turn_id, prompt, sampling, end - len(prompt)):
                    prompt += chunk.tokens
                    if turn.aborted and chunk.finish is None:  # the abort came before vLLM knew the request
                        await self._llm.abort(turn.request)
                    interrupted = chunk.finish is protocol.FinishReason.ABORT and not turn.aborted
                    finish = None if interrupted else chunk.finish
                    if chunk.tokens or finish:
                        yield chunk._replace(finish=finish)
        finally:
            del self._turns[turn_id]

    async def _stream(self, turn: _Turn, turn_id: str, prompt: list[int], sampling: protocol.Sampling,
                      max_tokens: int) -> AsyncIterator[Chunk]:
        """One vLLM request, from start to its own end."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        self._serial += 1
        turn.request = f"{turn_id}#{self._serial}"
        version, first = self.version, True
        # the number of tokens is part of the seed: a turn that goes on elsewhere doesn't draw the same again
        seed = None if sampling.seed is None else (sampling.seed * 1_000_003 + len(prompt)) % 2**63
        params = SamplingParams(
            max_tokens=max_tokens, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            seed=seed, stop_token_ids=self._stop_tokens, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA, skip_clone=True)
        request = tokens_input(list(prompt), cache_salt=f"v{version}")  # a prefix cached by older weights never matches
        self._prompted += len(prompt)
        try:
            async for output in self._llm.generate(request, params, turn.request):
                part, cached = output.outputs[0], output.num_cached_tokens or 0
                tokens = list(part.token_ids)
                self._generated += len(tokens)
                self._cached += cached if first else 0
                first = False
                finish = protocol.FinishReason(part.finish_reason) if part.finish_reason else None
                yield Chunk(tokens, list(part.logprobs.logprobs) if tokens else [], version, finish, cached)
        except EngineDeadError as error:
            raise EngineDied(f"engine process {self.pid} died during turn {turn_id}") from error

    async def abort(self, turn_id: str) -> None:
        """Stop a turn: its iterator ends with what it has and finish ABORT. Unknown turns are ignored: they ended."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            turn.aborted = True
            if turn.request and self.alive:
                await self._llm.abort(turn.request)

    # ------------------------------------------------------------------ weights

    async def load_version(self, manifest: str, timeout_s: float = 120.0) -> Loaded:
        """Put a committed version into the live weights and verify it there.

        Raises `TransferError` naming file or tensor (the old weights go on serving unless the text says that
        they are a mixture), `EngineDied`, or `EngineError` after `timeout_s` seconds.
        """
        start = time.monotonic()
        async with self._loading:
            with open_version(manifest):  # a bad manifest or a missing file costs no pause
                pass
            self._open.clear()
            paused = time.monotonic()
            try:
                await self._call(self._llm.pause_generation(mode="abort", clear_cache=True), RPC_TIMEOUT_S)
                # Requests that reached vLLM after the pause are still queued there, under the old version's label.
                await self._call(self._llm.abort([t.request for t in self._turns.values() if t.request]), RPC_TIMEOUT_S)
                results = await self._load(str(manifest), timeout_s)
                self.version = results[0]["version"]
            finally:
                if self.alive:
                    await self._call(self._llm.resume_generation(), RPC_TIMEOUT_S)
                self._open.set()
            end = time.monotonic()
        return Loaded(self.version, results[0]["nbytes"], end - start, end - paused)

    async def _load(self, manifest: str, timeout_s: float) -> list[dict]:
        try:
            return await self._call(self._llm.collective_rpc("rose_load_version", args=(manifest,)), timeout_s)
        except EngineError:
            raise
        except Exception as error:  # vLLM turns what a worker raised into a bare Exception with its text
            raise TransferError(str(error)) from error

    async def checksum(self) -> list[dict[str, str]]:
        """xxh3-128 of every live parameter, one dictionary per tensor-parallel rank."""
        return await self._call(self._llm.collective_rpc("rose_checksum"), RPC_TIMEOUT_S)

    # ------------------------------------------------------------------ state

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._died.done()

    @property
    def died(self) -> asyncio.Future:
        """Done once the engine process is gone; await it through `asyncio.shield`."""
        return self._died

    @property
    def kv_tokens(self) -> int:
        """KV-cache capacity, tokens."""
        cache = self._llm.vllm_config.cache_config
        return cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size

    def stats(self) -> Stats:
        scheduler = self._latest.scheduler
        active = len(self._turns)
        running = min(scheduler.num_running_reqs, active) if scheduler else 0
        return Stats(running, active - running, scheduler.kv_cache_usage if scheduler and active else 0.0,
                     self._generated, self._prompted, self._cached)

    async def shutdown(self) -> None:
        """End the engine process and every iterator; killed if it doesn't leave within `STOP_TIMEOUT_S`."""
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
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDied(f"engine process {self.pid} is gone")

    def _on_death(self) -> None:
        """The process is gone (its sentinel became readable), or will be: end every iterator now."""
        from vllm.v1.engine.exceptions import EngineDeadError

        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._died.set_result(None)
        self._llm.output_processor.propagate_error(EngineDeadError())

    async def _call(self, coroutine, timeout_s: float):
        """Await a call into the engine, but not beyond its death or `timeout_s`."""
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait({task, self._died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is None:
            return task.result()
        self._check_alive()
        if task.done():
            raise task.exception()
        task.cancel()
        raise EngineError(f"engine process {self.pid} did not answer within {timeout_s:g} s")
