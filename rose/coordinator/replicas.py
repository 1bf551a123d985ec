"""Dedicated engines that sleep while a replica beside them trains (trainer.elastic_replicas).

    the batch is complete    -> the engines sleep; trainer ranks and replicas get their parts
    all ranks are ahead, and every replica has computed its gradient, or is given up
                             -> the ranks compute what is missing, add the gradients, update
    the version is published -> replicas leave, the engines wake with it

ZeRO's groups stay as they are: replicas are as many as are up at the step's begin. Only the last
order of a step names gradients, those of replicas whose whole sum is there; so each row is computed
once or, of a replica that was given up, once more by the ranks, and nothing is applied twice. Left
out: parts by the speed of each; a planner of how many.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rose import protocol as p
from rose.config import Config
from rose.coordinator.device_turns import DeviceTurns
from rose.coordinator.training import Group, Training
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes
from rose.observe.recorder import NullRecorder

FOLDER = "gradients"  # in the run's
# of trainer.step_timeout_s, that the ranks wait for a replica which says nothing; or as long as
# they worked themselves. The death of one is known at once.
PATIENCE = 0.1


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
        self._folder = run_dir / FOLDER
        self._up: set[str] = set()  # workers whose replica is up
        self._step = 0
        self._rows: dict[str, list[int]] = {}  # of the replicas that compute
        self._found: dict[str, p.GradientComputed] = {}
        self._row: dict[str, float] = {}  # for the step's row of metrics

    async def train(self, step: int, groups: list[Group]) -> None:
        """The trainer ranks get all that they need for the step, whose replicas are done when this
        returns. Raises `RunFailed` where a rank doesn't answer."""
        chosen = self._choose(groups)
        if not chosen:
            self._training.complete(step, groups)
            self._row = {"replicas": 0, "replica_token_share": 0.0}
            return
        await self._put_away(list(chosen.values()))
        began = time.monotonic()
        asked = self._deal(step, groups, chosen)
        timeout_s = self._config.trainer.step_timeout_s
        await self._changes.until(
            lambda: self._training.ahead,
            timeout_s,
            lambda: f"trainer ranks to compute their part of step {step}",
        )
        own_s = time.monotonic() - began
        await self._changes.within(
            lambda: not self._rows,
            max(PATIENCE * timeout_s, own_s),
            lambda: f"replicas to compute their part of step {step}: {', '.join(self._rows)}",
        )
        for worker in list(self._rows):
            self._give_up(worker, f"no gradient of step {step} in time")
        missing = [row for name in asked if name not in self._found for row in asked[name]]
        found = list(self._found.values())
        self._training.finish(sorted(missing), [each.gradient for each in found])
        computed = [row for each in found for row in asked[each.worker]]
        self._row = {
            "replicas": len(asked),
            "replica_token_share": self._training.tokens(computed) / self._training.tokens(),
            "replicas_lost": len(asked) - len(found),
            "seconds_replica": max((each.seconds for each in found), default=0.0),
            "seconds_replica_wait": time.monotonic() - began - own_s,
        }

    def handle(self, message: p.ReplicaReady | p.GradientComputed | p.ReplicaLost) -> None:
        match message:
            case p.ReplicaReady(worker=worker, pid=pid):
                self._up.add(worker)
                self._on_change("replica ready", f"{worker}, process {pid}")
            case p.GradientComputed(worker=worker, step=step):
                if step == self._step and self._rows.pop(worker, None) is not None:
                    self._found[worker] = message
            case p.ReplicaLost(worker=worker, error=error, restarting=restarting):
                self._up.discard(worker)
                after = "another is started" if restarting else "the run goes on without it"
                self._on_fault("replica died", f"{worker}: {error}; {after}")
                self._rows.pop(worker, None)

    def take_row(self) -> dict[str, float]:
        """For the row of a step that is over: nobody needs its gradients' files any more.
        `replica_token_share`: of the batch's tokens those that replicas computed;
        `seconds_replica`: from the order to the gradient, of the slowest; `seconds_replica_wait`:
        what the ranks waited for it."""
        self._clear()
        row, self._row = self._row, {}
        return row

    def _clear(self) -> None:
        """Also of what a run that was stopped has left."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _choose(self, groups: list[Group]) -> dict[str, int]:
        """Worker -> rank, of those that take part: whose engine is up and has nothing to do."""
        most = sum(map(len, groups)) - self._config.trainer.replicas
        alive = {name for name, worker in self._hub.dedicated() if worker.alive}
        names = [f"rollout-{index}" for index in range(self._config.elastic_replicas)]
        up = [name for name in names if name in self._up & alive]
        if len(self._hub.ledger):
            return {}
        return {name: self._rollouts[int(name.partition("-")[2])] for name in up[: max(0, most)]}

    async def _put_away(self, ranks: list[int]) -> None:
        self._ranks[p.Role.ROLLOUT] = dict(enumerate(ranks))
        await self.to(p.Role.TRAINER)

    def _deal(self, step: int, groups: list[Group], chosen: dict[str, int]) -> dict[str, list[int]]:
        """The rows of each, also of one that has died meanwhile."""
        self._clear()
        self._folder.mkdir()
        self._step, self._rows, self._found = step, {}, {}
        shares = self._training.share(step, groups, len(chosen))
        asked = {}
        for (worker, rank), messages in zip(chosen.items(), shares, strict=True):
            asked[worker] = [row for m in messages[1:] for row in m.indices]
            if not asked[worker] or worker not in self._up:
                continue
            self._rows[worker] = asked[worker]
            file = str(self._folder / f"{worker}.h5")
            order = p.ComputeGradient(step, self._hub.version, self._hub.store, file)
            for message in (order, *messages):
                self._send(rank, message)
        return asked

    def _give_up(self, worker: str, why: str) -> None:
        del self._rows[worker]
        self._on_fault("replica given up", f"{worker}: {why}; the trainer computes its rows")
