"""Sandboxes: time to start, what a turn costs beside the same command in a plain bash, many at once.

    python scripts/bench_sandbox.py [--backend namespaces] [--at-once 1 8 64] [--turns 200]

Milliseconds, medians and 95th percentiles; a turn is the builtin `:`, so that its time is overhead.
Left out: checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from rose.sandbox import Sandbox, SandboxError, Spec
from rose.sandbox.probe import AUTO, BACKENDS, close

WAIT_S = 60.0


async def timed(call) -> tuple[float, object]:
    """Milliseconds of an awaitable, and what it gave."""
    began = time.perf_counter()
    made = await call
    return (time.perf_counter() - began) * 1e3, made


async def plain_turn(turns: int) -> float:
    """Milliseconds of the same turn in a bash without walls, by two pipes."""
    bash = await asyncio.create_subprocess_exec(
        "bash", "--norc", "-s", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    began = time.perf_counter()
    for _ in range(turns):
        bash.stdin.write(b":; echo $?\n")
        await bash.stdout.readline()
    each = (time.perf_counter() - began) * 1e3 / turns
    bash.stdin.close()
    await bash.wait()
    return each


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{statistics.median(values):.1f}, {statistics.quantiles(values, n=20)[-1]:.1f}"


async def measure(backend: str, at_once: list[int], turns: int) -> Table:
    first, box = await timed(Sandbox.start(Spec(), backend))
    await box.close()
    table = Table("at once", "start", "start, all", "turn", "close", title=f"{box.backend}, ms")
    for count in at_once:
        whole, made = await timed(
            asyncio.gather(*(timed(Sandbox.start(Spec(), backend)) for _ in range(count)))
        )
        boxes = [box for _, box in made]

        async def play(box: Sandbox) -> list[float]:
            return [(await timed(box.run(":", WAIT_S)))[0] for _ in range(turns)]

        taken = [each for one in await asyncio.gather(*map(play, boxes)) for each in one]
        ended, _ = await timed(asyncio.gather(*(box.close() for box in boxes)))
        starts = spread([each for each, _ in made])
        table.add_row(str(count), starts, f"{whole:.0f}", spread(taken), f"{ended:.1f}")
    table.caption = (
        f"the first one, with its keeper: {first:.0f}; the turn in a plain bash: "
        f"{await plain_turn(turns):.2f}"
    )
    return table


async def run(args: argparse.Namespace) -> None:
    try:
        Console().print(await measure(args.backend, args.at_once, args.turns))
    finally:
        close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=[AUTO, *BACKENDS], default=AUTO)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--turns", type=int, default=200)
    try:
        asyncio.run(run(parser.parse_args()))
    except SandboxError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
