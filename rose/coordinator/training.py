"""Gives the trainer ranks a step's groups: all at once, or with `trainer.stream` those that are
certain to be in the batch while others still run.

Whenever every rank has done its part of what was sent, groups that have become certain since then
follow as one round, planned over the ranks like a batch. So the trainer has work as long as there
is any, and rounds grow while it is the slower side. What is left when the batch is complete
is the last round; only then anything is applied (rose/trainer/growing.py). Left out: waiting for
fuller micro-batches, whose tokens would then be computed when everybody waits for them.

Where replicas take a part of the batch (rose/coordinator/replicas.py) the ranks' own part is a
round ahead, too. The last has what replicas failed to compute, and names the gradients to be added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rose import protocol as p
from rose.config import Config
from rose.coordinator import replay
from rose.coordinator.waiting import RunFailed
from rose.observe.recorder import NullRecorder
from rose.trainer import algorithms, segments
from rose.trainer.batching import Plan, plan_batch, train_messages

Group = list[p.Trajectory]
# Micro-batches of a rank in a round, about: a stop saves the last step, and waits for the round
# before. Smaller rounds would fill their micro-batches less. A round is one group at least, however
# large.
ROUND = 4


class Training:
    """`ranks`: the trainer's by index, complete before the first group."""

    def __init__(
        self,
        config: Config,
        ranks: dict[int, int],
        send: Callable[[int, p.Message], None],
        recorder: NullRecorder,
    ) -> None:
        self._config, self._ranks, self._send, self._recorder = config, ranks, send, recorder
        # of prefix trees, once the trainer reports that its model can have some
        self.costs: p.Costs | None = None
        algorithm = algorithms.build(config.algorithm.name, config.algorithm.args)
        # whether what trajectories share is trained in the first of them alone
        self._once: bool = getattr(algorithm, "trains_segments", False)
        self._stopping = False
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self._step = step
        self._sent: dict[str, Group] = {}  # in order
        self._samples = 0  # of these
        self._waiting: dict[str, Group] = {}  # certain, and not sent
        self._at_work: set[int] = set()  # ranks with a round whose end is not known
        self._since: float | None = None  # when that was sent, until the batch is complete
        self._hidden_s = 0.0

    def add(self, name: str, group: Group) -> None:
        """It will be one of the step's groups in any case."""
        self._waiting[name] = group
        self._go_on()

    def stop(self) -> None:
        """The run ends: no further round is ahead of what the ranks are told now."""
        self._stopping = True

    def received(self, message: p.TrainedAhead) -> None:
        if message.step == self._step:
            self._at_work.discard(message.index)
            if not self._at_work:
                self._count()
                self._go_on()

    def complete(self, step: int, groups: list[Group]) -> None:
        """Send what is left of the step's groups: the ranks apply the step. Raises `RunFailed`
        where one that was sent isn't among them; nothing of the step is applied then."""
        if self._step != step:  # no step has begun where the batch is a replayed one
            self.begin_step(step)
        self._count()
        self._waiting.clear()
        left = {group[0].group: group for group in groups}
        for name in self._sent:
            if left.pop(name, None) is None:
                raise RunFailed(
                    f"group {name} was trained ahead for step {step}, whose batch is without it; "
                    "set trainer.stream=false"
                )
        self._round(left, more=False)

    def share(self, step: int, groups: list[Group], replicas: int) -> list[list[p.Message]]:
        """As `complete` of a whole batch, of which each of `replicas` gets a part: the messages for
        each, none where its part is empty. Nothing is applied before `finish`."""
        self.begin_step(step)
        self._take({group[0].group: group for group in groups})
        plan, trees = self._planned(range(self._samples), True, replicas)
        count = self._config.trainer.replicas
        self._at_work = set(self._ranks)
        self._send_round(plan[:count], trees, True)
        return [
            self._messages(own, trees, True) if any(map(any, own)) else [] for own in plan[count:]
        ]

    @property
    def ahead(self) -> bool:
        """Whether every rank has done what it was sent."""
        return not self._at_work

    def finish(self, rows: list[int], sums: list[p.GradientSum]) -> None:
        """The last round of a batch that was shared: `rows` that nobody has computed, and the
        gradients of the others."""
        if rows:
            plan, trees = self._planned(rows, True)
        else:
            plan, trees = [[[[]]]] * self._config.trainer.replicas, False
        self._send_round(plan, trees, False, sums)

    def tokens(self, rows: Sequence[int] | None = None) -> int:
        """Of these rows of the step, or of all."""
        chosen = self._rows if rows is None else [self._rows[row] for row in rows]
        return sum(len(row.mask) for row in chosen)

    def take_figures(self, train_s: float) -> dict[str, float]:
        """For the step's row, empty without `trainer.stream`. `stream_hidden`: of the time that the
        trainer worked on the step, the share before the batch was complete; `train_s` is the
        rest."""
        if not self._config.trainer.stream:
            return {}
        hidden_s, self._hidden_s = self._hidden_s, 0.0
        return {
            "stream_hidden": hidden_s / max(hidden_s + train_s, 1e-9),
            "seconds_ahead": hidden_s,
        }

    def _count(self) -> None:
        if self._since is not None:
            now = time.time()
            self._hidden_s += now - self._since
            self._recorder.span("train_ahead", self._since, now, step=self._step)
            self._since = None

    def _go_on(self) -> None:
        if self._waiting and not self._at_work and not self._stopping:
            self._since, self._at_work = time.time(), set(self._ranks)
            self._round(self._next(), more=True)

    def _next(self) -> dict[str, Group]:
        """Of the groups that wait, those of a round: one at least."""
        c, taken, tokens = self._config.trainer, {}, 0
        for name, group in self._waiting.items():
            if taken and tokens >= ROUND * c.replicas * c.micro_batch_tokens:
                break
            taken[name] = group
            tokens += sum(len(sample.mask) for t in group for sample in t.samples())
        for name in taken:
            del self._waiting[name]
        return taken

    def _round(self, groups: dict[str, Group], more: bool) -> None:
        part = more or bool(self._sent)
        first = self._samples
        self._take(groups)
        plan, trees = self._planned(range(first, self._samples), part)
        self._send_round(plan, trees, more)

    def _take(self, groups: dict[str, Group]) -> None:
        """They are of the step."""
        self._sent |= groups
        self._summary = replay.summarise(list(self._sent.values()), self._config)
        shared = self._summary.segments if self._once else []
        trajectories = [t for group in self._sent.values() for t in group]
        found = segments.samples(trajectories, shared)
        self._rows, self._owners = map(list, zip(*found, strict=True))
        self._samples = len(self._rows)

    def _planned(self, rows: Sequence[int], part: bool, replicas: int = 0) -> tuple[Plan, bool]:
        """Of these rows over the ranks, and so many replicas behind them."""
        c = self._config.trainer
        plan, trees = plan_batch(
            [p.unpack_tokens(self._rows[row].tokens) for row in rows],
            c.replicas + replicas,
            c.micro_batch_tokens,
            c.updates_per_step,
            self.costs,
            part,
        )
        numbered = [
            [[[rows[at] for at in batch] for batch in update] for update in own] for own in plan
        ]
        return numbered, trees

    def _messages(
        self,
        own: list[list[list[int]]],
        trees: bool,
        more: bool,
        sums: Sequence[p.GradientSum] = (),
    ) -> list[p.Message]:
        batch = (self._summary, own, trees, self._rows, self._owners)
        return train_messages(self._step, *batch, more, sums)

    def _send_round(
        self, plan: Plan, trees: bool, more: bool, sums: Sequence[p.GradientSum] = ()
    ) -> None:
        parts = self._config.trainer.sequence_parallel
        for index, own in enumerate(plan):
            messages = self._messages(own, trees, more, sums)
            for rank in range(index * parts, (index + 1) * parts):
                for message in messages:
                    self._send(self._ranks[rank], message)
