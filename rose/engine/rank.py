"""A rollout worker: serves turns with one engine. All of its state may be lost at any time.

The worker streams tokens to the coordinator as they are generated. When the engine process dies,
the worker reports that at once and starts another engine. Meanwhile the coordinator sends the turns
elsewhere, and later has the new engine load the newest weights.

On a device shared with a trainer rank (colocate=true, rollout.hybrid), the coordinator orders when
the engine starts, wakes and sleeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path

import msgspec

from rose import energy, extensions
from rose import protocol as p
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.comm.wire import COORDINATOR
from rose.config import Config
from rose.engine.activation import NOTHING, Moved
from rose.engine.generation import Chunk
from rose.engine.vllm_engine import REAP_S, Engine, EngineDied
from rose.models import resolve
from rose.observe.recorder import NullRecorder
from rose.protocol import seed_of
from rose.transfer.broadcast import Broadcast
from rose.transfer.store import edge_name

HEARTBEAT_S = 1.0  # seconds between two load reports
STOP_DEADLINE_S = 5.0  # seconds for the worker's tasks to end after a shutdown
# Seconds between two progress messages of a turn. A longer interval loses more tokens with a
# worker; a shorter one costs the coordinator more messages.
PROGRESS_S = 0.1
# Seconds to wait, after an engine's error, for its process to be found dead. If vLLM reports that
# the process failed, it is then killed and has `REAP_S` to end.
DEATH_NOTICE_S = 2.0


class _Unsent:
    """Tokens of one turn and version that were not sent to the coordinator yet."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.routing = {"experts": b"", "routed": 0}

    def __bool__(self) -> bool:
        return bool(self.tokens or self.routing["routed"])

    def add(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.routing["experts"] += chunk.experts
        self.routing["routed"] += chunk.routed

    def packed(self) -> tuple[bytes, bytes, int]:
        """Return the tokens, their log-probabilities and their version, as messages have them."""
        return p.pack_tokens(self.tokens), p.pack_floats(self.logprobs), self.version


class RolloutWorker:
    """A rollout rank: serves the coordinator's turns with one engine.

    `mailbox` may be None until `run` is called; `start_engine` may be awaited before. A
    `broadcast`, if there is one, fills the node's mirror with new versions. `hybrid` means that the
    engine uses a device of the trainer, beside engines with devices of their own
    (rollout.hybrid)."""

    heartbeat_s = HEARTBEAT_S
    dedicated = True

    def __init__(
        self,
        config: Config,
        name: str,
        mailbox: Mailbox | None,
        recorder: NullRecorder,
        broadcast: Broadcast | None = None,
        hybrid: bool = False,
    ) -> None:
        self.config, self.name, self.mailbox, self.recorder = config, name, mailbox, recorder
        self._broadcast = broadcast
        self.folder = resolve(config.model)
        self.engine: Engine | None = None
        self.incarnation = 0
        self.dismissed = ""  # reason of the coordinator's `Shutdown`
        self._turns: dict[tuple[str, int], asyncio.Task] = {}  # (turn, attempt) -> its task
        self._has_device = asyncio.Event()  # clear while the trainer has the device
        self._device = asyncio.Lock()  # held while an engine starts or is put to sleep
        self._device_orders: asyncio.Queue[p.Sleep | p.Wake] = asyncio.Queue()
        # Set while the coordinator knows the engine and we have not seen it die.
        self._up = asyncio.Event()
        self._load_tasks: set[asyncio.Task] = set()
        # True if the engine and a trainer rank hold the device's memory alternately.
        self._alternates = config.trainer_sleeps and (
            hybrid or self.dedicated and config.shares_devices
        )
        # True if an order to sleep cancels an engine's start, because no process waits for the
        # start.
        self._start_cancellable = self._alternates and hybrid
        self._starting: asyncio.Timeout | None = None
        if not self._alternates:
            self._has_device.set()
        part = extensions.draft_methods().get(config.rollout.draft.method)
        self._draft_text = part and part.Receiver(lambda: self.engine, self._died)
        self._stopping = False
        # True if a cancelled turn sends its last tokens, because it continues on another worker.
        self._sends_last_tokens = False
        self._returned = 0  # number of turns that the engine evicted
        self._max_sequences = 1 if config.deterministic else config.rollout.max_sequences

    async def run(self) -> None:
        """Serve until the coordinator sends `Shutdown`. Raises `EngineDied` when the engine died
        more often than rollout.engine_restarts allows."""
        self._tasks = Tasks()
        try:
            await self._tasks.run_until(*self._services())
        finally:
            self._stopping = True
            if self.engine is not None:
                await self.engine.shutdown()
            await self._tasks.close(STOP_DEADLINE_S)
            if self._broadcast is not None:
                self._broadcast.close()

    def _services(self) -> list[Coroutine]:
        """Return the coroutines that `run` runs at the same time."""
        found = [self._receive(), self._keep_engine(), self._heartbeat(), self._share_device()]
        found += [self._draft_text.run()] if self._draft_text else []
        return found + ([self._broadcast.receive()] if self._broadcast else [])

    # ----------------------------------------------------------------- the engine's life

    async def start_engine(self) -> None:
        """Start an engine process. The coordinator is not informed yet. Raises `EngineError`."""
        rollout = self.config.rollout
        if self.config.cluster.gpus and self._alternates:
            sleeps = {"enable_sleep_mode": True} | rollout.engine_args
            rollout = msgspec.structs.replace(rollout, engine_args=sleeps)
        self.engine = await Engine.start(
            self.folder,
            rollout,
            self.config.model,
            deterministic=self.config.deterministic,
            gpus=self.config.cluster.gpus > 0,
            seed=seed_of(self.config.seed, self.name, self.incarnation),
            lora=self.config.trainer.lora,
            routing=self.config.trainer.router_replay,
        )
        self.incarnation += 1

    async def _keep_engine(self) -> None:
        """Keep an engine running; report starts and deaths. Raises `EngineDied` at the last
        death."""
        for restarts_left in range(self.config.rollout.engine_restarts, -1, -1):
            await self._bring_engine_up()
            self._send(self._ready())
            self._up.set()
            await asyncio.shield(self.engine.died)
            self._up.clear()
            # No restart if this worker is leaving, as Slurm's SIGTERM also ends the engine, or if
            # it has shut the engine down itself.
            if self._sends_last_tokens or self._stopping:
                await asyncio.Event().wait()
            why, again = f"engine process {self.engine.pid} died", restarts_left > 0
            self._send(p.WorkerDown(self.name, self.incarnation, why, again))
            await self.engine.shutdown()
        raise EngineDied(
            f"the engine of {self.name} died {self.config.rollout.engine_restarts + 1} times; "
            "rollout.engine_restarts allows no more"
        )

    async def _bring_engine_up(self) -> None:
        """Start an engine once this worker has the device, unless one is alive."""
        while True:
            await self._has_device.wait()
            async with self._device:
                if not self._has_device.is_set():
                    continue
                if self.engine is not None and self.engine.alive or await self._try_start():
                    return

    async def _try_start(self) -> bool:
        """Start an engine. Return False if `_sleep` cancelled the start."""
        try:
            async with asyncio.timeout(None) as self._starting:
                await self.start_engine()
        except TimeoutError:
            if not self._starting.expired():
                raise
            return False
        finally:
            self._starting = None
        return True

    # ----------------------------------------------------------------- shared with a trainer rank

    async def _share_device(self) -> None:
        """Carry out the coordinator's `Sleep` and `Wake` orders one by one, and answer each."""
        while True:
            order = await self._device_orders.get()
            began = time.time()
            awake = isinstance(order, p.Wake)
            moved = await (self._wake() if awake else self._sleep())
            name, took = "engine_wake" if awake else "engine_sleep", time.time() - began
            self.recorder.span(name, began, time.time(), freed_gib=moved.gib)
            memory = (abs(moved.gib), moved.free_gib, moved.total_gib)
            self._send(p.DeviceChanged(self.mailbox.rank, order.turn, awake, took, *memory))

    async def _sleep(self) -> Moved:
        """Put the engine to sleep; return the memory that this released, none by a dead engine.

        If the engine is starting, then
        1. if it never leaves its device, it keeps starting, as the trainer has room beside it;
        2. if the start is cancellable, it is cancelled, and begins again when the device is back;
        3. otherwise the engine finishes starting, then sleeps."""
        if self._device.locked() and not self._alternates:
            self._has_device.clear()
            return NOTHING
        if self._start_cancellable and self._starting is not None:
            self._starting.reschedule(asyncio.get_running_loop().time())
        async with self._device:
            self._has_device.clear()
            engine = self.engine
            if engine is not None and engine.alive:
                try:
                    return await engine.sleep()
                except Exception:
                    if not await self._died(engine):
                        raise
        return NOTHING

    async def _wake(self) -> Moved:
        """Wake the engine; return the memory that this took.

        The order is: weights, any version that arrived meanwhile, then the KV cache, because
        staging needs the cache's room. If an engine must be started, waits until it is up. A
        cancellable start is not awaited, so that the next order, to sleep, can cancel it."""
        engine = self.engine
        sleeps = engine is not None and engine.alive and engine.asleep
        moved = NOTHING
        try:
            if sleeps:
                moved = await engine.wake_weights()
            self._has_device.set()
            if sleeps:
                if self._load_tasks:
                    await asyncio.wait(self._load_tasks)
                moved += await engine.wake()
        except Exception:
            if not await self._died(engine):
                raise
            self._has_device.set()  # the condition for a restart by `_keep_engine`
        if self._alternates and not self._start_cancellable:
            await self._up.wait()
        return moved

    def _ready(self) -> p.WorkerReady:
        engine = self.engine
        assert engine is not None
        return p.WorkerReady(
            self.name,
            self.incarnation,
            engine.pid,
            self._max_sequences,
            engine.kv_tokens,
            engine.version,
            engine.hardware,
            self.config.serving.kind,
            engine.description,
        )

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if self.engine is None or not self.engine.alive:
                continue
            stats, joules = self.engine.stats(), energy.counters()
            self._send(p.WorkerLoad(self.name, self.incarnation, *stats, energy_j=joules))

    # ----------------------------------------------------------------- messages

    async def _receive(self) -> None:
        while True:
            _, message = await self.mailbox.receive()
            match message:
                case p.GenerateTurn():
                    key = (message.turn, message.attempt)
                    self._turns[key] = self._tasks.spawn(self._generate(message))
                case p.AbortTurn(turn, attempt):
                    task = self._turns.pop((turn, attempt), None)
                    if task is not None:
                        task.cancel()
                case p.LoadVersion():
                    task = self._tasks.spawn(self._load(message))
                    self._load_tasks.add(task)
                    task.add_done_callback(self._load_tasks.discard)
                case p.Sleep() | p.Wake():
                    self._device_orders.put_nowait(message)
                case p.DraftText():
                    # A rank of `rose serve` may use another draft method than the run.
                    if self._draft_text is not None:
                        self._draft_text.add(message)
                case p.Shutdown(reason):
                    self.dismissed = reason
                    return
                case _:
                    self._handle(message)

    def _handle(self, message: p.Message) -> None:
        """Reject a message of any other type. Subclasses handle more types."""
        raise ValueError(f"a rollout worker has no use for {type(message).__name__}")

    async def _died(self, engine: Engine) -> bool:
        """Return whether `engine` is dead, after an error: waits for news of the death. A process
        that vLLM reports as failed is killed, because it would take seconds to end by itself."""
        await asyncio.wait({engine.died}, timeout=DEATH_NOTICE_S)
        if engine.alive and engine.lost:
            engine.kill()
            await asyncio.wait({engine.died}, timeout=REAP_S)
        return not engine.alive

    async def _generate(self, m: p.GenerateTurn) -> None:
        """Stream one attempt of a turn to the coordinator. An engine's death ends it without a
        message, because `_keep_engine` sends `WorkerDown`."""
        engine = self.engine
        began = time.time()
        first = 0.0  # time of the first chunk
        generated = 0
        cached = 0
        unsent, progress_at = _Unsent(engine.version), began
        try:
            name = f"{m.turn}#{m.attempt}"
            async for delta in engine.generate(name, m.tokens, m.sampling, m.routed):
                now = time.time()
                first = first or now
                generated += len(delta.tokens)
                cached = max(cached, delta.cached_tokens)
                if delta.version != unsent.version:
                    if unsent:
                        self._send_progress(m, unsent)
                    unsent = _Unsent(delta.version)
                unsent.add(delta)
                if delta.finish is None:
                    if now - progress_at >= PROGRESS_S:
                        self._send_progress(m, unsent)
                        unsent, progress_at = _Unsent(delta.version), now
                    continue
                last = (m.turn, m.attempt, *unsent.packed())
                if delta.finish is p.FinishReason.ABORT:
                    self._returned += 1
                    self._send(p.TurnReturned(*last, "evicted by the engine", **unsent.routing))
                else:
                    self._send(
                        p.TurnFinished(
                            *last,
                            delta.finish,
                            cached,
                            ttft_s=first - began,
                            started=began,
                            finished=now,
                            **unsent.routing,
                        )
                    )
                self.recorder.span(
                    "turn",
                    began,
                    now,
                    turn=m.turn,
                    trajectory=m.turn.rpartition(".")[0],
                    tokens=generated,
                    version=delta.version,
                    attempt=m.attempt,
                    finish=delta.finish.value,
                )
        except asyncio.CancelledError:
            if unsent and self._sends_last_tokens:
                self._send_progress(m, unsent)
            raise
        except Exception:
            if not await self._died(engine):
                raise
        finally:
            self._turns.pop((m.turn, m.attempt), None)

    def _send_progress(self, m: p.GenerateTurn, unsent: _Unsent) -> None:
        self._send(p.TurnProgress(m.turn, m.attempt, *unsent.packed(), **unsent.routing))

    async def _load(self, m: p.LoadVersion) -> None:
        """Have the engine load a version, and report the result."""
        engine, incarnation = self.engine, self.incarnation
        await self._has_device.wait()
        began = time.time()
        try:
            mirror = await self._mirrored(edge_name(m.version, engine.version))
            # The trainer may have taken the device meanwhile, and staging reads the live weights.
            await self._has_device.wait()
            loaded = await engine.load_version(
                m.version, self._store(m.store), self.config.transfer, mirror
            )
        except Exception as error:
            if await self._died(engine):
                print(f"{self.name}: version {m.version}: {error}", flush=True)
                return
            # The coordinator ends the run on this message.
            why = f"{type(error).__name__}: {error}"
            self._send(p.VersionFailed(self.name, incarnation, m.version, why))
            return
        seconds = time.time() - began
        self.recorder.span(
            "load_version",
            began,
            time.time(),
            version=m.version,
            nbytes=loaded.nbytes,
            route=" ".join(loaded.route),
            mirrored=loaded.mirrored,
            pause_s=loaded.pause_s,
        )
        self._send(
            p.VersionLoaded(
                self.name, incarnation, m.version, seconds, loaded.pause_s, loaded.nbytes
            )
        )

    async def _mirrored(self, edge: str) -> str | None:
        """Wait until the node's mirror has all files of `edge`, an update to a new version, or
        won't get them. Return the mirror's folder, or None without a broadcast."""
        if self._broadcast is None:
            return None
        if why := await self._broadcast.mirror.wait(edge):
            print(f"{self.name} reads {edge} from the store: {why}", flush=True)
        return str(self._broadcast.mirror.path)

    def _store(self, folder: str) -> str:
        """Return the relay's URL for the store `folder`, or the folder itself without a relay."""
        relay = self.config.transfer.relay
        return folder if relay is None else f"{relay.rstrip('/')}/{Path(folder).name}"

    def _send(self, message: p.Message) -> None:
        self.mailbox.send(COORDINATOR, message)
