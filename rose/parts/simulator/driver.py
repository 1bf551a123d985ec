"""The driver of the scheduler in simulated time: it feeds events and carries out actions.
`simulate` is the entry point.

This module handles groups, trajectories and turns, as rose.coordinator.turns does in a live run. It
reports tokens at intervals, not one by one.
"""

from __future__ import annotations

import gc
import math
from array import array

import numpy as np

from rose.parts.simulator import result, spec
from rose.parts.simulator.episodes import Group, Groups, Trajectory
from rose.parts.simulator.loop import Loop
from rose.parts.simulator.sandboxes import Sandboxes
from rose.parts.simulator.supply import Supply
from rose.parts.simulator.training import Training
from rose.parts.simulator.worker import SimWorker
from rose.parts.simulator.workers import Workers
from rose.scheduler import Scheduler
from rose.scheduler import events as ev
from rose.scheduler.actions import ActionQueue, Journal

# A run fails when all turns have waited for this long: no worker will come.
STALLED_S = 24 * 3600.0  # ours: longer than any step or queue of a real run


def simulate(
    what: spec.Spec, scheduler: Scheduler, seed: int, journal: Journal | None = None
) -> result.Result:
    """Simulate a whole run of `what.steps` training steps with a fresh scheduler. The result is the
    same for the same seed. Raises `RuntimeError` with the simulated time when the run can't go on:
    no worker can ever take a turn, or the scheduler gives up."""
    collecting = gc.isenabled()
    # The run leaves few reference cycles, and searching for them would cost a third of the time.
    gc.disable()
    try:
        return Simulation(what, scheduler, seed, journal).run()
    finally:
        if collecting:
            gc.enable()


