"""Decides which role holds the devices that trainer ranks and engines share (colocate=true).

`Devices` is also the base class of a part's `HybridDevices` (rose/parts/hybrid). The step loop
calls the methods of both at the same points. Without shared devices `Devices` gives no orders.

One role at a time holds the devices' memory. The ranks that have to release it answer when they
have done so. Only then the other role is ordered to take it. The trainer holds the devices at the
start: it loads its model on an empty device, and the first order to wake starts an engine.
rose/trainer/offload.py and rose/engine/activation.py release and take the memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rose import protocol as p
from rose.config import Config
from rose.observe.recorder import NullRecorder
from rose.scheduler import events as ev

ANSWER_S = 60.0  # seconds for a message to arrive, in addition to the time of the work itself


class Devices:
    """Moves the devices from one role to the other. `ranks` maps role -> index -> rank, `send`
    takes (rank, message), and `until` waits like `Changes.until`."""

    def __init__(
        self,
        config: Config,
        ranks: dict[p.Role, dict[int, int]],
        send: Callable[[int, p.Message], None],
        until: Callable[..., Awaitable[None]],
        recorder: NullRecorder,
    ) -> None:
        self.shared = config.shares_devices or config.hybrids > 0
        self._config = config
        self._ranks = ranks
        self._send = send
        self._until = until
        self._recorder = recorder
        self.holder: p.Role | None = p.Role.TRAINER  # None during a move, or after a cancelled one
        self._order_number = 0
        self._answers: dict[int, p.DeviceChanged] = {}  # rank -> answer to the last order
        self._figures: dict[str, float] = {}  # collected since the last `row`

    # ----------------------------------------------------------------- for the step loop

    def step_fields(self) -> dict[str, Any]:
        """Return the fields of `StepBegun` that depend on how devices are divided."""
        return {}

    def rollout_began(self) -> None:
        """Begin to move the devices for a rollout phase whose batch isn't complete yet."""

    async def before_train(self, rollout_s: float) -> None:
        """Move the devices to the trainer after a rollout phase of `rollout_s` seconds."""
        await self.to(p.Role.TRAINER)

    async def published(self) -> None:
        """Move the devices to the engines after a version was published. An engine that wakes
        loads the weights before it has a KV cache."""
        await self.to(p.Role.ROLLOUT)

    def end_moves(self) -> None:
        """Note that the run ends, so that the scheduler moves devices no more."""

    async def before_save(self) -> None:
        """Wake a trainer that sleeps, so that it can save the run's last step."""
        if self._config.trainer_sleeps:
            await self.to(p.Role.TRAINER)

    def row(self, times: dict[str, float], at: float) -> dict[str, float]:
        """Return values for the row of a step that ended at `at`, and reset them. `times` are the
        seconds of the step's phases.

        The values are the seconds that orders took and, per role and order, the least memory in GiB
        that a rank moved and had free afterwards.
        """
        taken, self._figures = self._figures, {}
        return taken

    def handle(self, message: p.Message) -> bool:
        """Handle a message about devices; return False for any other."""
        if isinstance(message, p.DeviceChanged):
            self.received(message)
            return True
        return False

    def act(self, action: ev.Action) -> None:
        """Carry out an action of the scheduler about devices."""

    def engine_changed(self) -> None:
        """Note that an engine has come up or died."""

    def cancel(self) -> None:
        """Cancel a move, because the run has ended."""

    # ----------------------------------------------------------------- moves

    async def to(self, role: p.Role) -> None:
        """Move the devices to `role`, which holds them when this returns.

        After a cancellation it can be called again, for either role. Raises `RunFailed` with the
        ranks that did not answer.
        """
        if not self.shared or self.holder is role:
            return
        other = p.Role.ROLLOUT if role is p.Role.TRAINER else p.Role.TRAINER
        self.holder = None
        await self._order(other, p.Sleep, "release their devices' memory")
        await self._order(role, p.Wake, "take their devices' memory")
        self.holder = role
        self._recorder.instant("device_turn", holder=role.value)

    def received(self, answer: p.DeviceChanged) -> None:
        """Note an answer to the last order; answers to cancelled orders are ignored."""
        if answer.turn == self._order_number:
            self._answers[answer.rank] = answer

    async def _order(self, role: p.Role, order: type[p.Sleep] | type[p.Wake], what: str) -> None:
        """Send an order to the role's ranks and wait until all have answered."""
        ranks = self._recipients(role, order)
        if not ranks:
            return
        self._order_number += 1
        self._answers = {}
        name = order.__name__.lower()
        with self._recorder.timed(f"device_{name}", role=role.value):
            for rank in ranks.values():
                self._send(rank, order(self._order_number))
            await self._until(
                lambda: len(self._answers) == len(ranks),
                self._deadline_s(role),
                lambda: (
                    f"{role.value} ranks to {what}: no `DeviceChanged` of "
                    + ", ".join(str(i) for i, rank in ranks.items() if rank not in self._answers)
                ),
            )
        self._record_order(role, name)

    def _recipients(self, role: p.Role, order: type[p.Sleep] | type[p.Wake]) -> dict[int, int]:
        """Return index -> rank of the ranks that get the order."""
        return self._ranks[role]

    def _deadline_s(self, role: p.Role) -> float:
        """Return the deadline of an order. An engine may have to start and to load weights."""
        c = self._config
        if role is p.Role.TRAINER:
            return c.trainer.step_timeout_s + ANSWER_S
        return c.rollout.engine_start_timeout_s + c.transfer.load_timeout_s + ANSWER_S

    def _record_order(self, role: p.Role, name: str) -> None:
        """Add the figures of the ranks' answers to an order to the step's row."""
        answers, row = list(self._answers.values()), self._figures
        row[f"seconds_{name}"] = row.get(f"seconds_{name}", 0.0) + max(a.seconds for a in answers)
        row[f"{role.value}_{name}_gib"] = min(a.moved_gib for a in answers)
        row[f"{role.value}_{name}_free_gib"] = min(a.free_gib for a in answers)
