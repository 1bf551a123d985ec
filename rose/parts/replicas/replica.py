"""An elastic replica: the model beside an engine, which computes the gradient of a part of a step's
rows while that engine sleeps. It is in no group of torch.distributed.

It has no optimizer. Like an engine it gets the step's weights from the store of versions, so these
equal the trainer's if trainer.dtype is model.dtype. For its rows it computes the sum of gradients
that a trainer rank would, with the same `Step`, which has the whole batch's summary and so scales
each row by the whole batch. Between steps the weights are in host memory only. Left out: several
updates per step, adapters, a reference model, sequence parallelism, router replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rose import heap, protocol
from rose.config import Config
from rose.observe.recorder import NullRecorder
from rose.parts.replicas import gradients
from rose.processes import usable_threads
from rose.trainer.algorithms import build
from rose.trainer.batching import logit_elements
from rose.trainer.experts import parts
from rose.trainer.model import Policy, load
from rose.trainer.prefix_tree import PrefixTree, obstacle
from rose.trainer.step import NEVER, Step, TrainingDiverged
from rose.trainer.tree_attention import DENSE_TOKENS
from rose.transfer import codec
from rose.transfer.live import Live
from rose.transfer.receive import Receiver, whole
from rose.transfer.store import INITIAL


class ReplicaEngine:
    """The part of a `DeepSpeedEngine` that `Step` needs. It sums gradients in float32, on this
    process alone."""

    reference = None
    rank, world = 0, 1

    def __init__(self, config: Config, folder: Path | str, device: torch.device) -> None:
        self.settings, self.device, self.micro_batches = config.trainer, device, 0
        on_gpu = device.type == "cuda"
        self.policy: Policy = load(
            folder,
            getattr(torch, config.trainer.dtype),
            config.trainer.gradient_checkpointing is not False,
            logit_elements(config.trainer, on_gpu),
        )
        self.policy.head.temperature = config.rollout.temperature
        self.policy.offloads = config.trainer.offload_activations
        self.policy.train()
        self._weights = self.policy.named_weights()
        # The tensors into which versions are received. On a CPU the model computes with them, too.
        self.host = {name: parameter.detach() for name, parameter in self._weights}
        self._buffers = [(buffer, buffer.detach()) for buffer in self.policy.buffers()]
        # bytes of a float32 gradient
        self.nbytes = 4 * sum(parameter.numel() for _, parameter in self._weights)
        self._sums: dict[str, Tensor] = {}
        for name, parameter in self._weights:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._add(name, p))
        self.no_trees = ""  # reason why micro-batches can't be prefix trees here; "" if they can
        trees = config.trainer.share_prefixes and not obstacle(self.policy.hf.config)
        self._tries_flex = trees and on_gpu  # once the engine sleeps and frees the device
        if trees and not on_gpu:
            self.policy.use_stretches()

    def take_device(self) -> None:
        for name, parameter in self._weights:
            parameter.data = self._there(self.host[name])
        for buffer, here in self._buffers:
            buffer.data = self._there(here)
        if self._tries_flex:
            self._tries_flex = False
            self.try_flex()

    def _there(self, here: Tensor) -> Tensor:
        return here.to(self.device)

    def try_flex(self) -> None:
        """Use flex attention if it works here, else a dense mask up to `DENSE_TOKENS`."""
        tokens = self.settings.micro_batch_tokens
        if not (why := self.policy.why_not_flex(self.device)):
            self.policy.use_flex()
        elif tokens > DENSE_TOKENS:
            self.no_trees = (
                f"no prefix trees of trainer.micro_batch_tokens={tokens} beside this engine, whose "
                f"mask of all pairs takes too much memory above {DENSE_TOKENS}; without it: {why}"
            )

    def give_device_back(self) -> None:
        """Release the device's memory; on a GPU only CUDA's context stays."""
        self._sums.clear()
        for name, parameter in self._weights:
            parameter.data = self.host[name]
        for buffer, here in self._buffers:
            buffer.data = here
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # workspaces that torch keeps for cuBLAS
            torch.cuda.empty_cache()

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        mask: Tensor,
        tree: PrefixTree | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        inputs, targets, mask = (x.to(self.device) for x in (inputs, targets, mask))
        return self.policy(inputs, targets, mask, tree and tree.to(self.device), experts)

    def begin_micro_batch(self, last: bool) -> None:
        self.micro_batches += 1

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def first_bad(self, number: Tensor) -> int | None:
        return None if int(number) == NEVER else int(number)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter, its gradient summed over all micro-batches since `take_device`)."""
        for name, parameter in self._weights:
            found = self._sums.get(name)
            yield name, torch.zeros_like(parameter, dtype=torch.float32) if found is None else found

    def _add(self, name: str, parameter: torch.nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient.float()


class Replica:
    def __init__(self, config: Config, folder: Path | str, recorder: NullRecorder) -> None:
        self.config, self.recorder = config, recorder
        threads = config.rollout.threads or config.trainer.threads
        if threads:
            torch.set_num_threads(threads)
        self.device = torch.device("cuda" if config.cluster.gpus else "cpu")
        if self.device.type == "cpu":
            heap.keep_all()
        codec.compile_all()  # seconds to a minute, where it never ran before
        self.algorithm = build(config.algorithm.name, config.algorithm.args)
        self.engine = ReplicaEngine(config, folder, self.device)
        self._live = Live(self._tensors())
        self._receiver: Receiver | None = None
        self._held: int | None = INITIAL  # version in host memory; None: a mix of two, or unknown

    def compute(
        self,
        order: protocol.ComputeGradient,
        step: protocol.TrainStep,
        rows: dict[int, protocol.Trajectory],
    ) -> protocol.GradientSum:
        """Receive the step's weights and compute the gradient of `rows`. A loss that is not finite
        is reported in the statistics, since it must end the trainer ranks.

        Raises `TransferError` if the version can't be received, `ValueError` as `Trainer.train`,
        and `RuntimeError` if the step orders prefix trees that this device can't compute."""
        with self.recorder.timed("replica_weights", version=order.version):
            self.receive(order.version, order.store)
        with self.recorder.timed("replica_gradient", step=order.step):
            self.engine.take_device()
            try:
                return self._compute(order, step, rows)
            finally:
                self.engine.give_device_back()

    def _compute(
        self,
        order: protocol.ComputeGradient,
        step: protocol.TrainStep,
        rows: dict[int, protocol.Trajectory],
    ) -> protocol.GradientSum:
        if step.trees and self.engine.no_trees:
            raise RuntimeError(self.engine.no_trees)
        current = Step(self, order.step)
        current.extend(step, rows)
        try:
            current.run_ahead()
        except TrainingDiverged:
            return protocol.GradientSum("", {"loss": float("nan")}, 0.0)
        gradients.write(order.file, self.engine.gradients())
        statistics = {name: float(value) for name, value in current.sums.items()}
        return protocol.GradientSum(order.file, statistics, float(current.ratio_max))

    def receive(self, version: int, store: str) -> None:
        """Receive `version` into host memory, unless it is there. Raises `TransferError`."""
        t = self.config.transfer
        if self._receiver is None or self._receiver.where[0] != store:
            if self._receiver is not None:
                self._receiver.close()
                self._held = None  # a version's number has no meaning in another store
            self._receiver = Receiver(store, None, t.relay_token_file, whole, self._live)
        threads = t.threads or self.config.rollout.threads or usable_threads()
        dense = int(t.stage_gib * 2**30)
        if self._held == version:
            return
        staged = self._receiver.stage(self._held, version, threads, dense, t.load_timeout_s)
        self._held = None
        staged.flip()
        staged.check()
        staged.release()
        self._held = version

    def _tensors(self) -> dict[str, Tensor]:
        """Host tensors by their name in the store, which has a layer's experts one by one."""
        return {
            part.name: tensor.view(-1)[part.start :][: math.prod(part.shape)].view(part.shape)
            for name, tensor in self.engine.host.items()
            for part in parts(name, tuple(tensor.shape))
        }
