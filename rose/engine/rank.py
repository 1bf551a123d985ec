"""A rollout worker: a token server around one engine, without state worth losing.

Tokens go to the coordinator as they are made. When the engine process dies the worker reports it at
once, starts another with the newest weights, and is ready again; the coordinator has sent the turns
elsewhere meanwhile. Where the device is shared with a trainer rank (colocate=true, rollout.hybrid)
the engine is started, woken and put to sleep at the coordinator's orders. The device of an engine
with a replica (trainer.elastic_replicas) is the replica's while that engine sleeps.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Coroutine
from pathlib import Path

import msgspec

from rose import energy
from rose import protocol as p
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.comm.wire import COORDINATOR
from rose.config import Config
from rose.engine.activation import NOTHING, Moved
from rose.engine.generation import Chunk
from rose.engine.replica import Replica
from rose.engine.vllm_engine import Engine, EngineDied
from rose.models import resolve
from rose.observe.recorder import NullRecorder
from rose.protocol import seed_of
from rose.transfer.broadcast import Broadcast
from rose.transfer.store import edge_name

HEARTBEAT_S = 1.0
STOP_DEADLINE_S = 5.0
PROGRESS_S = 0.1  # between two messages of a turn: what a lost worker costs, against their price
HINTS = 32  # `SiblingTurns` (a quarter MiB at most) that wait for an engine: of more, the newest
DEATH_NOTICE_S = 2.0  # a killed process is reaped in well under a second


class _Word:
    """Tokens of one version that were not sent to the coordinator yet."""

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
        return p.pack_tokens(self.tokens), p.pack_floats(self.logprobs), self.version


class RolloutWorker:
    """`mailbox` may be set later, before `run`; `start_engine` may be awaited before that.
    `broadcast`, where the rank is part of one, fills its node's mirror. `hybrid`: on a device of
    the trainer's, beside engines that have their own (rollout.hybrid). `run_dir`: of a rank that
    has a replica (trainer.elastic_replicas)."""

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
        run_dir: Path | None = None,
    ) -> None:
        self.config, self.name, self.mailbox, self.recorder = config, name, mailbox, recorder
        self._broadcast = broadcast
        self.folder = resolve(config.model)
        self.engine: Engine | None = None
        self.incarnation = 0
        self.dismissed = ""  # the coordinator's reason
        self._turns: dict[tuple[str, int], asyncio.Task] = {}
        self._has_device = asyncio.Event()  # clear while it is the trainer's
        self._device = asyncio.Lock()  # held by who starts an engine or takes its memory
        self._device_orders: asyncio.Queue[p.Sleep | p.Wake] = asyncio.Queue()
        # the coordinator knows the engine, which lives as far as we know
        self._up = asyncio.Event()
        self._load_tasks: set[asyncio.Task] = set()
        # whether the engine holds memory of its device in its turn alone
        self._in_turn = config.trainer_sleeps and (
            hybrid or self.dedicated and config.shares_devices
        )
        self._replica = run_dir and Replica(config, run_dir, self.folder, name, self._send)
        # whether it gives memory of a GPU back
        self._moves = config.cluster.gpus > 0 and (self._in_turn or self._replica is not None)
        # nobody waits for its start
        self._gives_way = self._in_turn and hybrid or self._moves and self._replica is not None
        self._starting: asyncio.Timeout | None = None
        if not self._in_turn:
            self._has_device.set()
        # what siblings' turns got, and groups that ended, until an engine is told
        self._hints: deque[list[p.SiblingTurn]] = deque(maxlen=HINTS)
        self._groups_ended: list[str] = []
        self._hinted = asyncio.Event()
        self._ends = False
        # an ended turn's last tokens are still wanted: it goes on elsewhere
        self._hands_back = False
        self._returned = 0  # turns that the engine gave back
        self._max_sequences = 1 if config.deterministic else config.rollout.max_sequences

    async def run(self) -> None:
        """Until the coordinator sends `Shutdown`. Raises when the engine died too often."""
        self._tasks = Tasks()
        try:
            await self._tasks.run_until(*self._services())
        finally:
            self._ends = True
            if self.engine is not None:
                await self.engine.shutdown()
            await self._tasks.close(STOP_DEADLINE_S)
            if self._broadcast is not None:
                self._broadcast.close()

    def _services(self) -> list[Coroutine]:
        own = [self._receive(), self._keep_engine(), self._heartbeat(), self._share_device()]
        own.append(self._pass_hints_on())
        own += [self._keep_replica()] if self._replica else []
        return own + ([self._broadcast.receive()] if self._broadcast else [])

    # ----------------------------------------------------------------- the engine's life

    async def start_engine(self) -> None:
        """Raises `EngineError`."""
        rollout = self.config.rollout
        if self.config.cluster.gpus and rollout.draft.method in ("group", "suffix"):
            print(
                f"{self.name}: rollout/draft={rollout.draft.method} takes vLLM's older model "
                "runner (V1)",
                flush=True,
            )
        if self._moves:
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
        for restarts_left in range(self.config.rollout.engine_restarts, -1, -1):
            await self._bring_engine_up()
            self._send(self._ready())
            self._up.set()
            await asyncio.shield(self.engine.died)
            self._up.clear()
            # Slurm's SIGTERM reaches the engine too; this worker leaves, or has just ended it
            if self._hands_back or self._ends:
                await asyncio.Event().wait()
            why, again = f"engine process {self.engine.pid} died", restarts_left > 0
            self._send(p.WorkerDown(self.name, self.incarnation, why, again))
            await self.engine.shutdown()
        raise EngineDied(
            f"the engine of {self.name} died {self.config.rollout.engine_restarts + 1} times; "
            "rollout.engine_restarts allows no more"
        )

    async def _keep_replica(self) -> None:
        await self._up.wait()
        await self._replica.keep()
        await asyncio.Event().wait()  # the rank goes on without one

    async def _bring_engine_up(self) -> None:
        """Unless it is up: in its turn."""
        while True:
            await self._has_device.wait()
            async with self._device:
                if not self._has_device.is_set():
                    continue
                if self.engine is not None and self.engine.alive or await self._started():
                    return

    async def _started(self) -> bool:
        """Whether the engine got up before `_sleep` ended its start."""
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
        """One order after the other, each answered when it is done."""
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
        """An engine that is being started gets up first, unless the trainer has room beside it; a
        hybrid one's start ends, and comes again in its turn. A dead one has given everything
        back."""
        if self._device.locked() and not (self._in_turn or self._moves):
            self._has_device.clear()
            return NOTHING
        if self._gives_way and self._starting is not None:
            self._starting.reschedule(asyncio.get_running_loop().time())
        async with self._device:
            self._has_device.clear()
            engine = self.engine
            if engine is not None and engine.alive:
                try:
                    return await engine.sleep()
                except Exception:
                    if not await self._died(engine):
                        if self._replica is None:
                            raise
                        # the step goes on: another engine is started when this one is to wake
                        print(f"{self.name}: {traceback.format_exc()}", flush=True)
                        await engine.shutdown()
        return NOTHING

    async def _wake(self) -> Moved:
        """Weights, the version that came meanwhile, then the KV cache: staging needs the room. An
        engine that has to be started is up then, but a hybrid one, which may be told to sleep
        meanwhile."""
        if self._replica is not None:
            await self._replica.leave_device()
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
            self._has_device.set()  # another is started
        if self._in_turn and not self._gives_way:
            await self._up.wait()
        return moved

    def _ready(self) -> p.WorkerReady:
        return p.WorkerReady(
            self.name,
            self.incarnation,
            self.engine.pid,
            self._max_sequences,
            self.engine.kv_tokens,
            self.engine.version,
            self.engine.hardware,
            self.config.serving.kind,
        )

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if self.engine is None or not self.engine.alive:
                continue
            told, used = self.engine.stats(), energy.counters()
            self._send(p.WorkerLoad(self.name, self.incarnation, *told, energy_j=used))

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
                case p.ComputeGradient():
                    self._order_replica(message)
                case p.TrainStep() | p.TrainPart():
                    self._replica.order(message)
                case p.StopReplica():
                    self._replica.stop()
                case p.SiblingTurns():
                    self._hints.append(message.turns)
                    self._groups_ended += message.ended
                    self._hinted.set()
                case p.Shutdown(reason):
                    self.dismissed = reason
                    return
                case _:
                    self._handle(message)

    def _order_replica(self, message: p.LoadVersion | p.ComputeGradient) -> None:
        here = self._store(message.store)
        self._replica.order(msgspec.structs.replace(message, store=here))

    def _handle(self, message: p.Message) -> None:
        raise ValueError(f"a rollout worker has no use for {type(message).__name__}")

    async def _died(self, engine: Engine) -> bool:
        """Whether an error of `engine` was its death: vLLM's threads may notice it before we do."""
        await asyncio.wait({engine.died}, timeout=DEATH_NOTICE_S)
        return not engine.alive

    async def _generate(self, m: p.GenerateTurn) -> None:
        """Stream one attempt of a turn; an engine's death ends it silently: `WorkerDown` reports
        that."""
        engine, began, first, made, cached = self.engine, time.time(), 0.0, 0, 0
        word, progress_at = _Word(engine.version), began
        try:
            name = f"{m.turn}#{m.attempt}"
            async for delta in engine.generate(name, m.tokens, m.sampling, m.routed):
                now = time.time()
                first = first or now
                made += len(delta.tokens)
                cached = max(cached, delta.cached_tokens)
                if delta.version != word.version:
                    if word:
                        self._progress(m, word)
                    word = _Word(delta.version)
                word.add(delta)
                if delta.finish is None:
                    if now - progress_at >= PROGRESS_S:
                        self._progress(m, word)
                        word, progress_at = _Word(delta.version), now
                else:
                    if delta.finish is p.FinishReason.ABORT:
                        self._returned += 1
                        why = "evicted by the engine"
                        given = (m.turn, m.attempt, *word.packed(), why)
                        self._send(p.TurnReturned(*given, **word.routing))
                    else:
                        self._send(
                            p.TurnFinished(
                                m.turn,
                                m.attempt,
                                *word.packed(),
                                delta.finish,
                                cached,
                                ttft_s=first - began,
                                started=began,
                                finished=now,
                                **word.routing,
                            )
                        )
                    self.recorder.span(
                        "turn",
                        began,
                        now,
                        turn=m.turn,
                        trajectory=m.turn.rpartition(".")[0],
                        tokens=made,
                        version=delta.version,
                        attempt=m.attempt,
                        finish=delta.finish.value,
                    )
        except asyncio.CancelledError:
            if word and self._hands_back:
                self._progress(m, word)
            raise
        except Exception:
            if not await self._died(engine):
                raise
        finally:
            self._turns.pop((m.turn, m.attempt), None)

    def _progress(self, m: p.GenerateTurn, word: _Word) -> None:
        self._send(p.TurnProgress(m.turn, m.attempt, *word.packed(), **word.routing))

    async def _pass_hints_on(self) -> None:
        """One call at a time: what comes meanwhile is the next one. Only drafts depend on it: an
        engine that is not up, or dies over it, needs none."""
        while True:
            await self._hinted.wait()
            self._hinted.clear()
            turns, ended = [turn for some in self._hints for turn in some], self._groups_ended
            self._hints.clear()
            self._groups_ended = []
            engine = self.engine
            if engine is None or not engine.alive or not engine.drafts_of_groups:
                continue
            try:
                spans = [(turn.turn, turn.start, turn.before, turn.tokens) for turn in turns]
                await engine.learn_siblings(spans, ended)
            except Exception:
                if not await self._died(engine):
                    raise

    async def _load(self, m: p.LoadVersion) -> None:
        engine, incarnation = self.engine, self.incarnation
        await self._has_device.wait()
        began = time.time()
        try:
            mirror = await self._mirrored(edge_name(m.version, engine.version))
            await self._has_device.wait()  # staging reads the live weights, and a turn may be over
            loaded = await engine.load_version(
                m.version, self._store(m.store), self.config.transfer, mirror
            )
        except Exception as error:  # the engine process's; the coordinator ends the run with it
            if await self._died(engine):
                print(f"{self.name}: version {m.version}: {error}", flush=True)
                return
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
        took = (seconds, loaded.pause_s, loaded.nbytes)
        self._send(p.VersionLoaded(self.name, incarnation, m.version, *took))
        if self._replica is not None:  # not before: the step waits for the engine alone
            self._order_replica(m)

    async def _mirrored(self, edge: str) -> str | None:
        """The node's mirror, once the edge is complete in it or won't be."""
        if self._broadcast is None:
            return None
        if why := await self._broadcast.mirror.wait(edge):
            print(f"{self.name} reads {edge} from the store: {why}", flush=True)
        return str(self._broadcast.mirror.path)

    def _store(self, folder: str) -> str:
        """Where this worker reads the versions of `folder`."""
        relay = self.config.transfer.relay
        return folder if relay is None else f"{relay.rstrip('/')}/{Path(folder).name}"

    def _send(self, message: p.Message) -> None:
        self.mailbox.send(COORDINATOR, message)
