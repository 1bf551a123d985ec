"""A mixin of `Engine` that releases the memory of weights and KV cache, and later takes it again.

There are two ways:
1. `deactivate` drops the weights; `activate` reads them again from the model's folder.
2. `sleep` keeps the weights, and so the policy version, in host memory; `wake_weights` and `wake`
   bring all back. An engine and a trainer rank that use the same device alternately work this way.

rose/engine/inactive.py does the work inside vLLM's worker.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rose.engine import plugin
from rose.engine.start import RPC_TIMEOUT_S, EngineDied, EngineError
from rose.transfer import TransferError

# Bounds reading the weights again, and the wait for a thread of a worker that reads them.
ACTIVATE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Moved:
    """Memory in GiB that an engine released (`gib` > 0) or took (`gib` < 0)."""

    gib: float  # change at the tensor-parallel worker where it was smallest
    free_gib: float  # free memory of the fullest device afterwards
    total_gib: float  # size of the smallest device

    def __add__(self, later: Moved) -> Moved:
        return Moved(self.gib + later.gib, later.free_gib, later.total_gib)


NOTHING = Moved(0.0, 0.0, 0.0)


class Activation:
    """Puts an engine to sleep and wakes it, or deactivates and activates it."""

    active = True  # false from `deactivate` to `activate`
    asleep = False  # true from `sleep` to `wake`; turns wait meanwhile
    # Number of times that the engine slept or was deactivated. It is part of the prefix cache's
    # salt, so that prefixes that were cached before never match afterwards.
    _releases = 0
    _weights_here = True  # false from `sleep` to `wake_weights`

    async def sleep(self) -> Moved:
        """Release the KV cache and, on a GPU, the weights, which are copied to host memory.

        Running turns are interrupted and continue after `wake`. Raises `EngineError` for an engine
        on a GPU without vLLM's sleep mode, or if an aborted load doesn't end; `EngineDied` when the
        process dies."""
        self._check_sleep_mode()
        async with self._loading:
            self._check_active()
            await self._end_session(ACTIVATE_TIMEOUT_S)
            self._weights_here = False
            if not self.asleep:
                self.asleep, self._releases = True, self._releases + 1
                self._open.clear()
                await self._pause("recompute", clear_cache=True)
            return _moved(await self._worker_or_death("rose_sleep"))

    async def wake_weights(self) -> Moved:
        """Bring the weights back to the device. This is the first half of waking, after which
        `load_version` is possible; `wake` is the second half. Raises `EngineDied`."""
        async with self._loading:
            moved = _moved(await self._worker_or_death("rose_wake", "weights"))
            self._weights_here = True
            return moved

    async def wake(self) -> Moved:
        """Take the KV cache's memory again and serve. Raises `EngineError` unless `wake_weights`
        was called before, and `EngineDied`."""
        async with self._loading:
            if not self.asleep:
                return NOTHING
            if not self._weights_here:
                raise EngineError(f"engine process {self.pid} has no weights: wake_weights() first")
            moved = _moved(await self._worker_or_death("rose_wake", "kv_cache"))
            await self._call(self._llm.engine_core.resume_scheduler_async(), RPC_TIMEOUT_S)
            self.asleep = False
            self._open.set()
            return moved

    async def deactivate(self) -> None:
        """Release the memory of weights and KV cache, and keep the process. Running turns end with
        finish ABORT. Raises as `sleep` does."""
        self._check_sleep_mode()
        async with self._loading:
            if not self.active:
                return
            await self._end_session(ACTIVATE_TIMEOUT_S)
            self.active, self._releases = False, self._releases + 1
            for turn in self._turns.values():
                turn.aborted = True
            # vLLM can't clear the prefix cache while blocks are withheld. So the cache stays, and
            # the changed salt keeps it from matching.
            await self._pause("recompute")
            await self._set_scheduler_inactive(True)
            await self._worker_or_death("rose_deactivate")

    async def activate(self) -> None:
        """Read the weights of the model's folder, which are version -1, and serve again.
        `load_version` brings the newest version. Raises `EngineDied` when the process dies, and
        when the weights can't be read or differ from those that the folder had before."""
        async with self._loading:
            if self.active:
                return
            await self._worker_or_death("rose_activate")
            self.version = -1
            core = self._llm.engine_core
            await self._call(core.set_weight_version_async(str(self.version)), RPC_TIMEOUT_S)
            await self._set_scheduler_inactive(False)
            await self._call(core.resume_scheduler_async(), RPC_TIMEOUT_S)
            self.active = True

    async def _set_scheduler_inactive(self, inactive: bool) -> None:
        """Make vLLM's scheduler on a shared device take no KV memory while `inactive`."""
        # vLLM has `rose_set_inactive` only on a shared device, where a part adds it
        # (rose/engine/plugin.py).
        if plugin.FOLDER in os.environ:
            await self._call(
                self._llm.engine_core.call_utility_async("rose_set_inactive", inactive),
                RPC_TIMEOUT_S,
            )

    async def _worker_or_death(self, method: str, *args) -> list:
        """Call `method` in every worker. If it fails, kill the engine process, because a failure
        midway leaves weights that belong to no version. Raises `EngineDied`."""
        try:
            return await self._worker(method, ACTIVATE_TIMEOUT_S, *args)
        except (TransferError, EngineError) as error:
            self.kill()
            raise EngineDied(
                f"engine process {self.pid} was ended, as {method} failed: {error}"
            ) from error

    def _check_sleep_mode(self) -> None:
        config = self._llm.vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise EngineError(
                "an engine on a GPU can release its memory only if it was started with "
                "rollout.engine_args.enable_sleep_mode=true"
            )

    def _check_active(self) -> None:
        if not self.active:
            raise EngineError(f"engine process {self.pid} is inactive: activate() first")

    def _check_weights_here(self) -> None:
        self._check_active()
        if not self._weights_here:
            raise EngineError(f"engine process {self.pid} is asleep: wake_weights() first")


def _moved(found: list[list[float]]) -> Moved:
    """Combine the workers' (released, free, total) in GiB into the smallest value of each."""
    released, free, total = zip(*found, strict=False)
    return Moved(min(released, key=abs), min(free), min(total))
