"""The estimates of dry runs against what DeepSpeed allocates, counted tensor by tensor on the CPU.

Runs DeepSpeed on random weights: two steps of two micro-batches. Every tensor's storage is counted
as it comes and goes. What is estimated is rose/launch/memory.py's, which dry runs print. On GPUs
`scripts/gpu_check.py trainer` compares the peak. Left out: publishing, and engines.
"""

import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rose import config
from rose.comm import address
from rose.launch import memory
from tests.conftest import compose_tree
from tests.trainer import tiny_world

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
KEYS = "model=qwen3_8b trainer=zero3_gpu rollout=gpu cluster=local trainer.ranks=1 "
KEYS += "env.max_new_tokens=64 trainer.threads=2 "
TOKENS = 256
KEYS += f"trainer.micro_batch_tokens={TOKENS} model.max_context={TOKENS}"


def measured(job: dict, rank: int) -> None:
    """Reports moment -> (estimated, allocated), bytes, of the only rank."""
    from rose.trainer import deepspeed_engine

    c = config.from_dict(job["tree"])
    torch.set_num_threads(c.trainer.threads)
    device = deepspeed_engine.use_device(0, 0)
    deepspeed_engine.join_world(device, 0, 1, address.local_place(job["port"]), 300.0)
    meter = Meter()
    with meter:
        engine = deepspeed_engine.DeepSpeedEngine(c.trainer, Path(job["folder"]), device)
        found = steps(engine, c.model.shape.vocab, meter)
    estimated = memory.moments(c, c.model.shape)
    pairs = {moment: (estimated[moment], found[moment]) for moment in found}
    tiny_world.report(job, rank, pairs)


class Meter(TorchDispatchMode):
    """Bytes in storages of the tensors that are made within: now, and the most since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def begin(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            tree_map_only(torch.Tensor, self._count, made)
        return made

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


def steps(engine, vocabulary: int, meter: Meter) -> dict[str, float]:
    """Peaks of the second step, when Adam's moments are there."""
    found: dict[str, float] = {}
    inputs = torch.randint(0, vocabulary, (2, TOKENS // 2))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "vocab", "more", "mixture"),
    [
        (3, 2048, (), {}),
        (3, 256, (), {}),
        (2, 2048, (), {}),
        (1, 2048, ("trainer.dtype=float32", "trainer.gradient_checkpointing=false"), {}),
        (3, 2048, (), MIXTURE),
    ],
)
def test_a_trainer_rank_allocates_what_is_estimated(tmp_path, stage, vocab, more, mixture):
    """With a large vocabulary the logits need most, with a small one the layers."""
    family, sizes = "Qwen3Moe" if mixture else "Qwen3", SIZES | {"vocab_size": vocab} | mixture
    tree = compose_tree(KEYS, f"trainer.zero_stage={stage}", *more)
    dtype = getattr(torch, tree["trainer"]["dtype"])
    tiny_world.random_model(family, **sizes).to(dtype).save_pretrained(tmp_path)
    tree["model"]["shape"] = msgspec.to_builtins(config.read_shape(tmp_path))
    [found] = tiny_world.run_world({"name": "run", "tree": tree}, tmp_path, 1, measured)
    assert found.keys() == {"forward and backward", "update", "between steps"}
    for moment, (estimated, counted) in found.items():
        assert estimated == pytest.approx(counted, rel=0.15), (moment, found)
