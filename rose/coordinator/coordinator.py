"""The coordinator: drives the step loop and owns the scheduler's state. One rank, no GPU, no torch.

    synchronous      | step 1                           | step 2
    rollouts         |[1111111111111]a                  |[2222222222222]a
    training         |                [111111111]b      |                [222222
    weight transfer  |                            [11]c |

    asynchronous     | step 1                           | step 2
    rollouts         |[1111111111111]a[222222222222222222]a[3333333333333333333
    training         |                [111111111]b        [222222222]b
    weight transfer  |                            [11]c                [22]c

    waits          for                              until
    a: _rollout    the step's batch                 StartTraining, at its last GroupFinished
    b: _train      every trainer rank               TrainDone of each
    c: _sync       every dedicated engine           VersionLoaded of each
    a new group    the scheduler's batching policy  AdmitGroup: at StepBegun; asynchronous:
                                                    whenever its staleness will be in bounds
    a new turn     an engine with the last version  AssignTurn, after its VersionLoaded
    a checkpoint   every trainer rank's file        the step loop goes on meanwhile

One task receives messages, which only change state; the step loop waits for states. So rollouts
never wait for the step loop itself: an asynchronous batching policy admits groups during training
and weight transfer, and the next step's batch may be complete before the step begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose import extensions
from rose import protocol as p
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.config import Config
from rose.coordinator import replay
from rose.coordinator.borrowed import Borrowed
from rose.coordinator.checkpoints import Checkpoints
from rose.coordinator.evaluation import Evaluations
from rose.coordinator.exports import Exports
from rose.coordinator.groups import Rollouts
from rose.coordinator.journal import Journal
from rose.coordinator.members import Members
from rose.coordinator.provisioner import Provisioner
from rose.coordinator.records import TICK_S, Progress, Records, StepTimes
from rose.coordinator.shared_devices import ANSWER_S, Devices
from rose.coordinator.step_metrics import reward_row
from rose.coordinator.stopping import Ending, Stopped
from rose.coordinator.training import Training
from rose.coordinator.turn_log import TurnLog
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes, RunFailed
from rose.files import close_all
from rose.launch import resume
from rose.launch.layout import hybrid_ranks
from rose.observe.recorder import NullRecorder
from rose.policies import build
from rose.scheduler import events as ev
from rose.trainer import checkpoint


class Coordinator:
    """Connects the modules of this folder and drives the step loop. `attempt` is the number of the
    run's current attempt, `resume_from` the folder of the checkpoint that it starts from."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        mailbox: Mailbox,
        recorder: NullRecorder,
        resume_from: Path | None,
    ) -> None:
        self.config, self.run_dir = config, Path(run_dir)
        self.mailbox, self.recorder = mailbox, recorder
        state = checkpoint.read_state(resume_from) if resume_from else {}
        self.progress = Progress(state.get("step", 0))
        self.scheduler = scheduler = build(config.scheduler, config.rollout.turn_timeout_s)
        if state:
            scheduler.restore(state["scheduler"])
        path = self.run_dir / "journal" / f"attempt-{attempt:03d}.jsonl"
        journal = Journal(path, scheduler.snapshot())
        folder, resumed = self.run_dir, bool(state)
        self.records = Records(config, folder, attempt, recorder, self.progress, journal, resumed)
        self._changed = Changes(lambda what: self.records.live.update(waiting_for=what))
        self.members = Members(config, mailbox)
        fault, change, size = self.records.fault, self.records.change, mailbox.size
        self.borrowed = Borrowed(config, folder, attempt, size, lambda: self.hub, fault, change)
        log = TurnLog(folder / "turns", self.progress.step, config.rollout.resume_turns)
        hybrids = set(hybrid_ranks(config).values())
        self.hub = TurnHub(
            scheduler, self._send, journal, recorder, self._act, fault, size, log, hybrids
        )
        if part := extensions.draft_methods().get(config.rollout.draft.method):
            self.hub.listener = part.Sender(self.hub, self._send)
        self._connect(attempt, log)
        self.evaluations.lost(state.get("evaluating", []))
        self.rollouts.groups.failed = state.get("failed_trajectories", 0)
        self.rollouts.groups.given_up = state.get("failed_tasks", 0)
        self.hub.workers.restarts = state.get("engine_restarts", 0)
        self.progress.boundary = self._state()

    def _connect(self, attempt: int, log: TurnLog) -> None:
        """Connect the modules that need the turn hub."""
        config, folder, recorder = self.config, self.run_dir, self.recorder
        ranks, send = self.members.ranks, self.members.send
        fault, change = self.records.fault, self.records.change
        self.provisioner = Provisioner(config, folder, self.hub.feed, fault, change)
        jobs = extensions.only("reward_jobs") if config.reward.max_jobs else None
        self.reward_jobs = jobs and jobs.RewardJobs(config, folder, fault, change)
        self.exports = Exports(config, folder, fault)
        self.rollouts = Rollouts(config, self.hub, send, ranks[p.Role.ENVIRONMENT], fault)
        write = self.records.metrics.write
        self.evaluations = Evaluations(config, folder, self.rollouts, write, fault)
        trainers, kept, saved = ranks[p.Role.TRAINER], self.evaluations.kept, log.checkpoint_saved
        training = self.training = Training(config, trainers, send, recorder)
        self.checkpoints = Checkpoints(config, folder, trainers, send, recorder, kept, saved, fault)
        self.device: Devices = (
            extensions.only("hybrid_devices").HybridDevices(
                config, ranks, send, recorder, self.hub, fault
            )
            if config.hybrids
            else Devices(config, ranks, send, self._changed.until, recorder)
        )
        parts = self.progress, self.members, training, self.checkpoints, self.device, self._changed
        self.ending = Ending(config, folder, attempt, *parts)

    # ----------------------------------------------------------------- the algorithm

    async def run(self) -> None:
        """Drive the whole run. Raises `RunFailed` with the cause, or `Stopped` if asked to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ending.asked.set)
        tasks = Tasks()
        receiving, stepping = tasks.spawn(self._receive()), tasks.spawn(self._steps())
        if self.config.borrows:
            tasks.spawn(self.borrowed.run())
        if self.config.scheduler.provisioning.name != "fixed":
            tasks.spawn(self.provisioner.run())
        if self.reward_jobs:
            tasks.spawn(self.reward_jobs.run())
        try:
            await tasks.run_until(self._tick(), asyncio.wait({stepping}), self.ending.wait())
        except Stopped:
            self.hub.log.stopped()
            stepping.cancel()
            await self.ending.save_stopped()
            raise
        except Exception:
            self.ending.asked.set()
            if receiving.done():  # A message may have ended the run.
                tasks.spawn(self._receive_despite_failures())
            await self.ending.save_failed(stepping)
            raise
        finally:
            self.checkpoints.cancel()
            self.device.cancel()
            await self.exports.close()
            await self.borrowed.disconnect_all("the run has ended, or goes on in another attempt")
            await tasks.close(1.0)
            # On a full disk, the error that ended the run is raised and not this one.
            with contextlib.suppress(OSError):
                self.records.finish(self.hub)
            close_all(self.records, self.hub.log)

    async def _steps(self) -> None:
        """The step loop, until the run's last step."""
        await self._bring_up()
        while not await self._evaluate():
            times = StepTimes()
            groups = await self._rollout()
            rollout_s = times.rollout_ended(self.hub)
            done = await self._train(groups, rollout_s)
            times.trained = time.time()
            await self.checkpoints.before_sleep(self.progress.step + 1)
            await self._sync(done)
            times.synced = time.time()
            self.exports.offer(self.progress.step, done[0].store)
            self._record(groups, done, times)
            await self.checkpoints.step_ended(self.progress.step, self.progress.boundary)
        await self._finish()

    async def _bring_up(self) -> None:
        """Wait until every rank is up and every engine holds the trainer's first version."""
        c, hosts = self.config, self.members.wanted[p.Role.ENVIRONMENT]
        engines = self.members.wanted[p.Role.ROLLOUT]
        self.records.live.update(phase="starting", step=self.progress.step, steps=c.trainer.steps)
        await self.members.connected(self._changed)
        await self.training.loaded(self._changed, self.progress.step)
        await self.device.to(p.Role.ROLLOUT)
        await self._changed.until(
            lambda: len(self.rollouts.up) >= hosts,
            c.cluster.start_timeout_s,
            lambda: f"environment hosts to start: {len(self.rollouts.up)} of {hosts} are up",
        )
        await self._changed.until(
            lambda: self.hub.workers.own >= engines,
            c.rollout.engine_start_timeout_s + ANSWER_S,
            lambda: f"engines to start: {self.hub.workers.own} of {engines} are up",
        )
        first = self.training.ready[0]
        self.hub.weights.publish(first.version, first.store)
        await self._workers_loaded()
        self.exports.resume(self.progress.step, first.store)

    async def _evaluate(self) -> bool:
        """Run the evaluation that is due. Return True after the run's last step, which eval.stop
        may have chosen."""
        step, last = self.progress.step, self.config.trainer.steps
        await self.ending.unless_asked()
        if step >= last:
            self.rollouts.stop()
        await self.evaluations.run(step, last, self._wait_for_evaluation)
        if step < last and (reason := self.evaluations.stop_reason()):
            self.progress.stopped_early = reason
            print(f"stopped at step {step}: {reason}", flush=True)
            self.rollouts.stop()
            await self.evaluations.run(step, step, self._wait_for_evaluation)
        return step >= last or bool(self.progress.stopped_early)

    async def _wait_for_evaluation(self, done: Callable[[], bool]) -> None:
        step = self.progress.step
        self.records.live.update(phase="evaluating", step=step, waiting_for="")
        with self.recorder.timed("evaluate", step=step):
            await self._rollouts_until(done)

    async def _rollout(self) -> list[list[p.Trajectory]]:
        """Wait for the next step's batch; return its groups in the order of the task stream."""
        step, size = self.progress.step + 1, self.config.rollout.group_size
        if self.config.rollout.replay is not None:
            return replay.load(Path(self.config.rollout.replay), step)
        wanted = self.config.trainer.batch_size // size
        self.rollouts.begin_step(wanted * size)
        self.hub.begin_step()
        self.training.begin_step(step)
        # Without these, the live display shows the last phase's numbers until the next tick.
        finished, total = self.rollouts.progress
        self.records.live.update(
            phase="rollout", step=step, waiting_for="", finished=finished, total=total
        )
        stream, fields = self.config.trainer.stream, self.device.step_fields()
        with self.recorder.timed("rollout", step=step):
            begun = ev.StepBegun(
                at=time.time(), step=step, groups=wanted, stream=stream, group_size=size, **fields
            )
            self.hub.feed(begun)
            if self.rollouts.batch is None:
                self.device.rollout_began()
            await self._rollouts_until(lambda: self.rollouts.batch is not None)
        groups = self.rollouts.take(self.rollouts.batch)
        self.hub.log.trained(step, [t.id for group in groups for t in group])
        return groups

    async def _train(
        self, groups: list[list[p.Trajectory]], rollout_s: float
    ) -> dict[int, p.TrainDone]:
        """Train a step; return the `TrainDone` of every trainer rank by its index."""
        await self.ending.unless_asked()
        step = self.progress.step + 1
        self.progress.at_boundary = False
        self.ending.step_end.training_began()
        self.training.done.clear()
        ranks = f"{self.config.trainer.ranks} trainer ranks"
        self.records.live.update(phase="train", waiting_for=ranks)
        await self.device.before_train(rollout_s)
        with self.recorder.timed("train", step=step):
            self.training.complete(step, groups)
            done = await self.training.trained(self._changed)
        self.ending.step_end.training_ended()
        return done

    async def _sync(self, done: dict[int, p.TrainDone]) -> None:
        """Publish the step's weights and wait until every dedicated engine has verified and loaded
        them, unless the run is to stop. Running turns continue as `transfer.in_flight` says; a new
        turn waits for an engine that has the weights."""
        self.records.live.update(phase="sync")
        with self.recorder.timed("sync", version=done[0].version):
            self.hub.weights.publish(done[0].version, done[0].store)
            # A run that stops only has to save the step; its engines stay asleep.
            if not self.ending.asked.is_set():
                await self.device.published()
            await self._workers_loaded()
        self.progress.step += 1
        self.progress.boundary, self.progress.at_boundary = self._state(), True
        self._changed.set()

    def _record(
        self, groups: list[list[p.Trajectory]], done: dict[int, p.TrainDone], times: StepTimes
    ) -> None:
        """Write the rows and files of the step that has ended."""
        phases = times.phases()
        more = self.training.take_figures(phases["train"]) | self.device.row(phases, times.synced)
        if self.config.reward.pools and self.config.rollout.replay is None:
            more |= reward_row(groups, phases, self.rollouts.take_scoring_failures())
            more |= self.reward_jobs.row() if self.reward_jobs else {}
        self.records.step(groups, done[0].metrics, times, self.hub, self.rollouts, more)

    async def _finish(self) -> None:
        """Wait for the last checkpoint and export."""
        self.records.live.update(phase="saving", waiting_for="the last checkpoint")
        await self.ending.save_last(self.config.trainer.step_timeout_s)
        self.records.live.update(waiting_for="the last export")
        if self.progress.stopped_early:
            self.exports.stopped(self.progress.step, self.hub.weights.store)
        await self.exports.finish()
        self.records.live.update(phase="done", waiting_for="")

    def _state(self) -> dict[str, Any]:
        """Return the coordinator's state for a checkpoint. It shares no object with the rollouts,
        which continue while the checkpoint is written."""
        return {
            "step": self.progress.step,
            "scheduler": copy.deepcopy(self.scheduler.snapshot()),
            "failed_trajectories": self.rollouts.groups.failed,
            "failed_tasks": self.rollouts.groups.given_up,
            "engine_restarts": self.hub.workers.restarts,
            "evaluating": self.evaluations.running,
        }

    # ----------------------------------------------------------------- waiting

    async def _workers_loaded(self) -> None:
        """Wait until the run's engines have loaded the newest version, or the run is to stop."""
        c, weights = self.config, self.hub.weights
        if c.rollout.replay is None:
            await self._changed.until(
                lambda: self.ending.asked.is_set() or weights.are_loaded,
                c.transfer.load_timeout_s + c.rollout.engine_start_timeout_s,
                lambda: (
                    f"version {weights.version} in "
                    f"{', '.join(weights.stale_workers()) or 'any engine'}"
                ),
            )

    async def _rollouts_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, as long as any trajectory makes progress. Raises `RunFailed` after
        a silence that exceeds every timeout of a single engine, turn, step or score."""
        c = self.config
        score_s = c.reward.deadline_s if c.reward.pools else 0.0
        engine_s = max(c.rollout.engine_start_timeout_s, c.rollout.turn_timeout_s)
        patience = max(engine_s, c.step_timeout_s, score_s) + 30.0
        await self._changed.while_progressing(
            ready,
            lambda: self.hub.progress_at,
            patience,
            lambda: (
                f"{self.rollouts.groups.running} trajectories run; {len(self.hub.ledger)} turns "
                f"are open, {self.scheduler.waiting} of them unassigned"
                f"{self.rollouts.in_environments()}"
            ),
            lambda text: self.records.fault("no progress", text),
        )

    # ----------------------------------------------------------------- messages and actions

    async def _receive(self) -> None:
        """Receive messages, and pass each to the module that handles it."""
        while True:
            source, message = await self.mailbox.receive()
            if isinstance(message, p.HostReady) and message.machine:
                what = f"environment host, rank {message.rank}"
                self.records.row("host", what, message.machine)
            if isinstance(message, p.WorkerReady) and message.description:
                self.records.row("engine", message.worker, "\n".join(message.description))
            if not (
                self.rollouts.handle(message)
                or self.hub.handle(source, message)
                or self.training.handle(message)
                or self.device.handle(message)
                or (self.reward_jobs and self.reward_jobs.handle(message))
                or self.members.handle(source, message)
            ):
                what = f"a {type(message).__name__}, which is not for a coordinator"
                raise RunFailed(f"rank {source} sent {what}")
            own = source < self.mailbox.size
            if own and isinstance(message, p.WorkerLoad | p.TrainerReady | p.TrainDone):
                self.records.cost.energy(message.energy_j)
            if isinstance(message, p.WorkerReady | p.WorkerDown):
                self.device.engine_changed()
            self._changed.set()

    async def _receive_despite_failures(self) -> None:
        """Receive messages while a run that has failed is saved, and ignore further failures."""
        while True:
            with contextlib.suppress(RunFailed, OSError):
                await self._receive()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.hub.feed(ev.Tick(at=time.time()))
            self.hub.log.flush()
            if self.reward_jobs:
                self.reward_jobs.tick()
            self.evaluations.collect()
            self.records.tick(self.hub, self.rollouts)

    def _send(self, address: int, message: p.Message) -> None:
        own = address < self.mailbox.size
        (self.mailbox if own else self.borrowed).send(address, message)

    def _act(self, action: ev.Action) -> None:
        """Carry out an action of the scheduler that is not about turns or weights."""
        match action:
            case ev.AdmitGroup(index, name, spare):
                self.rollouts.admit(index, name, spare)
            case ev.DropGroup(name):
                self.rollouts.drop(name)
            case ev.TrainGroup(_, name):
                self.training.add(name, self.rollouts.finished[name])
            case ev.StartTraining(_, groups):
                self.rollouts.batch = groups
            case ev.RequestCapacity() | ev.ReleaseCapacity():
                self.provisioner.do(action)
            case ev.UseWorker() | ev.RestWorker():
                self.device.act(action)
            case ev.MoveTrajectory(trajectory, host):
                self.rollouts.move(trajectory, host)
            case ev.GiveUp(reason):
                raise RunFailed(reason)


async def drive(coordinator: Coordinator) -> None:
    """Run until the run is complete, stopped or has failed, and dismiss the other ranks. Raises the
    cause of a failure."""
    try:
        await coordinator.run()
    except Stopped as stopped:
        await coordinator.members.dismiss(str(stopped))
        return
    except Exception as error:
        await coordinator.members.dismiss(f"{type(error).__name__}: {error}")
        raise
    stopped = coordinator.config if coordinator.progress.stopped_early else None
    resume.mark_finished(coordinator.run_dir, coordinator.progress.step, stopped)
    await coordinator.members.dismiss("the run is complete")
