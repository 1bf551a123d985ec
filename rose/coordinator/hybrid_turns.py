"""Whose turn it is on the trainer's devices where hybrid engines are on some (rollout.hybrid).

    StepBegun ... UseWorker  -> trainer sleeps, engines wake   | beside the rollouts: nobody waits
    GroupFinished ... RestWorker -> engines sleep, trainer wakes
    a batch is complete -> the step loop waits for the latter, and counts how long

The scheduler decides when. All hybrid engines change sides together, as the trainer does: they are
awake while it uses any of them, but for one that would have to be started and hasn't the time
(rose/coordinator/hybrid_starts.py). On CPUs, where memory has room for both, the trainer is not
told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from rose import protocol as p
from rose.config import Config
from rose.coordinator.device_turns import DeviceTurns
from rose.coordinator.hybrid_starts import HybridStarts
from rose.coordinator.waiting import Changes, RunFailed
from rose.coordinator.worker import Worker
from rose.launch.layout import hybrid_ranks
from rose.observe.recorder import NullRecorder


class HybridTurns(DeviceTurns):
    """As `DeviceTurns` of the trainer's ranks and the hybrid engines; `begin` moves them without
    waiting. `up()`: ranks of the hybrid engines that are up; `on_fault` gets (what, detail)."""

    def __init__(
        self,
        config: Config,
        ranks: dict[p.Role, dict[int, int]],
        send: Callable[[int, p.Message], None],
        recorder: NullRecorder,
        up: Callable[[], Collection[int]],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._changes = Changes(lambda what: None)  # shown to nobody, as nobody waits
        sides = {
            p.Role.TRAINER: ranks[p.Role.TRAINER] if config.trainer_sleeps else {},
            p.Role.ROLLOUT: hybrid_ranks(config),
        }
        super().__init__(config, sides, send, self._changes.until, recorder)
        if not config.trainer_sleeps:
            self.holder = p.Role.ROLLOUT  # engines start beside the trainer, and are awake
        names = {rank: f"rollout-{index}" for index, rank in hybrid_ranks(config).items()}
        self.starts = HybridStarts(names, up, config.trainer_sleeps, on_fault)
        self._wanted = self.holder
        self._moving: asyncio.Task | None = None
        self._waits = 0  # calls of `to` that have not returned
        self._closed = False
        self._waited_s = 0.0  # since the last `figures`
        self._move_began = 0.0
        self.delay = 0.0  # for which the scheduler answers, of the step before: `StepBegun`'s

    def begin(self, role: p.Role) -> None:
        """Begin to move to `role`, unless that is done or under way; a move to the other role is
        broken off. Passed over while `to` waits, and after `close`: the next step begins with the
        turn that the scheduler wants then."""
        if not (self._waits or self._closed):
            self._begin(role)

    def _begin(self, role: p.Role) -> None:
        if role is not self._wanted:
            self._wanted = role
            self._moving = asyncio.create_task(self._move(self._moving, role))

    async def to(self, role: p.Role) -> None:
        """Raises as `DeviceTurns.to`, also for a move that nobody waited for, and `RunFailed` if
        the move is broken off: no cancellation but the caller's own."""
        began = time.time()
        self._begin(role)
        if (moving := self._moving) is not None:
            self._waits += 1
            try:
                await asyncio.wait({moving})
            finally:
                self._waits -= 1
            if moving.cancelled():
                raise RunFailed(f"the devices' move to {role.value} was broken off")
            moving.result()
        if role is p.Role.TRAINER:
            self._waited_s += time.time() - began

    def received(self, answer: p.DeviceChanged) -> None:
        super().received(answer)
        self._changes.set()

    def changed(self) -> None:
        """An engine has come up, or died."""
        self.starts.look(time.time())

    def close(self) -> None:
        """Only `to` moves devices from here on: the run ends."""
        self._closed = True

    def cancel(self) -> None:
        self.close()
        if self._moving is not None:
            self._moving.cancel()

    def figures(
        self, workers: list[Worker], times: dict[str, float], made: int, at: float
    ) -> dict[str, float]:
        """For the row of a step that ended at `at`, whose phases took `times` seconds and whose
        rollouts made `made` tokens; `workers` are the hybrid engines. `hybrid_idle_used`: of the
        time for which the trainer's devices had nothing to train, the share in which an engine had
        turns there; `device_seconds_hybrid`: the same, of all of them. `hybrid_delay`: of the step,
        the share for which the trainer waited for its devices."""
        c, waited_s, self._waited_s = self._config, self._waited_s, 0.0
        step_s = max(sum(times.values()), 1e-9)
        idle_s = max(step_s - times["train"] + waited_s, 1e-9)
        delay, broken_off = waited_s / step_s, self.starts.take_broken_off()
        self.delay = 0.0 if broken_off else delay  # an earlier tail would not have helped
        given_s = sum(w.busy_s(at) for w in workers) * c.rollout.tensor_parallel
        return {
            "hybrid_idle_used": given_s / c.trainer.ranks / idle_s,
            "device_seconds_hybrid": given_s,
            "hybrid_token_share": sum(w.tokens for w in workers) / max(made, 1),
            "hybrid_delay": delay,
            "seconds_hybrid_delay": waited_s,
            "starts_broken_off": broken_off,
        }

    async def _move(self, before: asyncio.Task | None, role: p.Role) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait({before})
            if not before.cancelled():
                before.result()
        self._move_began = time.time()
        await super().to(role)

    async def _order(self, role: p.Role, order: type[p.Sleep] | type[p.Wake], what: str) -> None:
        await super()._order(role, order, what)
        if (role, order) == (p.Role.ROLLOUT, p.Sleep):
            self.starts.asleep()

    def _asked(self, role: p.Role, order: type[p.Sleep] | type[p.Wake]) -> dict[int, int]:
        ranks = super()._asked(role, order)
        if role is p.Role.ROLLOUT and order is p.Sleep:
            self.starts.sleeps(time.time())
        elif role is p.Role.ROLLOUT:
            ranks = {index: rank for index, rank in ranks.items() if self.starts.worth(rank)}
            self.starts.wakes(ranks.values(), self._move_began)
        return ranks
