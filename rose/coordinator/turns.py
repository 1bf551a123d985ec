"""The coordinator's half that moves turns: between environment hosts, the scheduler and the
workers.

Every event that the scheduler receives is made here and journaled; every action about turns and
weights is carried out here. Actions about groups and batches go to `on_action`: they belong to the
step loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from rose import protocol as p
from rose.coordinator.drafts import Decoding, Siblings
from rose.coordinator.journal import Journal
from rose.coordinator.ledger import NOBODY, Ledger
from rose.coordinator.turn_log import TurnLog
from rose.coordinator.worker import POOLS, Worker
from rose.observe.recorder import NullRecorder
from rose.scheduler import Scheduler
from rose.scheduler import events as ev
from rose.scheduler.actions import ActionQueue

HYBRID_LOADS = 3  # of one version: one that is damaged for an engine is not tried again and again


class TurnHub:
    def __init__(
        self,
        scheduler: Scheduler,
        send: Callable[[int, p.Message], None],
        journal: Journal,
        recorder: NullRecorder,
        on_action: Callable[[ev.Action], None],
        on_fault: Callable[[str, str], None],
        world_size: int,
        log: TurnLog,
        siblings: bool = False,
        hybrids: Collection[int] = (),
    ) -> None:
        """`siblings`: whether engines draft from what groups say (rollout/draft=group). `hybrids`:
        ranks of engines on the trainer's devices."""
        self.log = log
        self.siblings = Siblings(send) if siblings else None
        self.resumed_snapshots = 0  # episodes that went on from one, since `begin_step`
        self._world_size = world_size  # workers beyond it are borrowed
        self._hybrids = hybrids
        self._send, self._recorder = send, recorder
        self._on_action, self._on_fault = on_action, on_fault
        self._queue = ActionQueue(scheduler, self._carry_out, journal)
        self.ledger = Ledger()
        self.workers: dict[str, Worker] = {}
        self.store = ""  # where versions are
        self.version = -1
        self.sync_bytes = 0
        self.sync_pause_s = 0.0
        self.engine_restarts = 0
        self.returned = 0  # turns that engines gave back since `begin_step`
        self.made = dict.fromkeys(POOLS, 0)  # tokens since the start
        # tokens since `begin_step` of workers that are gone
        self.past = dict.fromkeys(POOLS, 0)
        self.decoding = Decoding()
        self.progress_at = time.time()  # last progress of any kind
        self._begun_at = self._token_at = (
            0.0  # the last `begin_step`, and the last token since then
        )
        self._made: dict[str, int] = {}  # running trajectory -> tokens received for it
        # running trajectory -> turns that its environment has, since it was last started
        self._depth: dict[str, int] = {}
        self._left: set[str] = set()  # running trajectories whose host was lost
        self._resting: set[str] = set()  # workers that provisioning lets rest
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            p.TurnRequest: self._turn_requested,
            p.TrajectoryResumed: self._trajectory_resumed,
            p.TurnProgress: self._count,
            p.TurnFinished: self._turn_finished,
            p.TurnReturned: self._turn_returned,
            p.WorkerReady: self._worker_ready,
            p.WorkerDown: self._worker_down,
            p.WorkerLeaving: self._worker_leaving,
            p.WorkerLeft: self._worker_left,
            p.WorkerLoad: self._worker_load,
            p.WorkerCapacity: self._worker_capacity,
            p.VersionLoaded: self._version_loaded,
            p.VersionFailed: self._version_failed,
        }

    # ----------------------------------------------------------------- what the step loop asks

    def publish(self, version: int, store: str, tokens: int = 0) -> None:
        """Every worker takes this version, for which so many were trained, before any further
        turn."""
        self.version, self.store = version, store
        self.sync_bytes, self.sync_pause_s = 0, 0.0
        self.feed(ev.VersionPublished(at=time.time(), version=version, tokens=tokens))
        for name, worker in list(self.workers.items()):
            failed, worker.failed_loads = worker.failed_loads, 0
            if worker.alive and failed >= HYBRID_LOADS:
                self._has(name, worker)  # it has waited for this one

    def begin_step(self) -> None:
        """Counters of the workers start anew."""
        self._begun_at = self._token_at = time.time()
        for worker in self.workers.values():
            worker.begin_step(self._begun_at)
        self.past = dict.fromkeys(self.past, 0)
        self.ledger.migrations = self.returned = 0
        self.log.resumed_turns = self.log.resumed_tokens = 0
        self.resumed_snapshots = 0
        self.decoding.begin_step()

    @property
    def generating_s(self) -> float:
        """From the last `begin_step` to the last token since then: beyond the rollout phase when
        trajectories run on while the trainer trains."""
        return self._token_at - self._begun_at

    def busy_s(self, at: float) -> float:
        """Of a dedicated engine on average, seconds with at least one turn since `begin_step`; 0
        without engines."""
        busy = [w.busy_s(at) for _, w in self.dedicated()]
        return sum(busy) / len(busy) if busy else 0.0

    def stale_workers(self) -> list[str]:
        """Dedicated workers that are up and don't hold the newest version yet. Nobody waits for a
        borrowed one, nor for one that rests."""
        return [
            name
            for name, w in self.dedicated()
            if w.alive and w.version != self.version and name not in self._resting
        ]

    def dedicated(self) -> list[tuple[str, Worker]]:
        return self._of("dedicated")

    def hybrid(self) -> list[tuple[str, Worker]]:
        return self._of("hybrid")

    def _of(self, pool: str) -> list[tuple[str, Worker]]:
        return [(name, w) for name, w in self.workers.items() if w.pool == pool]

    @property
    def borrowed(self) -> int:
        """Workers of other jobs."""
        return len(self._of("borrowed"))

    @property
    def own(self) -> int:
        """Workers of the run's own."""
        return len(self.workers) - self.borrowed

    def rests(self, worker: str) -> bool:
        """Whether provisioning lets it rest."""
        return worker in self._resting

    @property
    def uses_hybrids(self) -> bool:
        """Whether any engine on the trainer's devices may take turns."""
        return any(w.alive and name not in self._resting for name, w in self.hybrid())

    def hybrids_up(self) -> set[int]:
        """Ranks of those whose engine is up."""
        return {w.rank for _, w in self.hybrid() if w.alive}

    def end(self, trajectory: p.Trajectory) -> None:
        """It is in. An agent may have ended while turns of it ran."""
        self.progress_at = time.time()
        if trajectory.stats.get("cut_turns") or trajectory.id in self._left:
            self._drop_turns(trajectory.id)
        self._forget_trajectory(trajectory.id)
        if trajectory.phase is p.Phase.EVAL:
            self.log.forget(trajectory.id)
        self.feed(
            ev.TrajectoryEnded(
                at=self.progress_at, trajectory=trajectory.id, tokens=trajectory.response_tokens
            )
        )

    def cancel(self, trajectory: str) -> int:
        """Forget a trajectory's turns and stop the engines that work on them; how many tokens it
        had."""
        self._drop_turns(trajectory)
        tokens = self._forget_trajectory(trajectory)
        self.log.forget(trajectory)
        self.feed(ev.TrajectoryEnded(at=time.time(), trajectory=trajectory, failed=True))
        return tokens

    def _forget_trajectory(self, trajectory: str) -> int:
        self.log.running.forget(trajectory)
        self._left.discard(trajectory)
        self._depth.pop(trajectory, None)
        return self._made.pop(trajectory, 0)

    def in_environment(self, trajectory: str) -> bool:
        """Whether its host, as it is now, waits for no turn of it."""
        asked = set(self.ledger.of_trajectory(trajectory)) - set(self.ledger.left(trajectory))
        return not asked

    def depth(self, trajectory: str) -> int:
        """How many turns it has had since it was last started, with those of a snapshot."""
        return self._depth.get(trajectory, 0)

    def leaves_host(self, trajectory: str) -> None:
        """The trajectory starts again, on another host or a new process of it: its open turns go on
        meanwhile, and it gets all that it asks for again."""
        self.progress_at = time.time()
        self.log.running.start_again(trajectory)
        self.ledger.leave(trajectory)
        self._left.add(trajectory)
        self._depth.pop(trajectory, None)

    def _drop_turns(self, trajectory: str) -> None:
        for turn in self.ledger.of_trajectory(trajectory):
            self._drop_turn(turn)

    def _drop_turn(self, turn: str) -> None:
        if (name := self.ledger.worker_of(turn)) is not None:
            worker = self.workers[name]
            worker.turn_closed(time.time())
            self._send(worker.rank, p.AbortTurn(turn, self.ledger.attempt_of(turn)))
        made = self.ledger.made(turn)
        self.ledger.drop(turn)
        self.feed(ev.TurnEnded(at=time.time(), turn=turn, tokens=made))

    def feed(self, event: ev.Event) -> None:
        """Pass the event to the scheduler; carry out its actions. Called while an action is carried
        out, it returns at once, and the event is handled after the actions that are left."""
        self._queue.feed(event)

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.AssignTurn(turn, worker, attempt, max_tokens):
                if turn in self.ledger:  # else an action before this one has cancelled it
                    self.workers[worker].turn_opened(time.time())
                    message = self.ledger.dispatch(turn, worker, attempt, max_tokens)
                    self._send(self.workers[worker].rank, message)
            case ev.AbortTurn(turn, worker, attempt, why):
                if self.ledger.worker_of(turn) == worker:
                    self._abort(turn, worker, attempt, why)
            case ev.LoadWeights(worker, version):
                self._send(self.workers[worker].rank, p.LoadVersion(version, self.store))
            case ev.UseWorker(worker) | ev.RestWorker(worker):
                rests = isinstance(action, ev.RestWorker)
                (self._resting.add if rests else self._resting.discard)(worker)
                known = self.workers.get(worker)  # a policy may name one that has left
                if known is not None and known.pool == "hybrid":
                    self._on_action(action)
            case _:
                self._on_action(action)

    def _abort(self, turn: str, worker: str, attempt: int, why: str) -> None:
        if why == "stalled":
            self._on_fault("stalled turn", f"{turn} on {worker}, attempt {attempt}: moved")
        self.ledger.take_back(turn)
        self.workers[worker].turn_closed(time.time())
        self._send(self.workers[worker].rank, p.AbortTurn(turn, attempt))

    # ----------------------------------------------------------------- messages

    def handle(self, source: int, message: p.Message) -> bool:
        """True when the message was about turns or workers."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return False
        handler(source, message)
        return True

    def _turn_requested(self, source: int, m: p.TurnRequest) -> None:
        made = 0
        if m.trajectory in self._left and self._still_runs(source, m):
            return
        if (recorded := self.log.find_again(m)) is None:
            recorded = self.log.find(m, self.version)
            if recorded is not None:
                self._count_made(m.trajectory, len(recorded.tokens) // 4)
        if recorded is not None:
            made = len(recorded.tokens) // 4
            self.progress_at = time.time()
            if recorded.finish is not p.FinishReason.ABORT:
                self._give(m.trajectory, source, recorded)
                return
        self.ledger.open(m, source, recorded)
        self.feed(
            ev.TurnRequested(
                at=time.time(),
                turn=m.turn,
                trajectory=m.trajectory,
                group=m.group,
                context_tokens=len(m.tokens) // 4,
                max_new_tokens=m.sampling.max_new_tokens,
                made_tokens=made,
                domain=m.domain,
                outcome=m.outcome,
                held_out=m.phase is p.Phase.EVAL,
            )
        )

    def _trajectory_resumed(self, source: int, m: p.TrajectoryResumed) -> None:
        """A snapshot spared these turns."""
        self.resumed_snapshots += 1
        self.progress_at = time.time()
        self.log.took_over(m.turns, m.tokens)
        self._depth[m.id] = m.turns
        if self.log.running.resumed(m.id, m.turns, m.earlier):
            self._count_made(m.id, m.tokens)

    def _still_runs(self, source: int, m: p.TurnRequest) -> bool:
        """Whether the lost host had asked for this turn, which is the new one's then. Another of
        its turns that has this one's name or context is cut, and what it has recorded."""
        for turn in self.ledger.left(m.trajectory):
            before = self.ledger.request_of(turn)
            if (before.turn, before.sampling, before.tokens) == (m.turn, m.sampling, m.tokens):
                self.ledger.adopt(turn, source)
                self.log.took_over(1, self.ledger.made(turn))
                return True
            if turn == m.turn or before.tokens == m.tokens:
                if (cut := self.ledger.cut_of(turn)) is not None:
                    self.log.add(*cut, self.version, asked=False)
                self._drop_turn(turn)
        return False

    def _turn_finished(self, source: int, m: p.TurnFinished) -> None:
        if self._count(source, m) is None:
            return
        self._leaves_worker(m.turn)
        if m.finish is p.FinishReason.LENGTH and self.ledger.chunk_ended(m.turn):
            self.feed(ev.TurnReturned(at=time.time(), turn=m.turn, attempt=m.attempt, chunk=True))
        else:
            self._close_turn(m.turn, m.finish)

    def _turn_returned(self, source: int, m: p.TurnReturned) -> None:
        if self._count(source, m) is None:
            return
        self._leaves_worker(m.turn)
        if self.ledger.complete(m.turn):
            self._close_turn(m.turn, p.FinishReason.LENGTH)
            return
        self.returned += 1
        self.feed(ev.TurnReturned(at=time.time(), turn=m.turn, attempt=m.attempt))

    def _leaves_worker(self, turn: str) -> None:
        """Its attempt is over."""
        self.workers[self.ledger.worker_of(turn)].turn_closed(time.time())
        self.ledger.take_back(turn)

    def _count(
        self, source: int, m: p.TurnProgress | p.TurnFinished | p.TurnReturned
    ) -> int | None:
        """Take the tokens of a message; None if it is about an attempt that was given up."""
        name = self.ledger.worker_of(m.turn)
        if m.turn in self.ledger and (name is None or self.workers[name].rank != source):
            return None  # taken back and waiting in the queue, or with another by now
        count = self.ledger.add(m)
        if count:
            now = self.progress_at = self._token_at = time.time()
            worker = self.workers[name]
            worker.tokens += count
            self.made[worker.pool] += count
            worker.total_tokens += count
            self._count_made(self.ledger.trajectory_of(m.turn), count)
            if self.siblings is not None:
                self.siblings.got(self.ledger.request_of(m.turn), name, m.tokens)
            self.feed(ev.TurnProgressed(at=now, turn=m.turn, attempt=m.attempt, tokens=count))
        return count

    def _count_made(self, trajectory: str, tokens: int) -> None:
        self._made[trajectory] = self._made.get(trajectory, 0) + tokens

    def _close_turn(self, turn: str, finish: p.FinishReason) -> None:
        made = self.ledger.made(turn)
        self._deliver(turn, finish)
        self.feed(ev.TurnEnded(at=time.time(), turn=turn, tokens=made))

    def _deliver(self, turn: str, finish: p.FinishReason) -> None:
        request = self.ledger.request_of(turn)
        if self.siblings is not None:
            self.siblings.closed(request)
        host, result = self.ledger.close(turn, finish)
        self.log.add(request, result, self.version, asked=host != NOBODY)
        if host != NOBODY:
            self._give(request.trajectory, host, result)

    def _give(self, trajectory: str, host: int, result: p.TurnResult) -> None:
        self._depth[trajectory] = self.depth(trajectory) + 1
        self._send(host, result)

    def record_open_turns(self) -> None:
        """The run ends: what open turns have is where a restart goes on. Raises OSError."""
        for request, result in self.ledger.cut():
            self.log.add(request, result, self.version)
        self.log.flush()

    def _worker_ready(self, source: int, m: p.WorkerReady) -> None:
        before = self.workers.get(m.worker)
        kind = "dedicated" if source < self._world_size else m.kind
        self._resting.discard(m.worker)
        if source in self._hybrids:
            kind = "hybrid"
            self._resting.add(m.worker)  # until the scheduler uses it
        self.workers[m.worker] = Worker(source, m.incarnation, m.version, kind)
        if before is not None:
            self.workers[m.worker].continue_counts_of(before)
        print(
            f"{m.worker} is ready: engine process {m.engine_pid}, {m.kv_tokens} KV tokens, start "
            f"{m.incarnation}",
            flush=True,
        )
        self.feed(
            ev.WorkerJoined(
                at=time.time(),
                worker=m.worker,
                kind=kind,
                max_sequences=m.max_sequences,
                kv_tokens=m.kv_tokens,
                version=m.version,
                hardware=m.hardware,
            )
        )

    def _worker_down(self, source: int, m: p.WorkerDown) -> None:
        worker = self.workers.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation:
            return
        self.engine_restarts += m.restarting
        held = self._take_turns(m.worker, m.error)
        self._on_fault(
            "engine died",
            f"{m.worker}: {m.error}; {held} turns go elsewhere"
            + (", the engine is restarted" if m.restarting else ""),
        )
        if not m.restarting:
            self._forget(m.worker)
            if not self.workers:
                self._on_action(
                    ev.GiveUp(f"no rollout worker is left; the last, {m.worker}: {m.error}")
                )

    def _worker_leaving(self, source: int, m: p.WorkerLeaving) -> None:
        if m.worker in self.workers:
            self.feed(ev.WorkerDraining(at=time.time(), worker=m.worker))

    def _worker_left(self, source: int, m: p.WorkerLeft) -> None:
        self.lose(m.worker, m.reason)

    def lose(self, name: str, why: str) -> int:
        """A worker is gone for good: its turns go on elsewhere from the tokens received; how many
        these are."""
        if name not in self.workers:
            return 0
        held = self._take_turns(name, why)
        self._forget(name)
        return held

    def share_siblings(self) -> None:
        """Engines that draft from what groups say get what theirs have got elsewhere."""
        if self.siblings is None:
            return
        held = self.ledger.groups_held()
        for name, worker in self.workers.items():
            if worker.alive:
                self.siblings.flush(name, worker.rank, sorted(held.get(name, ())))

    def group_ended(self, group: str) -> None:
        if self.siblings is not None:
            self.siblings.end(group)

    def _forget(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.past[worker.pool] += worker.tokens

    def _take_turns(self, name: str, why: str) -> int:
        worker = self.workers[name]
        worker.turn_closed(time.time(), worker.open_turns)
        worker.alive = False
        if self.siblings is not None:
            self.siblings.forget(name)
        held = self.ledger.of_worker(name)
        ended = [turn for turn in held if self.ledger.complete(turn)]
        for turn in held:
            self.ledger.take_back(turn)
        for turn in ended:
            self._deliver(turn, p.FinishReason.LENGTH)
        self.feed(ev.WorkerLost(at=time.time(), worker=name, reason=why, ended=ended))
        return len(held)

    def _worker_load(self, source: int, m: p.WorkerLoad) -> None:
        worker = self.workers.get(m.worker)
        if worker is not None and worker.incarnation == m.incarnation:
            worker.running, worker.waiting = m.running, m.waiting
            self.decoding.count(m)
            self._recorder.counter(f"{m.worker}/kv_usage", m.kv_usage)

    def _worker_capacity(self, source: int, m: p.WorkerCapacity) -> None:
        worker = self.workers.get(m.worker)
        if worker is not None and worker.alive and worker.incarnation == m.incarnation:
            self._recorder.counter(f"{m.worker}/kv_tokens", m.kv_tokens)
            self.feed(
                ev.WorkerCapacity(
                    at=time.time(),
                    worker=m.worker,
                    kv_tokens=m.kv_tokens,
                    max_sequences=m.max_sequences,
                    expected_s=m.expected_s,
                    revoked=m.revoked,
                )
            )

    def _version_loaded(self, source: int, m: p.VersionLoaded) -> None:
        worker = self.workers.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation:
            return
        self.progress_at = time.time()
        worker.version = m.version
        self.sync_bytes += m.nbytes
        self.sync_pause_s = max(self.sync_pause_s, m.pause_s)
        self._has(m.worker, worker)

    def _version_failed(self, source: int, m: p.VersionFailed) -> None:
        worker = self.workers.get(m.worker)
        if worker is not None and worker.incarnation != m.incarnation:
            return
        # one that nobody waits for was too slow, or a newer version is there: the next one, then
        if worker is not None and (worker.pool != "dedicated" or m.version < self.version):
            if worker.pool == "hybrid" and m.version == self.version:
                worker.failed_loads += 1
                last = worker.failed_loads == HYBRID_LOADS
                then = "not before the next version" if last else "again"
                self._on_fault("version not loaded", f"{m.worker}: {m.error}; {then}")
                if last:
                    return
            self._has(m.worker, worker)
            return
        self._on_action(ev.GiveUp(f"{m.worker} could not load version {m.version}: {m.error}"))

    def _has(self, name: str, worker: Worker) -> None:
        """What it loaded, or tried to, is over."""
        self.feed(ev.WorkerLoaded(at=time.time(), worker=name, version=worker.version))
