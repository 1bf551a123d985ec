"""A training step, as rose/trainer/trainer.py describes it: compute the gradient, apply it, and
collect statistics of the step's tokens."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from rose import protocol
from rose.config import Config
from rose.observe.recorder import NullRecorder
from rose.trainer.algorithms.base import Algorithm, Summary, TokenBatch
from rose.trainer.collate import MicroBatch, collate
from rose.trainer.growing import Growing
from rose.trainer.importance import NO_BOUNDS, Bounds, importance_weights, mismatch
from rose.trainer.reference import penalty

PHASES = ("proximal", "forward_backward", "optimizer")
NEVER = 2**62  # number for "no micro-batch", larger than any micro-batch's


class NonFiniteGradient(ArithmeticError):
    """The gradient is infinite or NaN. Nothing was applied."""


class TrainingDiverged(ArithmeticError):
    """Loss or gradient is infinite or NaN. The weights are those of the last good update."""


class Trains(Protocol):
    """A trainer rank, as far as a step needs it."""

    config: Config
    device: torch.device
    recorder: NullRecorder
    algorithm: Algorithm
    engine: Any  # a `DeepSpeedEngine`


class Step:
    """A training step: `extend` it by each part of the batch, then `run_ahead` (last: `run`)."""

    def __init__(self, trainer: Trains, number: int):
        self.engine, self.algorithm, self.number = trainer.engine, trainer.algorithm, number
        self.device, self.recorder = trainer.device, trainer.recorder
        a = trainer.config.algorithm
        self.bounds = Bounds(a.importance_cap, a.importance_floor, a.importance_level)
        self.kl_coef, self.kl_correction = a.kl_coef, a.kl_correction
        self.growing = Growing(self.algorithm)
        self.updates: list[list[MicroBatch]] = []
        zero = torch.zeros((), device=self.device)
        self.sums: dict[str, Tensor] = defaultdict(zero.clone)  # no reference cycle with `self`
        self.ratio_max = torch.zeros((), device=self.device)
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def extend(
        self, step: protocol.TrainStep, trajectories: dict[int, protocol.Trajectory]
    ) -> None:
        """Take the summary of the batch so far (`step.summary`), and the rows to train now."""
        summary = Summary(
            torch.tensor(step.summary.rewards, dtype=torch.float64),
            torch.tensor(step.summary.groups),
            torch.tensor(step.summary.response_tokens),
            torch.tensor(step.summary.truncated),
            _padded(step.summary.turn_rewards, torch.float64, math.nan),
            _padded(step.summary.segments, torch.int64, -1),
            torch.tensor(step.summary.limits, dtype=torch.int64) if step.summary.limits else None,
        )
        # both (N,), or (N, turns) if the algorithm has values for each turn
        self.advantages, self.weights = self.growing.extend(summary)
        self.owners = torch.tensor(step.owners or range(len(summary.rewards)))  # (rows,) int64
        policy = self.engine.policy
        known = policy.vocabulary, step.trees, policy.replay
        self.updates = [
            [collate(rows, trajectories, *known) for rows in update]
            for update in step.micro_batches
        ]

    def run_ahead(self) -> None:
        """Add the gradient of the rows to train now, and apply nothing yet."""
        with self._phase("forward_backward"):
            for micro_batches in self.updates:
                self._accumulate(0, micro_batches, {}, more=True)

    def run(self, stepped: Callable[[], None] | None) -> dict[str, float]:
        """Run all updates and return metrics. The last `DeepSpeedEngine.update` gets `stepped`."""
        proximal = self._proximal()
        norms, lr = [], 0.0
        for number, micro_batches in enumerate(self.updates):
            with self._phase("forward_backward"):
                self._accumulate(number, micro_batches, proximal)
            with self._phase("optimizer"):
                norm, lr = self._apply(number, stepped if number == len(self.updates) - 1 else None)
            norms.append(norm)
        return {"grad_norm": sum(norms) / len(norms), "lr": lr} | self._reduced()

    def _proximal(self) -> dict[tuple[int, int], Tensor]:
        """Compute log-probabilities by the weights before the step: (update, micro-batch) -> (B,
        T). The first update is left out: its own forward passes run with these weights."""
        if not self.algorithm.recompute_proximal or len(self.updates) == 1:
            return {}
        with self._phase("proximal"), torch.no_grad():
            return {
                (u, m): self._forward(batch)[0]
                for u, update in enumerate(self.updates)
                if u
                for m, batch in enumerate(update)
            }

    def _accumulate(
        self,
        update: int,
        micro_batches: list[MicroBatch],
        proximal: dict[tuple[int, int], Tensor],
        more: bool = False,
    ) -> None:
        """Add the gradient of an update's micro-batches. With `more` a later call adds further
        ones. Raises `TrainingDiverged`, on every rank, if any rank's loss is not finite."""
        bad = torch.tensor(NEVER, device=self.device)
        for m, batch in enumerate(micro_batches):
            self.engine.begin_micro_batch(last=m == len(micro_batches) - 1 and not more)
            loss = self._loss(batch, proximal.get((update, m)))
            bad = torch.where(loss.detach().isfinite(), bad, bad.clamp(max=m))
            self.engine.backward(loss * len(self.updates))
            self.sums["loss"] += loss.detach()
        if (first := self.engine.first_bad(bad)) is not None:
            raise TrainingDiverged(
                f"step {self.number}, update {update}, micro-batch {first}: the loss is not "
                "finite; nothing of this update was applied"
            )

    def _loss(self, batch: MicroBatch, proximal: Tensor | None) -> Tensor:
        """Compute this micro-batch's part of the loss, and add its statistics to the sums."""
        logprobs, entropy = self._forward(batch)
        mask, behaviour = batch.mask.to(self.device), batch.behaviour.to(self.device)
        policy = logprobs.detach() if proximal is None else proximal
        proximal = policy if self.algorithm.recompute_proximal else behaviour
        advantages = self._values_of(self.advantages, batch)
        tokens = TokenBatch(logprobs, proximal, behaviour, advantages, mask)
        losses, statistics = self.algorithm.token_loss(tokens)  # (B, T)
        bounds = NO_BOUNDS if self.algorithm.corrects_mismatch else self.bounds
        importance = importance_weights(proximal, behaviour, mask, bounds)
        statistics |= {"entropy": entropy.detach(), "tokens": mask.sum()}
        if (replay := self.engine.policy.replay) is not None:
            statistics["routing_differs"] = replay.differs
        self._count(statistics, mismatch(policy, behaviour, mask, bounds))
        losses = importance * losses
        if self.kl_coef:
            losses = losses + self.kl_coef * self._penalty(logprobs, proximal, mask, batch)
        return (self._values_of(self.weights, batch).view(len(mask), -1) * losses).sum()

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.engine(batch.inputs, batch.targets, batch.mask, batch.tree, batch.experts)

    def _penalty(
        self, logprobs: Tensor, proximal: Tensor, mask: Tensor, batch: MicroBatch
    ) -> Tensor:
        """Compute the KL penalty to the reference, (B, T), and add it to the statistics."""
        frozen = self.engine.reference.logprobs(batch.inputs, batch.targets, batch.mask, batch.tree)
        kl = penalty(logprobs, frozen, mask, proximal if self.kl_correction else None)
        self.sums["reference_kl"] += kl.detach().sum()
        return kl

    def _values_of(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """Return the values of a micro-batch's rows. (N,) gives each row its trajectory's value,
        (B,). (N, turns) gives each token its turn's value, (B, T). A padding row gets 0."""
        if not len(batch.rows):
            return values.new_zeros(len(batch.inputs), device=self.device)
        own = values[self.owners[batch.rows]]
        return (own if own.dim() == 1 else own.gather(1, batch.turns)).to(self.device)

    def _count(self, statistics: dict[str, Tensor], gap: dict[str, Tensor]) -> None:
        """Add a micro-batch's statistics to the sums."""
        self.ratio_max = torch.maximum(self.ratio_max, gap["ratio_max"])
        named = {
            "mismatch_kl": gap["kl_k3"],
            "mismatch_abs": gap["abs_diff"],
            "importance_capped": gap["capped"],
        }
        for name, value in (statistics | named).items():
            self.sums[name] += value

    def _apply(self, update: int, stepped: Callable[[], None] | None) -> tuple[float, float]:
        """Apply an update's gradient. Returns (its norm, the learning rate)."""
        try:
            return self.engine.update(stepped, self.growing.scale)
        except NonFiniteGradient as error:
            raise TrainingDiverged(
                f"step {self.number}, update {update}, after its last micro-batch: {error}; "
                "nothing of this update was applied"
            ) from None

    def _reduced(self) -> dict[str, float]:
        """Combine the ranks: means over response tokens (loss: sum), the slowest rank's times."""
        names = sorted(self.sums)
        sums = torch.stack([self.sums[name] for name in names]).double()
        largest = [float(self.ratio_max), *self.seconds.values()]
        maxima = torch.tensor(largest, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        sums /= self.engine.settings.sequence_parallel  # number of ranks that counted the same rows
        torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX)
        ratio_max, *seconds = maxima.tolist()
        totals = dict(zip(names, sums.tolist(), strict=True))
        tokens = totals.pop("tokens")
        per_token = {
            name: value * self.growing.scale if name == "loss" else value / max(1, tokens)
            for name, value in totals.items()
        }
        times = {f"seconds_{phase}": s for phase, s in zip(self.seconds, seconds, strict=True)}
        return per_token | times | {"mismatch_max_ratio": ratio_max, "tokens": tokens}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.time()
        with self.recorder.timed(name, step=self.number):
            yield
        self.seconds[name] += time.time() - start


def _padded(of_turns: list[list[float]], dtype: torch.dtype, fill: float) -> Tensor | None:
    """Make a tensor (N, K) of N lists, padded with `fill`; None if all lists are empty."""
    if not any(of_turns):
        return None
    rows = [torch.tensor(each, dtype=dtype) for each in of_turns]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
