"""The coordinator: drives the step loop and owns the scheduler's state. One rank, no GPU, no torch.

`run` reads like the algorithm: evaluate, then rollout, train, sync, record, checkpoint. One task
receives messages, which only change state; the step loop waits for states. Rollouts don't wait for
the step loop: an asynchronous batching policy admits groups during training and sync, so the next
step's batch may be complete before the step begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rose import protocol as p
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.config import Config, Mixture
from rose.coordinator import replay
from rose.coordinator.borrowed import Borrowed
from rose.coordinator.checkpoints import Checkpoints
from rose.coordinator.evaluation import Evaluations
from rose.coordinator.exports import Exports
from rose.coordinator.groups import Rollouts
from rose.coordinator.hybrid_devices import HybridDevices
from rose.coordinator.journal import Journal
from rose.coordinator.provisioner import Provisioner
from rose.coordinator.replicas import Replicas, remove_left
from rose.coordinator.retention import Retention
from rose.coordinator.reward_jobs import RewardJobs
from rose.coordinator.shared_devices import ANSWER_S, SharedDevices
from rose.coordinator.step_metrics import by_member, checkpoint_row, reward_row, step_row
from rose.coordinator.stopping import StepEnd
from rose.coordinator.training import Training
from rose.coordinator.turn_log import TurnLog
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes, RunFailed
from rose.files import close_all, printable
from rose.launch import resume
from rose.launch.layout import hybrid_ranks, layout
from rose.observe import cost, trackers
from rose.observe.metrics import MetricsWriter
from rose.observe.recorder import NullRecorder
from rose.observe.status import LiveStatus, WorkerStatus
from rose.policies import build
from rose.scheduler import events as ev
from rose.trainer import checkpoint

# Seconds between two ticks of the scheduler's clock and the live display; well under any deadline.
TICK_S = 0.5


class Stopped(Exception):
    """Raised when the user or the system asked the run to end."""


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
        self.config = config
        self.run_dir = Path(run_dir)
        self.mailbox = mailbox
        self.recorder = recorder
        state = checkpoint.read_state(resume_from) if resume_from else {}
        self.step: int = state.get("step", 0)  # last finished step
        scheduler = build(config.scheduler, config.rollout.turn_timeout_s)
        if state:
            scheduler.restore(state["scheduler"])
        self.scheduler = scheduler
        watching = trackers.start(config, self.run_dir)
        self.metrics = MetricsWriter(run_dir, config.observe.tensorboard, watching)
        self.metrics.truncate(after_step=self.step if resume_from else -1)
        self.retention = Retention(run_dir, config.observe.keep_steps, attempt)
        self.members = list(config.env.members) if isinstance(config.env, Mixture) else []
        self.live = LiveStatus(run_dir)
        self.journal = Journal(
            self.run_dir / "journal" / f"attempt-{attempt:03d}.jsonl", scheduler.snapshot()
        )
        self.borrowed = Borrowed(
            config, self.run_dir, attempt, mailbox.size, lambda: self.hub, self._fault, self._change
        )
        log = TurnLog(self.run_dir / "turns", self.step, config.rollout.resume_turns)
        self.hub = TurnHub(
            scheduler,
            self._send,
            self.journal,
            recorder,
            self._act,
            self._fault,
            mailbox.size,
            log,
            siblings=config.rollout.draft.method == "group",
            hybrids=set(hybrid_ranks(config).values()),
        )
        self.provisioner = Provisioner(
            config, self.run_dir, self.hub.feed, self._fault, self._change
        )
        self.reward_jobs = RewardJobs(config, self.run_dir, self._fault, self._change)
        self.exports = Exports(config, self.run_dir, self._fault)
        # role -> index -> rank
        self.ranks: dict[p.Role, dict[int, int]] = {role: {} for role in p.Role}
        self.rollouts = Rollouts(
            config, self.hub, mailbox.send, self.ranks[p.Role.ENVIRONMENT], self._fault
        )
        self.evaluations = Evaluations(
            config, self.run_dir, self.rollouts, self.metrics.write, self._fault
        )
        self.evaluations.lost(state.get("evaluating", []))
        self._attempt = attempt
        self.cost = cost.Meter(config, self.run_dir, attempt, time.monotonic())
        self.stopped_early = ""  # why eval.stop ends the run before its last step
        self.batch: list[str] | None = None  # the groups that the scheduler chose for this step
        self.trainers: dict[int, p.TrainerReady] = {}  # trainer rank's index -> its message
        self.training = Training(config, self.ranks[p.Role.TRAINER], mailbox.send, recorder)
        self.trained: dict[int, p.TrainDone] = {}  # trainer rank's index -> this step's result
        self.checkpoints = Checkpoints(
            config,
            self.run_dir,
            self.ranks[p.Role.TRAINER],
            mailbox.send,
            recorder,
            self.evaluations.kept,
            log.checkpoint_saved,
        )
        self.gone: set[int] = set()  # ranks that have left or failed
        self.rollouts.groups.failed = state.get("failed_trajectories", 0)
        self.rollouts.groups.given_up = state.get("failed_tasks", 0)
        self.hub.engine_restarts = state.get("engine_restarts", 0)
        self.boundary = self._state()  # at the last step boundary: what a checkpoint holds
        self.at_boundary = True  # the trainer's weights are those of `step`
        self._tokens: dict[str, int] = {}  # worker -> its total tokens at the last tick
        self._changed = Changes(lambda what: self.live.update(waiting_for=what))
        self.hybrids = (
            HybridDevices(
                config, self.ranks, mailbox.send, recorder, self.hub.hybrids_up, self._fault
            )
            if config.hybrids
            else None
        )
        remove_left(self.run_dir)
        self.replicas = (
            Replicas(
                config,
                self.run_dir,
                self.ranks[p.Role.ROLLOUT],
                self.training,
                self.hub,
                mailbox.send,
                self._changed,
                recorder,
                self._fault,
                partial(self._change, kind="replica"),
                not scheduler.waits_for_weights,
            )
            if config.elastic_replicas
            else None
        )
        self.device = (
            self.hybrids
            or self.replicas
            or SharedDevices(config, self.ranks, mailbox.send, self._changed.until, recorder)
        )
        self._stop = asyncio.Event()
        self._stop_asked_at = 0.0  # monotonic seconds
        self.step_end = StepEnd(self._changed)

    # ----------------------------------------------------------------- the algorithm

    async def run(self) -> None:
        """Drive the whole run. Raises `RunFailed` with the cause, or `Stopped` if asked to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        tasks = Tasks()
        self._receiving = tasks.spawn(self._receive())
        self._stepping = tasks.spawn(self._steps())
        if self.config.borrows:
            tasks.spawn(self.borrowed.run())
        if self.config.scheduler.provisioning.name != "fixed":
            tasks.spawn(self.provisioner.run())
        if self.config.reward.max_jobs:
            tasks.spawn(self.reward_jobs.run())
        try:
            await tasks.run_until(self._tick(), self._ended(), self._stopped())
        except Stopped:
            self.hub.log.stopped()
            self.training.stop()
            self._stepping.cancel()
            if self.hybrids:
                self.hybrids.close()
            waited_s = time.monotonic() - self._stop_asked_at
            deadline_s = resume.save_s(self.run_dir, self.config.cluster, waited_s)
            try:
                async with asyncio.timeout(deadline_s):
                    await self._save_if_idle(deadline_s)
            except TimeoutError:
                raise RunFailed(
                    f"step {self.step} was not saved within {deadline_s:.3g} s of the time to stop "
                    "(cluster.stop_timeout_s)"
                ) from None
            raise
        except Exception:
            await self._save_before_failing(tasks)
            raise
        finally:
            self.checkpoints.cancel()
            if self.hybrids:
                self.hybrids.cancel()
            await self.exports.close()
            await self.borrowed.disconnect_all("the run has ended, or goes on in another attempt")
            await tasks.close(1.0)
            # On a full disk, the error that ended the run is raised and not this one.
            with contextlib.suppress(OSError):
                self.hub.record_open_turns()
                self._count_cost()
                self.cost.write()
            close_all(self.journal, self.live, self.metrics, self.hub.log)

    async def _steps(self) -> None:
        await self._bring_up()
        self.exports.resume(self.step, self.trainers[0].store)
        while True:
            await self._unless_stopping()
            last = self.config.trainer.steps
            if self.step >= last:
                self.rollouts.stop()
            await self._evaluate(last)
            if self.step >= last:
                break
            if self._stops_early():
                await self._evaluate(last=self.step)
                break
            began = time.time()
            groups = await self._rollout()
            rolled_out, busy_s = time.time(), self.hub.busy_s(time.time())
            done = await self._train(groups)
            trained = time.time()
            if self.hybrids:
                self.hybrids.starts.rolled_out(rolled_out - began)
            if self.config.trainer_sleeps and self.checkpoints.due(self.step + 1):
                await self.checkpoints.order(self.step + 1)
            await self._sync(done)
            self.exports.offer(self.step, done[0].store)
            self._record(groups, done, began, rolled_out, busy_s, trained, time.time())
            if self.checkpoints.due(self.step):
                deadline_s = self.config.trainer.step_timeout_s
                await self.checkpoints.finish(self.step, self.boundary, deadline_s)
            else:
                await self.checkpoints.collect()
        self.live.update(phase="saving", waiting_for="the last checkpoint")
        await self._save_if_idle(self.config.trainer.step_timeout_s)
        self.live.update(waiting_for="the last export")
        await self.exports.finish()
        self.live.update(phase="done", waiting_for="")

    async def _bring_up(self) -> None:
        """Wait until every rank is up and every engine holds the trainer's first version."""
        c = self.config
        planned = [rank.role for rank in layout(c)]
        wanted = {role: planned.count(role) for role in p.Role if role is not p.Role.COORDINATOR}
        self.live.update(phase="starting", step=self.step, steps=c.trainer.steps)
        until = self._changed.until
        await until(
            lambda: all(len(self.ranks[role]) >= n for role, n in wanted.items()),
            c.cluster.start_timeout_s,
            lambda: (
                "ranks to connect: "
                + ", ".join(
                    f"{role.value} {len(self.ranks[role])} of {n}" for role, n in wanted.items()
                )
            ),
        )
        await until(
            lambda: len(self.trainers) == c.trainer.ranks,
            c.cluster.start_timeout_s,
            lambda: f"trainer ranks to load the model: {len(self.trainers)} of {c.trainer.ranks}",
        )
        await self.device.to(p.Role.ROLLOUT)
        hosts, engines = wanted[p.Role.ENVIRONMENT], wanted[p.Role.ROLLOUT]
        await until(
            lambda: len(self.rollouts.up) >= hosts,
            c.cluster.start_timeout_s,
            lambda: f"environment hosts to start: {len(self.rollouts.up)} of {hosts} are up",
        )
        await until(
            lambda: self.hub.own >= engines,
            c.rollout.engine_start_timeout_s + ANSWER_S,
            lambda: f"engines to start: {self.hub.own} of {engines} are up",
        )
        first = self.trainers[0]
        if first.step != self.step:
            raise RunFailed(
                f"the trainer resumed at step {first.step}, the coordinator at {self.step}; "
                "the checkpoint folder changed while the job started"
            )
        self.training.costs = (
            first.costs if c.trainer.share_prefixes and not first.no_trees else None
        )
        if c.trainer.share_prefixes and first.no_trees:
            print(
                f"trainer.share_prefixes has no effect on this model: {first.no_trees}", flush=True
            )
        self.hub.publish(first.version, first.store)
        await self._workers_loaded()

    async def _rollout(self) -> list[list[p.Trajectory]]:
        """Wait for the next step's batch; return its groups in the order of the task stream."""
        if self.config.rollout.replay is not None:
            return replay.load(Path(self.config.rollout.replay), self.step + 1)
        wanted = self.config.trainer.batch_size // self.config.rollout.group_size
        self.batch = None
        self.rollouts.begin_step(wanted * self.config.rollout.group_size)
        self.hub.begin_step()
        self.training.begin_step(self.step + 1)
        # Without these, the live display shows the last phase's numbers until the next tick.
        finished, total = self.rollouts.progress
        self.live.update(
            phase="rollout", step=self.step + 1, waiting_for="", finished=finished, total=total
        )
        with self.recorder.timed("rollout", step=self.step + 1):
            stream, size = self.config.trainer.stream, self.config.rollout.group_size
            planned = self.replicas is not None and self.replicas.is_planned
            self.hub.feed(
                ev.StepBegun(
                    at=time.time(),
                    step=self.step + 1,
                    groups=wanted,
                    stream=stream,
                    group_size=size,
                    hybrid_delay=self.hybrids.delay if self.hybrids else 0.0,
                    trainers=self.config.trainer.replicas if planned else 0,
                )
            )
            if self.hybrids and self.batch is None and self._rolls_hybrids():
                self.hybrids.begin(p.Role.ROLLOUT)
            await self._rollouts_until(lambda: self.batch is not None)
        groups = self.rollouts.take(self.batch)
        self.hub.log.trained(self.step + 1, [t.id for group in groups for t in group])
        return groups

    def _rolls_hybrids(self) -> bool:
        """True if the scheduler uses hybrid engines, or would use engines that are down and that
        have enough time to start."""
        starts = self.hybrids.starts.any_worth and self.scheduler.rolls_hybrids()
        return self.hub.uses_hybrids or starts

    async def _train(self, groups: list[list[p.Trajectory]]) -> dict[int, p.TrainDone]:
        """Train a step; return the `TrainDone` of every trainer rank by its index."""
        await self._unless_stopping()
        c = self.config.trainer
        self.at_boundary = False
        self.step_end.training_began()
        self.trained.clear()
        self.live.update(phase="train", waiting_for=f"{c.ranks} trainer ranks")
        if self.replicas is None:
            await self.device.to(p.Role.TRAINER)
        with self.recorder.timed("train", step=self.step + 1):
            if self.replicas is None:
                self.training.complete(self.step + 1, groups)
            else:
                await self.replicas.train(self.step + 1, groups)
            await self._changed.until(
                lambda: len(self.trained) == c.ranks,
                c.step_timeout_s,
                lambda: (
                    f"trainer ranks to finish step {self.step + 1}: {len(self.trained)} of "
                    f"{c.ranks}"
                ),
            )
        self.step_end.training_ended()
        return dict(self.trained)

    async def _sync(self, done: dict[int, p.TrainDone]) -> None:
        """Publish the step's weights and wait until every dedicated engine has verified and loaded
        them, unless the run is to stop. Running turns continue as `transfer.in_flight` says; a new
        turn waits for an engine that has the weights."""
        self.live.update(phase="sync")
        with self.recorder.timed("sync", version=done[0].version):
            tokens = self.training.tokens() if self.replicas and self.replicas.is_planned else 0
            self.hub.publish(done[0].version, done[0].store, tokens)
            # A run that stops only has to save the step; its engines stay asleep.
            if not self._stop.is_set() and (self.config.shares_devices or self.replicas):
                # An engine that wakes loads the weights before it has a KV cache.
                await self.device.to(p.Role.ROLLOUT)
            await self._workers_loaded()
        self.step += 1
        self.boundary, self.at_boundary = self._state(), True
        self._changed.set()

    def _state(self) -> dict[str, Any]:
        """Return the coordinator's state for a checkpoint. It shares no object with the rollouts,
        which continue while the checkpoint is written."""
        return {
            "step": self.step,
            "scheduler": copy.deepcopy(self.scheduler.snapshot()),
            "failed_trajectories": self.rollouts.groups.failed,
            "failed_tasks": self.rollouts.groups.given_up,
            "engine_restarts": self.hub.engine_restarts,
            "evaluating": self.evaluations.running,
        }

    async def _evaluate(self, last: int) -> None:
        """Start the evaluation that is due, if any, and wait for it. With eval.beside, wait only
        for those before the first and after the `last` step."""
        ends = self.step >= last
        beside = self.config.eval.beside and self.step > 0 and not ends
        self.evaluations.collect()
        if due := self.evaluations.due(self.step, last):
            self.evaluations.begin(self.step, beside)
        if self.evaluations.collect() or beside or not (due or ends):
            return
        self.live.update(phase="evaluating", step=self.step, waiting_for="")
        with self.recorder.timed("evaluate", step=self.step):
            await self._rollouts_until(self.evaluations.collect)

    def _stops_early(self) -> bool:
        """True if eval.stop ends the run at this step."""
        self.stopped_early = self.evaluations.stop_reason()
        if self.stopped_early:
            print(f"stopped at step {self.step}: {self.stopped_early}", flush=True)
            self.rollouts.stop()
        return bool(self.stopped_early)

    def _record(
        self,
        groups: list[list[p.Trajectory]],
        done: dict[int, p.TrainDone],
        began: float,
        rolled_out: float,
        busy_s: float,
        trained: float,
        synced: float,
    ) -> None:
        """Write the step's row and files. Times are wall-clock seconds: when the step `began`, was
        `rolled_out`, `trained` and `synced`. `busy_s` is the busy time of an average dedicated
        engine until `rolled_out`."""
        if self.config.observe.save_trajectories and self.config.rollout.replay is None:
            replay.save(self.run_dir, self.step, groups)
        idle = max(0.0, rolled_out - began - busy_s) if self.hub.dedicated() else 0.0
        times = {
            "rollout": rolled_out - began - idle,
            "train": trained - rolled_out,
            "sync": synced - trained,
            "idle": idle,
        }
        self.cost.trained(done[0].metrics.get("tokens", 0))
        rewarded = self.config.reward.pools and self.config.rollout.replay is None
        trained_on = done[0].metrics | self.device.take_figures()
        self.metrics.write(
            self.step,
            step_row(groups, trained_on, times, self.hub, self.rollouts, synced)
            | (self._reward_row(groups, times) if rewarded else {})
            | self.training.take_figures(times["train"])
            | self._hybrid_row(times, synced)
            | (self.replicas.take_row() if self.replicas else {})
            | checkpoint_row(groups)
            | by_member(self.members, [t for group in groups for t in group]),
        )
        self.retention.step_ended(self.step)
        self.journal.flush()
        self.recorder.span("step", began, synced, step=self.step)

    def _reward_row(
        self, groups: list[list[p.Trajectory]], times: dict[str, float]
    ) -> dict[str, Any]:
        jobs = {"reward_jobs": self.reward_jobs.running} if self.config.reward.max_jobs else {}
        return reward_row(groups, times, self.rollouts.take_scoring_failures()) | jobs

    def _hybrid_row(self, times: dict[str, float], at: float) -> dict[str, float]:
        if self.hybrids is None:
            return {}
        generated = sum(w.tokens for w in self.hub.workers.values()) + sum(self.hub.past.values())
        return self.hybrids.figures([w for _, w in self.hub.hybrid()], times, generated, at)

    # ----------------------------------------------------------------- waiting

    async def _workers_loaded(self) -> None:
        if self.config.rollout.replay is not None:
            return
        await self._changed.until(
            lambda: self._stop.is_set() or self._all_loaded(),
            self.config.transfer.load_timeout_s + self.config.rollout.engine_start_timeout_s,
            lambda: (
                f"version {self.hub.version} in "
                f"{', '.join(self.hub.stale_workers()) or 'any engine'}"
            ),
        )

    def _all_loaded(self) -> bool:
        return not self.hub.stale_workers() and any(w.alive for _, w in self.hub.dedicated())

    async def _rollouts_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, as long as any trajectory makes progress. Raises `RunFailed` after
        a silence that exceeds every timeout of a single engine, turn, step or score."""
        c = self.config
        patience = (
            max(
                c.rollout.engine_start_timeout_s,
                c.rollout.turn_timeout_s,
                c.step_timeout_s,
                c.reward.deadline_s if c.reward.pools else 0.0,
            )
            + 30.0
        )
        self.hub.progress_at = time.time()
        await self._changed.while_progressing(
            ready,
            lambda: time.time() - self.hub.progress_at,
            patience,
            lambda: (
                f"{self.rollouts.groups.running} trajectories run; {len(self.hub.ledger)} turns "
                f"are open, {self.scheduler.waiting} of them unassigned"
                f"{self.rollouts.in_environments()}"
            ),
            lambda text: self._fault("no progress", text),
        )

    async def _ended(self) -> None:
        await asyncio.wait({self._stepping})

    async def _stopped(self) -> None:
        await self._stop.wait()
        self._stop_asked_at = time.monotonic()
        self._changed.set()
        if not self.at_boundary:
            warned = resume.is_warned(self.run_dir, self._attempt)
            limit_s = resume.step_end_s(self.run_dir, self.config.cluster, warned)
            await self.step_end.wait(self.step + 1, lambda: self.at_boundary, limit_s)
        raise Stopped("asked to end by a signal")

    async def _unless_stopping(self) -> None:
        """Return at once, or never if the run is to stop, which cancels the step loop. Otherwise
        the next step could begin, and the finished one could not be saved any more."""
        if self._stop.is_set():
            await asyncio.Event().wait()

    async def _save_if_idle(self, deadline_s: float) -> None:
        """Save the last step within `deadline_s`, if the trainer is between two steps, all its
        ranks are up, and the step has no checkpoint."""
        await self.checkpoints.committed()
        whole = len(self.trainers) == self.config.trainer.ranks
        if self.at_boundary and self.step > self.checkpoints.newest() and whole:
            if not self.checkpoints.ordered and self.config.trainer_sleeps:
                await self.device.to(p.Role.TRAINER)
            await self.checkpoints.finish(self.step, self.boundary, deadline_s)
            await self.checkpoints.committed()

    async def _save_before_failing(self, tasks: Tasks) -> None:
        """Save the finished steps of a run that fails, if no trainer rank is lost. Waits for the
        end of a step that is being trained."""
        self._stop.set()  # no further step begins
        if self._receiving.done():  # A message may be what ended the run.
            self._receiving = tasks.spawn(self._receive_despite_failures())
        limit_s = self.config.trainer.step_timeout_s
        if not self.at_boundary:
            await self._changed.within(
                lambda: self.at_boundary or self._stepping.done() or self._trainer_lost(),
                limit_s,
                lambda: "the step's end, to save it before the run fails",
            )
        self._stepping.cancel()
        if not self.at_boundary or self._trainer_lost() or self.step <= self.checkpoints.newest():
            return
        self.training.stop()
        deadline_s = min(limit_s, resume.save_s(self.run_dir, self.config.cluster, 0.0))
        try:
            async with asyncio.timeout(deadline_s):
                await self._save_if_idle(deadline_s)
            print(f"step {self.step} was saved before the run failed", flush=True)
        except Exception as error:  # The run's own failure is raised and not this one.
            print(
                f"step {self.step} could not be saved before the run failed: {error!r}", flush=True
            )

    def _trainer_lost(self) -> bool:
        return not self.gone.isdisjoint(self.ranks[p.Role.TRAINER].values())

    async def _receive_despite_failures(self) -> None:
        """Receive messages while a run that has failed is saved, and ignore further failures."""
        while True:
            with contextlib.suppress(RunFailed, OSError):
                await self._receive()

    # ----------------------------------------------------------------- messages and actions

    async def _receive(self) -> None:
        while True:
            source, message = await self.mailbox.receive()
            if isinstance(message, p.HostReady) and message.machine:
                what = f"environment host, rank {message.rank}"
                row = {"kind": "host", "what": what, "detail": message.machine}
                self.metrics.write(self.step, row)
            if not (self.rollouts.handle(message) or self.hub.handle(source, message)):
                self._handle(source, message)
            if isinstance(message, (p.WorkerLoad, p.TrainerReady, p.TrainDone)):
                self._count_energy(source, message)
            if self.hybrids and isinstance(message, p.WorkerReady | p.WorkerDown):
                self.hybrids.changed()
            self._changed.set()

    def _handle(self, source: int, message: p.Message) -> None:
        """Handle a message that is about neither trajectories nor turns."""
        match message:
            case p.Hello():
                self.ranks[message.role][message.index] = source
            case p.TrainerReady():
                self.trainers[message.index] = message
            case p.TrainedAhead():
                self.training.received(message)
            case p.TrainDone():
                self.trained[message.index] = message
            case p.DeviceChanged():
                self.device.received(message)
            case p.ReplicaReady() | p.GradientComputed() | p.ReplicaLost() if self.replicas:
                self.replicas.handle(message)
            case p.RewardDemand():
                self.reward_jobs.demand(message)
            case p.Goodbye():
                self.gone.add(message.rank)
            case p.RankFailed():
                self.gone.add(message.rank)
                raise RunFailed(f"rank {message.rank}: {message.error}")
            case _:
                raise RunFailed(
                    f"rank {source} sent a {type(message).__name__}, which is not for a coordinator"
                )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.hub.feed(ev.Tick(at=time.time()))
            self.hub.log.flush()
            self.hub.share_siblings()
            self.reward_jobs.tick()
            self.evaluations.collect()
            self._count_cost()
            workers = {
                name: WorkerStatus(
                    tokens_per_s=(w.total_tokens - self._tokens.get(name, 0)) / TICK_S,
                    running=w.running,
                    waiting=w.waiting,
                    version=w.version,
                )
                for name, w in self.hub.workers.items()
            }
            self._tokens = {name: w.total_tokens for name, w in self.hub.workers.items()}
            self.live.update(
                workers=workers, finished=self.rollouts.progress[0], total=self.rollouts.progress[1]
            )

    def _count_cost(self) -> None:
        self.cost.tick(time.monotonic(), self.hub.borrowed, self.hub.generated)

    def _count_energy(self, source: int, m: p.WorkerLoad | p.TrainerReady | p.TrainDone) -> None:
        """Count the energy that one of the run's own devices reports."""
        if source < self.mailbox.size:
            self.cost.energy(m.energy_j)

    def _send(self, address: int, message: p.Message) -> None:
        if address < self.mailbox.size:
            self.mailbox.send(address, message)
        else:
            self.borrowed.send(address, message)

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
                self.batch = groups
            case ev.RequestCapacity() | ev.ReleaseCapacity():
                self.provisioner.do(action)
            case ev.UseWorker() | ev.RestWorker():
                used = self.hub.uses_hybrids
                self.hybrids.begin(p.Role.ROLLOUT if used else p.Role.TRAINER)
            case ev.PlanReplicas() if self.replicas:
                self.replicas.planned(action)
            case ev.MoveTrajectory(trajectory, host):
                self.rollouts.move(trajectory, host)
            case ev.GiveUp(reason):
                raise RunFailed(reason)

    def _change(self, what: str, detail: str, kind: str = "worker") -> None:
        """Report that a borrowed rank, a job or a replica has come or left in order."""
        self.recorder.instant(what, detail=detail)
        self.metrics.write(self.step, {"kind": kind, "what": what, "detail": detail})
        print(f"{what}: {detail}", flush=True)

    def _fault(self, what: str, detail: str) -> None:
        """Report a fault that the run survives."""
        detail = printable(detail)  # It may quote the output of an agent's program.
        self.recorder.instant("fault", what=what, detail=detail)
        self.metrics.write(self.step, {"kind": "fault", "what": what, "detail": detail})
        print(f"{what}: {detail}", flush=True)

    async def dismiss(self, reason: str) -> None:
        """Send every rank `Shutdown` and wait until all have left, or a third of
        cluster.stop_timeout_s is over; the launcher ends the remaining ranks."""
        others = set(range(self.mailbox.size)) - {self.mailbox.rank}
        for rank in others:
            self.mailbox.send(rank, p.Shutdown(reason))
        end = time.monotonic() + self.config.cluster.stop_timeout_s / 3
        try:
            while self.gone < others and time.monotonic() < end:
                got = self.mailbox.poll()
                if got is None:
                    await asyncio.sleep(0.005)
                elif isinstance(got[1], p.Goodbye):
                    self.gone.add(got[1].rank)
        finally:
            if self.replicas:
                self.replicas.close()


async def drive(coordinator: Coordinator) -> None:
    """Run until the run is complete, stopped or has failed, and dismiss the other ranks. Raises the
    cause of a failure."""
    try:
        await coordinator.run()
    except Stopped as stopped:
        await coordinator.dismiss(str(stopped))
        return
    except Exception as error:
        await coordinator.dismiss(f"{type(error).__name__}: {error}")
        raise
    stopped = coordinator.config if coordinator.stopped_early else None
    resume.mark_finished(coordinator.run_dir, coordinator.step, stopped)
    await coordinator.dismiss("the run is complete")
