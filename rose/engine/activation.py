"""An engine that gives the memory of its weights and KV cache back and takes it again: mixed into `Engine`.

The workers' side is rose/engine/inactive.py.
"""

from __future__ import annotations

from rose.engine.start import RPC_TIMEOUT_S, EngineDied, EngineError
from rose.transfer import TransferError

ACTIVATE_TIMEOUT_S = 300.0  # to read the weights again from the model's folder


class Activation:
    """`active`: whether it serves. `_activations` counts them: what was cached before one never matches after it."""

    active, _activations = True, 0

    async def deactivate(self) -> None:
        """Give back the memory of weights and KV cache; the process stays. Turns that run end with finish ABORT.

        Raises `EngineError` on a GPU without vLLM's sleep mode; `EngineDied`.
        """
        config, core = self._llm.vllm_config, self._llm.engine_core
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise EngineError("an engine on a GPU can be deactivated if it was started with "
                              "rollout.engine_args.enable_sleep_mode=true")
        async with self._loading:
            if not self.active:
                return
            self.active, self._activations = False, self._activations + 1
            for turn in self._turns.values():
                turn.aborted = True
            # The prefix cache stays: vLLM can't clear it while blocks are withheld. The salt keeps it from matching.
            await self._call(core.pause_scheduler_async(mode="abort", clear_cache=False), RPC_TIMEOUT_S)
            await self._abort_requests()
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
            await self._call(core.resume_scheduler_async(), RPC_TIMEOUT_S)
            self.active = True

    async def _worker_or_death(self, method: str) -> None:
        """What fails midway leaves weights that are nobody's."""
        try:
            await self._worker(method, ACTIVATE_TIMEOUT_S)
        except (TransferError, EngineError) as error:
            self._process.kill()
            raise EngineDied(f"engine process {self.pid} was ended, as {method} failed: {error}") from error

    def _check_active(self) -> None:
        if not self.active:
            raise EngineError(f"engine process {self.pid} is inactive: activate() first")
