"""What coordination costs: the main job's rollout beside vLLM driven alone on the same turns, in
one run.

    python scripts/bench_loop.py [--engines 1 2] [--steps 8] [--rounds 3] [HYDRA OVERRIDES ...]

For each number of engines it runs `launch.py`, takes every turn of its last steps from the saved
trajectories, and has bare AsyncLLM engines (same arguments, same number, no MPI, no environment, no
coordinator) make the same number of tokens from the same contexts, each trajectory's turns one
after the other as in the loop. Printed: step time split into rollout, train, sync and idle;
tokens/s of both; and their ratio, which is 1 when coordination is free. The two take turns for
`--rounds` rounds, since a machine's speed drifts: medians over the rounds, and the smallest and
largest ratio. Weights differ by a few updates, which changes no timing: the token counts are
forced.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rose import config as cfg
from rose.coordinator import replay
from rose.models import resolve
from rose.observe.metrics import read_metrics, rows_of
from rose.protocol import Trajectory, unpack_tokens

DEADLINE_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="training steps; the first is a warm-up and not counted",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--alone", nargs=3, metavar=("RUN", "INDEX", "ENGINES"), help=argparse.SUPPRESS
    )
    args, overrides = parser.parse_known_args()
    if args.alone:
        return asyncio.run(drive_alone(Path(args.alone[0]), int(args.alone[1]), int(args.alone[2])))
    rounds = [
        [measure(engines, args.steps, overrides) for engines in args.engines]
        for _ in range(args.rounds)
    ]
    show([[measured[i] for measured in rounds] for i in range(len(args.engines))])
    return 0


def measure(engines: int, steps: int, overrides: list[str]) -> dict:
    """One run of the loop and one of bare vLLM; medians over the counted steps, seconds and
    tokens/s."""
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        command = [
            sys.executable,
            str(REPOSITORY / "launch.py"),
            f"output_dir={folder}",
            "name=bench",
            f"trainer.steps={steps}",
            f"rollout.workers={engines}",
            "eval.episodes=0",
            "observe.report=false",
            *overrides,
        ]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        run = Path(folder) / "bench"
        loop = rows_of(read_metrics(run), "step")[1:]
        alone = run_alone(run, engines, steps)
    row = {
        key: statistics.median(step[f"time_{key}"] for step in loop)
        for key in ("rollout", "train", "sync", "idle", "step")
    }
    return row | {
        "engines": engines,
        "loop": statistics.median(step["tokens_per_s"] for step in loop),
        "alone": alone,
        "ratio": statistics.median(step["tokens_per_s"] for step in loop) / alone,
    }


def run_alone(run: Path, engines: int, steps: int) -> float:
    """Median tokens/s of the same steps on bare engines, one process each, released together."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--alone", str(run), str(i), str(engines)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(engines)
    ]
    rates = []
    try:
        for process in processes:
            expect(process, "ready")
        for step in range(2, steps + 1):
            began = time.time()
            for process in processes:
                process.stdin.write(f"{step}\n")
                process.stdin.flush()
            tokens = sum(int(expect(process, "tokens")) for process in processes)
            rates.append(tokens / (time.time() - began))
    finally:
        for process in processes:
            process.stdin.close()
        for process in processes:
            process.wait(timeout=60)
    return statistics.median(rates)


def expect(process: subprocess.Popen, word: str) -> str:
    """The rest of the process's next line that begins with `word`."""
    for line in process.stdout:
        if line.startswith(word):
            return line[len(word) :].strip()
    raise RuntimeError(
        f"bare engine {process.pid} ended without saying {word!r}; exit code {process.wait(60)}"
    )


def turns_of(trajectory: Trajectory) -> list[tuple[list[int], int]]:
    """[(context tokens, tokens that the policy made)] of each turn."""
    tokens, mask = unpack_tokens(trajectory.tokens), np.frombuffer(trajectory.mask, np.uint8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [
        (tokens[:start].tolist(), int(end - start))
        for start, end in zip(edges[::2], edges[1::2], strict=False)
    ]


async def drive_alone(run: Path, index: int, engines: int) -> int:
    """Bare engine `index`: for each step number read from stdin, make its share of the step's
    turns."""
    from rose.engine import start

    config = cfg.load(run / "config.json")
    for name, value in start.environment(config.cluster.gpus > 0, config.rollout.threads).items():
        os.environ.setdefault(name, value)
    folder = resolve(config.model)
    llm, _ = start.build(
        start.engine_args(folder, config.rollout, config.model, False, index),
        config.cluster.gpus > 0,
    )
    try:
        await play(llm, run, 1, index, engines)  # warm-up
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print("tokens", await play(llm, run, int(line), index, engines), flush=True)
    finally:
        llm.shutdown()
    return 0


async def play(llm, run: Path, step: int, index: int, engines: int) -> int:
    """All trajectories of a step that fall to this engine, at once; the number of tokens made."""
    groups = replay.load(run, step)[index::engines]
    made = await asyncio.gather(*(play_trajectory(llm, step, t) for group in groups for t in group))
    return sum(made)


async def play_trajectory(llm, step: int, trajectory: Trajectory) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    made = 0
    for number, (context, count) in enumerate(turns_of(trajectory)):
        params = SamplingParams(
            max_tokens=count,
            ignore_eos=True,
            temperature=1.0,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"prompt_token_ids": context, "cache_salt": str(step)}
        async for _ in llm.generate(request, params, f"{step}/{trajectory.id}/{number}"):
            made += count
    return made


def show(measured: list[list[dict]]) -> None:
    """`measured`: for each number of engines its rounds."""
    rows = [
        {key: statistics.median(r[key] for r in rounds) for key in rounds[0]} for rounds in measured
    ]
    table = Table(title=f"one training step, medians of {len(measured[0])} rounds")
    for column in (
        "engines",
        "step s",
        "rollout s",
        "train s",
        "sync s",
        "idle s",
        "loop tok/s",
        "vLLM alone tok/s",
        "ratio",
        "min..max",
    ):
        table.add_column(column, justify="right")
    for r, rounds in zip(rows, measured, strict=False):
        ratios = [one["ratio"] for one in rounds]
        table.add_row(
            str(r["engines"]),
            *(f"{r[k]:.2f}" for k in ("step", "rollout", "train", "sync", "idle")),
            f"{r['loop']:.0f}",
            f"{r['alone']:.0f}",
            f"{r['ratio']:.2f}",
            f"{min(ratios):.2f}..{max(ratios):.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
