"""The coordinator's half that deals with borrowed ranks: admits them, receives their messages,
notices that they are gone.

Nothing that such a rank does, sends or leaves undone may stop the run: its messages are checked
before anybody acts on them, and a rank that sends an invalid one is disconnected. Left out: the way
to it (rose/comm/guest.py) and turns (rose/coordinator/turns.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rose import protocol as p
from rose.comm.guest import Guest, GuestGone
from rose.comm.join import Ask, Door
from rose.comm.tasks import Tasks
from rose.comm.wire import WireError
from rose.config import Config
from rose.coordinator.turns import TurnHub
from rose.launch import local

LOOK_S = 0.1  # between two looks at who asks
LATE_S = 0.5  # a look that comes so late says nothing about others: this rank itself was busy
BEAT_S = 2.0  # between two signs of life in the endpoint's file
FAREWELL_S = 0.3  # for the last message to pass the porter
HELLO_S = 5.0  # from the connection to a rank's `JoinHello`
ACCEPTED = (
    p.WorkerReady,
    p.WorkerDown,
    p.WorkerLoad,
    p.WorkerCapacity,
    p.TurnProgress,
    p.TurnFinished,
    p.TurnReturned,
    p.VersionLoaded,
    p.VersionFailed,
    p.WorkerLeaving,
    p.WorkerLeft,
)


@dataclass
class _Rank:
    """One that was admitted."""

    worker: str
    ask: Ask
    id: str
    asked_at: float  # monotonic
    connecting: asyncio.Event = field(default_factory=asyncio.Event)
    guest: Guest | None = None
    connected: bool = False
    greeted: bool = False  # its hello was found right


class Borrowed:
    """`world_size`: the ranks' addresses begin there. `on_change(what, detail)`: one came or went
    in order."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        world_size: int,
        hub: Callable[[], TurnHub],
        on_fault: Callable[[str, str], None],
        on_change: Callable[[str, str], None],
    ) -> None:
        self._config, self._hub = config.serving, hub
        cluster = config.cluster
        self._mpi_env = cluster.interface_env | cluster.mpi.env | cluster.mpi.join_env
        self._on_fault, self._on_change = on_fault, on_change
        self._patience_s = config.rollout.engine_start_timeout_s
        self._shape = config.model.shape
        self._vocabulary = config.model.shape.vocab if config.model.shape else 2**31
        self._door = Door(run_dir, attempt)
        self._ranks: dict[int, _Rank] = {}  # by address
        self._first = self._next = world_size
        self._tasks: Tasks | None = None

    async def run(self) -> None:
        """For ever. The door's files may lie on a slow file system, so another thread looks at
        them."""
        self._tasks = Tasks()
        await asyncio.to_thread(self._door.open)
        try:
            await self._tasks.run_until(self._poll())
        finally:
            await self._tasks.close(1.0)
            self._door.close()

    async def _poll(self) -> None:
        beat_at = sent_at = looked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            asks, connecting = await asyncio.to_thread(self._door.look)
            for id, ask in asks:
                await self._decide(id, ask)
            for rank in self._ranks.values():
                if rank.id in connecting:
                    rank.connecting.set()
            now = time.monotonic()
            if now - sent_at >= self._config.heartbeat_s:
                sent_at = now
                for rank in self._ranks.values():
                    if rank.greeted:
                        rank.guest.send(p.Heartbeat())
            if now - beat_at >= BEAT_S:
                beat_at = now
                await asyncio.to_thread(self._door.beat)
            if now - looked_at < LATE_S:
                self._look_for_silence(now)
            looked_at = time.monotonic()

    def send(self, address: int, message: p.Message) -> None:
        """To a rank that may be gone: then it goes nowhere."""
        rank = self._ranks.get(address)
        if rank is not None and rank.connected:
            rank.guest.send(message)

    async def disconnect_all(self, reason: str) -> None:
        """Tell all of them that the run has ended, while their connections still stand."""
        for address in self._ranks:
            self.send(address, p.Shutdown(reason))
        if self._ranks:
            await asyncio.sleep(FAREWELL_S)

    # ----------------------------------------------------------------- in

    async def _decide(self, id: str, ask: Ask | str) -> None:
        answer = {}
        if isinstance(ask, str):
            self._on_fault("join refused", f"{id}: {ask}")
            answer = {"reason": ask}
        elif len(self._ranks) >= self._config.max_ranks:
            answer = {
                "reason": (
                    f"the run has {len(self._ranks)} borrowed ranks already (serving.max_ranks)"
                ),
                "temporary": True,
            }
        if answer:
            await asyncio.to_thread(self._door.answer, id, **answer)
            return
        address, self._next = self._next, self._next + 1
        rank = self._ranks[address] = _Rank(
            f"borrowed-{address - self._first + 1}", ask, id, time.monotonic()
        )
        self._tasks.spawn(self._serve_rank(address, rank))

    async def _serve_rank(self, address: int, rank: _Rank) -> None:
        """From the admission to the end of one rank."""
        try:
            rank.guest = await Guest.open([*local.MPIEXEC, "-n", "1"], self._mpi_env)
        except GuestGone as error:
            await asyncio.to_thread(self._door.answer, rank.id, reason=str(error), temporary=True)
            self._disconnect(address, str(error))
            return
        try:
            await asyncio.to_thread(
                self._door.answer, rank.id, worker=rank.worker, port=rank.guest.port
            )
            async with asyncio.timeout(self._patience_s):
                await rank.connecting.wait()
            await rank.guest.accept()
            rank.connected = True
            self._tasks.spawn(self._expect_hello(address, rank))
            while address in self._ranks:
                self._handle(address, rank, await rank.guest.receive())
        except (GuestGone, TimeoutError) as error:
            never = "" if rank.connected else "before it had joined: "
            self._disconnect(
                address, never + (str(error) or f"it did not come within {self._patience_s:g} s")
            )
        finally:
            await asyncio.to_thread(self._door.forget, rank.id)
            await rank.guest.close()

    async def _expect_hello(self, address: int, rank: _Rank) -> None:
        await asyncio.sleep(HELLO_S)
        if not rank.greeted:
            self._disconnect(address, f"sent no valid message within {HELLO_S:g} s")

    # ----------------------------------------------------------------- its messages

    def _handle(self, address: int, rank: _Rank, message: p.Message | WireError) -> None:
        """Whatever is wrong with a message concerns the rank that sent it, and no other."""
        if isinstance(message, WireError):
            self._disconnect(address, f"sent what is no message: {message}")
        elif isinstance(message, p.JoinHello) and not rank.greeted:
            self._hello(address, rank, message)
        elif not rank.greeted or not isinstance(message, ACCEPTED):
            self._disconnect(address, f"sent {type(message).__name__}, which it may not send")
        elif getattr(message, "worker", rank.worker) != rank.worker:
            self._disconnect(address, f"speaks for {message.worker}")
        elif isinstance(message, p.VersionFailed) and message.version >= self._hub().version:
            self._disconnect(address, f"could not load version {message.version}: {message.error}")
        else:
            self._listen(address, rank, message)

    def _hello(self, address: int, rank: _Rank, message: p.JoinHello) -> None:
        if not self._door.is_token(message.token):
            self._disconnect(address, "its token is not the run's")
        elif message.worker != rank.worker:
            self._disconnect(
                address, f"calls itself {message.worker}, and was admitted as {rank.worker}"
            )
        else:
            rank.greeted = True
            self._on_change(
                "joined",
                f"{rank.worker}: process {rank.ask.pid} on {rank.ask.host}"
                + (f", job {rank.ask.job}" if rank.ask.job else "")
                + f", {time.monotonic() - rank.asked_at:.1f} s after it asked",
            )

    def _listen(self, address: int, rank: _Rank, message: p.Message) -> None:
        try:
            self._check(message)
            self._hub().handle(address, message)
        except ValueError as error:
            self._disconnect(address, str(error))
            return
        if isinstance(message, p.WorkerLeft):
            rank.guest.send(p.Shutdown("goodbye"))
            del self._ranks[address]
            self._on_change("left", f"{rank.worker}: {message.reason}")

    def _check(self, message: p.Message) -> None:
        """Raises `ValueError` on values that no engine of this run sends, and that would stop
        somebody further on."""
        if isinstance(message, p.WorkerReady) and min(message.max_sequences, message.kv_tokens) < 1:
            raise ValueError(
                f"an engine with {message.max_sequences} sequences and {message.kv_tokens} KV "
                "tokens"
            )
        if isinstance(message, p.WorkerCapacity) and not (
            min(message.max_sequences, message.kv_tokens) >= 0
            and -1 <= message.expected_s < float("inf")
        ):
            raise ValueError(
                f"capacity for {message.max_sequences} sequences and {message.kv_tokens} KV "
                f"tokens, more in {message.expected_s:g} s"
            )
        if not isinstance(message, (p.TurnProgress, p.TurnFinished, p.TurnReturned)):
            return
        if len(message.tokens) % 4 or len(message.logprobs) % 4:
            return  # the ledger refuses them
        tokens, logprobs = p.unpack_tokens(message.tokens), p.unpack_floats(message.logprobs)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            raise ValueError(
                f"turn {message.turn}: token {tokens.min()} or {tokens.max()} is not in the "
                f"vocabulary of {self._vocabulary}"
            )
        if message.routed and not self._are_experts(message.experts, message.routed):
            raise ValueError(
                f"turn {message.turn}: {len(message.experts)} bytes of experts for "
                f"{message.routed} tokens, or experts that the model has not"
            )
        if not np.isfinite(logprobs).all() or (logprobs > 0).any():
            raise ValueError(f"turn {message.turn}: log-probabilities that are none")
        if (
            message.version > self._hub().version
            or getattr(message, "finish", None) is p.FinishReason.ABORT
        ):
            raise ValueError(f"turn {message.turn}: of version {message.version}, or aborted")

    def _are_experts(self, data: bytes, tokens: int) -> bool:
        shape = self._shape
        if shape is None or not shape.experts:
            return False
        row = shape.layers * shape.experts_per_token * shape.expert_bytes
        found = np.frombuffer(data, f"<u{shape.expert_bytes}") if len(data) == tokens * row else ()
        return len(found) > 0 and int(found.max()) < shape.experts

    # ----------------------------------------------------------------- out

    def _look_for_silence(self, now: float) -> None:
        for address, rank in list(self._ranks.items()):
            silent = now - rank.guest.last_seen if rank.greeted else 0.0
            if silent > self._config.lost_after_s:
                self._disconnect(
                    address,
                    f"silent for {silent:.1f} s (serving.lost_after_s="
                    f"{self._config.lost_after_s:g})",
                )

    def _disconnect(self, address: int, why: str) -> None:
        """It may be alive: it is sent the reason, and may ask again."""
        rank = self._ranks.pop(address, None)
        if rank is None:
            return
        held = self._hub().lose(rank.worker, why)
        self._on_fault(
            "borrowed rank lost",
            f"{rank.worker}: {why}" + (f"; {held} turns go elsewhere" if held else ""),
        )
        if rank.guest is not None:
            rank.guest.send(p.Shutdown(f"disconnected: {why}"))
            self._tasks.spawn(rank.guest.close())  # which ends `_serve_rank`, too
