"""Estimated against allocated memory of one trainer rank, moment by moment.

    python scripts/check_memory.py                                   # on a GPU: the shape of Qwen3-0.6B, ZeRO-3, one rank
    python scripts/check_memory.py --ranks 2 --set trainer.zero_stage=2      # as many GPUs
    python scripts/check_memory.py --cpu                             # a small shape, on the CPU

Runs DeepSpeed on random weights: two steps of two micro-batches. On a GPU the allocator tells the
peaks; on a CPU every tensor's storage is counted as it comes and goes. What is estimated is
rose/launch/memory.py's, which dry runs print; a GPU's context (memory.RUNTIME_GIB) is in neither
column. Left out: publishing, and engines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

QWEN3_0_6B = {
    "layers": 28,
    "hidden": 1024,
    "intermediate": 3072,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 151936,
    "tied_embeddings": True,
}
SMALL = {
    "layers": 4,
    "hidden": 128,
    "intermediate": 352,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "vocab": 2048,
    "tied_embeddings": False,
}
DEADLINE_S = 540.0
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="of a micro-batch; default 16384, on a CPU 512")
    parser.add_argument(
        "--vocab",
        type=int,
        help="of the model; with a small one the layers need most, not the logits",
    )
    parser.add_argument("--set", nargs="*", default=[], help="keys of the configuration")
    given = parser.parse_args()
    found = measure(
        given.cpu,
        given.ranks,
        given.tokens or (512 if given.cpu else 16384),
        given.set,
        given.vocab,
    )
    print(f"{'moment':24}{'estimated MiB':>16}{'allocated MiB':>16}{'ratio':>8}")
    for moment, (estimated, allocated) in found.items():
        print(
            f"{moment:24}{estimated / MIB:16.2f}{allocated / MIB:16.2f}{estimated / allocated:8.2f}"
        )
    return 0


def measure(
    cpu: bool, ranks: int, tokens: int, overrides: list[str], vocab: int | None = None
) -> dict[str, tuple[float, float]]:
    """moment -> (estimated, allocated by rank 0), bytes. Raises RuntimeError when a rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shape = SMALL if cpu else QWEN3_0_6B
    job = {
        "cpu": cpu,
        "ranks": ranks,
        "tokens": tokens,
        "port": port,
        "overrides": overrides,
        "shape": shape | ({"vocab": vocab} if vocab else {}),
    }
    with tempfile.TemporaryDirectory(prefix="rose-memory-") as folder:
        context = multiprocessing.get_context("spawn")
        started = [context.Process(target=_rank, args=(job, rank, folder)) for rank in range(ranks)]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join(DEADLINE_S)
            codes = [process.exitcode for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes} (None: not within {DEADLINE_S:g} s)")
        return {
            moment: tuple(pair)
            for moment, pair in json.loads((Path(folder) / "found.json").read_text()).items()
        }


def settings(job: dict[str, Any]):
    """The configuration that is estimated and run."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from rose import config as configuration
    from rose.models import REPOSITORY

    keys = [
        "model=qwen3_8b",
        "trainer=zero3_gpu",
        "rollout=gpu",
        f"cluster={'local' if job['cpu'] else 'gpus'}",
        f"trainer.ranks={job['ranks']}",
        f"trainer.micro_batch_tokens={job['tokens']}",
        f"model.max_context={job['tokens']}",
        "env.max_new_tokens=64",
        "trainer.threads=2",
        *job["overrides"],
    ]
    if not job["cpu"]:
        keys.append(f"cluster.gpus={job['ranks'] + 8}")
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        tree = OmegaConf.to_container(compose("config", keys), resolve=True)
    tree["model"]["shape"] = job["shape"]
    return configuration.from_dict(tree)


class Meter:
    """Bytes in tensors' storages: now, and the most since `begin`."""

    def __init__(self, device) -> None:
        self.device = device
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def begin(self) -> None:
        import torch

        self.peak = self.now
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def most(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else self.peak

    @contextmanager
    def counting(self) -> Iterator[None]:
        """On a CPU, of every tensor that is made within."""
        if self.device.type == "cuda":
            yield
            return
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


def _rank(job: dict[str, Any], rank: int, folder: str) -> None:
    import torch

    from rose.comm import address
    from rose.launch import memory
    from rose.trainer import deepspeed_engine

    c = settings(job)
    torch.set_num_threads(c.trainer.threads)
    device = deepspeed_engine.use_device(0 if job["cpu"] else job["ranks"], rank)
    deepspeed_engine.join_world(device, rank, job["ranks"], address.local_place(job["port"]), 300.0)
    model = Path(folder) / "model"
    if rank == 0:
        _save(job["shape"], model, c.trainer.dtype)
    torch.distributed.barrier()
    meter = Meter(device)
    with meter.counting():
        engine = deepspeed_engine.DeepSpeedEngine(c.trainer, model, device)
        found = _steps(engine, job, meter)
    if rank == 0:
        estimated = memory.moments(c, c.model.shape)
        (Path(folder) / "found.json").write_text(
            json.dumps({moment: (estimated[moment], found[moment]) for moment in found})
        )
    torch.distributed.barrier()


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
        found["forward and backward"] = meter.most()
        meter.begin()
        engine.update()
        found["update"] = meter.most()
        meter.begin()
        found["between steps"] = meter.most()
    return found


def _save(shape: dict[str, Any], folder: Path, dtype: str) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=shape["tied_embeddings"],
    )
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
