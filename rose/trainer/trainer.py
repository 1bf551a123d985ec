"""The work of a trainer rank: a batch of trajectories in, a policy version out. This file names no
algorithm, and uses no MPI.

A step first computes advantages and weights from the batch's summary. Then it computes proximal
log-probabilities if the algorithm needs them, except for the first update, whose own forward passes
yield them. Then each update computes the loss of `algorithms.base`, one micro-batch after another.
With several updates, each one's loss is multiplied by their number. So it is as large as the whole
batch's, and gradient clipping has the same effect. With `trainer.stream` a step's groups arrive in
rounds, of which only the last changes weights (rose/trainer/growing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rose import heap, protocol
from rose.comm.address import Place
from rose.config import Config, ConfigError, read_shape
from rose.memory import DeviceMemory
from rose.observe.recorder import NullRecorder
from rose.processes import usable_threads
from rose.trainer import adapter, compilers, kernels, probe, tree_attention, watch
from rose.trainer.algorithms import build
from rose.trainer.batching import flops
from rose.trainer.costs import measure
from rose.trainer.deepspeed_engine import (
    DTYPES,
    DeepSpeedEngine,
    check_second_copies,
    join_world,
    make_deterministic,
    use_device,
)
from rose.trainer.offload import Offload
from rose.trainer.prefix_tree import obstacle
from rose.trainer.reference import BelowAdapter
from rose.trainer.shards import ShardReader
from rose.trainer.step import Step
from rose.trainer.updates import Updates
from rose.transfer import codec
from rose.transfer.blocks import cut
from rose.transfer.publish import Published, Publisher
from rose.transfer.store import FORMAT, Plan

LENGTH_DEPENDENT = ("dynamic", "longrope")  # kinds of rotary positions


class Trainer:
    """Trainer rank `index` of `world`. All ranks must create it, and call each method, together.
    torch.distributed connects at `place`, where rank 0 listens."""

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
        if self.device.type == "cuda":
            self._check_compiler()
        self.algorithm = build(config.algorithm.name, config.algorithm.args)
        self.engine = DeepSpeedEngine(config.trainer, folder, self.device, place.neighbours)
        if config.algorithm.kl_coef:
            self.engine.hold_reference(folder)
        for model in self.engine.models():
            model.head.temperature = config.rollout.temperature
            model.head.fuses = not compilers.no_compiler(on_gpu=True)
        self._updates: Updates | None = None
        self._publisher: Publisher | None = None
        self._ahead: Step | None = None  # a step whose gradient is incomplete
        if config.trainer.compile or self.device.type == "cuda":  # flex attention is compiled, too
            kernels.share_cores(place.neighbours)
        self._prepare_rows()
        self.no_trees, self.costs = self._prepare_trees(folder)
        trees = config.trainer.share_prefixes and not self.no_trees
        probe.check(self.engine, folder, config.model.max_context, trees)
        if config.trainer.compile:
            self._compile()

    def _check_compiler(self) -> None:
        """Raise `ConfigError` if this host lacks the C compiler that Liger's kernels need."""
        lacking = compilers.no_compiler(on_gpu=True)
        if self.config.trainer.kernels == "liger" and lacking:
            raise ConfigError(f"trainer.kernels='liger': {lacking}; or trainer.kernels=none")

    def _prepare_rows(self) -> None:
        """Compute attention over long rows by cuDNN's kernels, if they work on every rank. Such
        rows are padded, which recorded experts and length-dependent positions don't allow. Compiled
        layers keep torch's own kernels."""
        t, policy = self.config.trainer, self.engine.policy
        rope = getattr(policy.hf.config, "rope_parameters", None) or {}
        if self.device.type == "cpu" or t.compile or t.router_replay or self.config.deterministic:
            return
        if obstacle(policy.hf.config) or rope.get("rope_type") in LENGTH_DEPENDENT:
            return
        if self._peers.sum(not tree_attention.cudnn_works(self.device, *policy.attention_form())):
            return
        print(f"trainer {self.index}: long rows attend by cuDNN's kernels", flush=True)
        for model in self.engine.models():
            model.use_own_attention()
        tree_attention.use_cudnn(True)

    def _prepare_trees(self, folder: Path | str) -> tuple[str, protocol.Costs | None]:
        """Return (why this model can't be trained on prefix trees, or ""; the costs that decide
        whether a batch uses them). The first is the same on every rank. On GPUs flex attention is
        tried and, unless `deterministic`, the costs are measured."""
        t, policy = self.config.trainer, self.engine.policy
        found = obstacle(policy.hf.config)
        if t.router_replay:  # each row has its own recorded experts for shared tokens
            found = "trainer.router_replay=true"
        if found or not t.share_prefixes:
            return found or "", None
        shape = read_shape(Path(folder))
        on_cpu = self.device.type == "cpu"
        if on_cpu and self.engine.shared is None:
            for model in self.engine.models():
                model.use_stretches()
            return "", flops(shape, sparse=True)
        without = tree_attention.why_not_flex(self.device, *policy.attention_form())
        flex = not self._peers.sum(int(bool(without)))
        if flex:
            for model in self.engine.models():
                model.use_flex()
        elif t.micro_batch_tokens > tree_attention.DENSE_TOKENS:
            return (
                f"trainer.micro_batch_tokens={t.micro_batch_tokens} is more than "
                f"{tree_attention.DENSE_TOKENS}, above which a mask of all pairs takes too much "
                f"memory, and flex attention is impossible: {without or 'another rank cannot'}"
            ), None
        if on_cpu or self.config.deterministic:
            return "", flops(shape, flex)
        sizes = (t.micro_batch_tokens, flex, t.gradient_checkpointing is not False)
        costs = measure(shape, DTYPES[t.dtype], self.device, *sizes)
        print(
            f"trainer {self.index}: a layer takes {costs.token:.3g} s a token, {costs.causal:.3g} "
            f"s a pair of tokens, {costs.tree:.3g} s a pair in a prefix tree; "
            f"{without or 'flex attention'}",
            flush=True,
        )
        return "", costs

    def _compile(self) -> None:
        """Compile the model's layers, by running each kind of pass that steps need."""
        t, engine = self.config.trainer, self.engine
        passes: list[kernels.Pass] = [engine.rehearse]
        if self.algorithm.recompute_proximal and t.updates_per_step > 1:
            passes.append(torch.no_grad()(engine.__call__))
        if isinstance(engine.reference, BelowAdapter):
            passes.append(engine.reference.logprobs)
        kernels.compile_layers(engine.policy)
        kernels.try_compiled(passes, self.device, t.share_prefixes and not self.no_trees)
        engine.forget_gathered()  # weights that ZeRO-3 prefetched for a next pass, too

    def train(
        self,
        step: protocol.TrainStep,
        trajectories: dict[int, protocol.Trajectory],
        publish_as: int | None = None,
    ) -> dict[str, float]:
        """Train on the rows of `step.micro_batches`. Returns metrics of the whole batch, the same
        on every rank. `publish_as` is the version to `publish` next: its encoding begins as soon as
        this rank's optimizer has stepped.

        Raises `TrainingDiverged` on every rank, before anything of that update is applied, and
        `ValueError` for a trajectory whose fields contradict each other or the model."""
        with self.recorder.timed("train_step", step=step.step):
            stepped = None if publish_as is None else lambda: self._publisher.begin(publish_as)
            current, self._ahead = self._ahead or Step(self, step.step), None
            current.extend(step, trajectories)
            return current.run(stepped)

    def train_ahead(
        self, step: protocol.TrainStep, trajectories: dict[int, protocol.Trajectory]
    ) -> None:
        """Compute the gradient of a part of the step's groups, and keep it until `train` gets the
        last of them. No weight changes before that. Raises what `train` raises."""
        with self.recorder.timed("train_ahead", step=step.step):
            self._ahead = self._ahead or Step(self, step.step)
            self._ahead.extend(step, trajectories)
            self._ahead.run_ahead()

    def open_store(
        self, folder: Path, cuts: Callable[[str, tuple[int, ...]], tuple[list[int], list[int]]]
    ) -> None:
        """Publish versions to this folder from now on. Call it before `load`, while the weights are
        the model folder's. `cuts(name, shape)` returns the rows and columns at which an engine's
        tensor-parallel part of a tensor begins or ends."""
        codec.compile_all()  # takes seconds to a minute on a host where it never ran
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
        threads = c.transfer.threads or c.trainer.threads or usable_threads()

        def updates(plan: Plan) -> Updates:
            self._updates = Updates(shards, plan, self.device, threads)
            self.engine.compare = self._updates.compare
            return self._updates

        self._publisher = Publisher(
            folder,
            Plan(FORMAT, "", self.world, shards.tensors, blocks, base),
            self._peers,
            shards.read,
            threads,
            c.transfer.full_every,
            c.transfer.keep_versions,
            c.trainer.step_timeout_s,
            updates if self._compares else None,
        )

    @property
    def _compares(self) -> bool:
        """True if updates are compared, which on a GPU takes Triton's kernels and a compiler."""
        on_gpu = self.device.type == "cuda"
        return self.config.compares_updates and not (on_gpu and compilers.no_compiler(on_gpu))

    def publish(
        self, version: int, send: Callable[[str, memoryview], None] | None = None
    ) -> Published:
        """Write the weights, in model.dtype, as `version`: see `Publisher.publish`."""
        with self.recorder.timed("publish", version=version):
            return self._publisher.publish(version, send)

    def tidy(self) -> None:
        """Write a full version if one is due, and remove old versions' files (`Publisher.tidy`).
        Call it while no rank waits for this one."""
        with self.recorder.timed("tidy"):
            self._publisher.tidy()

    def save(self, folder: Path) -> None:
        """Save a checkpoint with the last version's hashes, into an existing folder: see
        `DeepSpeedEngine.save`."""
        with self.recorder.timed("save"):
            self._publisher.write_hashes(Path(folder))
            self.engine.save(Path(folder))

    def load(self, folder: Path) -> None:
        """Continue from a folder that `save` filled (bit for bit: float32, deterministic=true)."""
        with self.recorder.timed("load"):
            if self._publisher is not None:
                self._publisher.copy_values()
            self.engine.load(Path(folder))
            if self._updates is not None:
                self._updates.forget()

    def share_device(self, folder: Path) -> None:
        """Prepare to share the device. On a CPU the states are then moved to files in `folder`."""
        self._offload = Offload(self.device, folder, self.engine.states, self.engine.saved)

    def give_device_back(self) -> DeviceMemory:
        """Move all device memory that can be moved to the host. Until `take_device`, call only
        `tidy`. Returns the device's memory afterwards. On a CPU this first waits for a checkpoint,
        since its copies are host memory, too. Raises `TimeoutError` if that takes too long."""
        with self.recorder.timed("offload"):
            if self._publisher is not None and self._publisher.full_due():
                self._publisher.copy_values()
            self.engine.forget_gathered()
            return self._offload.give_back()

    def take_device(self) -> DeviceMemory:
        """Move everything back to the device. Raises `RuntimeError` if it has too little memory."""
        with self.recorder.timed("reload"):
            return self._offload.take()

    def progress(self) -> int:
        """Count the collectives and micro-batches that this rank has begun; from any thread."""
        return watch.collectives() + self.engine.micro_batches

    def close(self) -> None:
        """Leave torch.distributed. Waits for a checkpoint that is being written, but at most half
        of cluster.stop_timeout_s: the launcher of a stopped job kills the ranks after that time."""
        self.engine.writer.wait(self.config.cluster.stop_timeout_s / 2)
        torch.distributed.destroy_process_group()


class _Peers:
    """Collectives of the trainer ranks in host memory, since an engine may use the device."""

    def __init__(self, rank: int, world: int, group: torch.distributed.ProcessGroup):
        self.rank, self.world, self._group = rank, world, group

    def barrier(self) -> None:
        torch.distributed.barrier(self._group)

    def sum(self, value: int) -> int:
        total = torch.tensor(int(value))  # int, since a sum of bools would be a bool
        torch.distributed.all_reduce(total, group=self._group)
        return int(total)
