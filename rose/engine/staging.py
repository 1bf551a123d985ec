"""A mixin of `Engine` that has its workers stage, flip and check a new policy version: decode its
changes, write them into the live weights, and verify these.

The workers stage and check in threads of their own (rose/engine/weight_transfer.py); the engine
polls them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rose.engine.start import RPC_TIMEOUT_S, EngineDied, EngineError
from rose.transfer import TransferError

SHORTEST_POLL_S = 0.001  # least seconds before the first poll of the workers
POLL_S = 0.05  # least seconds between later polls, or half of the elapsed time if that is less
# Most seconds before the first poll. The last version's duration predicts the next one's, but an
# engine's first version is slower.
LONGEST_FIRST_POLL_S = 0.25
# The states in which a worker's thread uses the live weights -> the status's key of their seconds.
DURATION_KEYS = {"staging": "stage_s", "checking": "check_s"}


class Staging:
    """Loads each version in a session. `_session_open` is true from a session's start until its end
    is known. Until then workers may use the live weights, and vLLM's weight update may be open."""

    _session_open = False

    @asynccontextmanager
    async def _session(self, timeout_s: float) -> AsyncIterator[None]:
        """Context of a load. On any error, or a cancellation, the workers abandon the version, so
        that vLLM accepts the next one. Raises what `_end_session` raises."""
        await self._end_session(timeout_s)
        self._session_open = True
        try:
            yield
        except BaseException:
            # If the workers don't answer now, the next load asks them again.
            with suppress(TransferError, EngineError):
                await self._abandon()
            raise
        self._session_open = False

    async def _end_session(self, timeout_s: float) -> None:
        """Wait until the workers have ended an aborted load, because their threads read live
        weights. Raises `EngineDied`, and `EngineError` after `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while self._session_open:
            await self._abandon()
            if not self._session_open:
                return
            if time.monotonic() > end:
                raise EngineError(
                    f"engine process {self.pid} is busy for over {timeout_s:g} s with a version "
                    "whose load was aborted"
                )
            await asyncio.sleep(POLL_S)

    async def _abandon(self) -> None:
        """Have the workers drop the version that is staged or being staged. A worker finishes the
        blocks that it is busy with; `_session_open` stays true until then."""
        found = await self._worker("rose_abandon", RPC_TIMEOUT_S)
        self._check_no_mixture(found)
        self._session_open = any(status["state"] in DURATION_KEYS for status in found)

    async def _wait_while(self, state: str, timeout_s: float) -> list[dict]:
        """Wait until no worker is in `state`; return their statuses.

        Polls rarely: each poll waits for the engine step in flight, and vLLM plans no step ahead
        meanwhile. `expected_s` is the slowest worker's time in `state` for the last version.

        Raises `TransferError` when a worker failed, `EngineError` after `timeout_s` seconds."""
        began, expected_s = time.monotonic(), self._took_s.get(state, 0.0)
        pause_s = max(SHORTEST_POLL_S, min(expected_s / 2, LONGEST_FIRST_POLL_S))
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
            pause_s = min(took_s / 2, max(POLL_S, expected_s / 8))
        self._check_statuses(found)
        self._took_s[state] = max(status[DURATION_KEYS[state]] for status in found)
        return found

    async def _flip_staged(self, timeout_s: float) -> None:
        """Put the staged version in place. Kills the engine if the call fails, as on a timeout,
        because its weights are unknown then. If a worker reports a flip that failed and was undone,
        only raises `TransferError`, and the old version keeps serving. Raises `EngineDied`, too."""
        try:
            found = await self._worker("rose_flip", timeout_s)
        except BaseException:
            self.kill()
            raise
        self._check_statuses(found)

    def _check_statuses(self, found: list[dict]) -> None:
        """Raise `TransferError` if a worker failed, and what `_check_no_mixture` raises."""
        self._check_no_mixture(found)
        failed = [status for status in found if status["state"] == "failed"]
        if failed:
            raise TransferError(failed[0]["error"])

    def _check_no_mixture(self, found: list[dict]) -> None:
        """Kill the engine and raise `EngineDied` if its weights are a mixture of two versions: a
        worker reports a mixture, or one worker failed while another has flipped."""
        failed = [status for status in found if status["state"] == "failed"]
        if any(status["mixture"] for status in failed) or (
            failed and any(s["state"] == "checking" for s in found)
        ):
            self.kill()
            raise EngineDied(
                f"engine process {self.pid} was ended, as its weights were a mixture: "
                f"{failed[0]['error']}"
            )
