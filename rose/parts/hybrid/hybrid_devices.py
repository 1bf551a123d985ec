"""Moves the trainer's devices between the trainer and the hybrid engines on them (rollout.hybrid).

    StepBegun ... UseWorker  -> trainer sleeps, engines wake   | during the rollouts, without a wait
    GroupFinished ... RestWorker -> engines sleep, trainer wakes
    a batch is complete -> the step loop waits for the second move, and counts how long

The scheduler decides when to move. All hybrid engines wake and sleep together, because the trainer
does. They are awake while the scheduler uses any of them. An engine that is down starts only if it
has enough time (hybrid_starts.py). On CPUs, where memory has room for both, the trainer gets no
orders.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from rose import protocol as p
from rose.config import Config
from rose.coordinator.shared_devices import Devices
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes, RunFailed
from rose.launch.layout import hybrid_ranks
from rose.observe.recorder import NullRecorder
from rose.parts.hybrid.hybrid_starts import HybridStarts
from rose.scheduler import events as ev


class HybridDevices(Devices):
    """`Devices` for the trainer's ranks and the hybrid engines. `begin` moves the devices without
    waiting. `on_fault` gets (what, detail)."""

    def __init__(
        self,
        config: Config,
        ranks: dict[p.Role, dict[int, int]],
        send: Callable[[int, p.Message], None],
        recorder: NullRecorder,
        hub: TurnHub,
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._changes = Changes(lambda what: None)  # moves are not displayed
        sides = {
            p.Role.TRAINER: ranks[p.Role.TRAINER] if config.trainer_sleeps else {},
            p.Role.ROLLOUT: hybrid_ranks(config),
        }
        super().__init__(config, sides, send, self._changes.until, recorder)
        self._hub = hub
        if not config.trainer_sleeps:
            self.holder = p.Role.ROLLOUT  # Engines start awake beside the trainer.
        names = {rank: f"rollout-{index}" for index, rank in hybrid_ranks(config).items()}
        self.starts = HybridStarts(names, hub.workers.hybrids_up, config.trainer_sleeps, on_fault)
        self._wanted = self.holder  # role of the last move that began
        self._moving: asyncio.Task | None = None
        self._waits = 0  # calls of `to` that have not returned
        self._closed = False
        self._waited_s = 0.0  # seconds that the step loop waited since the last `row`
        self._move_began = 0.0  # wall-clock seconds
        self._delay = 0.0  # `StepBegun.hybrid_delay` of the next step, see `row`

    def step_fields(self) -> dict[str, Any]:
        """Return the hybrid engines' field of `StepBegun`."""
        return {"hybrid_delay": self._delay}

    def rollout_began(self) -> None:
        """Wake the engines in two cases: the scheduler uses one of them, or an engine that is down
        has enough time to start and the scheduler would use it then."""
        if self._hub.workers.uses_hybrids or (
            self.starts.any_worth and self._hub.scheduler.rolls_hybrids()
        ):
            self.begin(p.Role.ROLLOUT)

    async def before_train(self, rollout_s: float) -> None:
        """Move the devices to the trainer, and note the rollout phase's length."""
        await super().before_train(rollout_s)
        self.starts.rolled_out(rollout_s)

    async def published(self) -> None:
        """Leave the devices with the trainer until the scheduler uses the engines."""

    def act(self, action: ev.Action) -> None:
        """Begin a move if the scheduler starts or stops using hybrid engines."""
        if isinstance(action, ev.UseWorker | ev.RestWorker):
            used = self._hub.workers.uses_hybrids
            self.begin(p.Role.ROLLOUT if used else p.Role.TRAINER)

    def begin(self, role: p.Role) -> None:
        """Begin to move the devices to `role`, and cancel a move to the other role. Do nothing
        while `to` waits, or once the run ends. The scheduler repeats its order in the next step."""
        if not (self._waits or self._closed):
            self._begin(role)

    def _begin(self, role: p.Role) -> None:
        """Begin to move the devices to `role`, unless the last move was to it."""
        if role is not self._wanted:
            self._wanted = role
            self._moving = asyncio.create_task(self._move(self._moving, role))

    async def to(self, role: p.Role) -> None:
        """Move the devices to `role` and wait for it. Raises what `Devices.to` raises, also
        for a move that `begin` started, and `RunFailed` if another task cancels the move."""
        began = time.time()
        self._begin(role)
        if (moving := self._moving) is not None:
            self._waits += 1
            try:
                await asyncio.wait({moving})
            finally:
                self._waits -= 1
            if moving.cancelled():
                raise RunFailed(f"the devices' move to {role.value} was cancelled")
            moving.result()
        if role is p.Role.TRAINER:
            self._waited_s += time.time() - began

    def received(self, answer: p.DeviceChanged) -> None:
        super().received(answer)
        self._changes.set()

    def engine_changed(self) -> None:
        """Note in `starts` which engines have come up or died."""
        self.starts.update(time.time())

    def end_moves(self) -> None:
        """Begin no further moves for the scheduler."""
        self._closed = True

    async def before_save(self) -> None:
        self.end_moves()
        await super().before_save()

    def cancel(self) -> None:
        """Begin no further moves, and cancel the current one."""
        self._closed = True
        if self._moving is not None:
            self._moving.cancel()

    def row(self, times: dict[str, float], at: float) -> dict[str, float]:
        """Return the values of `Devices.row` and those of the hybrid engines, among them
        - `hybrid_idle_used`: the share of the trainer's time without training in which engines on
          its devices had turns;
        - `device_seconds_hybrid`: the seconds in which these engines had turns, summed over
          devices;
        - `hybrid_delay`: the share of the step for which the trainer waited for its devices."""
        c, waited_s, self._waited_s = self._config, self._waited_s, 0.0
        workers = [worker for _, worker in self._hub.workers.of("hybrid")]
        step_s = max(sum(times.values()), 1e-9)
        idle_s = max(step_s - times["train"] + waited_s, 1e-9)
        delay, cancelled = waited_s / step_s, self.starts.take_cancelled()
        # The scheduler can't avoid the wait for a cancelled start by an earlier move.
        self._delay = 0.0 if cancelled else delay
        given_s = sum(w.busy_s(at) for w in workers) * c.rollout.tensor_parallel
        return super().row(times, at) | {
            "hybrid_idle_used": given_s / c.trainer.ranks / idle_s,
            "device_seconds_hybrid": given_s,
            "hybrid_token_share": sum(w.tokens for w in workers)
            / max(self._hub.workers.step_tokens, 1),
            "hybrid_delay": delay,
            "seconds_hybrid_delay": waited_s,
            "starts_broken_off": cancelled,
        }

    async def _move(self, before: asyncio.Task | None, role: p.Role) -> None:
        """Cancel the move `before`, then move the devices to `role`."""
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
            self.starts.devices_released()

    def _recipients(self, role: p.Role, order: type[p.Sleep] | type[p.Wake]) -> dict[int, int]:
        """Return the ranks that get the order, and note it in `starts`. An engine that is down, and
        whose last start was cancelled, wakes only if it is predicted to have time to start."""
        ranks = super()._recipients(role, order)
        if role is p.Role.ROLLOUT and order is p.Sleep:
            self.starts.sleep_ordered(time.time())
        elif role is p.Role.ROLLOUT:
            ranks = {index: rank for index, rank in ranks.items() if self.starts.worth(rank)}
            self.starts.wake_ordered(ranks.values(), self._move_began)
        return ranks
