"""The simulated workers: engines that join, load weights, are lent more or less memory, and
leave.

rose.parts.simulator.driver handles their turns, rose.parts.simulator.engine models their engines,
and rose.parts.simulator.supply decides when workers join and leave.
"""

from __future__ import annotations

import math
from typing import Protocol

from rose.parts.simulator import lending, result, spec
from rose.parts.simulator.drafts import Ended
from rose.parts.simulator.loop import Loop
from rose.parts.simulator.worker import SimWorker
from rose.scheduler import events as ev


class Hub(Protocol):
    """The driver of the scheduler, as this module uses it."""

    def feed(self, event: ev.Event) -> None: ...

    def returned(self, worker: SimWorker, turns: list) -> None:
        """Return the turns that the worker's engine dropped: it was lost, or memory was revoked."""

    def reschedule(self, worker: SimWorker) -> None:
        """Schedule the engine's next event, after a change of the engine."""

    def synced(self) -> None:
        """End the step if all dedicated and hybrid workers have loaded its weights."""

    def is_resting(self, worker: str) -> bool:
        """Return whether the scheduler has put the worker to sleep."""


class Workers:
    """The workers of a run, of all pools."""

    def __init__(self, what: spec.Spec, loop: Loop, hub: Hub) -> None:
        self._spec, self._loop, self._hub, self._feed = what, loop, hub, hub.feed
        self.by_name: dict[str, SimWorker] = {}
        self.gone: list[SimWorker] = []
        # Dedicated and hybrid workers that load weights; the step waits for them.
        self.waited_for: dict[str, None] = {}
        self.granted: list[result.Granted] = []
        names = [pool.name for pool in what.pools]
        self._serial = dict.fromkeys(names, 0)  # pool -> workers that have joined
        # pool -> (worker, version, bytes) of the transfers requested at this instant
        self._sending: dict[str, list[tuple[SimWorker, int, float]]] = {}
        self._link_free = dict.fromkeys(names, 0.0)  # pool -> time its link is free
        # (id of a Load, pool) -> (pace, changes)
        self._tables: dict[tuple[int, str], tuple] = {}
        # Seconds by which the next training step is longer because GPUs were moved.
        self._regroup_s = 0.0
        self.version = -1
        self._ended = Ended()

    def join(self, name: str, pool: spec.Pool, version: int, asked_at: float) -> None:
        """Add a worker that holds `version` (-1: none). `asked_at`: see `SimWorker`."""
        now = self._loop.now
        worker = SimWorker(name, pool, self._serial[pool.name], now, self._ended)
        self._serial[pool.name] += 1
        worker.version, worker.asked_at = version, asked_at
        self.by_name[name] = worker
        if pool.serving is not None:
            self._attach_serving(worker, pool.serving)
        if version == self.version and asked_at >= 0:
            self._note_ready(worker)
        self._feed(
            ev.WorkerJoined(
                at=now,
                worker=name,
                kind=pool.kind,
                max_sequences=pool.engine.max_sequences,
                kv_tokens=pool.engine.kv_tokens,
                version=version,
                hardware=pool.gpu.name,
                shape=_shape(pool, worker.serial),
            )
        )
        if self._hub.is_resting(name):
            worker.end_hold(now)
        if worker.budget is not None:
            self._update_budget(worker, 0)

    def _attach_serving(self, worker: SimWorker, serving: spec.Serving) -> None:
        """Have the worker share its device with online serving."""
        worker.load, worker.offset_s = serving.devices.load(worker.serial)
        key = id(worker.load), worker.pool.name
        if key not in self._tables:
            pace = (
                None
                if serving.executor == "none"
                else lending.Pace(worker.load, lending.rates(serving, worker.load), 0.0)
            )
            self._tables[key] = pace, lending.Changes(lending.beside(worker.load), serving.step)
        pace, changes = self._tables[key]
        worker.pace = pace and pace.moved(worker.offset_s)
        worker.budget = lending.Budget(serving, changes, worker.offset_s)

    def lose(self, worker: SimWorker, reason: str) -> None:
        """Remove the worker, and return its turns to the scheduler."""
        now = self._loop.now
        worker.alive = False
        del self.by_name[worker.name]
        self.gone.append(worker)
        work = worker.work(now)
        for turn in list(worker.turns.values()):
            worker.engine.remove(work, turn)
        self._hub.returned(worker, list(worker.turns.values()))
        self._hub.reschedule(worker)
        worker.end_hold(now)
        self.waited_for.pop(worker.name, None)
        self._feed(ev.WorkerLost(at=now, worker=worker.name, reason=reason))
        self._hub.synced()

    def trajectory_ended(self, group: str) -> None:
        """Count an ended trajectory, whose text helps to draft for its siblings."""
        self._ended.add(group)
        drafting = [w for w in self.by_name.values() if w.pool.engine.drafts is not None]
        for worker in drafting:
            if worker.engine.sibling_ended(worker.work(self._loop.now), group):
                self._hub.reschedule(worker)

    def group_ended(self, group: str) -> None:
        self._ended.drop(group)

    def use(self, action: ev.UseWorker) -> None:
        """Wake the worker up, which takes `switch_s`. The scheduler orders weights if needed."""
        worker, now = self.by_name[action.worker], self._loop.now
        self._note_switch(worker)
        worker.hold(now)
        worker.asked_at = now
        if worker.pool.switch_s:
            worker.engine.pause(worker.work(now), worker.pool.switch_s, recompute=False, clear=True)
        self._loop.at(now + worker.pool.switch_s, self._awake, worker)

    def _awake(self, worker: SimWorker, _ticket: int) -> None:
        """Count the worker as ready, unless it still loads weights."""
        if worker.alive and not worker.loading:
            self._note_ready(worker)

    def rest(self, action: ev.RestWorker) -> None:
        """Put the worker to sleep, and free its GPUs."""
        worker = self.by_name[action.worker]
        self._note_switch(worker)
        worker.end_hold(self._loop.now)
        worker.asked_at = -1.0

    def _note_ready(self, worker: SimWorker) -> None:
        """Record how long a worker that was requested or woken up took to be ready."""
        if worker.asked_at >= 0:
            self.granted.append(
                result.Granted(worker.name, worker.pool.name, worker.asked_at, self._loop.now)
            )
            worker.asked_at = -1.0

    def load(self, action: ev.LoadWeights) -> None:
        """Request a version for the worker. Requests of one instant share the pool's link."""
        worker = self.by_name[action.worker]
        worker.loading = True
        if worker.pool.kind in ("dedicated", "hybrid"):
            self.waited_for[worker.name] = None
        link = worker.pool.link
        has_previous = 0 <= action.version - 1 == worker.version
        size = link.version_bytes if has_previous else link.full_bytes
        if worker.pool.name not in self._sending:
            self._sending[worker.pool.name] = []
            self._loop.at(self._loop.now, self._send, worker.pool)
        self._sending[worker.pool.name].append((worker, action.version, size))

    def _send(self, pool: spec.Pool, _ticket: int) -> None:
        """Send the pool's requested versions, once its link is free."""
        loads = self._sending.pop(pool.name)
        sizes = [size for _, _, size in loads]
        begin = max(self._loop.now, self._link_free[pool.name])
        self._link_free[pool.name] = (
            begin + (max(sizes) if pool.link.relay else sum(sizes)) / pool.link.bytes_s
        )
        self._loop.at(self._link_free[pool.name] + pool.link.latency_s, self._arrived, loads)

    def _arrived(self, loads: list[tuple[SimWorker, int, float]], _ticket: int) -> None:
        """Apply the versions that the link has delivered."""
        for worker, version, _ in loads:
            if worker.alive:
                self._apply((worker, version), 0)

    def _apply(self, what: tuple[SimWorker, int], _ticket: int) -> None:
        """Pause the engine to apply a version. With in_flight=finish, let its turns end before."""
        worker, version = what
        if not worker.alive:
            return
        if self._spec.in_flight == "finish" and worker.turns:
            self._loop.at(
                worker.pace.wall(worker.engine.due) if worker.pace else worker.engine.due,
                self._apply,
                what,
            )
            return
        now, pause = self._loop.now, worker.pool.link.apply_s
        worker.engine.pause(
            worker.work(now), pause, recompute=self._spec.in_flight == "recompute", clear=True
        )
        self._hub.reschedule(worker)
        self._loop.at(now + pause, self._loaded, what)

    def _loaded(self, what: tuple[SimWorker, int], _ticket: int) -> None:
        """Report that the worker has applied a version."""
        worker, version = what
        if not worker.alive:
            return
        worker.version, worker.loading = version, False
        self.waited_for.pop(worker.name, None)
        if version == self.version:
            self._note_ready(worker)
        self._feed(ev.WorkerLoaded(at=self._loop.now, worker=worker.name, version=version))
        self._hub.synced()

    def _plan_budget_update(self, worker: SimWorker) -> None:
        at = worker.budget.next_change(self._loop.now)
        if at < math.inf:
            self._loop.at(at, self._update_budget, worker)

    def _update_budget(self, worker: SimWorker, _ticket: int) -> None:
        if worker.alive:
            worker.budget.update(self._loop.now)
            self._report_capacity(worker)
            self._plan_budget_update(worker)

    def step_begins(self) -> None:
        """Allow each budget to grow again, since a training step begins."""
        for worker in list(self.by_name.values()):
            if worker.budget is not None:
                worker.budget.thaw()
                worker.budget.update(self._loop.now)
                self._report_capacity(worker)

    def _report_capacity(self, worker: SimWorker) -> None:
        """Resize the engine's KV cache to the lent share and report it to the scheduler. Ignore
        changes below `step` of the whole, except to or from 0, or of `revoked`."""
        whole, share = worker.pool.engine.kv_tokens, worker.budget.share
        tokens, revoked = int(share * whole), worker.budget.frozen
        reported, was_revoked = worker.reported
        small = abs(tokens - reported) < worker.pool.serving.step * whole and bool(tokens) == bool(
            reported
        )
        if small and revoked == was_revoked:
            return
        worker.reported = tokens, revoked
        self._set_capacity(worker, tokens, -1.0 if revoked or share < 1 else 0.0, revoked)

    def _set_capacity(
        self, worker: SimWorker, tokens: int, expected_s: float, revoked: bool
    ) -> None:
        """Resize the engine's KV cache, report it, and return the turns that no longer fit."""
        now = self._loop.now
        gone = worker.engine.set_kv(worker.work(now), tokens)
        sequences = worker.pool.engine.max_sequences if tokens else 0
        report = ev.WorkerCapacity(
            at=now,
            worker=worker.name,
            kv_tokens=tokens,
            max_sequences=sequences,
            expected_s=expected_s,
            revoked=revoked,
        )
        self._feed(report)
        if gone:
            self._hub.returned(worker, gone)
            self._feed(report)  # A worker reports its capacity again after each TurnReturned.
        self._hub.reschedule(worker)

    def to_training(self, seconds: float) -> float:
        """Stop rollout on hybrid workers, for about `seconds`. Return the delay until their GPUs
        train."""
        return self._switch(False, seconds)

    def to_rollout(self) -> None:
        self._switch(True, 0.0)

    def gpus_rolling_out(self) -> int:
        """Return the number of the trainer's GPUs that roll out while it trains."""
        return sum(
            worker.pool.tensor_parallel
            for worker in self.by_name.values()
            if worker.pool.split and not self._hub.is_resting(worker.name)
        )

    def _note_switch(self, worker: SimWorker) -> None:
        """Delay the next training step by the switch of this worker, if it is a split hybrid."""
        if worker.pool.split:
            self._regroup_s = max(self._regroup_s, worker.pool.switch_s)

    def _switch(self, rollout: bool, seconds: float) -> float:
        """Switch the hybrid workers that alternate between rollout and training. Return the longest
        delay."""
        longest = 0.0
        if not rollout:
            longest, self._regroup_s = self._regroup_s, 0.0
        for worker in list(self.by_name.values()):
            if worker.pool.kind != "hybrid" or worker.pool.split:
                continue
            longest = max(longest, worker.pool.switch_s)
            if rollout:
                worker.engine.pause(
                    worker.work(self._loop.now), worker.pool.switch_s, recompute=False, clear=True
                )
            self._set_capacity(
                worker,
                worker.pool.engine.kv_tokens if rollout else 0,
                0.0 if rollout else seconds,
                False,
            )
        return longest

    def results(self) -> tuple[list[result.Worker], list[result.ServingUse]]:
        """End the open spans now. Return what each worker did, and the load and latencies of online
        serving in each pool that runs rollouts beside it."""
        now, found = self._loop.now, []
        observers = {
            pool.name: lending.Observer(pool.name, pool.serving, now)
            for pool in self._spec.pools
            if pool.serving is not None and pool.serving.executor != "none" and now > 0
        }
        for worker in [*self.gone, *self.by_name.values()]:
            if worker.busy_since >= 0:
                worker.spans.extend((worker.busy_since, now))
                worker.busy_since = -1.0
            worker.end_hold(now)
            if worker.load is not None and worker.pool.name in observers:
                observers[worker.pool.name].add(worker.load, worker.offset_s, worker.spans)
            engine = worker.engine
            found.append(
                result.Worker(
                    worker.name,
                    worker.pool.name,
                    worker.pool.kind,
                    worker.pool.tensor_parallel,
                    worker.held_s,
                    sum(worker.spans[1::2]) - sum(worker.spans[::2]),
                    round(engine.decoded),
                    engine.prefilled,
                    engine.preemptions,
                    worker.spans,
                )
            )
        return found, [observer.result() for observer in observers.values()]


def _shape(pool: spec.Pool, serial: int) -> ev.Shape | None:
    """Return the shape of the worker that joined this pool after `serial` others."""
    if pool.first_gpu is None:
        return None
    step, degree = pool.engine.step, pool.tensor_parallel
    first = pool.first_gpu + serial * degree
    return ev.Shape(first, degree, step.c0 + step.c5, step.c3, step.c4, step.c1)
