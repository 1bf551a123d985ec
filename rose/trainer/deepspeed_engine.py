"""DeepSpeed behind four calls: begin_micro_batch, the forward pass (`__call__`), backward, update.

DeepSpeed averages gradients over ranks and over a fixed number of micro-batches. Here the loss is a
sum over all micro-batches and ranks, and the number of micro-batches varies from step to step. So
this class sets the boundaries of gradient accumulation and undoes the averaging over ranks. Not
supported: fp16, DeepSpeed's own MoE layers, ZeRO-Infinity.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rose import config as configuration
from rose import files
from rose.comm.address import MEET_S, Place, RendezvousError
from rose.trainer import kernels, mixture
from rose.trainer.batching import logit_elements
from rose.trainer.checkpoint_writer import CheckpointWriter
from rose.trainer.model import Policy, load
from rose.trainer.prefix_tree import PrefixTree
from rose.trainer.reference import BelowAdapter, Reference
from rose.trainer.saving import Saving
from rose.trainer.schedule import learning_rates
from rose.trainer.sequence import SequenceGroup
from rose.trainer.step import NEVER, NonFiniteGradient

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUILD_DEADLINE_S = 900.0  # longest wait for another process's build; CPUAdam took 185 s on 2 cores
LARGEST_BUCKET = 200_000_000  # most elements of one collective; more cost memory and gain nothing
PREFETCHED = 50_000_000  # fewest elements that ZeRO-3 gathers ahead; DeepSpeed's own default
REDUCED = {"float32": "fp32", "bfloat16": "bf16"}  # DeepSpeed's names of the dtypes


def _import_muon() -> None:
    """Import DeepSpeed's Muon without its decorators, which would load the rest of torch's
    compiler. DeepSpeed imports Muon only to check that its optimizer, here Adam, isn't Muon."""
    from deepspeed.runtime import compiler

    given, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = given


def zero_config(trainer: configuration.Trainer, parameters: int, layer: int = 0) -> dict[str, Any]:
    """Build DeepSpeed's configuration. `layer` of the model's `parameters` are in its largest
    layer."""
    # A bucket is allocated whole at every update: DeepSpeed's 5e8 cost a tiny model 1.3 s each.
    bucket = min(LARGEST_BUCKET, parameters)
    zero: dict[str, Any] = {
        "stage": trainer.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if trainer.zero_stage == 3:
        # Gather a whole layer ahead. DeepSpeed's default holds one matrix of a large layer.
        zero["stage3_prefetch_bucket_size"] = max(PREFETCHED, layer)
        zero["zero_hpz_partition_size"] = trainer.hpz or 1
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    out = {
        "train_micro_batch_size_per_gpu": 1,
        # 2 stands for "more than one". We set the boundaries and the scale ourselves, but with 1
        # the optimizer offload keeps only the last micro-batch's gradient.
        "gradient_accumulation_steps": 2,
        "gradient_clipping": trainer.optimizer.grad_clip,
        "zero_optimization": zero,
    }
    if trainer.dtype == "bfloat16":
        out["bf16"] = {"enabled": True, "check_grad_overflow": True}
        out["communication_data_type"] = REDUCED[trainer.reduce_dtype]
        if trainer.zero_stage > 0:  # stage 0 has no float32 accumulation
            out["data_types"] = {"grad_accum_dtype": "fp32"}
    return out


def use_device(gpus: int, index: int) -> torch.device:
    """Choose this rank's device: one of the host's GPUs if the run has any, else the CPU. Call it
    before DeepSpeed is imported, since DeepSpeed reads DS_ACCELERATOR at import."""
    if gpus:
        if (count := torch.cuda.device_count()) == 0:
            raise configuration.ConfigError(
                f"cluster.gpus={gpus}: torch {torch.__version__} sees no GPU on this host: it is "
                "no build for CUDA, or none for this driver; `rose doctor` says which"
            )
        device = torch.device("cuda", index % count)
        torch.cuda.set_device(device)
        return device
    os.environ["DS_ACCELERATOR"] = "cpu"
    return torch.device("cpu")


def join_world(
    device: torch.device, rank: int, world: int, place: Place, timeout_s: float
) -> torch.distributed.ProcessGroup:
    """Start torch.distributed at `place`. All ranks must connect within `MEET_S` seconds. After
    that, a collective that takes more than `timeout_s` seconds fails.

    Returns a group of all ranks for tensors in host memory. NCCL can't serve these: its kernels
    would occupy the device until all ranks have arrived, while an engine may already use it. Raises
    `RendezvousError`, which names all hosts and addresses."""
    import deepspeed  # imported late: it reads DS_ACCELERATOR at import

    if device.type == "cpu":
        # Without this line DeepSpeed would compile its shared-memory allreduce at first use (160
        # s), which only speeds up a run on one machine. DeepSpeed looks up no other operator here,
        # and the look-up would first try the compilers for all of its operators.
        deepspeed.ops.__compatible_ops__ = {}
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed's source for its device
    backend, first = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=MEET_S)
    place.use_interface()
    try:
        store = torch.distributed.TCPStore(
            place.address,
            place.port,
            world,
            is_master=rank == 0,
            timeout=first,
            master_listen_fd=place.detach_listener(),
        )
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=first
        )
        met = torch.ones(1, device=device)
        torch.distributed.all_reduce(met)  # NCCL connects at the first collective
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        backend = "gloo"
        on_hosts = torch.distributed.new_group(backend=backend, timeout=first)
    except (RuntimeError, ValueError) as error:  # torch.distributed's errors are RuntimeErrors
        raise RendezvousError(
            f"trainer rank {rank} of {world} on {socket.gethostname()}: {backend} did not connect "
            f"all ranks at {place} within {MEET_S:g} s, by interface {place.interface}: {error}\n"
            f"{place.listing()}"
        ) from error
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    # ZeRO works in a group of its own, which would keep the backend's time limit (NCCL: 10
    # minutes). torch and DeepSpeed have no public call to change a group's limit.
    for group in (None, on_hosts, deepspeed.utils.groups._clone_world_group()):
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return on_hosts


