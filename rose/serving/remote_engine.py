"""The online server's engine as a borrowed rank's, where both sides serve the same weights: `Engine`'s interface, by HTTP.

    engine = await RemoteEngine.connect(boards_folder, model_folder, config)

It owns no process. The engine is gone (`died`) when the server's or the engine's process is, or when the server has not
answered for SILENT_S. Left out: starting it again, which is its operator's work; `connect` waits for that.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from rose import protocol
from rose.config import Config, ConfigError, Transfer
from rose.engine.activation import ACTIVATE_TIMEOUT_S
from rose.engine.start import RPC_TIMEOUT_S, EngineDied, EngineError, local_folder
from rose.engine.vllm_engine import Chunk, Loaded, Stats
from rose.serving import turns
from rose.serving.turns import Abort, Failure, Frames, Load, State, Turn

LOOK_S = 0.5  # between two questions for the state
ANSWER_S = 5.0  # for one
SILENT_S = 30.0
DEATH_NOTICE_S = 1.0  # a broken connection is often the first sign of it
TRY_S = 0.5  # between two attempts to connect

Answer = TypeVar("Answer")


class RemoteEngine:
    """Built by `connect`."""

    def __init__(self, address: turns.Address, state: State, config: Config) -> None:
        self._address, self._state, self.version = address, state, state.version
        self._max_context, self._turn_timeout_s = config.model.max_context, config.rollout.turn_timeout_s
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=address.header)
        self._died = asyncio.get_running_loop().create_future()
        self._turns: set[str] = set()
        self._processes: list[int] = []
        self._watching: asyncio.Task | None = None

    @classmethod
    async def connect(cls, folder: Path, model: Path, config: Config) -> RemoteEngine:
        """Wait for the server of the boards in `folder`, and have it serve the weights of `model`, the run's own: that
        is version -1.

        Raises `ConfigError` when its engine isn't the run's; `EngineError` after `rollout.engine_start_timeout_s`.
        """
        timeout_s = config.rollout.engine_start_timeout_s
        end = time.monotonic() + timeout_s
        while True:
            made = None
            try:
                made = cls(turns.find(folder), _NOBODY, config)
                await made._begin(model, config)
                return made
            except (EngineError, OSError) as error:
                if made is not None:
                    await made.shutdown()
                if time.monotonic() > end:
                    raise EngineError(f"no online engine to share within {timeout_s:g} s "
                                      f"(rollout.engine_start_timeout_s): {error}") from error
            except BaseException:
                if made is not None:
                    await made.shutdown()
                raise
            await asyncio.sleep(TRY_S)

    async def _begin(self, model: Path, config: Config) -> None:
        self._state = await self._ask("GET", turns.STATE, None, State, ANSWER_S)
        await asyncio.to_thread(_check, self._state, model, config)
        for process in (self._state.server, self._state.engine):
            self._processes.append(handle := os.pidfd_open(process))
            asyncio.get_running_loop().add_reader(handle, self._on_death)
        self._state = await self._ask("POST", turns.ANEW, None, State, ACTIVATE_TIMEOUT_S + 3 * RPC_TIMEOUT_S)
        self.version = self._state.version
        self._watching = asyncio.create_task(self._watch())

    # ------------------------------------------------------------------ turns

    async def generate(self, turn_id: str, tokens: bytes, sampling: protocol.Sampling) -> AsyncIterator[Chunk]:
        """As `Engine.generate`. A connection that breaks, or brings nothing for `rollout.turn_timeout_s`, while the
        engine lives ends the turn with finish ABORT."""
        self._check_alive()
        if turn_id in self._turns:
            raise EngineError(f"turn {turn_id} is already running on this engine")
        room = self._max_context - protocol.unpack_tokens(tokens).size
        if room <= 0:
            yield Chunk([], [], self.version, protocol.FinishReason.LENGTH, 0)
            return
        sampling = msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        self._turns.add(turn_id)
        try:
            asking = self._session.post(self._address.url + turns.TURNS, timeout=aiohttp.ClientTimeout(total=None),
                                        data=msgspec.msgpack.encode(Turn(turn_id, tokens, sampling)))
            async with await self._until_death(asking, RPC_TIMEOUT_S) as answer:
                if answer.status != 200:
                    raise turns.error_of(_decode(await answer.read(), Failure))
                frames = Frames()
                while True:
                    data = await self._until_death(answer.content.readany(), self._turn_timeout_s)
                    if not data:
                        raise aiohttp.ClientPayloadError("the stream ended before the turn")
                    for message in frames.feed(data):
                        if isinstance(message, Failure):
                            raise turns.error_of(message)
                        yield message
                        if message.finish is not None:
                            return
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            await asyncio.wait({self._died}, timeout=DEATH_NOTICE_S)
            self._check_alive()
            print(f"turn {turn_id} is given back: {type(error).__name__}: {error}", flush=True)
            yield Chunk([], [], self.version, protocol.FinishReason.ABORT, 0)
        finally:
            self._turns.discard(turn_id)

    async def abort(self, turn_id: str) -> None:
        """Stop a turn: its iterator ends with what it has and finish ABORT. Unknown turns are ignored: they ended."""
        if turn_id in self._turns and self.alive:
            await self._ask("POST", turns.ABORT, Abort(turn_id), None, RPC_TIMEOUT_S)

    # ------------------------------------------------------------------ weights

    async def load_version(self, version: int, store: str, transfer: Transfer, mirror: str | None = None) -> Loaded:
        """As `Engine.load_version`; online requests get these weights too."""
        self._check_alive()
        timeout_s = 3 * transfer.load_timeout_s + 8 * RPC_TIMEOUT_S  # staging, flip and check, and the calls for them
        if transfer.in_flight == "finish":
            timeout_s += self._turn_timeout_s
        load = Load(version, store, transfer, mirror, self._turn_timeout_s)
        loaded = await self._ask("POST", turns.LOAD, load, Loaded, timeout_s)
        self.version = loaded.version
        return loaded

    # ------------------------------------------------------------------ state

    @property
    def pid(self) -> int:
        """Of the engine process, which writes the boards."""
        return self._state.engine

    @property
    def open(self) -> bool:
        return self._state.open

    @property
    def alive(self) -> bool:
        return not self._died.done()

    @property
    def died(self) -> asyncio.Future:
        """Done once the engine is gone; await it through `asyncio.shield`."""
        return self._died

    @property
    def kv_tokens(self) -> int:
        """Of the whole KV cache, which online requests use first."""
        return self._state.kv_tokens

    @property
    def hardware(self) -> str:
        return self._state.hardware

    @property
    def max_sequences(self) -> int:
        """Of both sides."""
        return self._state.max_sequences

    def stats(self) -> Stats:
        """As of LOOK_S ago."""
        return self._state.stats

    async def shutdown(self) -> None:
        """Leave it, with every turn; the online server serves on."""
        self._on_death()
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        await self._session.close()

    async def _watch(self) -> None:
        """Ask for the state; an engine that says nothing for too long is as good as gone."""
        heard = time.monotonic()
        while self.alive and time.monotonic() - heard < SILENT_S:
            with suppress(EngineError):
                self._state = await self._ask("GET", turns.STATE, None, State, ANSWER_S)
                heard = time.monotonic()
            await asyncio.sleep(LOOK_S)
        if self.alive:
            print(f"{self._address.url} has not answered for {SILENT_S:g} s", flush=True)
            self._on_death()

    def _on_death(self) -> None:
        for handle in self._processes:
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)
        self._processes.clear()
        if not self._died.done():
            self._died.set_result(None)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDied(f"the online engine, process {self.pid}, is gone")

    async def _ask(self, method: str, path: str, message: Any, kind: type[Answer], timeout_s: float) -> Answer:
        """Raises what the server says went wrong; `EngineDied`; `EngineError` when it can't be asked."""
        try:
            return await self._until_death(self._answer(method, path, message, kind), timeout_s)
        except TimeoutError:
            raise EngineError(f"{self._address.url}{path}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            await asyncio.wait({self._died}, timeout=DEATH_NOTICE_S if self._processes else 0.0)
            self._check_alive()
            raise EngineError(f"{self._address.url}{path}: {type(error).__name__}: {error}") from error

    async def _answer(self, method: str, path: str, message: Any, kind: type[Answer]) -> Answer:
        data = b"" if message is None else msgspec.msgpack.encode(message)
        async with self._session.request(method, self._address.url + path, data=data,
                                         timeout=aiohttp.ClientTimeout(total=None)) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise turns.error_of(_decode(body, Failure))
            return _decode(body, kind)

    async def _until_death(self, work: Awaitable[Answer], timeout_s: float) -> Answer:
        """Raises `TimeoutError`, `EngineDied`."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._check_alive()
            raise TimeoutError(f"nothing came for {timeout_s:g} s")
        finally:
            task.cancel()


_NOBODY = State(0, 0, "", "", 0, 0, 0, "", -1, False, Stats(0, 0, 0.0, 0, 0, 0))


def _decode(data: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"not an answer of ROSE's endpoint ({error}): {data[:200]!r}") from None


def _check(state: State, model: Path, config: Config) -> None:
    """Raises `ConfigError` when the engine can't compute the run's turns."""
    if _digest(local_folder(state.model)) != _digest(model):
        raise ConfigError(f"serving.online.model={state.model!r} is not the run's model, {str(model)!r}: with "
                          "serving.lending.same_weights=true one engine serves both")
    if state.max_context < config.model.max_context:
        raise ConfigError(f"serving.online.max_context={state.max_context}: the run's turns need model.max_context="
                          f"{config.model.max_context}")
    if state.dtype != config.model.dtype:
        raise ConfigError(f"serving.online.dtype={state.dtype}: the run has model.dtype={config.model.dtype}")


def _digest(folder: Path) -> str:
    """Of its config.json, and the names and sizes of its weights."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        found.update(f"{path.name} {path.stat().st_size}".encode())
    return found.hexdigest()
