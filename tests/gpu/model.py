"""The model of gpu_check.py: a random one of Qwen3-0.6B's shape, changed versions, scores.

Without --model nothing is downloaded: tokenizer and chat template come from the tiny model of the
default run, its config gets other sizes, and the weights are drawn on the device.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scripts.harness import cfg, configured
from scripts.run_weights import Whole
from tests.gpu.frame import Report, check

DEVIATION = 0.02  # standard deviation of the weights; norms are ones
AT_ONCE = 2**24  # values that are drawn at once, which bounds the memory on the device
# Steps of the tiny model's recipe: enough for its tokenizer, in a quarter of the time.
TOKENIZER_STEPS = 63
FOLDER = "model"  # name within the scratch folder


class Shape(msgspec.Struct):
    """Sizes as in a Qwen3 config.json. `hidden_size` null stands for the tiny model as it is."""

    hidden_size: int | None
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int


QWEN3_0_6B = Shape(1024, 3072, 28, 16, 8, 128, 151936, 40960)
AS_IT_IS = Shape(None, 0, 0, 0, 0, 0, 0, 0)


def folder(report: Report) -> Path:
    """Return the folder into which the check `model` puts the model."""
    return report.folder / FOLDER


def shape_of(report: Report) -> cfg.ModelShape:
    return cfg.read_shape(folder(report))


def of_model(report: Report, context: int) -> list[str]:
    """Return the overrides of a run with one engine of the model, and with this context."""
    words = f"rollout.workers=1 model.source=folder model.dtype={report.sizes.dtype}"
    return [*words.split(), f"model.path={folder(report)}", f"model.max_context={context}"]


@check(
    "a model of the shape of Qwen3-0.6B, or the one given",
    "give one with --model FOLDER; a hub id needs network or a filled Hugging Face cache",
    {"cuda": QWEN3_0_6B, "cpu": AS_IT_IS},
    needs_model=False,
)
def model(report: Report) -> None:
    from rose import models

    target, given, began = folder(report), report.setup.model, time.monotonic()
    if given and not Path(given).is_dir():
        words = f"model.path={given}", "trainer.micro_batch_tokens=4096"
        source = models.resolve(configured("model=qwen3_0_6b", *words).model)
        target.symlink_to(Path(source).resolve())
    elif given:
        target.symlink_to(Path(given).resolve())
    else:
        as_it_is = report.sizes.hidden_size is None
        recipe = [] if as_it_is else [f"+model.recipe.steps={TOKENIZER_STEPS}"]
        tiny = models.resolve(configured(*recipe).model)
        if as_it_is:
            target.symlink_to(tiny)
        else:
            make(tiny, target, report.sizes, report.setup.device)
    report.figure("parameters", shape_of(report).parameters / 1e6, "million")
    report.figure("made or found in", time.monotonic() - began, "s")


MODEL = model


def make(tiny: Path, target: Path, shape: Shape, device: str) -> None:
    """Create a random model whose vocabulary begins with the tokens of `tiny`'s tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config, sizes = AutoConfig.from_pretrained(target), msgspec.to_builtins(shape)
    for name, value in sizes.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * shape.num_hidden_layers
    config.max_window_layers = shape.num_hidden_layers
    config.initializer_range = DEVIATION
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(target)
    written = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if wrong := {k: written.get(k) for k, v in sizes.items() if written.get(k) != v}:
        raise RuntimeError(f"{target}/config.json: {wrong} is not what was asked for")


# --------------------------------------------------------------------------- versions


class Versions(Whole):
    """A store of changed versions of the folder's weights. `tensors` are the newest, on the CPU."""

    lora = None  # all weights change

    def __init__(self, model: Path, store: Path, dtype: str, device: str) -> None:
        import torch
        from safetensors.torch import load_file

        found: dict[str, Any] = {}
        for file in sorted(model.glob("*.safetensors")):
            found |= load_file(file)
        shape, wanted = cfg.read_shape(model), getattr(torch, dtype)
        if shape.tied_embeddings:
            found.pop("lm_head.weight", None)
        self._device, self._generator = device, torch.Generator(device).manual_seed(1)
        tensors = {name: tensor.to(wanted).contiguous() for name, tensor in found.items()}
        super().__init__(store, tensors, shape)
        self.version = 0

    def change(self, share: float) -> int:
        """Move a random share of the values, with deviation DEVIATION. Publish the new version."""
        import torch

        there = {"generator": self._generator, "device": self._device}
        for name, tensor in self.tensors.items():
            parts = []
            # In parts, because an engine leaves little of the device's memory.
            for part in tensor.reshape(-1).split(AT_ONCE):
                old = part.to(self._device).float()
                new = old + torch.randn(old.shape, **there) * DEVIATION
                moved = torch.where(torch.rand(old.shape, **there) < share, new, old)
                parts.append(moved.to(tensor.dtype).cpu())
            self.tensors[name] = torch.cat(parts).reshape(tensor.shape)
        self.version += 1
        self.publish(self.version)
        return self.version


def score(
    model: Path,
    dtype: str,
    device: str,
    turns: list[tuple[list[int], list[int]]],
    tensors: dict[str, Any] | None,
    lora: cfg.Lora | None = None,
) -> np.ndarray:
    """Return the trainer's log-probability of every new token of the (prompt, new tokens) in
    `turns`, all turns in a row. `tensors` replace the folder's weights, or are the adapter's."""
    import torch

    from rose.trainer.model import load

    policy = load(model, getattr(torch, dtype), gradient_checkpointing=False, lora=lora)
    policy.to(device).eval()
    with torch.no_grad():
        if tensors is not None:
            for name, parameter in policy.named_weights():
                parameter.copy_(tensors[name])
        scores = []
        for prompt, new in turns:
            tokens = torch.tensor([prompt + new], device=device)
            mask = torch.zeros(1, tokens.shape[1] - 1, device=device)
            mask[:, len(prompt) - 1 :] = 1
            logprobs, _ = policy(tokens[:, :-1], tokens[:, 1:], mask)
            scores.append(logprobs[0, len(prompt) - 1 :].float().cpu().numpy())
    return np.concatenate(scores)
