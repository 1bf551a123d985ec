"""Dedicated engines that sleep while a replica beside them trains (trainer.elastic_replicas).

    the batch is complete    -> trainer ranks get their part, and the engines sleep; each replica
                                gets its part when its engine has fallen asleep
    the ranks have computed their part, and every replica its gradient, or was given up
                             -> the ranks compute the missing rows, add the gradients, update
    the version is published -> replicas release the devices, the engines wake and load it

Where rollouts run during training, only engines sleep that the scheduler idles (`RestWorker`); it
has moved their turns, with the tokens so far, to other workers.

ZeRO's groups don't change: a step uses the replicas that are up when its training begins. Only the
step's last message to the ranks names gradients, and only complete ones; the ranks compute the rows
of each replica that died or was given up. So no row is applied twice. A replica that was given up
ends and has no part in later steps, since each of them would wait for it.
Gradients are files in the machine's memory, or in the run's folder if memory has no room.

Not done: parts in proportion to speed; waking an engine before the step's end when its replica is
done or dead, because it would load the version that the step replaces.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rose import protocol as p
from rose.config import Config
from rose.coordinator.members import Members
from rose.coordinator.records import Records
from rose.coordinator.shared_devices import Devices
from rose.coordinator.training import Group, Training
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes
from rose.files import own_folder
from rose.scheduler import events as ev
from rose.transfer import mirror

FOLDER = "gradients"  # name of the folder in the run's folder
ROOM = 1.1  # free memory that the gradients' files need, over their size
# Share of trainer.step_timeout_s that the ranks wait for a silent replica, or as long as their own
# part took, if that is longer. The death of a replica is reported at once.
PATIENCE = 0.1


def build(config: Config, run_dir: Path, *arguments: Any) -> Replicas | None:
    """Return what trains the run's steps with replicas; None for a run without them. Remove the
    files that killed attempts of the run left in memory and in its folder."""
    mirror.remove_left(run_dir)
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
    return Replicas(config, run_dir, *arguments) if config.elastic_replicas else None


class Replicas(Devices):
    """Trains steps with replicas. `is_planned`: rollouts go on during training, so a provisioning
    policy decides how many replicas train, and the scheduler moves the turns of their engines to
    other engines."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        members: Members,
        changes: Changes,
        training: Training,
        hub: TurnHub,
        records: Records,
    ) -> None:
        sides: dict[p.Role, dict[int, int]] = {p.Role.TRAINER: {}, p.Role.ROLLOUT: {}}
        super().__init__(config, sides, members.send, changes.until, records.recorder, training)
        self.shared, self.holder = True, p.Role.ROLLOUT
        self._rollouts = members.ranks[p.Role.ROLLOUT]
        self._hub, self._changes, self._records = hub, changes, records
        self._files, self.is_planned = _Gradients(run_dir), not hub.scheduler.waits_for_weights
        self._up: dict[str, int] = {}  # worker whose replica is up -> bytes of its gradient
        self._stopped: set[str] = set()  # workers whose replica was given up
        self._why = ""  # reason why no replica had a part of the last step
        self._step = 0
        self._rows: dict[str, list[int]] = {}  # worker whose gradient is awaited -> its rows
        # worker whose engine is not asleep yet -> messages for its replica
        self._orders: dict[str, list[p.Message]] = {}
        self._ordered: dict[str, float] = {}  # worker -> time of these messages, monotonic seconds
        self._found: dict[str, p.GradientComputed] = {}
        self._row: dict[str, float] = {}  # values for the step's row of metrics
        self._plans: list[ev.PlanReplicas] = []  # plan of the last step, and plans for later steps

    def step_fields(self) -> dict[str, Any]:
        return {"trainers": self._config.trainer.replicas if self.is_planned else 0}

    async def before_train(self, rollout_s: float) -> None:
        """Leave the engines awake; those whose replica trains are ordered to sleep in `train`."""

    def batch_tokens(self) -> int:
        return self._tokens() if self.is_planned else 0

    async def train(self, step: int, groups: list[Group]) -> None:
        """Give the trainer ranks and the replicas their parts; return when the replicas are done
        and the ranks have all that they need. Raises `RunFailed` if a rank doesn't answer."""
        self._step = step
        chosen, why = self._choose(groups)
        if why and why != self._why:
            self._records.change("no replica trains", f"step {step}: {why}", "replica")
        self._why = why
        planned = self._planned_row(step)
        if not chosen:
            self._training.complete(step, groups)
            self._row = {"replicas": 0, "replicas_lost": 0, "replica_token_share": 0.0} | planned
            return
        began = time.monotonic()
        dealt = self._deal(step, groups, chosen)
        self._order_sleep([_index(worker) for worker in self._orders])
        timeout_s = self._config.trainer.step_timeout_s
        await self._changes.until(
            lambda: not self._training.working,
            timeout_s,
            lambda: f"trainer ranks to compute their part of step {step}",
        )
        own_s = time.monotonic() - began
        patience_s = max(PATIENCE * timeout_s, own_s)
        await self._changes.within(
            lambda: not self._rows,
            patience_s,
            lambda: f"replicas to compute their part of step {step}: {', '.join(self._rows)}",
        )
        if self._answers:
            self._record_order(p.Role.ROLLOUT, "sleep")
        for worker in list(self._rows):
            self._give_up(worker, began, own_s, patience_s)
        missing = [row for name in dealt if name not in self._found for row in dealt[name]]
        found = list(self._found.values())
        # The last round has the rows that no replica has computed, and names the others' gradients.
        ranks = self._config.trainer.replicas
        plan, trees = (
            self._training.plan(sorted(missing), True) if missing else ([[[[]]]] * ranks, False)
        )
        self._training.send_round(plan, trees, False, [each.gradient for each in found])
        computed = [row for each in found for row in dealt[each.worker]]
        self._row = {
            "replicas": len(dealt),
            "replica_token_share": self._tokens(computed) / self._tokens(),
            "replicas_lost": len(dealt) - len(found),
            "device_seconds_replica": sum(each.seconds for each in found),
            "seconds_replica": max((each.seconds for each in found), default=0.0),
            "seconds_replica_wait": time.monotonic() - began - own_s,
            **planned,
        }

    def received(self, answer: p.DeviceChanged) -> None:
        """Take an engine's answer; when it is asleep, send its replica the part."""
        super().received(answer)
        if answer.turn == self._order_number and not answer.awake:
            index = next(i for i, rank in self._rollouts.items() if rank == answer.rank)
            worker = f"rollout-{index}"
            for message in self._orders.pop(worker, ()):
                self._send(answer.rank, message)
            self._ordered[worker] = time.monotonic()

    def handle(self, message: p.Message) -> bool:
        if not isinstance(message, p.ReplicaReady | p.GradientComputed | p.ReplicaLost):
            return super().handle(message)
        if message.worker not in self._stopped:  # Else it was given up while this was on its way.
            self._replica_changed(message)
        return True

    def _replica_changed(self, m: p.ReplicaReady | p.GradientComputed | p.ReplicaLost) -> None:
        match m:
            case p.ReplicaReady(worker=worker, pid=pid, nbytes=nbytes):
                self._up[worker] = nbytes
                self._records.change("replica ready", f"{worker}, process {pid}", "replica")
                self._feed(ev.ReplicaReady, worker)
            case p.GradientComputed(worker=worker, step=step):
                if step == self._step and self._rows.pop(worker, None) is not None:
                    self._found[worker] = m
            case p.ReplicaLost(worker=worker, error=error, restarting=restarting):
                self._up.pop(worker, None)
                after = "another is started" if restarting else "the run goes on without it"
                self._records.fault("replica died", f"{worker}: {error}; {after}")
                self._rows.pop(worker, None)
                self._orders.pop(worker, None)
                self._feed(ev.ReplicaLost, worker)

    def act(self, action: ev.Action) -> None:
        """Record and report how many replicas the scheduler lets train from a step on."""
        if isinstance(action, ev.PlanReplicas):
            self._report_plan(action)

    def _report_plan(self, plan: ev.PlanReplicas) -> None:
        self._plans.append(plan)
        change = "still" if plan.replicas == plan.before else f"instead of {plan.before}"
        before = f" where {plan.expected_s:.3g} s were expected" if plan.expected_s else ""
        self._records.change(
            "replicas planned",
            f"from step {plan.step} on {plan.replicas} train, {change}: {plan.forecast_s:.3g} s a "
            f"step are expected. Steps took {plan.step_s:.3g} s{before}: training "
            f"{plan.training_s:.3g} s, and rollout {plan.rollout_s:.3g} s beside it",
            "replica",
        )

    def clean_up(self) -> None:
        """Remove the gradients' files. A rank that runs might still read or write one."""
        self._files.clear()

    def row(self, times: dict[str, float], at: float) -> dict[str, float]:
        """Return the values of `Devices.row` and those below, and remove the gradients' files.

        - `replicas`: replicas that had a part; `replicas_lost`: those of them without a gradient;
        - `replica_token_share`: share of the batch's tokens that replicas computed;
        - `seconds_replica`: from the order to the gradient, of the slowest replica;
          `device_seconds_replica`: the sum over the replicas;
        - `seconds_replica_wait`: how long the ranks waited for replicas;
        - `replicas_planned`: replicas that were to have a part; `seconds_step_planned`: the
          planner's prediction of `time_step`, if it has planned in this attempt.

        The trainer adds `seconds_replica_read`, to read and add the gradients.
        """
        self._files.clear()
        row, self._row = self._row, {}
        return super().row(times, at) | row

    def _choose(self, groups: list[Group]) -> tuple[list[str], str]:
        """Return (workers whose replica takes part, reason why none does).

        A worker takes part if its replica and its engine are up. Unless rollouts run during
        training, no turn may be open. The reason is "" also where the planner wants no replica.
        """
        most = sum(map(len, groups)) - self._config.trainer.replicas
        alive = {name for name, worker in self._hub.workers.of("dedicated") if worker.alive}
        names = self._names()
        up = [name for name in names if name in self._up and name in alive]
        if self.is_planned:
            if not names:
                return [], ""
        elif turns := len(self._hub.ledger):
            return [], f"{turns} turns are not over"
        if not up:
            return [], "no replica is up beside an engine that is"
        if most <= 0:
            return [], "the batch has no more rows than there are trainer ranks"
        return up[:most], ""

    def _names(self) -> list[str]:
        """Return the workers with a replica; where rollouts run during training, only those that
        the scheduler idles."""
        names = [f"rollout-{index}" for index in range(self._config.elastic_replicas)]
        if self.is_planned:
            return [name for name in names if name in self._hub.workers.idled]
        return names

    def _planned_row(self, step: int) -> dict[str, float]:
        if not self.is_planned:
            return {}
        plans = [plan for plan in self._plans if plan.step <= step]
        self._plans = plans[-1:] + [plan for plan in self._plans if plan.step > step]
        return {
            "replicas_planned": len(self._names()),
            **({"seconds_step_planned": plans[-1].forecast_s} if plans else {}),
        }

    def _feed(self, event: type[ev.ReplicaReady] | type[ev.ReplicaLost], worker: str) -> None:
        """Feed the event to the scheduler if it plans replicas."""
        if self.is_planned:
            self._hub.feed(event(at=time.time(), worker=worker))

    def _order_sleep(self, engines: list[int]) -> None:
        """Order the engines (by index) to sleep, and don't wait for it. `holder` is None until they
        wake again, so an engine that hangs is noticed only then."""
        self._answers = {}
        if not engines:
            return
        ranks = self._ranks[p.Role.ROLLOUT] = {i: self._rollouts[i] for i in engines}
        self.holder = None
        self._order_number += 1
        for rank in ranks.values():
            self._send(rank, p.Sleep(self._order_number))

    def _deal(self, step: int, groups: list[Group], chosen: list[str]) -> dict[str, list[int]]:
        """Share out the batch's rows: send the trainer ranks theirs, and prepare the replicas'
        messages. Return worker -> rows of each replica that gets some."""
        self._files.clear()
        folder = self._files.folder(sum(self._up[worker] for worker in chosen))
        self._rows, self._found = {}, {}
        self._orders, self._ordered = {}, {}
        training, ranks, dealt = self._training, self._config.trainer.replicas, {}
        training.begin_step(step)
        training.add_to_step({group[0].group: group for group in groups})
        plan, trees = training.plan(range(len(training.rows)), True, len(chosen))
        training.send_round(plan[:ranks], trees, True)
        for worker, own in zip(chosen, plan[ranks:], strict=True):
            if not any(map(any, own)):
                continue
            dealt[worker] = self._rows[worker] = [row for rows in sum(own, []) for row in rows]
            file = str(folder / f"{worker}-step-{step}")
            order = p.ComputeGradient(
                step, self._hub.weights.version, self._hub.weights.store, file
            )
            self._orders[worker] = [order, *training.messages(own, trees, True)]
        return dealt

    def _tokens(self, rows: Sequence[int] | None = None) -> int:
        """Return the number of tokens in these rows of the step, or in all, with contexts."""
        every = self._training.rows
        return sum(len(row.mask) for row in (every if rows is None else [every[r] for r in rows]))

    def _give_up(self, worker: str, began: float, own_s: float, patience_s: float) -> None:
        """Stop a worker's replica for good, no longer await its gradient, and report why."""
        del self._rows[worker]
        self._stopped.add(worker)
        del self._up[worker]
        self._feed(ev.ReplicaLost, worker)
        self._send(self._rollouts[_index(worker)], p.StopReplica())
        if self._orders.pop(worker, None) is not None:
            why = f"its engine has not fallen asleep in {time.monotonic() - began:.1f} s"
        else:
            spent = time.monotonic() - self._ordered[worker]
            why = (
                f"no gradient of step {self._step} in {spent:.1f} s, "
                f"{spent / max(own_s, 1e-3):.1f} times as long as trainer ranks took for their part"
            )
        self._records.fault(
            "replica given up",
            f"{worker}: {why}; the trainer computes its rows, and the run goes on without this "
            f"replica. The ranks waited {patience_s:.1f} s after their part, which is {PATIENCE:g} "
            "of trainer.step_timeout_s or as long as that part took. Give a replica what a trainer "
            "rank has (rollout.threads), raise trainer.step_timeout_s, or lower "
            f"trainer.elastic_replicas={self._config.elastic_replicas}",
        )


class _Gradients:
    """The folders of the gradients' files: in the machine's memory, and in the run's folder."""

    def __init__(self, run_dir: Path) -> None:
        self._near, self._far = mirror.choose_path(run_dir), run_dir / FOLDER

    def folder(self, nbytes: int) -> Path:
        """Create the folder for files of this size, in the machine's memory if that has room."""
        with suppress(OSError):  # If the system refuses it, the run's folder is only slower.
            if nbytes * ROOM <= shutil.disk_usage(self._near.parent).free:
                own_folder(self._near, parents=False)
                return self._near
        self._far.mkdir(mode=0o700, exist_ok=True)
        return self._far

    def clear(self) -> None:
        for folder in (self._near, self._far):
            shutil.rmtree(folder, ignore_errors=True)


def _index(worker: str) -> int:
    return int(worker.partition("-")[2])
