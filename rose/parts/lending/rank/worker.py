"""The rollout worker of a borrowed rank: may leave at any time, and outlives its coordinator."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from rose import protocol as p
from rose.comm.link import Link
from rose.comm.wire import COORDINATOR, decode, encode
from rose.engine.rank import RolloutWorker
from rose.engine.vllm_engine import Engine, EngineDied, EngineError
from rose.observe.recorder import NullRecorder
from rose.parts.lending.config import Config
from rose.parts.lending.rank.capacity import CapacityWatch, EngineBoard
from rose.parts.lending.rules.gate import Reason

FIRST_PAUSE_S = 0.0002  # seconds between the first two polls of an empty link; later ones are more
# Seconds to wait for `Shutdown` after `WorkerLeft`, so that a closing connection loses no message.
GOODBYE_S = 2.0
CAPACITY_POLL_S = 0.05  # seconds between two reads of the engine's board
INACTIVE_POLL_S = 0.25  # seconds between two checks whether the operator lends
INACTIVE_AFTER_S = 10.0  # seconds without lending after which the engine releases its memory
# Seconds of silence after which the run counts as over. A coordinator may be busy for some seconds.
RUN_SILENT_S = 30.0


class Wire:
    """A mailbox over a link, with the coordinator as its only peer."""

    def __init__(self, link: Link, idle_pause_s: float = 0.002) -> None:
        self._link, self._idle_pause_s, self._pause_s = link, idle_pause_s, FIRST_PAUSE_S
        self._empty_at = time.monotonic()  # time of the last poll that found no message

    def send(self, _: int, message: p.Message) -> None:
        self._link.send(encode(message))

    async def receive(self) -> tuple[int, p.Message]:
        while (data := self._link.take()) is None:
            self._empty_at = time.monotonic()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 1.5, self._idle_pause_s)
        self._pause_s = FIRST_PAUSE_S
        return COORDINATOR, decode(data)

    def silent_s(self) -> float:
        """Seconds between the coordinator's last message and our last poll of an empty link.
        Measured at the poll and not now: a worker that was suspended itself must not count this
        time as the coordinator's silence."""
        return max(0.0, self._empty_at - self._link.last_seen)


