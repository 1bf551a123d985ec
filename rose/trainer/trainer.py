"""One trainer rank: a batch of trajectories in, a policy version out. Knows no algorithm by name
and no MPI.

A step is: advantages and weights from the batch's summary; the proximal log-probabilities that no
forward pass of the step will give anyway; then, per update, the loss of `algorithms.base`
micro-batch by micro-batch. With several updates per step each one's loss is scaled by their number,
so that it is of the size of the whole batch's and gradient clipping means the same. With
`trainer.stream` a step's groups come in rounds, of which only the last applies anything; how that
is the same is said in rose/trainer/growing.py.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rose import heap, protocol
from rose.comm.address import Place
from rose.config import Config, read_shape
from rose.memory import DeviceMemory
from rose.observe.recorder import NullRecorder
from rose.processes import usable_threads
from rose.trainer import adapter, kernels, watch
from rose.trainer.algorithms import build
from rose.trainer.algorithms.base import Summary, TokenBatch
from rose.trainer.batching import flops
from rose.trainer.collate import MicroBatch, collate
from rose.trainer.costs import measure
from rose.trainer.deepspeed_engine import (
    DTYPES,
    DeepSpeedEngine,
    NonFiniteGradient,
    check_second_copies,
    join_world,
    make_deterministic,
    use_device,
)
from rose.trainer.growing import Growing
from rose.trainer.importance import importance_weights, mismatch
from rose.trainer.offload import Offload
from rose.trainer.prefix_tree import obstacle
from rose.trainer.reference import penalty
from rose.trainer.shards import ShardReader
from rose.trainer.tree_attention import DENSE_TOKENS
from rose.transfer import codec
from rose.transfer.blocks import cut
from rose.transfer.publish import Published, Publisher
from rose.transfer.store import FORMAT, Plan

PHASES = ("proximal", "forward_backward", "optimizer")
NEVER = 2**62  # number of a micro-batch that does not exist


class TrainingDiverged(ArithmeticError):
    """Loss or gradient is infinite or NaN. The weights are those of the last good update."""


class Trainer:
    """Rank `index` of `world`; all must be made, and each method called, together.
    torch.distributed meets at `place`, where rank 0 listens."""

    def __init__(
        self,
        config: Config,
        index: int,
        world: int,
        place: Place,
        folder: Path | str,
        recorder: NullRecorder,
    ):
        self.config, self.index, self.world, self.recorder = config, index, world, recorder
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        if config.deterministic:
            make_deterministic()
        torch.manual_seed(config.seed)
        self.device = use_device(config.cluster.gpus, index)
        if self.device.type == "cpu":
            heap.keep_all()
        on_hosts = join_world(self.device, index, world, place, config.trainer.step_timeout_s)
        self._peers = _Peers(index, world, on_hosts)
        check_second_copies(config.trainer.hpz, place)
        self.algorithm = build(config.algorithm.name, config.algorithm.args)
        self.engine = DeepSpeedEngine(config.trainer, folder, self.device, place.neighbours)
        if config.algorithm.kl_coef:
            self.engine.hold_reference(folder)
        self._publisher: Publisher | None = None
        self._ahead: _Step | None = None  # whose gradient is not whole yet
        if config.trainer.compile or self.device.type == "cuda":  # flex attention is compiled there
            kernels.share_cores(place.neighbours)
        self.no_trees, self.costs = self._prepare_trees(folder)
        if config.trainer.compile:
            self._compile()

    def _prepare_trees(self, folder: Path | str) -> tuple[str, protocol.Costs | None]:
        """(why this model is not trained on prefix trees, "" if it can be; what decides where they
        are cheaper), on every rank alike. On GPUs the first is tried and the second measured,
        unless `deterministic`."""
        t, policy = self.config.trainer, self.engine.policy
        found = obstacle(policy.hf.config)
        if t.router_replay:  # what rows share was routed once for each of them
            found = "trainer.router_replay=true"
        if found or not t.share_prefixes:
            return found or "", None
        shape = read_shape(Path(folder))
        on_cpu = self.device.type == "cpu"
        if on_cpu and self.engine.shared is None:
            for model in self.engine.models():
                model.use_stretches()
            return "", flops(shape, sparse=True)
        without = policy.why_not_flex(self.device)
        flex = not self._peers.sum(int(bool(without)))
        if flex:
            for model in self.engine.models():
                model.use_flex()
        elif t.micro_batch_tokens > DENSE_TOKENS:
            return (
                f"trainer.micro_batch_tokens={t.micro_batch_tokens} is more than {DENSE_TOKENS}, "
                "above which a mask of all pairs takes too much memory; without it: "
                f"{without or 'another rank cannot'}"
            ), None
        if on_cpu or self.config.deterministic:
            return "", flops(shape, flex)
        sizes = (t.micro_batch_tokens, flex, t.gradient_checkpointing)
        costs = measure(shape, DTYPES[t.dtype], self.device, *sizes)
        print(
            f"trainer {self.index}: a layer takes {costs.token:.3g} s a token, {costs.causal:.3g} "
            "s a pair of tokens, "
            f"{costs.tree:.3g} s one in a prefix tree; {without or 'flex attention'}",
            flush=True,
        )
        return "", costs

    def _compile(self) -> None:
        t, policy = self.config.trainer, self.engine.policy
        again = self.algorithm.recompute_proximal and t.updates_per_step > 1
        kernels.compile_layers(policy)
        kernels.try_compiled(
            policy, self.device, t.share_prefixes and not self.no_trees, without_gradient=again
        )

    def train(
        self,
        step: protocol.TrainStep,
        trajectories: dict[int, protocol.Trajectory],
        publish_as: int | None = None,
    ) -> dict[str, float]:
        """Train on the rows of `step.micro_batches`; returns metrics of the whole batch, the same
        on every rank. A version to `publish` next is encoded from the moment at which this rank's
        optimizer has stepped.

        Raises `TrainingDiverged` on every rank, before anything of that update is applied, and
        `ValueError` for a trajectory that makes no sense.
        """
        with self.recorder.timed("train_step", step=step.step):
            stepped = None if publish_as is None else lambda: self._publisher.ahead(publish_as)
            current, self._ahead = self._ahead or _Step(self, step.step), None
            current.extend(step, trajectories)
            return current.run(stepped)

    def train_ahead(
        self, step: protocol.TrainStep, trajectories: dict[int, protocol.Trajectory]
    ) -> None:
        """Gradient of a part of the step's groups, kept until `train` gets the last of them; no
        weight changes before, and a rank that ends before leaves nothing. Raises as `train`."""
        with self.recorder.timed("train_ahead", step=step.step):
            self._ahead = self._ahead or _Step(self, step.step)
            self._ahead.extend(step, trajectories)
            self._ahead.run_ahead()

    def open_store(
        self, folder: Path, cuts: Callable[[str, tuple[int, ...]], tuple[list[int], list[int]]]
    ) -> None:
        """Versions go to this folder from now on; before `load`, while the weights are still the
        model folder's. `cuts(name, shape)`: rows and columns at which some server's part of a
        tensor begins or ends."""
        codec.compile_all()  # seconds to a minute, where it never ran before; else nothing
        c, dtype = self.config, DTYPES[self.config.model.dtype]
        weights, stage = self.engine.policy.named_weights(), c.trainer.zero_stage
        scales = adapter.scales(c.trainer.lora, weights) if c.trainer.lora else None
        shards = ShardReader(
            self.engine.engine, weights, stage, dtype, self.index, self.world, scales
        )
        at = {t.name: cuts(t.name, t.shape) for t in shards.tensors}
        blocks = cut(shards.tensors, at, shards.shards, self.world)
        base = None
        if c.trainer.lora:
            below, whole = self.engine.policy.base_weights(), self.engine.whole
            base = adapter.base_of(below, whole, dtype, cuts)
            self.engine.base = base.fingerprint
        self._publisher = Publisher(
            folder,
            Plan(FORMAT, "", self.world, shards.tensors, blocks, base),
            self._peers,
            shards.read,
            c.transfer.threads or c.trainer.threads or usable_threads(),
            c.transfer.full_every,
            c.transfer.keep_versions,
            c.trainer.step_timeout_s,
        )

    def publish(
        self, version: int, send: Callable[[str, memoryview], None] | None = None
    ) -> Published:
        """Write the weights, in model.dtype, as `version`; see `Publisher.publish`."""
        with self.recorder.timed("publish", version=version):
            return self._publisher.publish(version, send)

    def tidy(self) -> None:
        """While nobody waits for this rank: make the store short for late readers, and small."""
        with self.recorder.timed("tidy"):
            self._publisher.tidy()

    def save(self, folder: Path) -> None:
        """Checkpoint into an existing folder, with the hashes of the version that was published
        last; see `DeepSpeedEngine.save`."""
        with self.recorder.timed("save"):
            self._publisher.write_hashes(Path(folder))
            self.engine.save(Path(folder))

    def load(self, folder: Path) -> None:
        """Continue from `save`'s folder; in float32 with deterministic=true bit for bit."""
        with self.recorder.timed("load"):
            self.engine.load(Path(folder))

    def share_device(self, folder: Path) -> None:
        """The device will be shared; on a CPU states wait in a file of `folder`."""
        self._offload = Offload(self.device, folder, self.engine.states, self.engine.saved)

    def give_device_back(self) -> DeviceMemory:
        """All memory on the device that can go to the host goes there; until `take_device` only
        `tidy` is allowed. Returns the device's memory afterwards. On a CPU a checkpoint is on disk
        first: its copies are host memory, too. Raises `TimeoutError` when that takes too long."""
        with self.recorder.timed("offload"):
            self.engine.forget_gathered()
            return self._offload.give_back()

    def take_device(self) -> DeviceMemory:
        """What was given back is on the device again. Raises `RuntimeError` for want of room."""
        with self.recorder.timed("reload"):
            return self._offload.take()

    def progress(self) -> int:
        """Collectives and micro-batches that this rank has begun; for other threads, too."""
        return watch.collectives() + self.engine.micro_batches

    def close(self) -> None:
        """Ends the world. A checkpoint that is being written is waited for, unless the job is being
        stopped, whose launcher waits no longer than it said."""
        self.engine.writer.wait(self.config.cluster.stop_timeout_s / 2)
        torch.distributed.destroy_process_group()


