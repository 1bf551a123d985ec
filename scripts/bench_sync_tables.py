"""What bench_sync.py found, as tables, and the targets of the issue, met or not."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from bench_sync_parts import RANKS

NAMES = {"dense": "dense", "coo": "COO int32 + value", "xor": "XOR + zstd-1", "ours": "ours"}
TARGETS = {1e-5: 10, 1e-6: 40}  # learning rate -> times less than dense
PAUSE = 0.02  # of a sync
GROWTH = 1.05  # bytes with the most receivers, of those with one: listings and manifests are asked for anew


@dataclass
class Sync:
    rate: float  # Mbit/s
    lr: float
    encoding: str
    receivers: int
    engines: bool
    version: int
    payload: int  # bytes of the edge
    link: int  # bytes over it
    pulled: int  # bytes of files that the relay pulled
    seconds: float  # publish to flipped
    publish_s: float
    stage_s: float  # of the slowest receiver, as the next two
    pause_s: float
    publish_cpu_s: (
        float  # computed, both ranks; other programs on the machine count less than in `seconds`
    )
    # of the slowest receiver until it had flipped; of an engine, what it generated included
    stage_cpu_s: float
    changed: int  # values
    trainer_peak: int  # bytes above those before the publisher was made, the larger rank
    receiver_peak: int  # above the weights


def middle(rows: list[Sync]) -> dict[str, float]:
    """Medians."""
    return {
        field: median(getattr(row, field) for row in rows)
        for field in (
            "payload",
            "link",
            "pulled",
            "seconds",
            "publish_s",
            "stage_s",
            "pause_s",
            "publish_cpu_s",
            "stage_cpu_s",
            "changed",
            "trainer_peak",
            "receiver_peak",
        )
    }


def _of(rows: list[Sync], **wanted) -> list[Sync]:
    return [
        row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())
    ]


def tables(rows: list[Sync], weights: int) -> list[str]:
    """`weights`: bytes of the model."""
    lines = []
    for rate in sorted({row.rate for row in rows}, reverse=True):
        here = _of(rows, rate=rate)
        counts = sorted({row.receivers for row in here if not row.engines})
        lines += [
            f"\n{f'{rate:g} Mbit/s' if rate else 'no limit'}; medians of the syncs",
            f"  {'lr':6}{'encoding':19}{'MB a sync':>10}"
            + "".join(f"{f'link x{n}':>10}" for n in counts)
            + " |"
            + "".join(f"{f's x{n}':>8}" for n in counts)
            + " | dense / it:  bytes  seconds | publish s  stage s  flip ms  of sync | CPU s: publish    stage",
        ]
        for lr in sorted({row.lr for row in here}):
            dense = _of(here, lr=lr, encoding="dense", receivers=counts[0], engines=False)
            for encoding in NAMES:
                found = {
                    n: middle(_of(here, lr=lr, encoding=encoding, receivers=n, engines=False))
                    for n in counts
                }
                one, beside = found[counts[0]], middle(dense)
                lines.append(
                    f"  {lr:<6g}{NAMES[encoding]:19}{one['payload'] / 1e6:10.2f}"
                    + "".join(f"{found[n]['link'] / 1e6:10.2f}" for n in counts)
                    + " |"
                    + "".join(f"{found[n]['seconds']:8.2f}" for n in counts)
                    + f" |            {beside['link'] / one['link']:7.1f}{beside['seconds'] / one['seconds']:9.1f} |"
                    f"{one['publish_s']:10.2f}{one['stage_s']:9.2f}{1e3 * one['pause_s']:9.1f}"
                    f"{100 * one['pause_s'] / one['seconds']:8.2f}% |"
                    f"{one['publish_cpu_s']:15.2f}{one['stage_cpu_s']:9.2f}"
                )
        for lr, count in sorted({(row.lr, row.receivers) for row in here if row.engines}):
            one = middle(_of(here, lr=lr, receivers=count, engines=True))
            lines.append(
                f"  {lr:<6g}ours, {count} vLLM engine{'s' if count > 1 else ' '} generating: "
                f"{one['seconds']:.2f} s, publish {one['publish_s']:.2f}, stage "
                f"{one['stage_s']:.2f}, generation paused {1e3 * one['pause_s']:.1f} ms = "
                f"{100 * one['pause_s'] / one['seconds']:.2f}% of the sync; over the link "
                f"{one['link'] / 1e6:.2f} MB"
            )
    return lines + _memory(rows, weights)


def _memory(rows: list[Sync], weights: int) -> list[str]:
    lines = [
        f"\nmemory, MB: the largest peak of any sync (model {weights / 1e6:.1f}, a rank's shard "
        f"{weights / RANKS / 1e6:.1f})",
        f"  {'lr':6}{'encoding':19}{'trainer rank, above before the publisher':>42}"
        f"{'receiver, above its weights':>30}",
    ]
    for lr in sorted({row.lr for row in rows}):
        for encoding in NAMES:
            found = _of(rows, lr=lr, encoding=encoding, engines=False)
            lines.append(
                f"  {lr:<6g}{NAMES[encoding]:19}{max(row.trainer_peak for row in found) / 1e6:42.1f}"
                f"{max(row.receiver_peak for row in found) / 1e6:30.1f}"
            )
        if engines := _of(rows, lr=lr, engines=True):
            lines.append(
                f"  {lr:<6g}ours, vLLM engine  "
                f"{max(row.receiver_peak for row in engines) / 1e6:72.1f}"
            )
    return lines


def targets(rows: list[Sync]) -> list[str]:
    lines = []

    def say(what: str, met: bool, found: str) -> None:
        lines.append(f"  {'met    ' if met else 'NOT met'}  {what}: {found}")

    for rate in sorted({row.rate for row in rows}, reverse=True):
        where = f"{rate:g} Mbit/s" if rate else "no limit"
        for lr, times in sorted(TARGETS.items(), reverse=True):
            here = _of(rows, rate=rate, lr=lr, engines=False)
            fewest = min((row.receivers for row in here), default=0)
            if not here:
                continue
            dense, ours = (
                middle(_of(here, encoding=name, receivers=fewest)) for name in ("dense", "ours")
            )
            for what, field in (("bytes over the link", "link"), ("seconds", "seconds")):
                ratio = dense[field] / ours[field]
                say(
                    f"{times}x under dense at lr {lr:g}, {where}, {what}",
                    ratio >= times,
                    f"{ratio:.1f}x",
                )
        ours = _of(rows, rate=rate, encoding="ours", engines=False)
        for lr in sorted({row.lr for row in ours}):
            counts = sorted({row.receivers for row in ours})
            few, many = (
                middle(_of(ours, lr=lr, receivers=n))["link"] for n in (counts[0], counts[-1])
            )
            if len(counts) > 1:
                say(
                    f"bytes don't grow from {counts[0]} to {counts[-1]} receivers, lr {lr:g}, "
                    f"{where}",
                    many <= GROWTH * few,
                    f"{few / 1e6:.3f} and {many / 1e6:.3f} MB",
                )
            for engines in (True, False):
                found = _of(rows, rate=rate, encoding="ours", lr=lr, engines=engines)
                if not found:
                    continue
                one = middle(_of(found, receivers=min(row.receivers for row in found)))
                share = one["pause_s"] / one["seconds"]
                say(
                    f"pause under {100 * PAUSE:g}% of the sync, "
                    f"{'engine' if engines else 'flip alone'}, lr {lr:g}, "
                    f"{where}",
                    share < PAUSE,
                    f"{100 * share:.2f}%, {1e3 * one['pause_s']:.1f} ms",
                )
    return lines


def trained(said: list[list[dict]]) -> list[str]:
    """Of the real trainer ranks, while they made the steps: ours, to a folder, without a link."""
    lines = []
    for number, ranks in enumerate(ranks for ranks in said if "nbytes" in ranks[0]):
        seconds, rise = (max(rank[field] for rank in ranks) for field in ("publish_s", "rise"))
        lines.append(
            f"  version {number}{' (with a full one)' if number == 0 else ''}: publish "
            f"{seconds:.2f} s, {ranks[0]['nbytes'] / 1e6:.2f} MB; a rank's memory rose by "
            f"{rise / 1e6:.1f} MB at most (the copy of its shard was there before)"
        )
    return lines
