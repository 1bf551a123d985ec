"""The check of an adapter for gpu_check.py: vLLM's LoRA kernels and CUDA graphs, while versions are
written into the adapter's memory and turns run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rose.config.trainer import FUSED
from scripts.harness import cfg
from scripts.run_weights import Whole
from tests.gpu import engine
from tests.gpu.frame import Report, check
from tests.gpu.model import folder

RANK = 12  # not a size of vLLM's, which then has memory for rank 16
LORA = f"trainer.lora={{rank: {RANK}, alpha: {RANK}, targets: [{', '.join(FUSED)}]}}"
# Standard deviations of A and B. Their product is about a tenth of the random model's matrices,
# whose deviation is 0.02.
DEVIATIONS = {"A": 0.02, "B": 0.05}
GPU = engine.Engines("gpu", "bfloat16", 0.6, 0, 64, 0, 0, 16, 512, 1.0, 16, 96)
CPU = engine.Engines("cpu", "bfloat16", 0.9, 0, 16, 0, 0, 2, 300, 1.0, 4, 24)


class Adapters(Whole):
    """A store of random adapters beside the model folder's weights. `tensors` are the newest."""

    def __init__(self, model: Path, store: Path, dtype: str, lora: cfg.Lora) -> None:
        import torch

        from rose.engine import layout
        from rose.trainer import adapter
        from rose.trainer.model import load

        self.lora, self.version = lora, 0
        shape, wanted = cfg.read_shape(model), getattr(torch, dtype)
        policy = load(model, wanted, gradient_checkpointing=False, lora=lora)
        base = adapter.base_of(
            policy.base_weights(),
            lambda parameter: parameter.detach(),
            wanted,
            lambda name, extent: layout.cuts(name, extent, shape, (1, 2)),
        )
        tensors = {name: torch.zeros_like(p.detach()) for name, p in policy.named_weights()}
        super().__init__(store, tensors, shape, base=base)

    def change(self, share: float) -> int:
        """Publish another random adapter and return its version."""
        import torch

        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for name, tensor in self.tensors.items():
            drawn = torch.randn(tensor.shape, generator=generator)
            deviation = DEVIATIONS[name.removesuffix(".weight")[-1]]
            self.tensors[name] = (drawn * deviation).to(tensor.dtype)
        self.publish(self.version)
        return self.version


@check(
    "an engine with an adapter: a version into its memory under traffic, log-probabilities "
    "against PEFT's",
    "vLLM's LoRA kernels, or an adapter that is not the version's: the log has the engine's words",
    {"cuda": GPU, "cpu": CPU},
)
async def lora(report: Report) -> None:
    config = engine.settings(report, LORA)
    running = await engine.start(report, config)
    made = folder(report), report.folder / "store-lora", report.sizes.dtype, config.trainer.lora
    versions = await asyncio.to_thread(Adapters, *made)
    try:
        await engine.flip_under_traffic(report, running, config, versions)
        await engine.compare(report, running, versions)
    finally:
        await running.shutdown()
