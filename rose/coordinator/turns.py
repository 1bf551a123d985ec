"""The part of the coordinator that moves turns between environment hosts, the scheduler and the
workers.

Every event passes `TurnHub.feed`, which journals it and passes it to the scheduler. `TurnHub`
carries out the scheduler's actions about turns and weights. Other actions, such as those about
groups and batches, go to `on_action`; `UseWorker` and `RestWorker` only if they name a hybrid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rose import protocol as p
from rose.coordinator.journal import Journal
from rose.coordinator.ledger import NO_HOST, Ledger
from rose.coordinator.turn_log import TurnLog
from rose.coordinator.weights import Weights
from rose.coordinator.worker import Decoding, Worker, Workers
from rose.observe.recorder import NullRecorder
from rose.scheduler import Scheduler
from rose.scheduler import events as ev
from rose.scheduler.actions import ActionQueue


@dataclass
class StepCounts:
    """Counts since a step began."""

    began_at: float = 0.0
    token_at: float = 0.0  # time of the last token
    resumed_snapshots: int = 0  # trajectories that resumed from a snapshot
    returned: int = 0  # turns that engines returned


class TurnHub:
    """Passes messages of hosts and workers to the scheduler, and carries out its actions.

    `send` takes (rank, message), `on_fault` (what, detail). `hybrids`: ranks of engines on the
    trainer's devices.
    """

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
        hybrids: Collection[int] = (),
    ) -> None:
        self.log = log
        self.listener: Any = None  # `Sender` of a part (rose/extensions.py)
        self._world_size = world_size  # workers at this rank and above are borrowed
        self._hybrids = hybrids
        self._send, self._recorder = send, recorder
        self._on_action, self._on_fault = on_action, on_fault
        self.scheduler = scheduler
        self._queue = ActionQueue(scheduler, self._carry_out, journal)
        self.ledger = Ledger()
        self.workers = Workers()
        self.weights = Weights(self.workers, self.feed, lambda a: self._on_action(a), on_fault)
        self.decoding = Decoding()
        self.progress_at = time.time()  # last progress of any kind
        self.counts = StepCounts()
        self._tokens: dict[str, int] = {}  # running trajectory -> tokens received for it
        # running trajectory -> turns completed since it was last started, a snapshot's included
        self._turns_done: dict[str, int] = {}
        # running trajectories that started again after their host was lost or released them
        self._restarted: set[str] = set()
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            p.TurnRequest: self._turn_requested,
            p.TrajectoryResumed: self._trajectory_resumed,
            p.TurnProgress: self._take_tokens,
            p.TurnFinished: self._turn_finished,
            p.TurnReturned: self._turn_returned,
            p.WorkerReady: self._worker_ready,
            p.WorkerDown: self._worker_down,
            p.WorkerLeaving: self._worker_leaving,
            p.WorkerLeft: lambda source, m: self.lose(m.worker, m.reason),
            p.WorkerLoad: self._worker_load,
            p.WorkerCapacity: self._worker_capacity,
            p.VersionLoaded: self._version_loaded,
            p.VersionFailed: lambda source, m: self.weights.failed(m),
        }

    # ----------------------------------------------------------------- for the step loop

    def begin_step(self) -> None:
        """Reset the counters of the step."""
        at = time.time()
        self.counts = StepCounts(at, at)
        self.workers.begin_step(at)
        self.ledger.migrations = 0
        self.log.resumed_turns = self.log.resumed_tokens = 0
        self.decoding.begin_step()

    def trajectory_ended(self, trajectory: p.Trajectory) -> None:
        """Report the end to the scheduler. First drop turns that still run: of an agent that exits
        without awaiting them ("cut_turns"), or of an earlier host of a restarted trajectory."""
        self.progress_at = time.time()
        if trajectory.stats.get("cut_turns") or trajectory.id in self._restarted:
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
        """Drop a trajectory and abort its turns; return the number of tokens received for it."""
        self._drop_turns(trajectory)
        tokens = self._forget_trajectory(trajectory)
        self.log.forget(trajectory)
        self.feed(ev.TrajectoryEnded(at=time.time(), trajectory=trajectory, failed=True))
        return tokens

    def _forget_trajectory(self, trajectory: str) -> int:
        self.log.running.forget(trajectory)
        self._restarted.discard(trajectory)
        self._turns_done.pop(trajectory, None)
        return self._tokens.pop(trajectory, 0)

    def in_environment(self, trajectory: str) -> bool:
        """True if the trajectory's current host awaits no turn of it."""
        open_turns = set(self.ledger.of_trajectory(trajectory))
        return not open_turns - set(self.ledger.orphans(trajectory))

    def turns_done(self, trajectory: str) -> int:
        """Return the number of turns completed since the trajectory was last started, including
        those of a snapshot."""
        return self._turns_done.get(trajectory, 0)

    def restart_trajectory(self, trajectory: str) -> None:
        """Prepare for the trajectory's start on another host, or in a new process of its host.

        Its open turns keep running. The new host requests the recorded turns again and gets them
        from memory.
        """
        self.progress_at = time.time()
        self.log.running.restart(trajectory)
        self.ledger.orphan(trajectory)
        self._restarted.add(trajectory)
        self._turns_done.pop(trajectory, None)

    def _drop_turns(self, trajectory: str) -> None:
        for turn in self.ledger.of_trajectory(trajectory):
            self._drop_turn(turn)

    def _drop_turn(self, turn: str) -> None:
        if (name := self.ledger.worker_of(turn)) is not None:
            worker = self.workers[name]
            worker.turn_closed(time.time())
            self._send(worker.rank, p.AbortTurn(turn, self.ledger.attempt_of(turn)))
        tokens = self.ledger.received(turn)
        self.ledger.drop(turn)
        self.feed(ev.TurnEnded(at=time.time(), turn=turn, tokens=tokens))

    def feed(self, event: ev.Event) -> None:
        """Pass the event to the scheduler and carry out its actions. When called from within an
        action, return at once; the event is handled after the remaining actions."""
        if self.listener is not None:
            self.listener.observe(event)
        self._queue.feed(event)

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.AssignTurn(turn, worker, attempt, max_tokens):
                if turn in self.ledger:  # An earlier action may have ended it.
                    self.workers[worker].turn_opened(time.time())
                    message = self.ledger.dispatch(turn, worker, attempt, max_tokens)
                    self._send(self.workers[worker].rank, message)
            case ev.AbortTurn(turn, worker, attempt, why):
                if self.ledger.worker_of(turn) == worker:
                    self._abort(turn, worker, attempt, why)
            case ev.LoadWeights(worker, version):
                self._send(self.workers[worker].rank, p.LoadVersion(version, self.weights.store))
            case ev.UseWorker(worker) | ev.RestWorker(worker):
                idled = isinstance(action, ev.RestWorker)
                (self.workers.idled.add if idled else self.workers.idled.discard)(worker)
                known = self.workers.get(worker)  # None if the worker has left
                if known is not None and known.pool == "hybrid":
                    self._on_action(action)
            case _:
                self._on_action(action)

    def _abort(self, turn: str, worker: str, attempt: int, why: str) -> None:
        if why == "stalled":
            self._on_fault("stalled turn", f"{turn} on {worker}, attempt {attempt}: moved")
        self.ledger.unassign(turn)
        self.workers[worker].turn_closed(time.time())
        self._send(self.workers[worker].rank, p.AbortTurn(turn, attempt))

    # ----------------------------------------------------------------- messages

    def handle(self, source: int, message: p.Message) -> bool:
        """Handle a message about turns or workers; return False for any other."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return False
        handler(source, message)
        return True

    def _turn_requested(self, source: int, m: p.TurnRequest) -> None:
        tokens = 0
        if m.trajectory in self._restarted and self._adopt_open_turn(source, m):
            return
        if (recorded := self.log.find_in_memory(m)) is None:
            recorded = self.log.find(m, self.weights.version)
            if recorded is not None:
                self._count_tokens(m.trajectory, len(recorded.tokens) // 4)
        if recorded is not None:
            tokens = len(recorded.tokens) // 4
            self.progress_at = time.time()
            if recorded.finish is not p.FinishReason.ABORT:
                self._answer(m.trajectory, source, recorded)
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
                made_tokens=tokens,
                domain=m.domain,
                outcome=m.outcome,
                held_out=m.phase is p.Phase.EVAL,
            )
        )

    def _trajectory_resumed(self, source: int, m: p.TrajectoryResumed) -> None:
        """Count the turns of the snapshot, which are not generated again."""
        self.counts.resumed_snapshots += 1
        self.progress_at = time.time()
        self.log.count_resumed(m.turns, m.tokens)
        self._turns_done[m.id] = m.turns
        if self.log.running.resumed(m.id, m.turns, m.earlier):
            self._count_tokens(m.id, m.tokens)

    def _adopt_open_turn(self, source: int, m: p.TurnRequest) -> bool:
        """Hand the lost host's open turn to the new host if both requested the same; else return
        False. An open turn that only has the same name or the same context is aborted, and its
        tokens are recorded."""
        for turn in self.ledger.orphans(m.trajectory):
            before = self.ledger.request_of(turn)
            if (before.turn, before.sampling, before.tokens) == (m.turn, m.sampling, m.tokens):
                self.ledger.adopt(turn, source)
                self.log.count_resumed(1, self.ledger.received(turn))
                return True
            if turn == m.turn or before.tokens == m.tokens:
                if (cut := self.ledger.partial_result(turn)) is not None:
                    self.log.add(*cut, self.weights.version, delivered=False)
                self._drop_turn(turn)
        return False

    def _turn_finished(self, source: int, m: p.TurnFinished) -> None:
        if self._take_tokens(source, m) is None:
            return
        self._attempt_ended(m.turn)
        if m.finish is p.FinishReason.LENGTH and self.ledger.chunk_ended(m.turn):
            self.feed(ev.TurnReturned(at=time.time(), turn=m.turn, attempt=m.attempt, chunk=True))
        else:
            self._close_turn(m.turn, m.finish)

    def _turn_returned(self, source: int, m: p.TurnReturned) -> None:
        if self._take_tokens(source, m) is None:
            return
        self._attempt_ended(m.turn)
        if self.ledger.complete(m.turn):
            self._close_turn(m.turn, p.FinishReason.LENGTH)
            return
        self.counts.returned += 1
        self.feed(ev.TurnReturned(at=time.time(), turn=m.turn, attempt=m.attempt))

    def _attempt_ended(self, turn: str) -> None:
        self.workers[self.ledger.worker_of(turn)].turn_closed(time.time())
        self.ledger.unassign(turn)

    def _take_tokens(
        self, source: int, m: p.TurnProgress | p.TurnFinished | p.TurnReturned
    ) -> int | None:
        """Add the tokens of a message to its turn and return their number. Return None for a late
        message."""
        name = self.ledger.worker_of(m.turn)
        if m.turn in self.ledger and (name is None or self.workers[name].rank != source):
            return None  # The turn waits in the queue, or another worker has it.
        count = self.ledger.add(m)
        if count:
            now = self.progress_at = self.counts.token_at = time.time()
            self.workers.count(name, count)
            self._count_tokens(self.ledger.request_of(m.turn).trajectory, count)
            self.feed(ev.TurnProgressed(at=now, turn=m.turn, attempt=m.attempt, tokens=count))
        return count

    def _count_tokens(self, trajectory: str, tokens: int) -> None:
        self._tokens[trajectory] = self._tokens.get(trajectory, 0) + tokens

    def _close_turn(self, turn: str, finish: p.FinishReason) -> None:
        tokens = self.ledger.received(turn)
        self._deliver(turn, finish)
        self.feed(ev.TurnEnded(at=time.time(), turn=turn, tokens=tokens))

    def _deliver(self, turn: str, finish: p.FinishReason) -> None:
        """Close the turn, record it, and send the result to its host."""
        request = self.ledger.request_of(turn)
        host, result = self.ledger.close(turn, finish)
        self.log.add(request, result, self.weights.version, delivered=host != NO_HOST)
        if host != NO_HOST:
            self._answer(request.trajectory, host, result)

    def _answer(self, trajectory: str, host: int, result: p.TurnResult) -> None:
        self._turns_done[trajectory] = self.turns_done(trajectory) + 1
        self._send(host, result)

    def record_open_turns(self) -> None:
        """Record the tokens of open turns as the run ends, for a restart. Raises OSError."""
        for request, result in self.ledger.partial_results():
            self.log.add(request, result, self.weights.version)
        self.log.flush()

    def _worker_ready(self, source: int, m: p.WorkerReady) -> None:
        before = self.workers.get(m.worker)
        if before is not None and before.alive:
            self._unassign_all(m.worker, "it started again without a report of its end")
        kind = "dedicated" if source < self._world_size else m.kind
        self.workers.own_ready |= source < self._world_size
        self.workers.idled.discard(m.worker)
        if source in self._hybrids:
            kind = "hybrid"
            self.workers.idled.add(m.worker)  # The scheduler orders `UseWorker` to use it.
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
        self.workers.restarts += m.restarting
        held = self._unassign_all(m.worker, m.error)
        self._on_fault(
            "engine died",
            f"{m.worker}: {m.error}; {held} turns go elsewhere"
            + (", the engine is restarted" if m.restarting else ""),
        )
        if not m.restarting:
            self.workers.remove(m.worker)
            # A borrowed engine may be ready, and end, before the run's own engines are ready.
            if not self.workers and self.workers.own_ready:
                self._on_action(
                    ev.GiveUp(f"no rollout worker is left; the last, {m.worker}: {m.error}")
                )

    def _worker_leaving(self, source: int, m: p.WorkerLeaving) -> None:
        if m.worker in self.workers:
            self.feed(ev.WorkerDraining(at=time.time(), worker=m.worker))

    def lose(self, name: str, why: str) -> int:
        """Remove a worker for good; return the number of its turns. They continue on other workers
        from the tokens received."""
        if name not in self.workers:
            return 0
        held = self._unassign_all(name, why)
        self.workers.remove(name)
        return held

    def group_ended(self, group: str) -> None:
        if self.listener is not None:
            self.listener.group_ended(group)

    def _unassign_all(self, name: str, why: str) -> int:
        """Take all turns from a worker that is lost, deliver those that are complete, and report
        the loss to the scheduler. Return the number of the worker's turns."""
        worker = self.workers[name]
        worker.turn_closed(time.time(), worker.open_turns)
        worker.alive = False
        held = self.ledger.of_worker(name)
        ended = [turn for turn in held if self.ledger.complete(turn)]
        for turn in held:
            self.ledger.unassign(turn)
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
        if self.weights.loaded(m):
            self.progress_at = time.time()
