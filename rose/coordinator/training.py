"""Sends a step's groups to the trainer ranks: all at once, or with `trainer.stream` in rounds, each
with groups that are certain to be in the batch while others still run.

When every rank has computed its part of a round, the groups that became certain in the meantime
form the next round, which is planned over the ranks like a batch. So the trainer always has work if
there is any, and rounds grow while it is slower than the rollouts. When the batch is complete, its
remaining groups are the last round, and only then the update is applied (rose/trainer/growing.py).
A round does not wait for fuller micro-batches, because their tokens would then be computed after
the batch is complete, when the rollouts may wait for the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rose import protocol as p
from rose.config import Config
from rose.coordinator import replay
from rose.coordinator.waiting import Changes, RunFailed
from rose.observe.recorder import NullRecorder
from rose.trainer import algorithms, segments
from rose.trainer.batching import plan_batch, train_messages

Group = list[p.Trajectory]
# Bounds a round, which has one group at least, to about this many micro-batches of each rank. A run
# that stops has to wait for the current round before it can save. Smaller rounds would have emptier
# micro-batches.
MICRO_BATCHES_OF_ROUND = 4


class Training:
    """Plans and sends the rounds of each step, and awaits its end. `ranks` maps index -> rank of
    the trainer ranks and is complete before the first group; `send` takes (rank, message)."""

    def __init__(
        self,
        config: Config,
        ranks: dict[int, int],
        send: Callable[[int, p.Message], None],
        recorder: NullRecorder,
    ) -> None:
        self._config, self._ranks, self._send, self._recorder = config, ranks, send, recorder
        # costs of prefix trees, set when the trainer reports that its model supports them
        self.costs: p.Costs | None = None
        self.ready: dict[int, p.TrainerReady] = {}  # trainer rank's index -> its message
        self.done: dict[int, p.TrainDone] = {}  # trainer rank's index -> this step's result
        algorithm = algorithms.build(config.algorithm.name, config.algorithm.args)
        # True: a segment that several trajectories share is trained only in the first of them
        self._once: bool = getattr(algorithm, "trains_segments", False)
        self._stopping = False
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self._step = step
        self._sent: dict[str, Group] = {}  # groups in the order of their rows
        self._samples = 0  # number of samples (rows) of the groups sent
        self._waiting: dict[str, Group] = {}  # certain groups that are not sent yet
        self.working: set[int] = set()  # indices of ranks that have not reported the round's end
        self._since: float | None = None  # start of the round ahead that runs, if any
        self._hidden_s = 0.0  # seconds of rounds ahead, up to the batch's completion

    @property
    def whole(self) -> bool:
        """True if every trainer rank has loaded the model."""
        return len(self.ready) == self._config.trainer.ranks

    async def loaded(self, changes: Changes, step: int) -> None:
        """Wait until every trainer rank has loaded the model. Raises `RunFailed` if its weights
        aren't those of `step`."""
        c = self._config.trainer
        await changes.until(
            lambda: self.whole,
            self._config.cluster.start_timeout_s,
            lambda: f"trainer ranks to load the model: {len(self.ready)} of {c.ranks}",
        )
        first = self.ready[0]
        if first.step != step:
            raise RunFailed(
                f"the trainer resumed at step {first.step}, the coordinator at {step}; "
                "the checkpoint folder changed while the job started"
            )
        self.costs = first.costs if c.share_prefixes and not first.no_trees else None
        if c.share_prefixes and first.no_trees:
            print(
                f"trainer.share_prefixes has no effect on this model: {first.no_trees}", flush=True
            )

    async def trained(self, changes: Changes) -> dict[int, p.TrainDone]:
        """Wait for the end of the step; return the `TrainDone` of every rank by its index."""
        c = self._config.trainer
        await changes.until(
            lambda: len(self.done) == c.ranks,
            c.step_timeout_s,
            lambda: f"trainer ranks to finish step {self._step}: {len(self.done)} of {c.ranks}",
        )
        return dict(self.done)

    def handle(self, message: p.Message) -> bool:
        """Handle a message of a trainer rank; return False for any other."""
        match message:
            case p.TrainerReady():
                self.ready[message.index] = message
            case p.TrainedAhead():
                self.received(message)
            case p.TrainDone():
                self.done[message.index] = message
            case _:
                return False
        return True

    def add(self, name: str, group: Group) -> None:
        """Add a group that is certain to be in the step's batch."""
        self._waiting[name] = group
        self._start_round()

    def stop(self) -> None:
        """Send no further round ahead, because the run ends."""
        self._stopping = True

    def received(self, message: p.TrainedAhead) -> None:
        """Note that a rank has computed its part of the round; after the last rank's, send the next
        round."""
        if message.step == self._step:
            self.working.discard(message.index)
            if not self.working:
                self._end_round_ahead()
                self._start_round()

    def complete(self, step: int, groups: list[Group]) -> None:
        """Send the step's remaining groups as the last round, after which the ranks update. Raises
        `RunFailed`, before any update, if a group that was sent before isn't in `groups`."""
        if self._step != step:  # A replayed batch has no `begin_step`.
            self.begin_step(step)
        self._end_round_ahead()
        self._waiting.clear()
        remaining = {group[0].group: group for group in groups}
        for name in self._sent:
            if remaining.pop(name, None) is None:
                raise RunFailed(
                    f"group {name} was trained ahead for step {step}, whose batch is without it; "
                    "set trainer.stream=false"
                )
        self._send_groups(remaining, more=False)

    def take_figures(self, train_s: float) -> dict[str, float]:
        """Return values for the step's row; empty without `trainer.stream`.

        `stream_hidden` is the share of the trainer's work on the step that was done before the
        batch was complete. `train_s` are the seconds of its work after that.
        """
        if not self._config.trainer.stream:
            return {}
        hidden_s, self._hidden_s = self._hidden_s, 0.0
        return {
            "stream_hidden": hidden_s / max(hidden_s + train_s, 1e-9),
            "seconds_ahead": hidden_s,
        }

    def _end_round_ahead(self) -> None:
        """Add the seconds of the round that ran before the batch was complete, if one ran."""
        if self._since is not None:
            now = time.time()
            self._hidden_s += now - self._since
            self._recorder.span("train_ahead", self._since, now, step=self._step)
            self._since = None

    def _start_round(self) -> None:
        """Send the waiting groups as the next round ahead, if no round runs."""
        if self._waiting and not self.working and not self._stopping:
            self._since = time.time()
            self._send_groups(self._take_waiting(), more=True)

    def _take_waiting(self) -> dict[str, Group]:
        """Remove the groups of the next round from the waiting groups, and return them: at least
        one if any waits."""
        c, taken, tokens = self._config.trainer, {}, 0
        for name, group in self._waiting.items():
            if taken and tokens >= MICRO_BATCHES_OF_ROUND * c.replicas * c.micro_batch_tokens:
                break
            taken[name] = group
            tokens += sum(len(sample.mask) for t in group for sample in t.samples())
        for name in taken:
            del self._waiting[name]
        return taken

    def _send_groups(self, groups: dict[str, Group], more: bool) -> None:
        """Send these groups as a round, to each rank its part of their rows. With `more`, further
        rounds of the step follow."""
        part = more or bool(self._sent)
        self._sent |= groups
        summary = replay.summarise(list(self._sent.values()), self._config)
        shared = summary.segments if self._once else []
        trajectories = [t for group in self._sent.values() for t in group]
        samples, owners = map(list, zip(*segments.samples(trajectories, shared), strict=True))
        first, self._samples = self._samples, len(samples)
        c = self._config.trainer
        plan, trees = plan_batch(
            [p.unpack_tokens(sample.tokens) for sample in samples[first:]],
            c.replicas,
            c.micro_batch_tokens,
            c.updates_per_step,
            self.costs,
            part,
        )
        if more:
            self.working = set(self._ranks)
        for index, own in enumerate(plan):
            rows = [[[first + row for row in batch] for batch in update] for update in own]
            messages = train_messages(self._step, summary, rows, trees, samples, owners, more)
            for rank in range(index * c.sequence_parallel, (index + 1) * c.sequence_parallel):
                for message in messages:
                    self._send(self._ranks[rank], message)
