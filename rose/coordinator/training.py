"""Gives the trainer ranks a step's groups: all at once, or with `trainer.stream` those that are
certain to be in the batch while others still run.

Whenever every rank has done its part of what was sent, groups that have become certain since then
follow as one round, planned over the ranks like a batch. So the trainer has work as long as there
is any, and rounds grow while it is the slower side. What is left when the batch is complete
is the last round; only then anything is applied (rose/trainer/growing.py). Left out: waiting for
fuller micro-batches, whose tokens would then be computed when everybody waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rose import protocol as p
from rose.config import Config
from rose.coordinator import replay
from rose.coordinator.waiting import RunFailed
from rose.observe.recorder import NullRecorder
from rose.trainer import algorithms, segments
from rose.trainer.batching import plan_batch, train_messages

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
        self._sent |= groups
        summary = replay.summarise(list(self._sent.values()))
        shared = summary.segments if self._once else []
        trajectories = [t for group in self._sent.values() for t in group]
        samples, owners = map(list, zip(*segments.samples(trajectories, shared), strict=True))
        first, self._samples = self._samples, len(samples)
        c = self._config.trainer
        plan, trees = plan_batch(
            [p.unpack_tokens(s.tokens) for s in samples[first:]],
            c.replicas,
            c.micro_batch_tokens,
            c.updates_per_step,
            self.costs,
            part,
        )
        for index, own in enumerate(plan):
            rows = [[[first + row for row in batch] for batch in update] for update in own]
            messages = train_messages(self._step, summary, rows, trees, samples, owners, more)
            for rank in range(index * c.sequence_parallel, (index + 1) * c.sequence_parallel):
                for message in messages:
                    self._send(self._ranks[rank], message)
