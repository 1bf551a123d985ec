"""The scheduler: one state machine, four replaceable policies.

`handle(event) -> actions` is a pure function of the events so far. The policies decide: routing
which worker takes a turn, order which waiting turn goes first, batching what a training step
consumes, provisioning which capacity to hold.
"""

from __future__ import annotations

from typing import Any, Protocol

from rose.scheduler import events as ev
from rose.scheduler.events import Action, Event
from rose.scheduler.state import Cluster, TurnState, WorkerState

MAX_ATTEMPTS = 5  # dispatches of one turn that may stall before the run stops: more is no accident


class Routing(Protocol):
    def choose(self, turn: TurnState, candidates: list[WorkerState], cluster: Cluster) -> WorkerState | None:
        """One of `candidates` (never empty, each has room), or None to let the turn wait."""


class Order(Protocol):
    def key(self, turn: TurnState, cluster: Cluster) -> Any:
        """Sort key: the smallest goes first."""


class Batching(Protocol):
    def begin(self, step: int, groups: int) -> list[Action]: ...

    def finished(self, group: str, accepted: bool) -> list[Action]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Provisioning(Protocol):
    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        """Called on every tick."""


class Scheduler:
    def __init__(self, provisioning: Provisioning, routing: Routing, order: Order, batching: Batching,
                 queue_depth: float, turn_timeout_s: float) -> None:
        self.cluster = Cluster()
        self._provisioning, self._routing, self._order, self._batching = provisioning, routing, order, batching
        self._queue_depth = queue_depth
        self._turn_timeout_s = turn_timeout_s
        self._sequence = 0

    def handle(self, event: Event) -> list[Action]:
        """Take one event; return what must be done now, in order."""
        actions = getattr(self, f"_on_{type(event).__name__}")(event)
        if isinstance(event, ev.TurnProgressed):
            return actions  # frees nothing, and comes most often
        return actions + self._dispatch(event.at)

    def snapshot(self) -> dict[str, Any]:
        """What outlives a step boundary, as plain containers; workers and turns join anew."""
        return {"batching": self._batching.snapshot()}

    def restore(self, state: dict[str, Any]) -> None:
        self._batching.restore(state["batching"])

    @property
    def waiting(self) -> int:
        return self.cluster.waiting

    # ----------------------------------------------------------------- workers

    def _on_WorkerJoined(self, e: ev.WorkerJoined) -> list[Action]:
        self._forget_worker(e.worker)
        worker = WorkerState(e.worker, e.kind, e.max_sequences, e.kv_tokens, e.version)
        self.cluster.workers[e.worker] = worker
        return self._load_if_stale(worker)

    def _on_WorkerLost(self, e: ev.WorkerLost) -> list[Action]:
        for turn in e.ended:
            self._on_TurnEnded(ev.TurnEnded(at=e.at, turn=turn))
        self._forget_worker(e.worker)
        return []

    def _on_WorkerDraining(self, e: ev.WorkerDraining) -> list[Action]:
        if e.worker in self.cluster.workers:
            self.cluster.workers[e.worker].draining = True
        return []

    def _on_WorkerLoaded(self, e: ev.WorkerLoaded) -> list[Action]:
        worker = self.cluster.workers.get(e.worker)
        if worker is None:
            return []
        worker.version, worker.loading = e.version, False
        return self._load_if_stale(worker)

    def _on_VersionPublished(self, e: ev.VersionPublished) -> list[Action]:
        self.cluster.version = e.version
        self.cluster.home.clear()  # cached prefixes belong to the old weights
        self.cluster.group_home.clear()
        return [a for _, w in sorted(self.cluster.workers.items()) for a in self._load_if_stale(w)]

    def _load_if_stale(self, worker: WorkerState) -> list[Action]:
        if worker.loading or worker.draining or self.cluster.version < 0 or worker.version == self.cluster.version:
            return []
        worker.loading = True
        return [ev.LoadWeights(worker.worker, self.cluster.version)]

    def _forget_worker(self, name: str) -> None:
        """Its turns go back to the queue, in their old places; nothing is cached there any more."""
        worker = self.cluster.workers.pop(name, None)
        for turn in worker.turns if worker else ():
            self.cluster.turns[turn].worker = None
        for homes in (self.cluster.home, self.cluster.group_home):
            for key in [k for k, w in homes.items() if w == name]:
                del homes[key]

    # ----------------------------------------------------------------- capacity

    def _on_CapacityQueued(self, e: ev.CapacityQueued) -> list[Action]:
        self.cluster.requests.setdefault(e.request, False)
        return []

    def _on_CapacityGranted(self, e: ev.CapacityGranted) -> list[Action]:
        self.cluster.requests[e.request] = True
        self.cluster.refusals = 0
        return []

    def _on_CapacityRefused(self, e: ev.CapacityRefused) -> list[Action]:
        self.cluster.requests.pop(e.request, None)
        self.cluster.refusals += 1
        self.cluster.refused_at = e.at
        return []

    def _on_CapacityEnded(self, e: ev.CapacityEnded) -> list[Action]:
        self.cluster.requests.pop(e.request, None)
        return []

    # ----------------------------------------------------------------- turns

    def _on_TurnRequested(self, e: ev.TurnRequested) -> list[Action]:
        if e.turn in self.cluster.turns:
            raise ValueError(f"turn {e.turn} was requested twice; a turn is one unit of work")
        self._sequence += 1
        self.cluster.turns[e.turn] = TurnState(e.turn, e.trajectory, e.group, e.context_tokens, e.max_new_tokens,
                                               self._sequence, e.at)
        return []

    def _on_TurnProgressed(self, e: ev.TurnProgressed) -> list[Action]:
        turn = self.cluster.turns.get(e.turn)
        if turn is not None and turn.worker is not None and turn.attempt == e.attempt:
            turn.made_tokens += e.tokens
            turn.heard_at = e.at
        return []

    def _on_TurnEnded(self, e: ev.TurnEnded) -> list[Action]:
        turn = self.cluster.turns.pop(e.turn, None)
        if turn is not None and turn.worker is not None:
            self.cluster.workers[turn.worker].turns.pop(turn.turn)
        return []

    def _on_TrajectoryEnded(self, e: ev.TrajectoryEnded) -> list[Action]:
        self.cluster.home.pop(e.trajectory, None)
        return []

    # ----------------------------------------------------------------- batches, time

    def _on_StepBegun(self, e: ev.StepBegun) -> list[Action]:
        return self._batching.begin(e.step, e.groups)

    def _on_GroupFinished(self, e: ev.GroupFinished) -> list[Action]:
        self.cluster.group_home.pop(e.group, None)
        return self._batching.finished(e.group, e.accepted)

    def _on_Tick(self, e: ev.Tick) -> list[Action]:
        return self._unstick(e.at) + self._provision(e.at)

    def _provision(self, at: float) -> list[Action]:
        actions = self._provisioning.decide(at, self.cluster)
        for action in actions:
            if isinstance(action, ev.RequestCapacity):
                self.cluster.requests[action.request] = False
            elif isinstance(action, ev.ReleaseCapacity):
                del self.cluster.requests[action.request]
        return actions

    def _unstick(self, at: float) -> list[Action]:
        """Turns without a token for `turn_timeout_s` go elsewhere (stall deadline)."""
        actions: list[Action] = []
        for turn in list(self.cluster.turns.values()):
            if turn.worker is None or at - turn.heard_at <= self._turn_timeout_s:
                continue
            if turn.attempt >= MAX_ATTEMPTS:
                return [ev.GiveUp(f"turn {turn.turn} stalled {turn.attempt} times, {self._turn_timeout_s:g} s each "
                                  f"(rollout.turn_timeout_s), last on {turn.worker}")]
            actions.append(ev.AbortTurn(turn.turn, turn.worker, turn.attempt))
            self.cluster.workers[turn.worker].turns.pop(turn.turn)
            turn.avoid, turn.worker = turn.worker, None
            self.cluster.home.pop(turn.trajectory, None)
        return actions

    def _dispatch(self, at: float) -> list[Action]:
        queue = [t for t in self.cluster.turns.values() if t.worker is None]
        ready = self.cluster.ready()
        if not queue or not ready:
            return []
        actions: list[Action] = []
        for turn in sorted(queue, key=lambda t: self._order.key(t, self.cluster)):
            candidates = [w for w in ready if w.fits(turn, self._queue_depth)]
            if not candidates:
                break  # the first in line keeps its place: a large turn is not starved by small ones
            others = [w for w in candidates if w.worker != turn.avoid]
            worker = self._routing.choose(turn, others or candidates, self.cluster)
            if worker is not None:
                actions.append(self._assign(turn, worker, at))
        return actions

    def _assign(self, turn: TurnState, worker: WorkerState, at: float) -> Action:
        turn.worker, turn.heard_at = worker.worker, at
        turn.attempt += 1
        worker.turns[turn.turn] = turn.kv_need
        self.cluster.home[turn.trajectory] = worker.worker
        self.cluster.group_home.setdefault(turn.group, worker.worker)
        return ev.AssignTurn(turn.turn, worker.worker, turn.attempt)
