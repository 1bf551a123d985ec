"""Whose turn it is where trainer ranks and engines share devices (colocate=true).

One role at a time holds the devices' memory: who gives it back answers when that is done, and only
then the other is ordered to take it. Ranks begin as the trainer's turn: it loads its model on an
empty device, and an engine is started by its first turn. Left out: how memory is given back
(rose/trainer/offload.py, rose/engine/activation.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rose import protocol as p
from rose.config import Config
from rose.observe.recorder import NullRecorder

ANSWER_S = 60.0  # for a message to get through, beside what the work itself may take


class DeviceTurns:
    """`ranks`: role -> index -> rank. `until(ready, deadline_s, what)` waits, see
    `Changes.until`."""

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
        self.holder: p.Role | None = p.Role.TRAINER  # None: nobody, or an order broke off
        self._turn = 0
        self._answers: dict[int, p.DeviceChanged] = {}
        self._figures: dict[str, float] = {}  # since `take_figures`

    async def to(self, role: p.Role) -> None:
        """The devices are `role`'s when this returns, and nobody else's before. Broken off by a
        cancellation it can be asked again, for either role. Raises `RunFailed` with the ranks that
        did not answer."""
        if not self.shared or self.holder is role:
            return
        other = p.Role.ROLLOUT if role is p.Role.TRAINER else p.Role.TRAINER
        self.holder = None
        await self._order(other, p.Sleep, "give their devices' memory back")
        await self._order(role, p.Wake, "take their devices' memory")
        self.holder = role
        self._recorder.instant("device_turn", holder=role.value)

    def received(self, answer: p.DeviceChanged) -> None:
        """Answers to orders that were broken off are late."""
        if answer.turn == self._turn:
            self._answers[answer.rank] = answer

    def take_figures(self) -> dict[str, float]:
        """For the step's row: seconds that the orders took, and the least memory that a rank of
        each role moved and had free afterwards; empty unless devices are shared."""
        taken, self._figures = self._figures, {}
        return taken

    async def _order(self, role: p.Role, order: type[p.Sleep] | type[p.Wake], what: str) -> None:
        ranks = self._asked(role, order)
        if not ranks:
            return
        self._turn += 1
        self._answers = {}
        name = order.__name__.lower()
        with self._recorder.timed(f"device_{name}", role=role.value):
            for rank in ranks.values():
                self._send(rank, order(self._turn))
            await self._until(
                lambda: len(self._answers) == len(ranks),
                self._deadline_s(role),
                lambda: (
                    f"{role.value} ranks to {what}: no `DeviceChanged` of "
                    + ", ".join(str(i) for i, rank in ranks.items() if rank not in self._answers)
                ),
            )
        self._count(role, name)

    def _asked(self, role: p.Role, order: type[p.Sleep] | type[p.Wake]) -> dict[int, int]:
        """Index -> rank of those that get the order."""
        return self._ranks[role]

    def _deadline_s(self, role: p.Role) -> float:
        """An engine may have to be started, and takes new weights in its turn."""
        c = self._config
        if role is p.Role.TRAINER:
            return c.trainer.step_timeout_s + ANSWER_S
        return c.rollout.engine_start_timeout_s + c.transfer.load_timeout_s + ANSWER_S

    def _count(self, role: p.Role, name: str) -> None:
        found = list(self._answers.values())
        add = self._figures
        add[f"seconds_{name}"] = add.get(f"seconds_{name}", 0.0) + max(a.seconds for a in found)
        add[f"{role.value}_{name}_gib"] = min(a.moved_gib for a in found)
        add[f"{role.value}_{name}_free_gib"] = min(a.free_gib for a in found)
