"""Run a process of bench_sync.py: `bench_sync_roles.py ROLE JSON`. Orders and answers are lines of
JSON.

    publish     a rank that publishes versions, as often as ordered, in the encoding ordered
    receive     the weights of an engine without the engine: `Receiver` over tensors
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.transfer import codec
from scripts.harness import answers
from scripts.run_weights import CodecOf, Whole, threads

STAGE_BYTES = 8 * 2**30
TIMEOUT_S = 300.0


def load(file: str) -> dict:
    """Load a version's tensors into memory of their own, not mapped from the file."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def digest(tensors: dict) -> str:
    """Return xxh3-128 over all tensors in the order of their names."""
    import torch
    import xxhash

    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().view(torch.uint8).numpy().data.cast("B"))
    return state.hexdigest()


def encoding(name: str):
    return codec if name == "ours" else CodecOf(name)


def publish(job: dict, orders, say) -> None:
    """Publish versions as ordered: {"open": store, "file", "encoding"} publishes that file as
    version 0, then {"version", "file"} each load one, and the next order publishes it."""
    import torch

    from rose.config import ModelShape
    from rose.trainer.trainer import _Peers
    from rose.transfer import publish as product

    place, rank, ranks = f"tcp://127.0.0.1:{job['port']}", job["rank"], job["ranks"]
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    shape, peers = ModelShape(**job["shape"]), _Peers(rank, ranks, None)
    made: Any = None
    for order in orders:
        tensors = load(order["file"])
        if "open" in order:
            product.codec, made = encoding(order["encoding"]), None
            made = Whole(Path(order["open"]), tensors, shape, (1, 2, 4, 8), peers)
            made.publish(0)
            say({})
            continue
        made.tensors = tensors
        say({})  # answer that the file is loaded
        next(orders)
        computed = time.process_time()
        nbytes = made.publish(order["version"]).nbytes
        say({"cpu_s": time.process_time() - computed, "nbytes": nbytes})


def receive(job: dict, orders, say) -> None:
    """Receive versions as ordered: {"open": store, "file", "encoding"}, then {"version"}."""
    from rose.transfer import stage as product
    from rose.transfer.live import Live
    from rose.transfer.receive import Receiver, whole

    receiver: Any = None
    tensors: dict = {}
    for order in orders:
        if "open" in order:
            if receiver is not None:
                receiver.close()
            product.codec, tensors = encoding(order["encoding"]), load(order["file"])
            receiver = Receiver(order["open"], None, job["token_file"], whole, Live(tensors))
            say({})
            continue
        version, computed = order["version"], time.process_time()
        staged = receiver.stage(version - 1, version, threads(), STAGE_BYTES, TIMEOUT_S)
        staged.flip()
        told = {"flipped": time.monotonic(), "cpu_s": time.process_time() - computed}
        staged.check()
        say(told | {"route": staged.route, "digest": digest(tensors)})
        del staged


def main() -> None:
    say, (role, job) = answers(), sys.argv[1:]
    codec.compile_all()
    say({"ready": True})
    orders = (json.loads(line) for line in sys.stdin)
    {"publish": publish, "receive": receive}[role](json.loads(job), orders, say)


if __name__ == "__main__":
    main()
