"""An engine that gives the memory of its weights and KV cache back and takes it again: mixed into
`Engine`.

Two ways. `deactivate` forgets the weights: they are read again from the model's folder. `sleep`
keeps them in host memory, and the version with them: a device is shared in turn with a trainer that
way. The workers' side is rose/engine/inactive.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rose.engine import plugin
from rose.engine.start import RPC_TIMEOUT_S, EngineDied, EngineError
from rose.transfer import TransferError

ACTIVATE_TIMEOUT_S = 300.0  # to read the weights again, or for a thread that reads them to end


@dataclass(frozen=True)
class Moved:
    """Memory of an engine's devices that it gave back (`gib` > 0) or took (< 0), GiB."""

    gib: float  # of the worker that moved least
    free_gib: float  # afterwards, of the fullest device
    total_gib: float

    def __add__(self, later: Moved) -> Moved:
        return Moved(self.gib + later.gib, later.free_gib, later.total_gib)


NOTHING = Moved(0.0, 0.0, 0.0)


class Activation:
    """`active`: whether it serves. `asleep`: it keeps its weights in host memory and has no KV
    cache; turns wait. `_activations` counts both: what was cached before one never matches after
    it."""

    active, asleep, _activations = True, False, 0
    _weights_here = True  # false from `sleep` to `wake_weights`

    async def sleep(self) -> Moved:
        """Give back the memory of the KV cache and, on a GPU, of the weights, which stay in host
        memory. Turns that run are interrupted, and go on after `wake`.

        Raises `EngineError` on a GPU without vLLM's sleep mode, or as `Staging._quiet`;
        `EngineDied`.
        """
        self._check_sleep_mode()
        async with self._loading:
            self._check_active()
            await self._quiet(ACTIVATE_TIMEOUT_S)
            self._weights_here = False
            if not self.asleep:
                self.asleep, self._activations = True, self._activations + 1
                self._open.clear()
                await self._call(
                    self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True),
                    RPC_TIMEOUT_S,
                )
                await self._abort_requests()
            return _moved(await self._worker_or_death("rose_sleep"))

    async def wake_weights(self) -> Moved:
        """First half of waking: afterwards `load_version` is possible. Raises `EngineDied`."""
        async with self._loading:
            moved = _moved(await self._worker_or_death("rose_wake", "weights"))
            self._weights_here = True
            return moved

    async def wake(self) -> Moved:
        """The KV cache's memory too; serve again. Raises `EngineDied`."""
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
        """Give back the memory of weights and KV cache; the process stays. Turns that run end with
        finish ABORT.

        Raises `EngineError` on a GPU without vLLM's sleep mode, or as `Staging._quiet`;
        `EngineDied`.
        """
        core = self._llm.engine_core
        self._check_sleep_mode()
        async with self._loading:
            if not self.active:
                return
            await self._quiet(ACTIVATE_TIMEOUT_S)
            self.active, self._activations = False, self._activations + 1
            for turn in self._turns.values():
                turn.aborted = True
            # The prefix cache stays: vLLM can't clear it while blocks are withheld. The salt keeps
            # it from matching.
            await self._call(
                core.pause_scheduler_async(mode="abort", clear_cache=False), RPC_TIMEOUT_S
            )
            await self._abort_requests()
            await self._rest(True)
            await self._worker_or_death("rose_deactivate")

    async def activate(self) -> None:
        """Read the folder's weights, version -1, and serve again; `load_version` brings the newest.

        Raises `EngineDied`, also when the weights can't be read or aren't those of before.
        """
        async with self._loading:
            if self.active:
                return
            await self._worker_or_death("rose_activate")
            self.version = -1
            core = self._llm.engine_core
            await self._call(core.set_weight_version_async(str(self.version)), RPC_TIMEOUT_S)
            await self._rest(False)
            await self._call(core.resume_scheduler_async(), RPC_TIMEOUT_S)
            self.active = True

    async def _rest(self, resting: bool) -> None:
        """Where the device is shared, the scheduler takes none of its KV memory meanwhile."""
        if plugin.FOLDER in os.environ:  # as vLLM's plugin looks at it, who makes this call
            await self._call(
                self._llm.engine_core.call_utility_async("rose_rest", resting), RPC_TIMEOUT_S
            )

    async def _worker_or_death(self, method: str, *args) -> list:
        """What fails midway leaves weights that are nobody's."""
        try:
            return await self._worker(method, ACTIVATE_TIMEOUT_S, *args)
        except (TransferError, EngineError) as error:
            self._process.kill()
            raise EngineDied(
                f"engine process {self.pid} was ended, as {method} failed: {error}"
            ) from error

    def _check_sleep_mode(self) -> None:
        config = self._llm.vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise EngineError(
                "an engine on a GPU gives its memory back if it was started with "
                "rollout.engine_args.enable_sleep_mode=true"
            )

    def _check_active(self) -> None:
        if not self.active:
            raise EngineError(f"engine process {self.pid} is inactive: activate() first")

    def _check_weights(self) -> None:
        self._check_active()
        if not self._weights_here:
            raise EngineError(f"engine process {self.pid} is asleep: wake_weights() first")


def _moved(found: list[list[float]]) -> Moved:
    """The least of the workers' (given back, free, total)."""
    given, free, total = zip(*found, strict=False)
    return Moved(min(given, key=abs), min(free), min(total))
