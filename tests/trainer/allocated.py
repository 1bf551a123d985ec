"""Estimated against allocated memory of one trainer rank on a CPU, moment by moment.

Runs DeepSpeed on random weights: two steps of two micro-batches. Every tensor's storage is counted
as it comes and goes. What is estimated is rose/launch/memory.py's, which dry runs print. On GPUs
`scripts/gpu_check.py trainer` compares the peak. Left out: publishing, and engines.
"""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.trainer import tiny_world

SHAPE = {"layers": 4, "hidden": 128, "intermediate": 352, "heads": 4, "kv_heads": 2}
SHAPE |= {"head_dim": 32, "vocab": 2048, "tied_embeddings": False}
MIXTURE = {"experts": 8, "experts_per_token": 2, "expert_intermediate": 96}
KEYS = "model=qwen3_8b trainer=zero3_gpu rollout=gpu cluster=local trainer.ranks=1 "
KEYS += "env.max_new_tokens=64 trainer.threads=2"
DEADLINE_S = 540.0


def measure(
    tokens: int, overrides: list[str], shape: dict[str, int]
) -> dict[str, tuple[float, float]]:
    """moment -> (estimated, allocated), bytes. Raises RuntimeError when the rank fails."""
    # Imported here, so that no rank needs Hydra and pytest.
    from tests.conftest import compose_tree

    sizes = f"trainer.micro_batch_tokens={tokens} model.max_context={tokens}"
    tree = compose_tree(KEYS, sizes, *overrides)
    tree["model"]["shape"] = SHAPE | shape
    job = {"tokens": tokens, "port": free_port(), "tree": tree, "shape": SHAPE | shape}
    with tempfile.TemporaryDirectory(prefix="rose-memory-") as folder:
        process = tiny_world.server().Process(target=_rank, args=(job, folder))
        process.start()
        try:
            process.join(DEADLINE_S)
            code = process.exitcode
        finally:
            process.kill()
            process.join()
        if code != 0:
            raise RuntimeError(f"the rank ended with {code} (None: not within {DEADLINE_S:g} s)")
        return {
            moment: tuple(pair)
            for moment, pair in json.loads((Path(folder) / "found.json").read_text()).items()
        }


class Meter:
    """Bytes in tensors' storages: now, and the most since `begin`."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def begin(self) -> None:
        self.peak = self.now

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Of every tensor that is made within."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_map_only

        meter = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                tree_map_only(torch.Tensor, meter._count, made)
                return made

        with Mode():
            yield

    def _count(self, tensor) -> None:
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known and self._known[key].alive:
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self._known[key] = weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        self._known.pop(key, None)


def _rank(job: dict[str, Any], folder: str) -> None:
    import torch

    from rose import config
    from rose.comm import address
    from rose.launch import memory
    from rose.trainer import deepspeed_engine

    c = config.from_dict(job["tree"])
    torch.set_num_threads(c.trainer.threads)
    device = deepspeed_engine.use_device(0, 0)
    deepspeed_engine.join_world(device, 0, 1, address.local_place(job["port"]), 300.0)
    model = Path(folder) / "model"
    _save(job["shape"], model, c.trainer.dtype)
    meter = Meter()
    with meter.counting():
        engine = deepspeed_engine.DeepSpeedEngine(c.trainer, model, device)
        found = _steps(engine, job, meter)
    estimated = memory.moments(c, c.model.shape)
    (Path(folder) / "found.json").write_text(
        json.dumps({moment: (estimated[moment], found[moment]) for moment in found})
    )


def _steps(engine, job: dict[str, Any], meter: Meter) -> dict[str, float]:
    """Peaks of the second step, when Adam's moments are there."""
    import torch

    found: dict[str, float] = {}
    rows = 2
    inputs = torch.randint(0, job["shape"]["vocab"], (rows, job["tokens"] // rows))
    mask = torch.ones_like(inputs)
    for _ in range(2):
        meter.begin()
        for micro_batch in range(2):
            engine.begin_micro_batch(last=micro_batch == 1)
            logprobs, _ = engine(inputs, inputs, mask)
            engine.backward(logprobs.mean())
            del logprobs
        found["forward and backward"] = meter.peak
        meter.begin()
        engine.update()
        found["update"] = meter.peak
        meter.begin()
        found["between steps"] = meter.peak
    return found


def _save(shape: dict[str, Any], folder: Path, dtype: str) -> None:
    import torch
    import transformers

    kind, mixture = "Qwen3", {}
    if experts := shape.get("experts"):
        kind, mixture = "Qwen3Moe", {"num_experts": experts}
        mixture["num_experts_per_tok"] = shape["experts_per_token"]
        mixture["moe_intermediate_size"] = shape["expert_intermediate"]
    sizes = {"vocab_size": shape["vocab"], "hidden_size": shape["hidden"]}
    sizes |= {"intermediate_size": shape["intermediate"], "num_hidden_layers": shape["layers"]}
    sizes |= {"num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"]}
    sizes |= {"head_dim": shape["head_dim"], "tie_word_embeddings": shape["tied_embeddings"]}
    config = getattr(transformers, f"{kind}Config")(**sizes, **mixture)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
