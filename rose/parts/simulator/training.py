"""The training steps of a simulated run.

As in rose.coordinator.coordinator, a step begins, the trainer trains its batch and publishes a
version, the dedicated workers load it, and the next step begins.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rose.parts.simulator import result, spec
from rose.parts.simulator.episodes import Group, Groups
from rose.parts.simulator.loop import Loop
from rose.parts.simulator.workers import Workers
from rose.scheduler import events as ev


class Training:
    """The training of a run, step by step."""

    def __init__(
        self,
        what: spec.Spec,
        loop: Loop,
        groups: Groups,
        workers: Workers,
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._spec, self._loop, self._groups = what, loop, groups
        self._workers, self._feed = workers, feed
        self.steps: list[result.Step] = []  # steps that ended
        self.version = 0  # newest published version
        self._began = 0.0
        # (step, begin of training, its groups) while a batch is in training
        self._batch: tuple[int, float, list[Group]] | None = None
        # Streamed training: groups that are certain to be in the step's batch are trained in
        # rounds, ahead of the batch.
        self._waiting: list[Group] = []  # groups of no round yet
        self._ahead: set[str] = set()  # groups of the step's rounds
        self._free_at = 0.0  # end of the current round
        self._ahead_s = 0.0  # seconds of the step's rounds
        self._trained_at = self._published_at = 0.0
        self._syncing = False  # a published version is not yet on all dedicated and hybrid workers

    def begin_step(self, step: int, _ticket: int) -> None:
        self._began = self._loop.now
        self._workers.step_begins()
        self._waiting.clear()
        self._ahead.clear()
        self._ahead_s = 0.0
        stream, batch = self._spec.stream, self._spec.batch
        wanted = {"groups": batch.groups, "group_size": batch.group_size}
        self._feed(ev.StepBegun(at=self._loop.now, step=step, stream=stream, **wanted))

    def train_group(self, action: ev.TrainGroup) -> None:
        """Train a group ahead of the step's batch, in the next round."""
        self._waiting.append(self._groups.finished[action.group])
        if self._loop.now >= self._free_at:
            self._next_round(None, 0)

    def _next_round(self, _what: None, _ticket: int) -> None:
        """Train all waiting groups in one round. (A live run limits the size of a round.)"""
        if not self._waiting or self._batch is not None:
            return
        groups, self._waiting = self._waiting, []
        seconds = self._computing_s(groups)
        self._ahead.update(group.name for group in groups)
        self._ahead_s += seconds
        self._free_at = self._loop.now + seconds
        self._loop.at(self._free_at, self._next_round, None)

    def start(self, action: ev.StartTraining) -> None:
        """Train the step's batch after the current round, without the groups trained ahead."""
        now = self._loop.now
        groups = [self._groups.finished.pop(name) for name in action.groups]
        self._batch = action.step, now, groups
        running_s = max(0.0, self._free_at - now)
        self._ahead_s -= running_s
        left = [group for group in groups if group.name not in self._ahead]
        seconds = running_s + self._spec.trainer.step_s + self._computing_s(left)
        seconds += self._workers.to_training(seconds)
        self._loop.at(now + seconds, self._trained, None)

    def _computing_s(self, groups: list[Group]) -> float:
        """Seconds of forward and backward passes, as if all micro-batches were full."""
        trainer = self._spec.trainer
        tokens = sum(group.context for group in groups)
        seconds = trainer.token_s * tokens
        if trainer.gpus:
            pairs = sum(group.pairs for group in groups)
            flops = tokens * trainer.flops_per_token + pairs * trainer.flops_per_pair
            seconds += flops / (self._training_gpus() * trainer.gpu.flops * trainer.mfu)
        return seconds

    def _training_gpus(self) -> int:
        """Number of the trainer's GPUs that train. The others run hybrid workers meanwhile."""
        left = self._spec.trainer.gpus - self._workers.gpus_rolling_out()
        if left <= 0:
            raise RuntimeError(
                f"at {self._loop.now:.1f} s of simulated time all {self._spec.trainer.gpus} GPUs "
                "of the trainer roll out; which of them do is the provisioning policy's"
            )
        return left

    def _trained(self, _what: None, _ticket: int) -> None:
        self._trained_at = self._loop.now
        self._loop.at(self._loop.now + self._spec.trainer.publish_s, self._published, None)

    def _published(self, _what: None, _ticket: int) -> None:
        self._published_at = self._loop.now
        self.publish(self.version + 1)
        self._workers.to_rollout()
        self._syncing = True
        self.end_step_if_synced()

    def publish(self, version: int) -> None:
        self.version = self._workers.version = version
        self._feed(ev.VersionPublished(at=self._loop.now, version=version))

    def end_step_if_synced(self) -> None:
        """End the step and begin the next, if all dedicated and hybrid workers hold it."""
        if not self._syncing or self._workers.waited_for:
            return
        step, training_at, groups = self._batch
        self._batch, self._syncing = None, False
        rewards = [reward for group in groups for reward in group.rewards]
        staleness = tuple(self.version - 1 - group.version for group in groups)
        self.steps.append(
            result.Step(
                step,
                self._began,
                training_at,
                self._trained_at,
                self._published_at,
                self._loop.now,
                sum(group.tokens for group in groups),
                sum(group.context for group in groups),
                len(rewards),
                float(np.mean(rewards)) if rewards else float("nan"),
                staleness,
                self._ahead_s,
            )
        )
        if len(self.steps) < self._spec.steps:
            self.begin_step(step + 1, 0)
        else:
            self._loop.over = True
