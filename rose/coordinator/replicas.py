"""Dedicated engines that sleep while a replica beside them trains (trainer.elastic_replicas).

    the batch is complete    -> trainer ranks get their part, and the engines sleep; each replica
                                gets its part when its engine has fallen asleep; where rollouts go
                                on, the engines are those that the scheduler lets rest, whose turns
                                went elsewhere with their tokens as it said so
    all ranks are ahead, and every replica has computed its gradient, or is given up
                             -> the ranks compute what is missing, add the gradients, update
    the version is published -> replicas leave, the engines wake with it

ZeRO's groups stay as they are: replicas are as many as are up at the step's begin. Only the last
order of a step names gradients, those of replicas whose whole sum is there; so each row is computed
once or, of a replica that was given up, once more by the ranks, and nothing is applied twice. One
that is given up ends, and has no part of later steps: it would be waited for in each of them.
Gradients' files are in the machine's memory, or in the run's folder where that has no room. Left
out: parts by the speed of each; waking an engine whose replica is done, or dead, before the step is
over, as it would load the version that the step replaces.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rose import protocol as p
from rose.config import Config
from rose.coordinator.device_turns import DeviceTurns
from rose.coordinator.training import Group, Training
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes
from rose.files import own_folder
from rose.observe.recorder import NullRecorder
from rose.scheduler import events as ev
from rose.transfer import mirror

FOLDER = "gradients"  # in the run's
ROOM = 1.1  # times what gradients take, that the machine's memory must have for them
# of trainer.step_timeout_s, that the ranks wait for a replica which says nothing; or as long as
# they worked themselves. The death of one is known at once.
PATIENCE = 0.1


def remove_left(run_dir: Path) -> None:
    """What attempts of the run that were killed have left of gradients."""
    mirror.remove_left(run_dir)
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


class Replicas(DeviceTurns):
    """`ranks`: the rollout ranks by index. `on_fault` and `on_change` get (what, detail)."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ranks: dict[int, int],
        training: Training,
        hub: TurnHub,
        send: Callable[[int, p.Message], None],
        changes: Changes,
        recorder: NullRecorder,
        on_fault: Callable[[str, str], None],
        on_change: Callable[[str, str], None],
    ) -> None:
        sides = {p.Role.TRAINER: {}, p.Role.ROLLOUT: {}}
        super().__init__(config, sides, send, changes.until, recorder)
        self.shared, self.holder = True, p.Role.ROLLOUT
        self._rollouts, self._training, self._hub, self._changes = ranks, training, hub, changes
        self._on_fault, self._on_change = on_fault, on_change
        self._near, self._far = mirror.choose_path(run_dir), run_dir / FOLDER
        self._up: dict[str, int] = {}  # worker whose replica is up -> bytes of a gradient
        self._stopped: set[str] = set()
        self._why = ""  # no replica had a part of the last step
        self._step = 0
        self._rows: dict[str, list[int]] = {}  # of replicas whose gradient is awaited
        self._orders: dict[str, list[p.Message]] = {}  # of those whose engine is not asleep yet
        self._ordered: dict[str, float] = {}  # of the others, since when, monotonic
        self._found: dict[str, p.GradientComputed] = {}
        self._row: dict[str, float] = {}  # for the step's row of metrics
        self._plans: list[ev.PlanReplicas] = []  # that of the last step, and those for later ones

    async def train(self, step: int, groups: list[Group]) -> None:
        """The trainer ranks get all that they need for the step, whose replicas are done when this
        returns. Raises `RunFailed` where a trainer rank doesn't answer."""
        self._step = step
        chosen, why = self._choose(groups)
        if why and why != self._why:
            self._on_change("no replica trains", f"step {step}: {why}")
        self._why = why
        planned = self._planned_row(step)
        if not chosen:
            self._training.complete(step, groups)
            self._row = {"replicas": 0, "replicas_lost": 0, "replica_token_share": 0.0} | planned
            return
        began = time.monotonic()
        asked = self._deal(step, groups, chosen)
        self._put_away([_index(worker) for worker in self._orders])
        timeout_s = self._config.trainer.step_timeout_s
        await self._changes.until(
            lambda: self._training.ahead,
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
            self._count(p.Role.ROLLOUT, "sleep")
        for worker in list(self._rows):
            self._give_up(worker, began, own_s, patience_s)
        missing = [row for name in asked if name not in self._found for row in asked[name]]
        found = list(self._found.values())
        self._training.finish(sorted(missing), [each.gradient for each in found])
        computed = [row for each in found for row in asked[each.worker]]
        self._row = {
            "replicas": len(asked),
            "replica_token_share": self._training.tokens(computed) / self._training.tokens(),
            "replicas_lost": len(asked) - len(found),
            "device_seconds_replica": sum(each.seconds for each in found),
            "seconds_replica": max((each.seconds for each in found), default=0.0),
            "seconds_replica_wait": time.monotonic() - began - own_s,
            **planned,
        }

    def received(self, answer: p.DeviceChanged) -> None:
        """A replica gets its part once its engine is asleep."""
        super().received(answer)
        if answer.turn == self._turn and not answer.awake:
            index = next(i for i, rank in self._rollouts.items() if rank == answer.rank)
            worker = f"rollout-{index}"
            for message in self._orders.pop(worker, ()):
                self._send(answer.rank, message)
            self._ordered[worker] = time.monotonic()

    def handle(self, message: p.ReplicaReady | p.GradientComputed | p.ReplicaLost) -> None:
        if message.worker in self._stopped:
            return  # what was on its way when it was given up
        match message:
            case p.ReplicaReady(worker=worker, pid=pid, nbytes=nbytes):
                self._up[worker] = nbytes
                self._on_change("replica ready", f"{worker}, process {pid}")
                self._tell(ev.ReplicaReady, worker)
            case p.GradientComputed(worker=worker, step=step):
                if step == self._step and self._rows.pop(worker, None) is not None:
                    self._found[worker] = message
            case p.ReplicaLost(worker=worker, error=error, restarting=restarting):
                self._up.pop(worker, None)
                after = "another is started" if restarting else "the run goes on without it"
                self._on_fault("replica died", f"{worker}: {error}; {after}")
                self._rows.pop(worker, None)
                self._orders.pop(worker, None)
                self._tell(ev.ReplicaLost, worker)

    def planned(self, plan: ev.PlanReplicas) -> None:
        """The scheduler has decided how many replicas train from a step on."""
        self._plans.append(plan)
        change = "still" if plan.replicas == plan.before else f"instead of {plan.before}"
        before = f" where {plan.expected_s:.3g} s were expected" if plan.expected_s else ""
        self._on_change(
            "replicas planned",
            f"from step {plan.step} on {plan.replicas} train, {change}: {plan.forecast_s:.3g} s a "
            f"step are expected. Steps took {plan.step_s:.3g} s{before}: training "
            f"{plan.training_s:.3g} s, and rollout {plan.rollout_s:.3g} s beside it",
        )

    def close(self) -> None:
        """The run is over, its ranks are gone or about to be ended: not before, as one might still
        read or write a gradient."""
        self._clear()

    def take_row(self) -> dict[str, float]:
        """For the row of a step that is over: nobody needs its gradients' files any more.
        `replicas_planned`: how many were to have a part; `seconds_step_planned`: what the planner
        expected of a step, if it has planned since the attempt's begin, beside `time_step`.
        `replicas`: how many had a part, `replicas_lost` of them in vain; `replica_token_share`: of
        the batch's tokens those that replicas computed; `seconds_replica`: from the order to the
        gradient, of the slowest, and `device_seconds_replica` of all; `seconds_replica_wait`: what
        the ranks waited for it; the trainer's `seconds_replica_read`: to read and add the
        gradients."""
        self._clear()
        row, self._row = self._row, {}
        return row

    def _clear(self) -> None:
        for folder in (self._near, self._far):
            shutil.rmtree(folder, ignore_errors=True)

    def _choose(self, groups: list[Group]) -> tuple[list[str], str]:
        """(workers that take part: their engine is up and has nothing to do; why none does, unless
        none is to)."""
        most = sum(map(len, groups)) - self._config.trainer.replicas
        alive = {name for name, worker in self._hub.dedicated() if worker.alive}
        names = self._names()
        up = [name for name in names if name in self._up and name in alive]
        if self._config.plans_replicas:
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
        """Workers with a replica; where rollouts go on, those of them that rest."""
        names = [f"rollout-{index}" for index in range(self._config.elastic_replicas)]
        if self._config.plans_replicas:
            return [name for name in names if self._hub.rests(name)]
        return names

    def _planned_row(self, step: int) -> dict[str, float]:
        if not self._config.plans_replicas:
            return {}
        plans = [plan for plan in self._plans if plan.step <= step]
        self._plans = plans[-1:] + [plan for plan in self._plans if plan.step > step]
        return {
            "replicas_planned": len(self._names()),
            **({"seconds_step_planned": plans[-1].forecast_s} if plans else {}),
        }

    def _tell(self, event: type[ev.ReplicaReady] | type[ev.ReplicaLost], worker: str) -> None:
        """The planner, where there is one."""
        if self._config.plans_replicas:
            self._hub.feed(event(at=time.time(), worker=worker))

    def _put_away(self, engines: list[int]) -> None:
        """Who holds the devices is open until these engines have woken again: nobody waits for one
        that hangs before that."""
        self._answers = {}
        if not engines:
            return
        ranks = self._ranks[p.Role.ROLLOUT] = {i: self._rollouts[i] for i in engines}
        self.holder = None
        self._turn += 1
        for rank in ranks.values():
            self._send(rank, p.Sleep(self._turn))

    def _deal(self, step: int, groups: list[Group], chosen: list[str]) -> dict[str, list[int]]:
        """The rows of each that gets some. Trainer ranks have theirs when this returns."""
        self._clear()
        folder = self._folder([self._up[worker] for worker in chosen])
        self._rows, self._found = {}, {}
        self._orders, self._ordered = {}, {}
        shares = self._training.share(step, groups, len(chosen))
        asked = {}
        for worker, messages in zip(chosen, shares, strict=True):
            if not messages:
                continue
            asked[worker] = self._rows[worker] = [row for m in messages[1:] for row in m.indices]
            file = str(folder / f"{worker}-step-{step}")
            order = p.ComputeGradient(step, self._hub.version, self._hub.store, file)
            self._orders[worker] = [order, *messages]
        return asked

    def _folder(self, nbytes: list[int]) -> Path:
        """A new one for so many files: of the machine's memory where that has room."""
        with suppress(OSError):  # as a mirror is: what is refused there costs time alone
            if sum(nbytes) * ROOM <= shutil.disk_usage(self._near.parent).free:
                own_folder(self._near, parents=False)
                return self._near
        self._far.mkdir(mode=0o700, exist_ok=True)
        return self._far

    def _give_up(self, worker: str, began: float, own_s: float, patience_s: float) -> None:
        del self._rows[worker]
        self._stopped.add(worker)
        del self._up[worker]
        self._tell(ev.ReplicaLost, worker)
        self._send(self._rollouts[_index(worker)], p.StopReplica())
        if self._orders.pop(worker, None) is not None:
            why = f"its engine has not fallen asleep in {time.monotonic() - began:.1f} s"
        else:
            spent = time.monotonic() - self._ordered[worker]
            why = (
                f"no gradient of step {self._step} in {spent:.1f} s, "
                f"{spent / max(own_s, 1e-3):.1f} times as long as trainer ranks took for their part"
            )
        self._on_fault(
            "replica given up",
            f"{worker}: {why}; the trainer computes its rows, and the run goes on without this "
            f"replica. The ranks waited {patience_s:.1f} s after their part, which is {PATIENCE:g} "
            "of trainer.step_timeout_s or as long as that part took. Give a replica what a trainer "
            "rank has (rollout.threads), raise trainer.step_timeout_s, or lower "
            f"trainer.elastic_replicas={self._config.elastic_replicas}",
        )


def _index(worker: str) -> int:
    return int(worker.partition("-")[2])