class _Peers:
    """The trainer ranks in host memory (`join_world`'s group): the device may be an engine's."""

    def __init__(self, rank: int, world: int, group: torch.distributed.ProcessGroup):
        self.rank, self.world, self._group = rank, world, group

    def barrier(self) -> None:
        torch.distributed.barrier(self._group)

    def sum(self, value: int) -> int:
        total = torch.tensor(int(value))  # a sum of truth values would be one
        torch.distributed.all_reduce(total, group=self._group)
        return int(total)


class _Step:
    """One training step's data and running sums."""

    def __init__(self, trainer: Trainer, number: int):
        self.engine, self.algorithm, self.number = trainer.engine, trainer.algorithm, number
        self.device, self.recorder = trainer.device, trainer.recorder
        self.cap = trainer.config.algorithm.importance_cap
        self.kl_coef = trainer.config.algorithm.kl_coef
        self.growing = Growing(self.algorithm)
        self.updates: list[list[MicroBatch]] = []
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.device))
        self.ratio_max = torch.zeros((), device=self.device)
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def extend(
        self, step: protocol.TrainStep, trajectories: dict[int, protocol.Trajectory]
    ) -> None:
        """The batch so far, and what of it is to be trained now."""
        summary = Summary(
            torch.tensor(step.summary.rewards, dtype=torch.float32),
            torch.tensor(step.summary.groups),
            torch.tensor(step.summary.response_tokens),
            torch.tensor(step.summary.truncated),
            _padded(step.summary.turn_rewards, torch.float64, math.nan),
            _padded(step.summary.segments, torch.int64, -1),
        )
        # each (N,), or (N, turns)
        self.advantages, self.weights = self.growing.extend(summary)
        self.owners = torch.tensor(step.owners or range(len(summary.rewards)))  # (rows,) int64
        policy = self.engine.policy
        known = policy.vocabulary, step.trees, policy.replay
        self.updates = [
            [collate(rows, trajectories, *known) for rows in update]
            for update in step.micro_batches
        ]

    def run_ahead(self) -> None:
        with self._phase("forward_backward"):
            for micro_batches in self.updates:
                self._accumulate(0, micro_batches, {}, more=True)

    def run(self, stepped: Callable[[], None] | None) -> dict[str, float]:
        """`stepped` is called after the last update."""
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
        """(update, micro-batch) -> (B, T) log-probabilities before the step. The first update's
        forward passes run with just these weights, so theirs needs no extra pass."""
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
        """Gradient of one update, or of a part to which `more` will be added. Raises
        `TrainingDiverged`, on every rank, if any rank's loss is not finite."""
        bad = torch.tensor(NEVER, device=self.device)
        for m, batch in enumerate(micro_batches):
            self.engine.begin_micro_batch(last=m == len(micro_batches) - 1 and not more)
            loss = self._loss(batch, proximal.get((update, m)))
            bad = torch.where(loss.detach().isfinite(), bad, bad.clamp(max=m))
            self.engine.backward(loss * len(self.updates))
            self.sums["loss"] += loss.detach()
        torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MIN)
        if int(bad) != NEVER:
            raise TrainingDiverged(
                f"step {self.number}, update {update}, micro-batch {int(bad)}: the loss is not "
                "finite; nothing of this update was applied"
            )

    def _loss(self, batch: MicroBatch, proximal: Tensor | None) -> Tensor:
        """This micro-batch's part of the batch's loss; adds its statistics to the sums."""
        logprobs, entropy = self._forward(batch)
        mask, behaviour = batch.mask.to(self.device), batch.behaviour.to(self.device)
        policy = logprobs.detach() if proximal is None else proximal
        proximal = policy if self.algorithm.recompute_proximal else behaviour
        advantages = self._of(self.advantages, batch)
        tokens = TokenBatch(logprobs, proximal, behaviour, advantages, mask)
        losses, statistics = self.algorithm.token_loss(tokens)  # (B, T)
        cap = None if self.algorithm.corrects_mismatch else self.cap
        importance = importance_weights(proximal, behaviour, mask, cap)
        statistics |= {"entropy": entropy.detach(), "tokens": mask.sum()}
        if (replay := self.engine.policy.replay) is not None:
            statistics["routing_differs"] = replay.differs
        self._count(statistics, mismatch(policy, behaviour, mask, cap))
        losses = importance * losses
        if self.kl_coef:
            losses = losses + self.kl_coef * self._penalty(logprobs, mask, batch)
        return (self._of(self.weights, batch).view(len(mask), -1) * losses).sum()

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.engine(batch.inputs, batch.targets, batch.mask, batch.tree, batch.experts)

    def _penalty(self, logprobs: Tensor, mask: Tensor, batch: MicroBatch) -> Tensor:
        """(B, T) KL to the reference, which is counted, too."""
        frozen = self.engine.reference.logprobs(batch.inputs, batch.targets, batch.mask, batch.tree)
        kl = penalty(logprobs, frozen, mask)
        self.sums["reference_kl"] += kl.detach().sum()
        return kl

    def _of(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """(N,) -> (B,), each row its trajectory's; (N, turns) -> (B, T), each token its turn's. The
        padding row of an empty micro-batch gets 0."""
        if not len(batch.rows):
            return values.new_zeros(len(batch.inputs), device=self.device)
        own = values[self.owners[batch.rows]]
        return (own if own.dim() == 1 else own.gather(1, batch.turns)).to(self.device)

    def _count(self, statistics: dict[str, Tensor], gap: dict[str, Tensor]) -> None:
        self.ratio_max = torch.maximum(self.ratio_max, gap["ratio_max"])
        named = {
            "mismatch_kl": gap["kl_k3"],
            "mismatch_abs": gap["abs_diff"],
            "importance_capped": gap["capped"],
        }
        for name, value in (statistics | named).items():
            self.sums[name] += value

    def _apply(self, update: int, stepped: Callable[[], None] | None) -> tuple[float, float]:
        try:
            return self.engine.update(stepped, self.growing.scale)
        except NonFiniteGradient as error:
            raise TrainingDiverged(
                f"step {self.number}, update {update}, after its last micro-batch: {error}; "
                "nothing of this update was applied"
            ) from None

    def _reduced(self) -> dict[str, float]:
        """Sums over ranks, per response token but for the loss; times of the slowest rank."""
        names = sorted(self.sums)
        sums = torch.stack([self.sums[name] for name in names]).double()
        largest = [float(self.ratio_max), *self.seconds.values()]
        maxima = torch.tensor(largest, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        sums /= self.engine.settings.sequence_parallel  # ranks that counted the same rows
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


def _padded(of_turns: list[list[float]], dtype: torch.dtype, behind: float) -> Tensor | None:
    """N lists -> (N, K), `behind` each list's end; None if nobody gives any."""
    if not any(of_turns):
        return None
    rows = [torch.tensor(each, dtype=dtype) for each in of_turns]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=behind)
