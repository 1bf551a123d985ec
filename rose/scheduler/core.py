"""The scheduler: one state machine with five replaceable policies (policies.py).

`handle(event) -> actions` is a pure function of the events so far. The policies decide:
- routing: which worker takes a turn,
- order: which waiting turn goes first,
- batching: which groups a training step consumes,
- provisioning: which capacity to request and which workers to use,
- placement: which environment host continues a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from rose.scheduler import events as ev
from rose.scheduler.dispatch import Dispatch
from rose.scheduler.events import Action, Event
from rose.scheduler.fleet import Fleet
from rose.scheduler.policies import (
    OBSERVED,
    OBSERVED_BEFORE,
    Batching,
    Order,
    Placement,
    Provisioning,
    Routing,
)
from rose.scheduler.state import Cluster, HostState, SavedState, TurnState
from rose.scheduler.workers import Workers

MAX_STALLS = 5  # stalls of one turn after which the run stops; five are no accident


class Scheduler:
    def __init__(
        self,
        provisioning: Provisioning,
        routing: Routing,
        order: Order,
        batching: Batching,
        queue_depth: float,
        turn_timeout_s: float,
        placement: Placement | None = None,
    ) -> None:
        self.cluster = Cluster()
        self.fleet = Fleet(self.cluster, queue_depth, getattr(routing, "label", lambda worker: ""))
        self._queue = Dispatch(self.cluster, self.fleet, routing, order)
        self.joins_resting: Callable[[str], bool] = getattr(
            provisioning, "joins_resting", lambda kind: False
        )
        workers = Workers(self.cluster, self.fleet, self._queue, self.joins_resting)
        self._workers = workers
        self._provisioning, self._batching, self._placement = provisioning, batching, placement
        self._turn_timeout_s = turn_timeout_s
        self._sequence = 0
        # Min-heap of (time of progress, sequence, turn, attempt), one entry per attempt. An entry
        # may be older than the turn's last progress; `_abort_stalled` then pushes a newer one.
        self._deadlines: list[tuple[float, int, str, int]] = []
        handlers: dict[type[Event], Callable[[Any], list[Action]]] = {
            ev.WorkerJoined: workers.joined,
            ev.WorkerLost: self._worker_lost,
            ev.WorkerDraining: workers.draining,
            ev.WorkerCapacity: workers.capacity_changed,
            ev.WorkerLoaded: workers.loaded,
            ev.VersionPublished: self._version_published,
            ev.CapacityQueued: self._capacity_queued,
            ev.CapacityGranted: self._capacity_granted,
            ev.CapacityRefused: self._capacity_refused,
            ev.CapacityEnded: self._capacity_ended,
            ev.TurnRequested: self._turn_requested,
            ev.TurnProgressed: self._turn_progressed,
            ev.TurnEnded: self._turn_ended,
            ev.TurnReturned: self._turn_returned,
            ev.TrajectoryEnded: self._trajectory_ended,
            ev.HostLoad: self._host_load,
            ev.HostLost: self._host_lost,
            ev.TrajectorySaved: self._trajectory_saved,
            ev.StepBegun: self._step_begun,
            ev.GroupFinished: self._group_finished,
            ev.Tick: self._tick,
        }
        # Type of event -> (handler, policies see it before the handler runs, policies see it after)
        self._handlers = {
            kind: (handler, kind in OBSERVED_BEFORE, kind in OBSERVED)
            for kind, handler in handlers.items()
        }
        self._listeners: list[Callable] = [
            policy.on_event
            for policy in (provisioning, routing, order, batching, placement)
            if hasattr(policy, "on_event")
        ]
        self.rolls_hybrids: Callable[[], bool] = getattr(
            provisioning, "rolls_hybrids", lambda: True
        )
        self._published: Callable[[int], list[Action]] = getattr(
            batching, "published", lambda version: []
        )
        self._certain: Callable[[], list[str]] = getattr(batching, "certain", lambda: [])
        # Groups sent early to the trainer of a streamed step; None if the step isn't streamed
        self._sent_early: set[str] | None = None
        self._batching_trajectory_ended: Callable[[str, str], list[Action]] = getattr(
            batching, "trajectory_ended", lambda trajectory, group: []
        )

    def handle(self, event: Event) -> list[Action]:
        """Apply one event and return the actions to carry out now, in this order (`ActionQueue`):

        1. the actions that the event itself causes;
        2. the actions of policies that observe the event;
        3. the assignments of waiting turns to workers.

        So an action follows the actions that make room for it: a turn is aborted before another
        takes its place, and a worker is ordered to load weights before it gets turns.
        """
        kind = type(event)
        # The most frequent event. It frees no capacity, so no waiting turn can be assigned.
        if kind is ev.TurnProgressed:
            self._turn_progressed(event)
            return []
        handler, before, after = self._handlers[kind]
        decided = self._notify(event) if before else []
        actions = handler(event) + decided
        if after:
            actions += self._notify(event)
        if before or after:
            self._queue.reorder(event)
        tick = kind is ev.Tick
        if self.cluster.waiting or self._queue.may_move(tick):
            actions += self._dispatch(event.at, tick)
        return actions

    def snapshot(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain containers. Workers and turns are not in it:
        after a restart workers join again and turns are requested again."""
        return {"batching": self._batching.snapshot()}

    def restore(self, state: dict[str, Any]) -> None:
        self._batching.restore(state["batching"])

    @property
    def staleness(self) -> int:
        """Most versions from a group's admission to the step that trains it; 0 if on-policy."""
        return self._batching.staleness

    @property
    def waiting(self) -> int:
        """Number of turns in the queue."""
        return self.cluster.waiting

    def _notify(self, event: Event) -> list[Action]:
        """Pass a current event to the policies that observe events. Return the actions that they
        decide on, and the actions that these cause."""
        if not self._listeners or not self._is_current(event):
            return []
        actions: list[Action] = []
        for on_event in self._listeners:
            if decided := on_event(event, self.cluster):
                actions += self._carry_out(decided)
        return actions

    def _is_current(self, event: Event) -> bool:
        """False for an event about a gone worker, a gone turn, or an earlier attempt."""
        match event:
            case ev.TurnEnded(turn=name):
                return name in self.cluster.turns
            case ev.TurnReturned(turn=name, attempt=attempt):
                turn = self.cluster.turns.get(name)
                return turn is not None and turn.worker is not None and turn.attempt == attempt
            case ev.WorkerLost(worker=name) | ev.WorkerCapacity(worker=name):
                return name in self.cluster.workers
        return True

    def _carry_out(self, actions: list[Action]) -> list[Action]:
        """Apply policies' actions to the cluster's state. Return them and their consequences."""
        done: list[Action] = []
        for action in actions:
            done.append(action)
            match action:
                case ev.StartTraining():
                    self.cluster.training, self._sent_early = True, None
                case ev.AdmitGroup(_, group):
                    self.cluster.admitted[group] = 0
                case ev.DropGroup(group):
                    self.cluster.admitted.pop(group, None)
                case ev.RequestCapacity(request):
                    self.cluster.requests[request] = False
                case ev.ReleaseCapacity(request):
                    del self.cluster.requests[request]
                case ev.UseWorker(worker):
                    done += self._workers.use(worker)
                case ev.RestWorker(worker):
                    done += self._workers.rest(worker)
                case ev.MoveTrajectory(trajectory, host):
                    self.cluster.saved[trajectory].host = host
        return done

    # ----------------------------------------------------------------- workers

    def _worker_lost(self, e: ev.WorkerLost) -> list[Action]:
        actions: list[Action] = []
        for name in e.ended:
            if turn := self.cluster.turns.get(name):
                actions += self._notify(ev.TurnEnded(at=e.at, turn=name, tokens=turn.made_tokens))
            self._remove_turn(name)
        self._workers.forget(e.worker)
        return actions

    def _version_published(self, e: ev.VersionPublished) -> list[Action]:
        self.cluster.version, self.cluster.training = e.version, False
        return self._workers.load_published() + self._carry_out(self._published(e.version))

    # ----------------------------------------------------------------- capacity

    def _capacity_queued(self, e: ev.CapacityQueued) -> list[Action]:
        self.cluster.requests.setdefault(e.request, False)
        return []

    def _capacity_granted(self, e: ev.CapacityGranted) -> list[Action]:
        self.cluster.requests[e.request] = True
        self.cluster.back_off.granted()
        return []

    def _capacity_refused(self, e: ev.CapacityRefused) -> list[Action]:
        self.cluster.requests.pop(e.request, None)
        self.cluster.back_off.refused(e.request, e.at, self.cluster.requests)
        return []

    def _capacity_ended(self, e: ev.CapacityEnded) -> list[Action]:
        self.cluster.requests.pop(e.request, None)
        return []

    # ----------------------------------------------------------------- turns

    def _turn_requested(self, e: ev.TurnRequested) -> list[Action]:
        if e.turn in self.cluster.turns:
            raise ValueError(f"turn {e.turn} was requested twice; a turn is one unit of work")
        self._sequence += 1
        turn = TurnState(
            e.turn, e.trajectory, e.group, e.context_tokens, e.max_new_tokens, self._sequence, e.at
        )
        turn.domain, turn.outcome = e.domain, e.outcome
        turn.made_tokens, turn.held_out = e.made_tokens, e.held_out
        self.cluster.turns[e.turn] = turn
        self.cluster.group_of[e.trajectory] = e.group
        self._queue.add(turn)
        return []

    def _turn_progressed(self, e: ev.TurnProgressed) -> list[Action]:
        turn = self.cluster.turns.get(e.turn)
        if turn is not None and turn.worker is not None and turn.attempt == e.attempt:
            turn.made_tokens += e.tokens
            turn.progress_at = e.at
        return []

    def _turn_ended(self, e: ev.TurnEnded) -> list[Action]:
        self._remove_turn(e.turn)
        return []

    def _turn_returned(self, e: ev.TurnReturned) -> list[Action]:
        """Queue the turn again. A return doesn't count as a stall, so it never stops the run.

        If the worker returned the turn before the end of its chunk:
        1. the worker gets no turns until it reports its capacity, because it would return them;
        2. this turn goes to the same worker again only if no other worker has room.
        """
        turn = self.cluster.turns.get(e.turn)
        if turn is None or turn.worker is None or turn.attempt != e.attempt:
            return []
        if e.chunk:
            self._queue.requeue(turn)
        else:
            self.cluster.workers[turn.worker].awaits_capacity_report = True
            self._requeue_elsewhere(turn)
        return []

    def _trajectory_ended(self, e: ev.TrajectoryEnded) -> list[Action]:
        self._forget_home(e.trajectory)
        self.cluster.saved.pop(e.trajectory, None)
        group = self.cluster.group_of.pop(e.trajectory, "")
        if group in self.cluster.admitted and not e.failed:
            self.cluster.admitted[group] += 1
        return self._carry_out(self._batching_trajectory_ended(e.trajectory, group))

    def _remove_turn(self, name: str) -> None:
        turn = self.cluster.turns.pop(name, None)
        if turn is None:
            return
        if turn.worker is None:
            self._queue.remove(turn)
        else:
            self._queue.left_worker(turn)
            self.cluster.workers[turn.worker].free(turn)
            self.fleet.changed(turn.worker)

    def _requeue_elsewhere(self, turn: TurnState) -> None:
        """Queue the turn again (`Dispatch.requeue`) and prefer any other worker for it."""
        turn.avoid = turn.worker
        self._forget_home(turn.trajectory)
        self._queue.requeue(turn)

    def _forget_home(self, trajectory: str) -> None:
        home = self.cluster.home.pop(trajectory, None)
        if home in self.cluster.workers:
            self.cluster.workers[home].cached.pop(trajectory, None)

    # ----------------------------------------------------------------- environment hosts

    def _host_load(self, e: ev.HostLoad) -> list[Action]:
        self.cluster.hosts[e.host] = HostState(e.host, e.running, e.cores, e.cpu, e.memory, e.at)
        return []

    def _host_lost(self, e: ev.HostLost) -> list[Action]:
        """Forget the host and the snapshots of its trajectories. The driver chooses the host on
        which a trajectory continues; a later `TrajectorySaved` names it."""
        self.cluster.hosts.pop(e.host, None)
        saved = self.cluster.saved
        self.cluster.saved = {name: one for name, one in saved.items() if one.host != e.host}
        return []

    def _trajectory_saved(self, e: ev.TrajectorySaved) -> list[Action]:
        if e.trajectory in self.cluster.group_of:  # The trajectory may have ended since then.
            self.cluster.saved[e.trajectory] = SavedState(e.host, e.turns, e.commands_s)
        return []

    # ----------------------------------------------------------------- batches, time

    def _step_begun(self, e: ev.StepBegun) -> list[Action]:
        self.cluster.step, self.cluster.group_size = e.step, e.group_size
        self._sent_early = set() if e.stream else None
        return self._carry_out(self._batching.begin(e.step, e.groups)) + self._train_early()

    def _group_finished(self, e: ev.GroupFinished) -> list[Action]:
        self.cluster.admitted.pop(e.group, None)
        home = self.cluster.group_home.pop(e.group, None)
        if home in self.cluster.workers:
            self.cluster.workers[home].cached.pop(e.group, None)
        return self._carry_out(self._batching.finished(e.group, e.accepted)) + self._train_early()

    def _train_early(self) -> list[Action]:
        """Send a streamed step's trainer the groups that have become certain."""
        if self._sent_early is None:
            return []
        found = [group for group in self._certain() if group not in self._sent_early]
        self._sent_early.update(found)
        return [ev.TrainGroup(self.cluster.step, group) for group in found]

    def _tick(self, e: ev.Tick) -> list[Action]:
        actions = self._abort_stalled(e.at)
        actions += self._carry_out(self._provisioning.decide(e.at, self.cluster))
        if self._placement is not None and self.cluster.hosts:
            actions += self._carry_out(self._placement.decide(e.at, self.cluster))
        return actions

    def _abort_stalled(self, at: float) -> list[Action]:
        """Abort turns that got no token for `turn_timeout_s`, and queue them for other workers."""
        actions: list[Action] = []
        while self._deadlines and at - self._deadlines[0][0] > self._turn_timeout_s:
            progress_at, sequence, name, attempt = heappop(self._deadlines)
            turn = self.cluster.turns.get(name)
            if (
                turn is None
                or turn.worker is None
                or (turn.sequence, turn.attempt) != (sequence, attempt)
            ):
                continue
            if turn.progress_at != progress_at and at - turn.progress_at <= self._turn_timeout_s:
                heappush(self._deadlines, (turn.progress_at, sequence, name, attempt))
                continue
            turn.stalls += 1
            actions.append(ev.AbortTurn(turn.turn, turn.worker, turn.attempt, "stalled"))
            if turn.stalls >= MAX_STALLS:
                each = f"{self._turn_timeout_s:g} s each (rollout.turn_timeout_s)"
                times = f"stalled {turn.stalls} times, {each}, last on {turn.worker}"
                actions.append(ev.GiveUp(f"turn {turn.turn} {times}"))
            self._requeue_elsewhere(turn)
        return actions

    def _dispatch(self, at: float, tick: bool) -> list[Action]:
        """Assign waiting turns, move running ones, and start the stall timeout of each attempt."""
        actions = self._queue.round(at, tick)
        for action in actions:
            if type(action) is ev.AssignTurn:
                sequence = self.cluster.turns[action.turn].sequence
                heappush(self._deadlines, (at, sequence, action.turn, action.attempt))
        return actions
