"""The coordinator's half that moves turns: between environment hosts, the scheduler and the workers.

Every event that the scheduler hears is made here and journaled; every action about turns and weights
is carried out here. Actions about groups and batches go to `on_action`: they belong to the step loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rose import protocol as p
from rose.observe.recorder import NullRecorder
from rose.rollout.ledger import Ledger
from rose.roles.journal import Journal
from rose.scheduler import Scheduler
from rose.scheduler import events as ev


@dataclass
class Worker:
    rank: int
    incarnation: int
    version: int
    kind: Literal["dedicated", "cooperative"] = "dedicated"
    alive: bool = True
    tokens: int = 0  # received from it since `begin_step`
    total_tokens: int = 0
    running: int = 0
    waiting: int = 0
    open_turns: int = 0
    busy_s: float = 0.0  # with at least one turn, since `begin_step`
    busy_since: float = 0.0

    def turn_opened(self, at: float) -> None:
        if self.open_turns == 0:
            self.busy_since = at
        self.open_turns += 1

    def turn_closed(self, at: float) -> None:
        self.open_turns -= 1
        if self.open_turns == 0:
            self.busy_s += at - self.busy_since


class TurnHub:
    def __init__(self, scheduler: Scheduler, send: Callable[[int, p.Message], None], journal: Journal,
                 recorder: NullRecorder, on_action: Callable[[ev.Action], None],
                 on_fault: Callable[[str, str], None], world_size: int) -> None:
        self._world_size = world_size  # workers beyond it are borrowed
        self._scheduler, self._send, self._journal, self._recorder = scheduler, send, journal, recorder
        self._on_action, self._on_fault = on_action, on_fault
        self.ledger = Ledger()
        self.workers: dict[str, Worker] = {}
        self.manifest = ""  # of the newest version
        self.version = -1
        self.sync_bytes = 0
        self.sync_pause_s = 0.0
        self.engine_restarts = 0
        self.past = {"dedicated": 0, "cooperative": 0}  # tokens since `begin_step` of workers that are gone
        self.heard_at = time.time()  # last progress of any kind

    # ----------------------------------------------------------------- what the step loop asks

    def publish(self, version: int, manifest: str) -> None:
        """Every worker takes this version before any further turn."""
        self.version, self.manifest = version, manifest
        self.sync_bytes, self.sync_pause_s = 0, 0.0
        self.feed(ev.VersionPublished(at=time.time(), version=version))

    def begin_step(self) -> None:
        """Counters of the workers start anew."""
        for worker in self.workers.values():
            worker.tokens, worker.busy_s = 0, 0.0
        self.past = dict.fromkeys(self.past, 0)
        self.ledger.migrations = 0

    def stale_workers(self) -> list[str]:
        """Dedicated workers that are up and don't hold the newest version yet. Nobody waits for a borrowed one."""
        return [name for name, w in self.dedicated() if w.alive and w.version != self.version]

    def dedicated(self) -> list[tuple[str, Worker]]:
        return [(name, w) for name, w in self.workers.items() if w.kind == "dedicated"]

    def cancel(self, trajectory: str) -> None:
        """Forget a trajectory's turns and stop the engines that work on them."""
        for turn in self.ledger.of_trajectory(trajectory):
            state = self._scheduler.cluster.turns[turn]
            if state.worker is not None:
                self.workers[state.worker].turn_closed(time.time())
                self._send(self.workers[state.worker].rank, p.AbortTurn(turn, state.attempt))
            self.ledger.drop(turn)
            self.feed(ev.TurnEnded(at=time.time(), turn=turn))
        self.feed(ev.TrajectoryEnded(at=time.time(), trajectory=trajectory))

    def feed(self, event: ev.Event) -> None:
        """Tell the scheduler; do what it says."""
        actions = self._scheduler.handle(event)
        self._journal.write(event, actions)
        # Assignments first: what drops a group must find its turns where the scheduler believes them.
        for action in sorted(actions, key=lambda a: not isinstance(a, ev.AssignTurn)):
            match action:
                case ev.AssignTurn(turn, worker, attempt):
                    self.workers[worker].turn_opened(event.at)
                    self._send(self.workers[worker].rank, self.ledger.dispatch(turn, attempt))
                case ev.AbortTurn(turn, worker, attempt):
                    self._on_fault("stalled turn", f"{turn} on {worker}, attempt {attempt}: moved")
                    self.workers[worker].turn_closed(event.at)
                    self._send(self.workers[worker].rank, p.AbortTurn(turn, attempt))
                case ev.LoadWeights(worker, version):
                    self._send(self.workers[worker].rank, p.LoadVersion(version, self.manifest))
                case _:
                    self._on_action(action)

    # ----------------------------------------------------------------- messages

    def handle(self, source: int, message: p.Message) -> bool:
        """True when the message was about turns or workers."""
        handler = getattr(self, f"_on_{type(message).__name__}", None)
        if handler is None:
            return False
        handler(source, message)
        return True

    def _on_TurnRequest(self, source: int, m: p.TurnRequest) -> None:
        self.ledger.open(m, source)
        self.feed(ev.TurnRequested(at=time.time(), turn=m.turn, trajectory=m.trajectory, group=m.group,
                                   context_tokens=len(m.tokens) // 4, max_new_tokens=m.sampling.max_new_tokens))

    def _on_TurnProgress(self, source: int, m: p.TurnProgress) -> None:
        self._count(source, m)

    def _on_TurnFinished(self, source: int, m: p.TurnFinished) -> None:
        if self._count(source, m) is None:
            return
        worker = self.workers[self._scheduler.cluster.turns[m.turn].worker]
        worker.turn_closed(time.time())
        self._close_turn(m.turn, m.finish)

    def _count(self, source: int, m: p.TurnProgress | p.TurnFinished) -> int | None:
        """Take the tokens of a word; None if it is about an attempt that was given up."""
        state = self._scheduler.cluster.turns.get(m.turn)
        if state is not None and (state.worker is None or self.workers[state.worker].rank != source):
            return None  # taken back and waiting in the queue, or with another by now
        count = self.ledger.add(m)
        if count:
            now = self.heard_at = time.time()
            worker = self.workers[state.worker]
            worker.tokens += count
            worker.total_tokens += count
            self.feed(ev.TurnProgressed(at=now, turn=m.turn, attempt=m.attempt, tokens=count))
        return count

    def _close_turn(self, turn: str, finish: p.FinishReason) -> None:
        host, result = self.ledger.close(turn, finish)
        self._send(host, result)
        self.feed(ev.TurnEnded(at=time.time(), turn=turn))

    def _on_WorkerReady(self, source: int, m: p.WorkerReady) -> None:
        before = self.workers.get(m.worker)
        kind = "dedicated" if source < self._world_size else "cooperative"
        self.workers[m.worker] = Worker(source, m.incarnation, m.version, kind)
        if before is not None:  # a restart: what it did in this step still counts
            self.workers[m.worker].tokens = before.tokens
            self.workers[m.worker].total_tokens = before.total_tokens
            self.workers[m.worker].busy_s = before.busy_s
        print(f"{m.worker} is ready: engine process {m.engine_pid}, {m.kv_tokens} KV tokens, start {m.incarnation}",
              flush=True)
        self.feed(ev.WorkerJoined(at=time.time(), worker=m.worker, kind=kind, max_sequences=m.max_sequences,
                                  kv_tokens=m.kv_tokens, version=m.version))

    def _on_WorkerDown(self, source: int, m: p.WorkerDown) -> None:
        worker = self.workers.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation:
            return
        self.engine_restarts += m.restarting
        held = self._take_turns(m.worker, m.error)
        self._on_fault("engine died", f"{m.worker}: {m.error}; {held} turns go elsewhere"
                       + (", the engine is restarted" if m.restarting else ""))
        if not m.restarting:
            self._forget(m.worker)
            if not self.workers:
                self._on_action(ev.GiveUp(f"no rollout worker is left; the last, {m.worker}: {m.error}"))

    def _on_WorkerLeaving(self, source: int, m: p.WorkerLeaving) -> None:
        if m.worker in self.workers:
            self.feed(ev.WorkerDraining(at=time.time(), worker=m.worker))

    def _on_WorkerLeft(self, source: int, m: p.WorkerLeft) -> None:
        self.lose(m.worker, m.reason)

    def lose(self, name: str, why: str) -> int:
        """A worker is gone for good: its turns go on elsewhere from the tokens received; how many these are."""
        if name not in self.workers:
            return 0
        held = self._take_turns(name, why)
        self._forget(name)
        return held

    def _forget(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.past[worker.kind] += worker.tokens

    def _take_turns(self, name: str, why: str) -> int:
        worker = self.workers[name]
        if worker.alive and worker.open_turns:
            worker.busy_s += time.time() - worker.busy_since
        worker.alive, worker.open_turns = False, 0
        held = [t.turn for t in self._scheduler.cluster.turns.values() if t.worker == name]
        ended = [turn for turn in held if self.ledger.complete(turn)]
        for turn in ended:
            self._send(*self.ledger.close(turn, p.FinishReason.LENGTH))
        self.feed(ev.WorkerLost(at=time.time(), worker=name, reason=why, ended=ended))
        return len(held)

    def _on_WorkerLoad(self, source: int, m: p.WorkerLoad) -> None:
        worker = self.workers.get(m.worker)
        if worker is not None and worker.incarnation == m.incarnation:
            worker.running, worker.waiting = m.running, m.waiting
            self._recorder.counter(f"{m.worker}/kv_usage", m.kv_usage)

    def _on_VersionLoaded(self, source: int, m: p.VersionLoaded) -> None:
        worker = self.workers.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation:
            return
        self.heard_at = time.time()
        worker.version = m.version
        self.sync_bytes += m.nbytes
        self.sync_pause_s = max(self.sync_pause_s, m.pause_s)
        self.feed(ev.WorkerLoaded(at=time.time(), worker=m.worker, version=m.version))

    def _on_VersionFailed(self, source: int, m: p.VersionFailed) -> None:
        worker = self.workers.get(m.worker)
        if worker is not None and worker.kind == "cooperative":  # it was too slow: the next version, then
            self.feed(ev.WorkerLoaded(at=time.time(), worker=m.worker, version=worker.version))
            return
        self._on_action(ev.GiveUp(f"{m.worker} could not load version {m.version}: {m.error}"))
