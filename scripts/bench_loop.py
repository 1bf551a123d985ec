"""Measure the cost of coordination: the main job's rollout beside bare vLLM on the same turns.

    python scripts/bench_loop.py [--engines 1 2] [--steps 8] [--rounds 3] [HYDRA OVERRIDES ...]

For each number of engines it runs `launch.py`. Then as many bare AsyncLLM engines (same arguments,
no MPI, no environment, no coordinator) generate the same number of tokens from the contexts of the
saved trajectories, the turns of each one after the other. Prints the step time split into rollout,
train, sync and idle; tokens/s of both; and their ratio, which is 1 when coordination is free. The
two alternate, since a machine's speed drifts; figures are medians over the rounds. Weights differ
by a few updates, which changes no timing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.coordinator import replay
from rose.models import resolve
from rose.protocol import Trajectory, unpack_tokens
from scripts.csv_tables import middle, show
from scripts.harness import Child, answers, cfg, flagged
from scripts.runs import ran


def main() -> int:
    if sys.argv[1:2] == ["--alone"]:
        return asyncio.run(drive_alone(Path(sys.argv[2]), *map(int, sys.argv[3:])))
    args = flagged(__doc__, None, "OVERRIDE", engines=[1, 2], steps=8, rounds=3)
    rounds = [
        [measure(engines, args.steps, args.words) for engines in args.engines]
        for _ in range(args.rounds)
    ]
    rows = []
    for each in zip(*rounds, strict=True):
        medians = {key: median(one[key] for one in each) for key in each[0]}
        rows.append(medians | {"ratio": middle([one["ratio"] for one in each])})
    show(rows, f"one training step, medians of {args.rounds} rounds; seconds, tokens/s")
    return 0


def measure(engines: int, steps: int, overrides: list[str]) -> dict:
    """Run the loop and bare vLLM once. Return medians over the steps: seconds, tokens/s."""
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        run = ran(
            folder, "bench", f"trainer.steps={steps}", f"rollout.workers={engines}", *overrides
        )
        loop = run.steps(1)
        alone = run_alone(run.run, engines, steps)
    parts = ("step", "rollout", "train", "sync", "idle")
    seconds = {part: median(step[f"time_{part}"] for step in loop) for part in parts}
    rate = median(step["tokens_per_s"] for step in loop)
    return {"engines": engines, **seconds, "loop": rate, "alone": alone, "ratio": rate / alone}


def run_alone(run: Path, engines: int, steps: int) -> float:
    """Return the median tokens/s of the same steps on bare engines, one process each."""
    rates = []
    with ExitStack() as stack:
        children = []
        for i in range(engines):
            command = [sys.executable, __file__, "--alone", str(run), str(i), str(engines)]
            children.append(Child(f"engine {i}", command, run / f"alone-{i}.log"))
            stack.callback(children[-1].end)
        for child in children:
            child.answer()
        for step in range(2, steps + 1):
            began = time.time()
            for child in children:
                child.order({"step": step})
            tokens = sum(child.answer()["tokens"] for child in children)
            rates.append(tokens / (time.time() - began))
        for child in children:  # the process ends by itself and shuts its engine down
            child.popen.stdin.close()
            child.popen.wait(60)
    return median(rates)


def turns_of(trajectory: Trajectory) -> list[tuple[list[int], int]]:
    """Return (context tokens, number of tokens that the policy generated) of each turn."""
    tokens, mask = unpack_tokens(trajectory.tokens), np.frombuffer(trajectory.mask, np.uint8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [
        (tokens[:start].tolist(), int(end - start))
        for start, end in zip(edges[::2], edges[1::2], strict=False)
    ]


async def drive_alone(run: Path, index: int, engines: int) -> int:
    """Run bare engine `index`: generate its share of each step that is ordered on stdin."""
    from rose.engine import start

    say, config = answers(), cfg.load(run / "config.json")
    for name, value in start.environment(config.cluster.gpus > 0, config.rollout.threads).items():
        os.environ.setdefault(name, value)
    folder = resolve(config.model)
    llm, _ = start.build(
        start.engine_args(folder, config.rollout, config.model, False, index),
        config.cluster.gpus > 0,
    )
    try:
        await play(llm, run, 1, index, engines)  # warm-up
        say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            step = json.loads(line)["step"]
            say({"tokens": await play(llm, run, step, index, engines)})
    finally:
        llm.shutdown()
    return 0


async def play(llm, run: Path, step: int, index: int, engines: int) -> int:
    """Run this engine's trajectories of a step at once and return the tokens generated."""
    groups = replay.load(run, step)[index::engines]
    made = await asyncio.gather(*(play_trajectory(llm, step, t) for group in groups for t in group))
    return sum(made)


async def play_trajectory(llm, step: int, trajectory: Trajectory) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    made = 0
    alike = {"ignore_eos": True, "temperature": 1.0, "logprobs": 0, "detokenize": False}
    for number, (context, count) in enumerate(turns_of(trajectory)):
        params = SamplingParams(max_tokens=count, output_kind=RequestOutputKind.FINAL_ONLY, **alike)
        request = {"prompt_token_ids": context, "cache_salt": str(step)}
        async for _ in llm.generate(request, params, f"{step}/{trajectory.id}/{number}"):
            made += count
    return made


if __name__ == "__main__":
    sys.exit(main())