class Simulation:
    """The state of a run. Workers, sandboxes and training share its loop and its scheduler."""

    def __init__(
        self, what: spec.Spec, scheduler: Scheduler, seed: int, journal: Journal | None
    ) -> None:
        self._spec, self._scheduler, self._seed = what, scheduler, seed
        self._queue = ActionQueue(scheduler, self._carry_out, journal)
        self._loop = Loop()
        self._groups = Groups(what, seed)
        stream = 1 << 32  # numerics: no group has this index
        draw = np.random.Generator(np.random.PCG64([seed, stream]))
        self._workers = Workers(what, self._loop, self)
        self._turns: dict[str, Trajectory] = {}  # open turn -> its trajectory
        self._counts = result.Counts()
        self._supply = Supply(what, self._loop, draw, self._workers, self.feed, self._counts)
        self._boxes = what.sandboxes and Sandboxes(
            what.sandboxes, self._loop, seed, self, self._counts
        )
        self._training = Training(what, self._loop, self._groups, self._workers, self.feed)
        self._turn_s, self._trajectory_s = array("f"), array("f")
        self._ran_at = 0.0  # time of the last tick at which a turn ran, or none was open
        self._do = {
            ev.AssignTurn: self._assign,
            ev.AbortTurn: self._abort,
            ev.LoadWeights: self._workers.load,
            ev.AdmitGroup: self._admit,
            ev.DropGroup: self._drop,
            ev.TrainGroup: self._training.train_group,
            ev.StartTraining: self._training.start,
            ev.RequestCapacity: self._supply.request,
            ev.ReleaseCapacity: self._supply.release,
            ev.UseWorker: self._workers.use,
            ev.RestWorker: self._workers.rest,
            ev.MoveTrajectory: self._move,
            ev.GiveUp: self._give_up,
        }

    def run(self) -> result.Result:
        """Simulate the run to its last step."""
        self._training.publish(0)
        self._supply.start()
        if self._boxes is not None:
            self._boxes.start()
        self._loop.at(0.0, self._training.begin_step, 1)
        if self._spec.tick_s < math.inf:
            self._loop.at(self._spec.tick_s, self._tick, None)
        try:
            self._loop.run(self._spec.horizon_s)
        except RuntimeError as error:
            raise RuntimeError(
                f"step {len(self._training.steps) + 1} of {self._spec.steps}: {error}; "
                f"{len(self._turns)} turns are open, {self._scheduler.waiting} of them wait for "
                f"{len(self._workers.by_name)} workers"
            ) from None
        workers, serving = self._workers.results()
        return result.Result(
            self._spec.name,
            self._seed,
            self._loop.now,
            self._training.steps,
            workers,
            serving,
            self._workers.granted,
            self._counts,
            self._loop.events,
            np.frombuffer(self._turn_s, np.float32),
            np.frombuffer(self._trajectory_s, np.float32),
            self._boxes is not None,
        )

    def feed(self, event: ev.Event) -> None:
        self._counts.decisions += 1
        self._queue.feed(event)

    def _carry_out(self, action: ev.Action) -> None:
        self._do[type(action)](action)

    def is_resting(self, worker: str) -> bool:
        return self._scheduler.cluster.workers[worker].resting

    def synced(self) -> None:
        """End the step if all dedicated and hybrid workers hold the new version."""
        self._training.end_step_if_synced()

    def _tick(self, _what: None, _ticket: int) -> None:
        """Feed a tick. Raises `RuntimeError` if all turns have waited for too long."""
        now = self._loop.now
        if not self._turns or self._scheduler.waiting < len(self._turns):
            self._ran_at = now
        elif now - self._ran_at > STALLED_S:
            raise RuntimeError(
                f"at {now:.1f} s of simulated time all turns have waited for {STALLED_S:g} s; the "
                "provisioning policy decides which of the pools "
                f"({', '.join(pool.name for pool in self._spec.pools)}) is used, and when"
            )
        self.feed(ev.Tick(at=now))
        self._loop.at(now + self._spec.tick_s, self._tick, None)

    def _give_up(self, action: ev.GiveUp) -> None:
        raise RuntimeError(action.reason)

    def _admit(self, action: ev.AdmitGroup) -> None:
        now = self._loop.now
        for trajectory in self._groups.admit(
            action.group, action.index, self._training.version, now, action.spare
        ):
            self._start(trajectory)

    def _start(self, trajectory: Trajectory) -> None:
        """Open the trajectory's sandbox, or request its first turn after `reset_s`."""
        if self._boxes is not None:
            self._boxes.open(trajectory)
            return
        self._loop.at(self._loop.now + trajectory.episode.reset_s, self._request, trajectory)

    def _drop(self, action: ev.DropGroup) -> None:
        """Cancel the group's running trajectories and count all its tokens as dropped."""
        self._counts.dropped_groups += 1
        group = self._groups.open.pop(action.group, None) or self._groups.finished.pop(action.group)
        self._workers.group_ended(group.name)
        self._counts.dropped_tokens += group.tokens
        self._cancel(group)

    def _cancel(self, group: Group) -> None:
        """Cancel the trajectories of the group that still run."""
        late, group.running = group.running, {}
        for trajectory in late.values():
            trajectory.dead = True
            self._leave_engine(trajectory)
            self._counts.dropped_tokens += (
                trajectory.generated + trajectory.turn_tokens + trajectory.attempt_tokens
            )
            self._close(trajectory)

    def _close(self, trajectory: Trajectory) -> None:
        """Report the end of a trajectory that ended or was cancelled."""
        now = self._loop.now
        if self._boxes is not None:
            self._boxes.close(trajectory)
        self._close_turn(trajectory)
        self.feed(
            ev.TrajectoryEnded(
                at=now,
                trajectory=trajectory.key,
                tokens=0 if trajectory.dead else trajectory.generated,
                failed=trajectory.dead,
            )
        )

    def _close_turn(self, trajectory: Trajectory) -> None:
        """Report the end of the trajectory's turn, if one is open."""
        if self._turns.pop(trajectory.turn, None) is not None:
            self.feed(ev.TurnEnded(at=self._loop.now, turn=trajectory.turn))

    def ready(self, trajectory: Trajectory) -> None:
        """Request the trajectory's turn, since its sandbox has started."""
        self._request(trajectory, 0)

    def observed(self, trajectory: Trajectory, more: bool) -> None:
        """Request the next turn if `more`, otherwise finish: the last turn's command has ended."""
        (self._request if more else self._finish)(trajectory, 0)

    def rewind(self, trajectory: Trajectory, turns: int, keep_open: bool) -> None:
        """Set back a trajectory that has lost its host (see `Trajectory.rewind`)."""
        self._leave_engine(trajectory)
        self._close_turn(trajectory)
        self._counts.remade_tokens += trajectory.rewind(turns, keep_open)

    def _move(self, action: ev.MoveTrajectory) -> None:
        if self._boxes is not None:
            self._boxes.move(action.trajectory, action.host)

    def _request(self, trajectory: Trajectory, _ticket: int) -> None:
        """Request a worker for the trajectory's turn from the scheduler."""
        if trajectory.dead:
            return
        trajectory.asked_at = now = self._loop.now
        self._turns[trajectory.turn] = trajectory
        episode, number = trajectory.episode, trajectory.number
        outcome = "" if not number else "failed" if episode.failed[number - 1] else "ok"
        self.feed(
            ev.TurnRequested(
                at=now,
                turn=trajectory.turn,
                trajectory=trajectory.key,
                group=trajectory.group,
                context_tokens=trajectory.base,
                domain=episode.domain,
                outcome=outcome,
                max_new_tokens=self._spec.environment.max_new_tokens,
                made_tokens=trajectory.turn_tokens,
            )
        )

    def _turn_ended(self, trajectory: Trajectory) -> None:
        """Report the end of a turn, and run its tool call."""
        now, generated, number = self._loop.now, trajectory.turn_tokens, trajectory.number
        turn = trajectory.turn
        del self._turns[turn]
        self._counts.turns += 1
        self._turn_s.append(now - trajectory.asked_at)
        more, seconds = trajectory.next_turn(), trajectory.episode.tool_s[number]
        if self._boxes is not None:
            self._boxes.command(trajectory, seconds, more)
        else:
            self._loop.at(now + seconds, self._request if more else self._finish, trajectory)
        self.feed(ev.TurnEnded(at=now, turn=turn, tokens=generated))

    def _finish(self, trajectory: Trajectory, _ticket: int) -> None:
        """End a trajectory, and its group if it is complete. Replace a crashed trajectory."""
        if trajectory.dead:
            return
        now = self._loop.now
        self._trajectory_s.append(now - trajectory.began)
        if trajectory.episode.crashed:
            self._counts.crashed += 1
            self._counts.crashed_tokens += trajectory.generated
            trajectory.dead = True
            self._close(trajectory)
            self._start(self._groups.crashed(trajectory, now))
            return
        group = self._groups.ended(trajectory)
        self._workers.trajectory_ended(trajectory.group)
        self._close(trajectory)
        if group is not None:
            self._workers.group_ended(group.name)
            self._cancel(group)
            self.feed(
                ev.GroupFinished(at=now, group=group.name, accepted=self._groups.accepted(group))
            )

    def _assign(self, action: ev.AssignTurn) -> None:
        """Begin an attempt at a turn, and send it to its worker."""
        trajectory = self._turns.get(action.turn)
        if trajectory is None:
            return  # An action before this one cancelled the turn.
        if action.attempt > 1 and trajectory.worker.name != action.worker:
            self._counts.migrations += 1
        trajectory.attempt, trajectory.worker = action.attempt, self._workers.by_name[action.worker]
        # The scheduler did not get the end of the last attempt: only its reported tokens count.
        if trajectory.attempt_tokens:
            trajectory.turn_tokens += trajectory.reported
            trajectory.attempt_tokens = trajectory.reported = 0
        trajectory.left = (
            trajectory.episode.output_tokens[trajectory.number] - trajectory.turn_tokens
        )
        if action.max_tokens:
            trajectory.left = min(trajectory.left, action.max_tokens)
        what = trajectory, action.turn, action.attempt
        if self._spec.dispatch_s:
            self._loop.at(self._loop.now + self._spec.dispatch_s, self._arrive, what)
        else:
            self._arrive(what, 0)

    def _arrive(self, what: tuple[Trajectory, str, int], _ticket: int) -> None:
        """Add the attempt to its worker's engine. Return it if the engine has no memory."""
        trajectory, turn, attempt = what
        if trajectory.turn != turn or trajectory.attempt != attempt or trajectory.dead:
            return  # The scheduler revoked the attempt before it arrived.
        if not trajectory.worker.alive:
            return
        worker, now = trajectory.worker, self._loop.now
        trajectory.context, trajectory.attempt_tokens = trajectory.base + trajectory.turn_tokens, 0
        trajectory.reported = 0
        worker.turns[turn] = trajectory
        if not worker.engine.memory.capacity:
            self.returned(worker, [trajectory])
            return
        worker.engine.add(worker.work(now), trajectory)
        self.reschedule(worker)

    def _abort(self, action: ev.AbortTurn) -> None:
        trajectory = self._turns.get(action.turn)
        if trajectory is not None and trajectory.attempt == action.attempt:
            self._counts.aborted += 1
            self._leave_engine(trajectory)

    def _leave_engine(self, trajectory: Trajectory) -> None:
        """Remove the open turn from its engine. Another engine can continue from its tokens."""
        worker = trajectory.worker
        if worker is not None and worker.turns.pop(trajectory.turn, None) is not None:
            worker.engine.remove(worker.work(self._loop.now), trajectory)
            self.reschedule(worker)
            self._take_tokens(trajectory)
        trajectory.attempt = 0

    def _take_tokens(self, trajectory: Trajectory) -> None:
        """Add the tokens of the current attempt to those of its turn."""
        trajectory.turn_tokens += trajectory.attempt_tokens
        trajectory.attempt_tokens = trajectory.reported = 0

    def reschedule(self, worker: SimWorker) -> None:
        """Schedule the next event of the worker's engine, after the engine was changed."""
        engine, now = worker.engine, self._loop.now
        worker.watch(now)
        if engine.due < math.inf:
            due = engine.due if worker.pace is None else worker.pace.wall(engine.due)
            worker.ticket = self._loop.at(due, self._engine_due, worker)
            if not worker.reporting and self._spec.progress_s < math.inf:
                worker.reporting = True
                self._loop.at(now + self._spec.progress_s, self._report_progress, worker)
        else:
            worker.ticket = 0

    def _engine_due(self, worker: SimWorker, ticket: int) -> None:
        """Advance the worker's engine, and send the ends of attempts to the coordinator."""
        if ticket != worker.ticket:
            return
        ended = worker.engine.step()
        self.reschedule(worker)
        for trajectory in ended:
            del worker.turns[trajectory.turn]
        for trajectory in ended:
            what = trajectory, trajectory.turn, trajectory.attempt
            if self._spec.answer_s:
                self._loop.at(self._loop.now + self._spec.answer_s, self._attempt_ended, what)
            else:
                self._attempt_ended(what, 0)

    def _attempt_ended(self, what: tuple[Trajectory, str, int], _ticket: int) -> None:
        """Receive the end of an attempt at the coordinator. As in rose.coordinator.turns, the end
        is ignored if the attempt was revoked, or the worker lost, before it arrived."""
        trajectory, turn, attempt = what
        if (
            trajectory.dead
            or trajectory.turn != turn
            or trajectory.attempt != attempt
            or not trajectory.worker.alive
        ):
            return
        generated, reported = trajectory.attempt_tokens, trajectory.reported
        self._take_tokens(trajectory)
        if trajectory.turn_tokens >= trajectory.episode.output_tokens[trajectory.number]:
            self._turn_ended(trajectory)
            return
        self._counts.chunks += 1
        self._feed_progress(trajectory, generated - reported)
        self.feed(
            ev.TurnReturned(
                at=self._loop.now, turn=trajectory.turn, attempt=trajectory.attempt, chunk=True
            )
        )

    def _feed_progress(self, trajectory: Trajectory, tokens: int) -> None:
        if tokens:
            self.feed(
                ev.TurnProgressed(
                    at=self._loop.now,
                    turn=trajectory.turn,
                    attempt=trajectory.attempt,
                    tokens=tokens,
                )
            )

    def _report_progress(self, worker: SimWorker, _ticket: int) -> None:
        """Report new tokens of each turn, now and at intervals until the worker is idle."""
        if not worker.alive or worker.ticket == 0:
            worker.reporting = False
            return
        work = worker.work(self._loop.now)
        for trajectory in list(worker.turns.values()):
            generated = worker.engine.tokens_by(work, trajectory)
            self._feed_progress(trajectory, generated - trajectory.reported)
            trajectory.reported = generated
        self._loop.at(self._loop.now + self._spec.progress_s, self._report_progress, worker)

    def returned(self, worker: SimWorker, trajectories: list[Trajectory]) -> None:
        """Return the turns of a worker that was lost, or that lost memory, to the scheduler."""
        for trajectory in trajectories:
            worker.turns.pop(trajectory.turn, None)
            generated = trajectory.attempt_tokens - trajectory.reported
            self._take_tokens(trajectory)
            if not worker.alive:
                trajectory.attempt = 0  # The WorkerLost event returns all turns of the worker.
                continue
            self._counts.returned += 1
            self._feed_progress(trajectory, generated)
            self.feed(
                ev.TurnReturned(at=self._loop.now, turn=trajectory.turn, attempt=trajectory.attempt)
            )
