"""What a pre-deployed, inactive rollout engine costs, and how soon it serves.

    python scripts/bench_activation.py                   # SmolLM2-135M, float32
    python scripts/bench_activation.py --model FOLDER    # any Hugging Face folder
    python scripts/bench_activation.py --lent            # KV cache from the page pool that a shared device has
    python scripts/bench_activation.py --gpus            # on a machine with a GPU: its memory beside the host's

One engine is started, fills part of its KV cache, and is deactivated and activated `--rounds`
times; after each activation it must make the same tokens as before. Resident is what smaps_rollup
says, private the part of it that no other process shares (the engine is forked, so that much of
what it imports is the parent's). The folder's files are in the page cache, as they are beside a
running job. Left out: the transfer of the newest version after it (bench_sync.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose import config, models, protocol  # noqa: E402
from rose.config.tree import Serving  # noqa: E402
from rose.engine.vllm_engine import Engine  # noqa: E402
from rose.lending.vllm import device  # noqa: E402
from rose.memory import resident_bytes  # noqa: E402

CONF = Path(__file__).resolve().parents[1] / "conf"
TURNS, PROMPT, NEW = 4, 256, 6  # tokens


def section(name: str, kind: type):
    return msgspec.convert(yaml.safe_load((CONF / name).read_text()), kind)


async def tokens(engine: Engine, vocab: int, round_: int) -> list[list[int]]:
    async def turn(i: int) -> list[int]:
        prompt = np.random.default_rng(i).integers(0, vocab, PROMPT)
        sampling = protocol.Sampling(max_new_tokens=NEW, temperature=0.0)
        return [
            token
            async for chunk in engine.generate(
                f"{round_}.{i}", protocol.pack_tokens(prompt), sampling
            )
            for token in chunk.tokens
        ]

    return [await turn(i) for i in range(TURNS)]


def footprint(engine: Engine, gpus: bool) -> tuple[float, ...]:
    """GiB: resident, private, and used on the GPU (by all processes)."""
    found = [resident_bytes(engine.pid), psutil.Process(engine.pid).memory_full_info().uss]
    if gpus:
        import torch

        free, total = torch.cuda.mem_get_info()
        found.append(total - free)
    return tuple(nbytes / 2**30 for nbytes in found)


async def worker(engine: Engine, method: str, *args):
    """A call that R's scheduler makes, of an engine's one worker."""
    return (await engine._llm.collective_rpc(method, args=args))[0]


async def measure(folder: Path, arguments) -> dict[str, list]:
    rollout = section("rollout/cpu.yaml", config.Rollout)
    if arguments.gpus:
        rollout = msgspec.structs.replace(rollout, engine_args={"enable_sleep_mode": True})
    model = msgspec.structs.replace(
        section("model/smollm2.yaml", config.Model), dtype=arguments.dtype
    )
    vocab = config.read_shape(folder).vocab
    began = time.monotonic()
    engine = await Engine.start(folder, rollout, model, gpus=arguments.gpus)
    rows: dict[str, list] = {
        "start": [time.monotonic() - began],
        "active": [],
        "inactive": [],
        "down": [],
        "up": [],
    }
    try:
        if arguments.lent:
            layout = await worker(engine, "rose_kv_layout")
            rows["unmapped"] = [footprint(engine, arguments.gpus)]
            await worker(engine, "rose_map_blocks", list(range(layout["blocks"])))
        expected = await tokens(engine, vocab, 0)
        for round_ in range(1, arguments.rounds + 1):
            rows["active"].append(footprint(engine, arguments.gpus))
            began = time.monotonic()
            await engine.deactivate()
            rows["down"].append(time.monotonic() - began)
            rows["inactive"].append(footprint(engine, arguments.gpus))
            began = time.monotonic()
            await engine.activate()
            rows["up"].append(time.monotonic() - began)
            if (found := await tokens(engine, vocab, round_)) != expected:
                wrong = sum(a != b for a, b in zip(found, expected))
                raise RuntimeError(
                    f"after activation {round_}, {wrong} of {TURNS} turns are not those of before"
                )
    finally:
        await engine.shutdown()
    return rows


def table(rows: dict[str, list]) -> str:
    lines = [f"start {rows['start'][0]:.1f} s"]
    for name in ("unmapped", "active", "inactive"):
        if name not in rows:
            continue
        figures = [statistics.mean(column) for column in zip(*rows[name])]
        lines.append(
            f"{name:8} "
            + ", ".join(
                f"{what} {gib:.3f} GiB"
                for what, gib in zip(("resident", "private", "of the GPU"), figures)
            )
        )
    for name, what in (("down", "deactivate"), ("up", "activate")):
        lines.append(
            f"{what:10} {statistics.mean(rows[name]):.2f} s (mean of {len(rows[name])}; "
            f"{min(rows[name]):.2f} to {max(rows[name]):.2f})"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="Hugging Face folder; SmolLM2-135M if not given")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lent", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    arguments = parser.parse_args(argv)
    folder = arguments.model or models.resolve(section("model/smollm2.yaml", config.Model))
    with tempfile.TemporaryDirectory() as boards:
        if arguments.lent:
            os.environ |= device.describe(
                Path(boards), section("serving/borrow.yaml", Serving), None
            )
        print(table(asyncio.run(measure(folder, arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
