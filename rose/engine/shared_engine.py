"""Rollouts on an engine that an online server owns: `Engine` around the server's own AsyncLLM, in the server's process.

    engine = await SharedEngine.around(server's AsyncLLM)

Its turns have the priority by which the scheduler (rose.coserving.shared) knows them as rollouts. What is the server's
is left alone: online requests run on through a change of weights with the KV cache that they have, none is aborted, and
the server's own metrics of requests go on counting online ones only. Prefixes cached under older weights are forgotten.
"""

from __future__ import annotations

import asyncio
import os
import time

from rose.coserving import names
from rose.engine.activation import ACTIVATE_TIMEOUT_S
from rose.engine.staging import LAST_LOOK_S
from rose.engine.start import Latest, local_folder
from rose.engine.vllm_engine import RPC_TIMEOUT_S, Engine, EngineError
from rose.processes import usable_threads

TURN_TIMEOUT_S = 600.0  # until a run says its own


class SharedEngine(Engine):
    """Built by `around`."""

    priority = names.ROLLOUT_PRIORITY

    @classmethod
    async def around(cls, llm) -> SharedEngine:
        """`llm`: a running AsyncLLM with one engine process, the transfer engine "rose" and its worker extension."""
        model = llm.vllm_config.model_config
        async with asyncio.timeout(RPC_TIMEOUT_S):
            await llm.get_supported_tasks()
        folder = await asyncio.to_thread(local_folder, model.model)
        made = cls(llm, Latest(), folder, model.max_model_len, TURN_TIMEOUT_S,
                   int(os.environ.get("ROSE_ENGINE_THREADS") or usable_threads()))
        made._listen(llm.output_processor)
        return made

    def _listen(self, processor) -> None:
        """Hear the scheduler's statistics too, and keep turns out of the server's metrics of requests."""
        told = processor.update_scheduler_stats

        def update(stats) -> None:
            self._latest.update(stats)
            told(stats)

        processor.update_scheduler_stats = update
        for name in ("_update_stats_from_output", "_update_stats_from_finished"):
            setattr(processor, name, self._unless_ours(getattr(processor, name)))

    def _unless_ours(self, counts):
        def count(state, *args) -> None:
            if state.external_req_id.rpartition("#")[0] not in self._turns:
                counts(state, *args)

        return count

    @property
    def config(self):
        """vLLM's."""
        return self._llm.vllm_config

    async def begin_anew(self) -> None:
        """The folder's own weights, version -1, as another run expects them: its versions mean nothing here. Turns end
        with finish ABORT. Raises `EngineDied`, also when the weights can't be read, and as `Staging._quiet`."""
        async with self._loading:
            await self._quiet(ACTIVATE_TIMEOUT_S)
            for turn in self._turns.values():
                turn.aborted = True
            await self._abort_requests()
            if self.version == -1:
                return
            core = self._llm.engine_core
            self._open.clear()
            try:
                await self._pause("recompute")
                await self._worker_or_death("rose_begin_anew")
                self.version, self._activations = -1, self._activations + 1
                await self._call(core.set_weight_version_async(str(self.version)), RPC_TIMEOUT_S)
            finally:
                if self.alive:
                    await self._call(core.resume_scheduler_async(), RPC_TIMEOUT_S)
                self._open.set()

    async def _pause(self, in_flight: str) -> float:
        """vLLM's other ways to pause end or await online requests too."""
        core = self._llm.engine_core
        if in_flight == "finish":
            await self._turns_end()
        await self._call(core.pause_scheduler_async(mode="keep", clear_cache=False), RPC_TIMEOUT_S)
        paused = time.monotonic()
        if in_flight == "recompute":
            await self._abort_requests()
        await self._call(core.reset_prefix_cache_async(), RPC_TIMEOUT_S)
        return paused

    async def _turns_end(self) -> None:
        """No turn begins meanwhile: those that wait for it don't count."""
        end = time.monotonic() + self.turn_timeout_s
        known = self._llm.output_processor.external_req_ids
        while (left := sum(turn.request in known for turn in self._turns.values())) and self.alive:
            if time.monotonic() > end:
                raise EngineError(f"{left} turns did not end within {self.turn_timeout_s:g} s, for which "
                                  "transfer.in_flight=finish waits")
            await asyncio.sleep(LAST_LOOK_S)

    async def shutdown(self) -> None:
        """Nothing: the engine process is the server's."""
