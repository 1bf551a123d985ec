"""A new version in an engine's workers, as the engine follows it: mixed into `Engine`.

The workers' side, which stages and checks in threads of its own, is rose/engine/weight_transfer.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rose.engine.start import RPC_TIMEOUT_S, EngineDied, EngineError
from rose.transfer import TransferError

FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.05  # between two questions whether a version is staged
TRUST_S = 0.25  # the first comes by then: the version before may have been an engine's slow first
# State in which a worker's thread uses the live weights -> the status's figure of how long it took.
TOOK = {"staging": "stage_s", "checking": "check_s"}


class Staging:
    """`_broke_off`: the workers may still be busy with a version that nobody waits for, or have
    vLLM's session open."""

    _broke_off = False

    @asynccontextmanager
    async def _session(self, timeout_s: float) -> AsyncIterator[None]:
        """Around a load: whatever breaks it off, the workers give up what they stage, and vLLM
        takes a next version. Raises as `_quiet`."""
        await self._quiet(timeout_s)
        self._broke_off = True  # until it is known to have ended
        try:
            yield
        except BaseException:
            # who does not answer now is asked before the next load
            with suppress(TransferError, EngineError):
                await self._abandon()
            raise
        self._broke_off = False

    async def _quiet(self, timeout_s: float) -> None:
        """Wait until nothing of a load that broke off goes on in the workers, whose threads would
        read live weights. Raises `EngineError` after `timeout_s` seconds, `EngineDied`."""
        end = time.monotonic() + timeout_s
        while self._broke_off:
            await self._abandon()
            if not self._broke_off:
                return
            if time.monotonic() > end:
                raise EngineError(
                    f"engine process {self.pid} is busy for over {timeout_s:g} s with a version "
                    "whose load broke off"
                )
            await asyncio.sleep(LAST_LOOK_S)

    async def _abandon(self) -> None:
        """No version is staged any more, or will be. What a worker is in the middle of it goes on
        with for a while: `_broke_off` until then."""
        found = await self._worker("rose_abandon", RPC_TIMEOUT_S)
        self._no_mixture(found)
        self._broke_off = any(status["state"] in TOOK for status in found)

    async def _settled(self, state: str, timeout_s: float) -> list[dict]:
        """What the workers report once none of them is in `state` any more. Raises `TransferError`,
        `EngineError`.

        Few questions: each waits behind the step in flight, and no step is planned ahead meanwhile.
        The first comes after half of the time that the version before took the slowest worker, but
        within `TRUST_S`, the others in eighths of it, but within half of the time until then.
        """
        began, expected_s = time.monotonic(), self._took_s.get(state, 0.0)
        pause_s = max(FIRST_LOOK_S, min(expected_s / 2, TRUST_S))
        while True:
            await asyncio.sleep(pause_s)
            found = await self._worker("rose_status", RPC_TIMEOUT_S)
            if all(status["state"] != state for status in found):
                break
            took_s = time.monotonic() - began
            if took_s > timeout_s:
                raise EngineError(
                    f"engine process {self.pid} is {state} a version for over {timeout_s:g} s"
                )
            pause_s = min(took_s / 2, max(LAST_LOOK_S, expected_s / 8))
        self._all_well(found)
        self._took_s[state] = max(status[TOOK[state]] for status in found)
        return found

    async def _flipped(self, timeout_s: float) -> None:
        """Put what is staged in place. Raises as `_settled`; an engine of which it is not known
        which weights it has, as where the workers did not answer in time, is ended."""
        try:
            found = await self._worker("rose_flip", timeout_s)
        except BaseException:
            self._process.kill()
            raise
        self._all_well(found)

    def _all_well(self, found: list[dict]) -> None:
        self._no_mixture(found)
        failed = [status for status in found if status["state"] == "failed"]
        if failed:
            raise TransferError(failed[0]["error"])

    def _no_mixture(self, found: list[dict]) -> None:
        failed = [status for status in found if status["state"] == "failed"]
        if any(status["mixture"] for status in failed) or (
            failed and any(s["state"] == "checking" for s in found)
        ):
            self._process.kill()
            raise EngineDied(
                f"engine process {self.pid} was ended, as its weights were a mixture: "
                f"{failed[0]['error']}"
            )
