"""The part of the coordinator that deals with borrowed ranks, which other jobs lend: it admits
them, receives their messages, and detects their loss.

Whatever a borrowed rank does, sends or fails to do, it must not stop the run. So each message is
checked before it has any effect, and a rank that sends an invalid message is disconnected.
The connection itself is in rose/comm/guest.py, turns are in rose/coordinator/turns.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rose import processes
from rose import protocol as p
from rose.comm.guest import Guest, GuestGone
from rose.comm.join import Ask, Door
from rose.comm.tasks import Tasks
from rose.comm.wire import WireError
from rose.config import Config
from rose.coordinator.turns import TurnHub
from rose.launch import local

POLL_S = 0.1  # seconds between two polls for requests to join
# If two polls are this far apart, the coordinator itself was busy, and a rank's silence shows
# nothing.
LATE_S = 0.5  # seconds
BEAT_S = 2.0  # seconds between two updates of the endpoint's file, which show that the run lives
FAREWELL_S = 0.3  # seconds for the last message to reach the ranks
ASKS_S = 5.0  # seconds between two checks that an admitted rank still wants to join
WITHDREW = "it withdrew its request"
HELLO_S = 5.0  # seconds from a rank's connection to its `JoinHello`
# Messages that a borrowed rank may send after its `JoinHello`.
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
    """An admitted rank."""

    worker: str
    ask: Ask
    id: str  # name of its request to join
    asked_at: float  # monotonic seconds
    connecting: asyncio.Event = field(default_factory=asyncio.Event)  # set when it connects
    guest: Guest | None = None
    connected: bool = False
    greeted: bool = False  # True after a valid `JoinHello`


class Borrowed:
    """Connects borrowed ranks, whose addresses begin at `world_size`.

    `on_fault` gets (what, detail) of refusals and losses, `on_change` of ranks that join, or leave
    in order.
    """

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
        self._ranks: dict[int, _Rank] = {}  # address -> rank
        self._first = self._next = world_size
        self._tasks: Tasks | None = None
        # Bounds the porters (rose/comm/porter.py) that start at once: each needs a core for 1 s.
        self._opening = asyncio.Semaphore(2 * processes.cores())

    async def run(self) -> None:
        """Poll for requests to join, and serve the ranks, until cancelled.

        Another thread accesses the files of requests (`Door`), because their disk may be slow.
        """
        self._tasks = Tasks()
        await asyncio.to_thread(self._door.open)
        try:
            await self._tasks.run_until(self._poll())
        finally:
            await self._tasks.close(1.0)
            self._door.close()

    async def _poll(self) -> None:
        """Poll for ranks that ask to join or connect; send heartbeats; disconnect silent ranks."""
        beat_at = sent_at = polled_at = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            asks, connecting = await asyncio.to_thread(self._door.poll)
            for id, ask in asks:
                await self._answer_request(id, ask)
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
            if now - polled_at < LATE_S:
                self._disconnect_silent(now)
            polled_at = time.monotonic()

    def send(self, address: int, message: p.Message) -> None:
        """Send the message; drop it if the rank is not connected."""
        rank = self._ranks.get(address)
        if rank is not None and rank.connected:
            rank.guest.send(message)

    async def disconnect_all(self, reason: str) -> None:
        """Send `Shutdown` with the reason to all connected ranks, and wait until it can arrive."""
        for address in self._ranks:
            self.send(address, p.Shutdown(reason))
        if self._ranks:
            await asyncio.sleep(FAREWELL_S)

    # ----------------------------------------------------------------- joining

    async def _answer_request(self, id: str, ask: Ask | str) -> None:
        """Admit the rank that asks, or refuse it. `ask` is a text if the request is invalid."""
        if isinstance(ask, str):
            self._on_fault("join refused", f"{id}: {ask}")
            await asyncio.to_thread(self._door.answer, id, reason=ask)
            return
        if len(self._ranks) >= self._config.max_ranks:
            full = f"the run has {len(self._ranks)} borrowed ranks already (serving.max_ranks)"
            await asyncio.to_thread(self._door.answer, id, reason=full, temporary=True)
            return
        address, self._next = self._next, self._next + 1
        rank = self._ranks[address] = _Rank(
            f"borrowed-{address - self._first + 1}", ask, id, time.monotonic()
        )
        self._tasks.spawn(self._serve_rank(address, rank))

    async def _serve_rank(self, address: int, rank: _Rank) -> None:
        """Serve one rank, from its admission until it is disconnected or has left."""
        try:
            async with self._opening:
                # The rank may have given up while the porters of other ranks started.
                if not await asyncio.to_thread(self._door.is_asking, rank.id):
                    self._disconnect(address, WITHDREW)
                    return
                rank.guest = await Guest.open([*local.MPIEXEC, "-n", "1"], self._mpi_env)
        except (GuestGone, OSError) as error:
            await asyncio.to_thread(self._door.answer, rank.id, reason=str(error), temporary=True)
            self._disconnect(address, str(error))
            return
        try:
            await asyncio.to_thread(
                self._door.answer, rank.id, worker=rank.worker, port=rank.guest.port
            )
            await self._until_it_connects(rank)
            await rank.guest.accept()
            rank.connected = True
            self._tasks.spawn(self._expect_hello(address, rank))
            while address in self._ranks:
                self._handle(address, rank, await rank.guest.receive())
        except (GuestGone, TimeoutError) as error:
            never = "" if rank.connected else "before it had joined: "
            self._disconnect(
                address, never + (str(error) or f"did not connect within {self._patience_s:g} s")
            )
        finally:
            await asyncio.to_thread(self._door.forget, rank.id)
            await rank.guest.close()

    async def _until_it_connects(self, rank: _Rank) -> None:
        """Wait until the rank connects. Raises `TimeoutError` if it is late, `GuestGone` if it
        withdraws its request."""
        async with asyncio.timeout(self._patience_s):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(rank.connecting.wait(), ASKS_S)
                    return
                if not await asyncio.to_thread(self._door.is_asking, rank.id):
                    raise GuestGone(WITHDREW)

    async def _expect_hello(self, address: int, rank: _Rank) -> None:
        """Disconnect the rank if it has sent no valid `JoinHello` in time."""
        await asyncio.sleep(HELLO_S)
        if not rank.greeted:
            self._disconnect(address, f"sent no valid message within {HELLO_S:g} s")

    # ----------------------------------------------------------------- its messages

    def _handle(self, address: int, rank: _Rank, message: p.Message | WireError) -> None:
        """Handle a message; disconnect its sender, and no other rank, if it is invalid."""
        if isinstance(message, WireError):
            self._disconnect(address, f"sent an invalid message: {message}")
        elif isinstance(message, p.JoinHello) and not rank.greeted:
            self._handle_hello(address, rank, message)
        elif not rank.greeted or not isinstance(message, ACCEPTED):
            self._disconnect(address, f"sent {type(message).__name__}, which it may not send")
        elif getattr(message, "worker", rank.worker) != rank.worker:
            self._disconnect(address, f"sent a message in the name of {message.worker}")
        elif (
            isinstance(message, p.VersionFailed) and message.version >= self._hub().weights.version
        ):
            self._disconnect(address, f"could not load version {message.version}: {message.error}")
        else:
            self._pass_on(address, rank, message)

    def _handle_hello(self, address: int, rank: _Rank, message: p.JoinHello) -> None:
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

    def _pass_on(self, address: int, rank: _Rank, message: p.Message) -> None:
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
        """Raise `ValueError` for values that no working engine of this run sends. They could stop
        a process that uses them."""
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
            return  # `Ledger.add` rejects the message.
        tokens, logprobs = p.unpack_tokens(message.tokens), p.unpack_floats(message.logprobs)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            raise ValueError(
                f"turn {message.turn}: token {tokens.min()} or {tokens.max()} is not in the "
                f"vocabulary of {self._vocabulary}"
            )
        if message.routed and not self._are_experts(message.experts, message.routed):
            raise ValueError(
                f"turn {message.turn}: {len(message.experts)} bytes of experts for "
                f"{message.routed} tokens, or experts that the model doesn't have"
            )
        invalid = ~np.isfinite(logprobs) | (logprobs > 0)
        if invalid.any():
            at = int(invalid.argmax())
            raise ValueError(
                f"turn {message.turn}: log-probabilities must be finite and at most 0, it sent "
                f"{logprobs[at]:g} at token {at}"
            )
        newest = self._hub().weights.version
        if tokens.size and message.version < 0:
            raise ValueError(
                f"turn {message.turn}: tokens of version {message.version}, and the first is 0"
            )
        if message.version > newest or getattr(message, "finish", None) is p.FinishReason.ABORT:
            raise ValueError(
                f"turn {message.turn}: tokens of version {message.version}, where {newest} is the "
                "newest, or `finish` ABORT, which no worker may send"
            )

    def _are_experts(self, data: bytes, tokens: int) -> bool:
        """True if `data` holds valid expert numbers of the model for this many tokens."""
        shape = self._shape
        if shape is None or not shape.experts:
            return False
        row = shape.layers * shape.experts_per_token * shape.expert_bytes
        found = np.frombuffer(data, f"<u{shape.expert_bytes}") if len(data) == tokens * row else ()
        return len(found) > 0 and int(found.max()) < shape.experts

    # ----------------------------------------------------------------- leaving

    def _disconnect_silent(self, now: float) -> None:
        for address, rank in list(self._ranks.items()):
            silent = now - rank.guest.last_seen if rank.greeted else 0.0
            if silent > self._config.lost_after_s:
                self._disconnect(
                    address,
                    f"silent for {silent:.1f} s (serving.lost_after_s="
                    f"{self._config.lost_after_s:g})",
                )

    def _disconnect(self, address: int, why: str) -> None:
        """Remove the rank and send it the reason; if it is alive, it may ask to join again."""
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
            self._tasks.spawn(rank.guest.close())  # This ends `_serve_rank`, too.