class BorrowedWorker(RolloutWorker):
    """A rollout worker that may leave, and outlives its coordinator. `board`: path of its engine's
    board, None without a shared device. `on_version(version)` is called after a version's load."""

    dedicated = False

    def __init__(
        self,
        config: Config,
        name: str,
        recorder: NullRecorder,
        board: Path | None = None,
        on_version: Callable[[int], object] = lambda version: None,
    ) -> None:
        super().__init__(config, name, None, recorder)
        self._board, self._on_version = board, on_version
        self._awake = asyncio.Event()  # clear while the engine is inactive
        self._awake.set()
        self._loads = 0  # number of versions being loaded
        self.heartbeat_s = config.serving.heartbeat_s
        self.over = ""  # reason why the run is over for this rank
        self._asked_to_leave: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ask_to_leave(self, number: int) -> None:
        """Leave because of signal `number`: after SIGUSR2 when the turns are done, after any other
        signal at once. Slurm's signals may arrive twice, because the lender passes them on."""
        if number == signal.SIGTERM:
            # Slurm also sends SIGTERM to the engine's process. vLLM would log its end as an error.
            logging.getLogger("vllm").setLevel(logging.CRITICAL)
        if not self._asked_to_leave.done():
            self._asked_to_leave.set_result(number)
        elif number != signal.SIGUSR2:
            self._drain_until = 0.0

    @property
    def asked_to_leave(self) -> bool:
        return self._asked_to_leave.done() and not self._asked_to_leave.cancelled()

    def _services(self) -> list[Coroutine]:
        watches = (
            [self._watch_capacity(self._board), self._watch_lending(self._board)]
            if self._board is not None
            else []
        )
        return [*super()._services(), self._watch_run(), self._leave(), *watches]

    def _handle(self, message: p.Message) -> None:
        if not isinstance(message, p.Heartbeat):
            super()._handle(message)

    async def _watch_run(self) -> None:
        """Return when the coordinator has been silent for RUN_SILENT_S."""
        while self.mailbox.silent_s() < RUN_SILENT_S:
            await asyncio.sleep(1.0)
        self.over = f"the run has been silent for {RUN_SILENT_S:g} s"

    async def _watch_capacity(self, path: Path) -> None:
        """Report the engine's capacity after each `WorkerReady`, evicted turn and large change."""
        incarnation = returned = 0
        while True:
            await asyncio.sleep(CAPACITY_POLL_S)
            engine = self.engine
            if engine is None or not engine.alive:
                continue
            if incarnation != self.incarnation:
                incarnation = self.incarnation
                board = EngineBoard(path, engine.pid)
                watch = CapacityWatch(engine.kv_tokens, self._max_sequences)
            # After an evicted turn, the scheduler sends no turns until it receives this report.
            if returned != self._returned:
                returned = self._returned
                watch.repeat()
            found = watch.update(time.monotonic(), board.read())
            if found is not None:
                self._send(p.WorkerCapacity(self.name, incarnation, *found))

    async def _watch_lending(self, path: Path) -> None:
        """Deactivate the engine after INACTIVE_AFTER_S without lending, and activate it when
        lending resumes. An inactive engine has a process, but no weights and no KV cache.
        Activating it takes about a second."""
        since: float | None = None
        board: EngineBoard | None = None
        while True:
            await asyncio.sleep(INACTIVE_POLL_S)
            engine = self.engine
            if engine is None or not engine.alive:
                self._awake.set()  # the next engine starts with weights and KV cache
                continue
            if board is None or board.pid != engine.pid:
                board = EngineBoard(path, engine.pid)
            state = board.read()
            stopped = state is not None and state.shut_by in (Reason.STOPPED, Reason.HOUR)
            since = (since or time.monotonic()) if stopped else None
            try:
                if not stopped and not engine.active:
                    await self._activate(engine)
                elif (
                    stopped
                    and engine.active
                    and not self._turns
                    and not self._loads
                    and time.monotonic() - since > INACTIVE_AFTER_S
                ):
                    self._awake.clear()
                    await engine.deactivate()
                    print(
                        f"{self.name}: nothing is lent; the engine released its memory", flush=True
                    )
            except EngineDied:
                continue  # `_keep_engine` reports it
            except EngineError as error:
                # The engine was busy for too long and keeps its memory. The next poll tries again.
                print(f"{self.name}: {error}", flush=True)
                self._awake.set()

    async def _activate(self, engine: Engine) -> None:
        """Activate the engine, and report it to the coordinator as a new worker."""
        began = time.monotonic()
        await engine.activate()
        print(
            f"{self.name}: lending again; the engine is active after "
            f"{time.monotonic() - began:.2f} s",
            flush=True,
        )
        # The engine holds no version of the run, so it is a new worker to the scheduler.
        self.incarnation += 1
        self._send(self._ready())
        self._awake.set()

    async def _generate(self, m: p.GenerateTurn) -> None:
        # The coordinator sent this turn before it received our report of no capacity.
        if not self._awake.is_set():
            self._send(p.TurnReturned(m.turn, m.attempt, b"", b"", self.engine.version, "inactive"))
            self._turns.pop((m.turn, m.attempt), None)
            return
        await super()._generate(m)

    async def _load(self, m: p.LoadVersion) -> None:
        if not self._awake.is_set():
            return  # After the report of `_activate`, the coordinator orders the load again.
        self._loads += 1
        try:
            await super()._load(m)
        finally:
            self._loads -= 1
        if self.engine.version == m.version:
            self._on_version(m.version)

    async def _leave(self) -> None:
        """Wait for `ask_to_leave`; then report, end the turns and say goodbye."""
        number = await self._asked_to_leave
        reason = f"asked by {signal.Signals(number).name}"
        self._drain_until = time.monotonic() + (
            self.config.serving.drain_s if number == signal.SIGUSR2 else 0.0
        )
        self._sends_last_tokens = True
        self._send(p.WorkerLeaving(self.name, self.incarnation, reason))
        while self._turns and time.monotonic() < self._drain_until:
            await asyncio.sleep(0.02)
        for task in list(self._turns.values()):
            task.cancel()
        await asyncio.sleep(0)  # lets the cancelled turns send their last tokens
        self._send(p.WorkerLeft(self.name, self.incarnation, reason))
        await asyncio.sleep(GOODBYE_S)  # the coordinator's `Shutdown` ends the worker before this
