"""Measure sandboxes: starts, turns, captures, recovery by policy, costs.

    python scripts/sandbox/bench_sandbox.py [--only starts captures recovery costs] [--think 2]

starts     a turn is the builtin `:`, so that its time is overhead
captures   the fastest and the median of captures in --folder, and of a restore with its first turn; state
           `server` has a Python HTTP server in the background
recovery   killed at every turn of three scripted episodes and one that the tiny model plays, then
           restored and played to the end
costs      the figures of an episode in conf/sim/sandboxes/*.yaml

Milliseconds unless stated otherwise, medians and 95th percentiles. `--think`: seconds that an agent
thinks between two turns; restored episodes are played without thinking.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from rose.parts.sandbox import Sandbox, SandboxError, Spec
from rose.parts.sandbox.inspector import NONE
from rose.parts.sandbox.probe import AUTO, close
from scripts.harness import configured, flagged
from scripts.sandbox.bench_sandbox_episodes import (
    CHAT,
    CLASSIFIED,
    EPISODES,
    FULL,
    POLICIES,
    Sampled,
    kill_at_each_turn,
    play,
    restoring,
    saves,
)

WAIT_S = 60.0
STARTS, TURNS = (1, 8, 64), 200  # sandboxes at once, and turns of each
CAPTURES = 15
SMALL_FILES = "for i in $(seq 20); do echo $i > f$i; done"
HTTP_SERVER = (
    'python3 -c "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=80, '
    "bind='127.0.0.1')\" >/dev/null 2>&1 & "
    "until python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1')\" 2>/dev/null; "
    "do sleep .05; done"
)
RESTORES = 5


async def timed(call) -> tuple[float, Any]:
    """Return the milliseconds of an awaitable, and its result."""
    began = time.perf_counter()
    made = await call
    return (time.perf_counter() - began) * 1e3, made


def spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{statistics.median(values):.1f}, {statistics.quantiles(values, n=20)[-1]:.1f}"


async def starts(args: Any) -> Table:
    async with await Sandbox.start(Spec()) as box:  # the first one starts the keeper, too
        table = Table("at once", "start", "start, all", "turn", title=f"{box.backend}, ms")

    async def turns(box: Sandbox) -> list[float]:
        return [(await timed(box.run(":", WAIT_S)))[0] for _ in range(TURNS)]

    for count in STARTS:
        starting = asyncio.gather(*(timed(Sandbox.start(Spec())) for _ in range(count)))
        whole, made = await timed(starting)
        took, boxes = zip(*made, strict=True)
        taken = [each for one in await asyncio.gather(*map(turns, boxes)) for each in one]
        await asyncio.gather(*(box.close() for box in boxes))
        table.add_row(str(count), spread(took), f"{whole:.0f}", spread(taken))
    return table


async def captured(box: Sandbox, kind: str, folder: Path) -> tuple[float, float, int]:
    """Return milliseconds of a capture and of a restore with one turn, and the capture's bytes."""
    took, _ = await timed(box.capture(kind, folder))
    began = time.perf_counter()
    other = await Sandbox.restore(folder)
    await other.run(":", WAIT_S)
    restored = (time.perf_counter() - began) * 1e3
    await other.close()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return took, restored, size


async def captures(args: Any) -> Table:
    title = f"captures in {args.folder}, ms"
    table = Table("state", "kind", "capture", "restore", "kB", title=title)
    with tempfile.TemporaryDirectory(prefix="rose-bench-", dir=args.folder) as top:
        for state, command in (("bash", SMALL_FILES), ("server", f"{SMALL_FILES}; {HTTP_SERVER}")):
            async with await Sandbox.start(Spec(), args.backend) as box:
                await box.run(command, WAIT_S)
                for kind in box.capture_kinds:
                    found = [await captured(box, kind, Path(top, f"{i}")) for i in range(CAPTURES)]
                    *taken, sizes = zip(*found, strict=True)
                    shown = [f"{min(each):.0f}, {statistics.median(each):.0f}" for each in taken]
                    table.add_row(state, kind, *shown, f"{sizes[-1] / 1000:,.0f}")
    return table


async def recovery(args: Any) -> Table:
    title = f"killed at every turn, thinking {args.think:g} s"
    columns = ("episode", "policy", "right", "captured", "stored", "exposed", "time")
    table = Table(*columns, title=title)
    for episode in (*EPISODES, Sampled(configured("+experiment=terminal").model)):
        async with await Sandbox.start(Spec()) as box:
            wanted = (await play(box, episode)).end
        found = {p: await kill_at_each_turn(episode, p, args.think, wanted) for p in POLICIES}
        base, full = found[CHAT].played.seconds, found[FULL]
        for policy, made in found.items():
            played = made.played
            table.add_row(
                episode.name,
                policy,
                f"{made.right}/{episode.length}",
                f"{made.captured / 1e6:.1f} MB, {made.captured / full.captured:.0%}",
                f"{made.stored / 1e3:,.0f} kB, {made.stored / full.stored:.0%}",
                f"{sum(played.exposed) / played.seconds:.2%}",
                f"{played.seconds / base - 1:+.2%}",
            )
    return table


async def costs(args: Any) -> Table:
    """Return the table of costs. A capture is without the look, which the simulator adds."""
    title = "turns by what is captured: share, milliseconds, bytes in the store"
    table = Table("episode", "kind", "share", "look", "capture", "stored", "restore", title=title)
    for episode in EPISODES:
        classified = await saves(episode, CLASSIFIED, args.think)
        (full,) = await saves(episode, FULL, args.think)
        look = next((each.seconds for each in classified if each.kind == NONE), 0.0)
        for each in classified:
            row = f"{each.share:.3f}", f"{look * 1e3:.1f}", f"{(each.seconds - look) * 1e3:.1f}"
            table.add_row(episode.name, each.kind, *row, f"{each.stored:,.0f}")
        took, size = await restoring(episode, RESTORES)
        row = "1.000", "", f"{full.seconds * 1e3:.1f}", f"{full.stored:,.0f}"
        table.add_row(episode.name, FULL, *row, f"{took * 1e3:.1f}, {size:,} bytes")
    return table


PARTS = {part.__name__: part for part in (starts, captures, recovery, costs)}


async def run(args: Any) -> None:
    try:
        for name in args.only:
            Console(width=120).print(await PARTS[name](args))
    finally:
        close()


def main() -> None:
    folder = Path(tempfile.gettempdir())
    args = flagged(__doc__, only=list(PARTS), think=2.0, backend=AUTO, folder=folder)
    try:
        asyncio.run(run(args))
    except SandboxError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