def check_second_copies(hpz: int | None, place: Place) -> None:
    """Raise `ValueError` if a group of `trainer.hpz` ranks spans hosts, because the launcher placed
    ranks otherwise than configured. The group would gather weights over the network."""
    if hpz and place.spans_hosts(hpz):
        raise ValueError(
            f"trainer.hpz={hpz}: ranks 0 to {hpz - 1}, the next {hpz} and so on must each be on "
            "one host, or the second copy of the weights is gathered over the network, too; "
            f"another number, or trainer.hpz=null. Trainer ranks:\n{place.listing()}"
        )


def make_deterministic() -> None:
    """Make torch give bitwise the same result for the same input, number of threads and machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


class DeepSpeedEngine(Saving):
    """A rank's share of the model and its optimizer. Create it after `join_world`.

    `folder` is the model's, and `neighbours` counts the trainer ranks on this host. Raises what
    `rose.trainer.model.load` raises."""

    def __init__(
        self,
        trainer: configuration.Trainer,
        folder: Path | str,
        device: torch.device,
        neighbours: int = 1,
    ):
        import deepspeed

        self.settings, self.device = trainer, device
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.micro_batches = 0  # micro-batches that this process has begun
        # If set, called after the step of each group of ZeRO's partition, with the group's number.
        self.compare: Callable[[int], None] | None = None
        self.updates = 0  # updates since the start of the run; the learning rate depends on it
        self._learning_rate = learning_rates(trainer)
        logits = logit_elements(trainer, device.type == "cuda")
        parts = trainer.sequence_parallel
        self.shared = SequenceGroup(parts, device, trainer.step_timeout_s) if parts > 1 else None
        policy = _load_policy(trainer, folder, logits, self.shared)
        policy.offloads = trainer.offload_activations
        if trainer.kernels == "liger":
            kernels.use_liger(policy)
        if trainer.compile and trainer.zero_stage == 3:
            kernels.gather_whole_layers(policy)
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for _, p in policy.named_weights())
        _import_muon()
        self.engine, *_ = deepspeed.initialize(
            model=policy,
            optimizer=_optimizer(trainer, policy),
            dist_init_required=False,
            config=zero_config(trainer, self.parameters, policy.largest_layer()),
        )
        self.engine.train()
        if trainer.hpz:  # Connect the group before the first step, and limit its collectives' time.
            group = deepspeed.utils.groups._get_zero_param_intra_parallel_group()
            torch.distributed.all_reduce(torch.ones(1, device=device), group=group)
            limit = timedelta(seconds=trainer.step_timeout_s)
            torch.distributed.distributed_c10d._set_pg_timeout(limit, group)
        self.writer = self.engine.checkpoint_engine = CheckpointWriter(self.rank, neighbours)
        self.reference: Reference | BelowAdapter | None = None
        self.base = ""  # fingerprint of the frozen weights below an adapter, for checkpoints

    @property
    def policy(self) -> Policy:
        return self.engine.module

    def models(self) -> list[Policy]:
        """Return the policy, and the reference where it is a model of its own."""
        own = isinstance(self.reference, Reference)
        return [self.policy, *([self.reference.policy] if own else [])]

    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor,
        tree: PrefixTree | None = None,
        experts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call `Policy.forward` with tensors that may lie on any device."""
        inputs, targets, mask, experts = (
            x if x is None else x.to(self.device, non_blocking=True)
            for x in (inputs, targets, mask, experts)
        )
        return self.engine(inputs, targets, mask, tree and tree.to(self.device), experts)

    def begin_micro_batch(self, last: bool) -> None:
        """Call this before each forward pass that `backward` follows. `last`: it is the update's
        last, equal on all ranks."""
        self.micro_batches += 1
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`. An update sums it over micro-batches and all ranks."""
        self.engine.backward(loss * self.world, scale_wrt_gas=False)

    def rehearse(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor,
        tree: PrefixTree | None,
    ) -> None:
        """Run a step's forward and backward pass before the first step, and keep no gradient."""
        if self.settings.zero_stage == 3:  # hooks of DeepSpeed that need whole passes on all ranks
            self.engine.set_gradient_accumulation_boundary(False)
            logprobs, _ = self(inputs, targets, mask, tree)
            self.engine.backward(0.0 * logprobs.sum(), scale_wrt_gas=False)
            self.engine.optimizer.zero_grad()  # a step begins without gradients
            return
        # The gradient of one parameter of the first layer runs every layer's backward pass.
        # Gradients of all parameters would take memory that steps don't need.
        below = [*self.policy.hf.base_model.layers[0].parameters(), *self.policy.parameters()]
        inputs, targets, mask = (x.to(self.device) for x in (inputs, targets, mask))
        logprobs, _ = self.policy(inputs, targets, mask, tree and tree.to(self.device))
        torch.autograd.grad(logprobs.sum(), next(p for p in below if p.requires_grad))

    def first_bad(self, number: torch.Tensor) -> int | None:
        """Return the minimum of the ranks' numbers of a bad micro-batch; None if it is `NEVER`."""
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MIN)
        return None if int(number) == NEVER else int(number)

    def update(
        self, stepped: Callable[[], None] | None = None, scale: float = 1.0
    ) -> tuple[float, float]:
        """Apply the gradient times `scale`. Returns (its norm before clipping, the learning rate).
        Under ZeRO `stepped` is called once this rank's partition is final, before ranks gather it.

        Raises `NonFiniteGradient` on every rank. Nothing is applied then."""
        with self._scaled(scale):
            return self._update(stepped)

    @contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        """Scale an update's gradients. Under ZeRO the loss scale is 1 / `factor`: every stage
        divides gradients by it for their norm and clipping. Without ZeRO they are multiplied."""
        if self.settings.zero_stage:
            optimizer = self.engine.optimizer
            before, optimizer.loss_scale = optimizer.loss_scale, 1.0 / factor
            try:
                yield
            finally:
                optimizer.loss_scale = before
            return
        if factor != 1.0:
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        yield

    def _update(self, stepped: Callable[[], None] | None) -> tuple[float, float]:
        with self._steps_observed(stepped):
            lr = self._learning_rate(self.updates)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = lr
            norm = self._unwrapped_norm()
            self.engine.step()
        if not self.engine.was_step_applied():
            raise NonFiniteGradient("the gradient is not finite")
        self.updates += 1
        return float(self.engine.get_global_grad_norm() if norm is None else norm), lr

    @contextmanager
    def _steps_observed(self, stepped: Callable[[], None] | None) -> Iterator[None]:
        """Under ZeRO, which steps torch's optimizer once for each group of the partition, observe
        these steps. `compare` is called after each, before the group is copied into the parameters.
        `stepped` is called after the last."""
        if not self.settings.zero_stage or (stepped is None and self.compare is None):
            yield
            return
        zero, group = self.engine.optimizer, 0
        groups = len(zero.fp16_groups if self.settings.zero_stage == 3 else zero.bit16_groups)

        def observe(*_) -> None:
            nonlocal group
            if self.compare is not None:
                self.compare(group)
            group += 1
            if group == groups and stepped is not None:
                stepped()

        hook = zero.optimizer.register_step_post_hook(observe)
        try:
            yield
        finally:
            hook.remove()

    def _unwrapped_norm(self) -> float | None:
        """Return the gradient norm under ZeRO 0 in float32. Otherwise DeepSpeed computes and checks
        it, so return None. Raises `NonFiniteGradient`."""
        if self.settings.zero_stage or self.settings.dtype != "float32":
            return None
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not np.isfinite(norm):
            raise NonFiniteGradient("the gradient is not finite")
        return norm

    def states(self) -> Iterator[torch.Tensor]:
        """Yield all weights, and the tensors that the optimizer updates and keeps."""
        for model in self.models():
            yield from model.parameters()
        # torch's optimizer, which ZeRO's contains
        optimizer = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))

    def hold_reference(self, folder: Path | str) -> None:
        """Read the model of `folder` once more, as the frozen reference of the KL penalty. With an
        adapter nothing is read: the reference is the policy without the adapter."""
        if self.settings.lora is not None:
            self.reference = BelowAdapter(self.policy, self)
            return
        # The reference uses its own routers, and DeepSpeed makes groups of `hpz` ranks only once.
        alone = msgspec.structs.replace(self.settings, router_replay=False, hpz=None)
        policy = _load_policy(alone, folder, self.policy.head.elements, self.shared)
        policy.hf.gradient_checkpointing_disable()  # nothing is kept for a backward pass
        if self.settings.kernels == "liger":
            kernels.use_liger(policy)
        whole = self.settings.zero_stage != 3
        split = None if whole else _frozen_config(self.settings, policy.largest_layer())
        self.reference = Reference(policy, self.device, split)

    def whole(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Copy a parameter's values, gathered under ZeRO-3. All ranks must call it together."""
        import deepspeed

        split = [parameter] if self.settings.zero_stage == 3 else []
        with deepspeed.zero.GatheredParameters(split, enabled=bool(split)):
            return parameter.detach().clone()

    def forget_gathered(self) -> None:
        """Release the weights that ZeRO-3 gathered from other ranks."""
        if self.settings.zero_stage == 3:
            self.engine.empty_partition_cache()


def _load_policy(
    trainer: configuration.Trainer, folder: Path | str, logits: int, shared: SequenceGroup | None
) -> Policy:
    dtype = DTYPES[trainer.dtype]
    recomputes = trainer.gradient_checkpointing is not False
    args = (folder, dtype, recomputes, logits, trainer.lora, shared, trainer.router_replay)
    if trainer.zero_stage != 3:
        return load(*args)
    from transformers.integrations import HfDeepSpeedConfig

    # While this object lives, from_pretrained splits what it reads over the ranks.
    split = HfDeepSpeedConfig(zero_config(trainer, LARGEST_BUCKET))  # noqa: F841
    with mixture.merged_by_first_rank():
        return load(*args)


def _frozen_config(trainer: configuration.Trainer, layer: int) -> dict[str, Any]:
    """Build DeepSpeed's JSON for a model that ZeRO-3 splits and that is not trained."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": max(PREFETCHED, layer)},
    }
    return config | ({"bf16": {"enabled": True}} if trainer.dtype == "bfloat16" else {})


def _optimizer(trainer: configuration.Trainer, policy: Policy) -> torch.optim.Optimizer:
    o = trainer.optimizer
    trained = [p for p in policy.parameters() if p.requires_grad]
    args = dict(lr=o.lr, betas=tuple(o.betas), eps=o.eps, weight_decay=o.weight_decay)
    if trainer.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with _build_lock():  # DeepSpeedCPUAdam's constructor compiles it
            return DeepSpeedCPUAdam(trained, **args)
    # torch's fused kernel is as fast as DeepSpeed's FusedAdam, and needs no compilation.
    return torch.optim.AdamW(trained, fused=True, **args)


@contextmanager
def _build_lock() -> Iterator[None]:
    """Let one process of this user at a time build torch extensions, by a lock that is released
    when its holder dies. A `lock` file in torch's own cache is then from a dead builder. torch
    would wait for it forever, so it is removed."""
    from torch.utils.cpp_extension import _get_build_directory

    build = Path(_get_build_directory("cpu_adam", verbose=False))
    try:
        with files.held(build.parent / "rose.lock", BUILD_DEADLINE_S):
            (build / "lock").unlink(missing_ok=True)
            yield
    except TimeoutError as error:
        remedy = "end its holder, or set trainer.offload_optimizer=false"
        raise TimeoutError(f"{error}; {remedy}") from None
