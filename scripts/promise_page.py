"""The table and the figure of prove_promise.py, from its runs' figures. Pure; not a command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

import numpy as np
from csv_tables import markdown
from promise_count import HOUR_S, apart, curve, difference

from rose.sim.study.gains import Interval

BLOCKS = 5  # of a reward curve
TARGET_S = {"ttft_s": 2.0, "tpot_s": 0.5}  # P99, of bench_live.SLO
SIDES = ("dedicated", "borrowed")
COLOURS = {"dedicated": "#5b6b7b", "borrowed": "#c2185b"}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 300, 56, 44, 40


class Line(NamedTuple):
    what: str
    dedicated: str
    borrowed: str
    forecast: str
    holds: bool | None  # null: no claim


def block_of(steps: int) -> int:
    return max(1, math.ceil(steps / BLOCKS))


def lines(runs: Sequence[dict], forecast: dict[str, dict[str, float]]) -> list[Line]:
    """The promise, line by line."""
    of = {side: [run for run in runs if run["side"] == side] for side in SIDES}
    return [
        *_rewards(of),
        *_devices(of, forecast),
        *(_online(of, forecast, key) for key in TARGET_S),
        _trajectories(of),
        _steps(of, forecast),
        _harm(of),
    ]


def _curves(of: dict[str, list[dict]]) -> dict[str, list[tuple[float, Interval]]]:
    block = block_of(max(len(run["rewards"]) for runs in of.values() for run in runs))
    return {side: curve([run["rewards"] for run in of[side]], block) for side in SIDES}


def _rewards(of: dict[str, list[dict]]) -> list[Line]:
    curves = _curves(of)
    ends = [f"{curves[side][0][1].mean:.2f}, {curves[side][-1][1].mean:.2f}" for side in SIDES]
    rewards = {side: [run["rewards"] for run in of[side]] for side in SIDES}
    means = {side: fmean(map(fmean, rewards[side])) for side in SIDES}
    found = difference(rewards["borrowed"], rewards["dedicated"])
    equal = found.low <= 0 <= found.high and not apart(curves["borrowed"], curves["dedicated"])
    shown = f"{means['borrowed']:.3f}; {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    return [
        Line("reward, first and last fifth of the steps", *ends, "", None),
        Line("reward, all steps; difference", f"{means['dedicated']:.3f}", shown, "", equal),
    ]


def _devices(of: dict[str, list[dict]], forecast: dict[str, dict[str, float]]) -> list[Line]:
    found = []
    for words, more, claimed in (
        ("dedicated engines' device-hours", 0, True),
        ("... and the trainer's", 1, False),
    ):
        hours = {
            side: fmean((run["engines"] + more) * run["held_s"] / HOUR_S for run in of[side])
            for side in SIDES
        }
        share = hours["borrowed"] / hours["dedicated"]
        engines = {side: of[side][0]["engines"] + more for side in SIDES}
        predicted = [engines[side] * forecast[side]["held_s"] for side in SIDES if forecast]
        found.append(
            Line(
                words,
                f"{hours['dedicated']:.3f}",
                f"{hours['borrowed']:.3f} ({share:.0%})",
                f"{predicted[1] / predicted[0]:.0%}" if predicted else "",
                share <= 0.5 if claimed else None,
            )
        )
    return found


def _online(of: dict[str, list[dict]], forecast: dict[str, dict[str, float]], key: str) -> Line:
    p99 = {
        side: float(np.percentile([v for run in of[side] for v in run[key]] or [math.nan], 99))
        for side in SIDES
    }
    target, name = TARGET_S[key], key.removesuffix("_s").upper()
    counts = {side: sum(len(run[key]) for run in of[side]) for side in SIDES}
    predicted = forecast.get("borrowed", {}).get(f"{key.removesuffix('_s')}_p99_s", math.nan)
    return Line(
        f"online {name} P99 (target {target:g} s)",
        f"{p99['dedicated']:.2f} s of {counts['dedicated']}",
        f"{p99['borrowed']:.2f} s of {counts['borrowed']}",
        f"{predicted:.2f} s" if predicted == predicted else "",
        p99["borrowed"] <= target,
    )


def _trajectories(of: dict[str, list[dict]]) -> Line:
    wrong = {
        side: {
            key: sum(run["counts"][key] for run in of[side])
            for key in ("lost", "replaced", "doubled", "short")
        }
        for side in SIDES
    }
    shown = {
        side: f"{n['lost'] + n['replaced']} and {n['doubled']} of "
        f"{sum(run['counts']['trained'] for run in of[side]):,}"
        for side, n in wrong.items()
    }
    holds = not any(wrong["borrowed"].values())
    return Line("trajectories lost, counted twice", *shown.values(), "", holds)


def _steps(of: dict[str, list[dict]], forecast: dict[str, dict[str, float]]) -> Line:
    step = {
        side: float(np.median([s for run in of[side] for s in run["step_s"]])) for side in SIDES
    }
    share = fmean(share for run in of["borrowed"] for share in run["borrowed_share"])
    predicted = [f"{forecast[side]['step_s']:.1f}" for side in SIDES if forecast]
    return Line(
        "median step; tokens by borrowed engines",
        f"{step['dedicated']:.1f} s",
        f"{step['borrowed']:.1f} s; {share:.0%}",
        f"{', '.join(predicted)} s; {forecast['borrowed']['borrowed_share']:.0%}"
        if forecast
        else "",
        None,
    )


def _harm(of: dict[str, list[dict]]) -> Line:
    kinds = ("killed borrowed", "preempted", "killed environment", "requeued")
    harm = [what for run in of["borrowed"] for what in run["harm"]]
    counted = [sum(what.startswith(kind) for what in harm) for kind in kinds]
    words = "engines killed, preempted; hosts killed; requeues"
    return Line(words, "none", "{}, {}; {}; {}".format(*counted), "", None)


def table(found: Sequence[Line]) -> str:
    verdict = {True: "holds", False: "does not hold", None: ""}
    header = ("", "four dedicated", "one and borrowed", "forecast", "verdict")
    return markdown(header, [(*line[:4], verdict[line.holds]) for line in found])


def figure(runs: Sequence[dict], title: str) -> str:
    """Reward curves of both sides with their intervals, as SVG."""
    of = {side: [run for run in runs if run["side"] == side] for side in SIDES}
    curves = _curves(of)
    steps = max(len(run["rewards"]) for run in runs)
    most = max(
        one.mean if math.isnan(one.high) else one.high for c in curves.values() for _, one in c
    )
    top = min(1.0, math.ceil(10 * most) / 10) or 1.0

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * step / steps

    def y(reward: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(max(reward, 0.0), top) / top

    parts = [f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>']
    parts += _axes(steps, top, x, y)
    for number, side in enumerate(SIDES):
        points = curves[side]
        band = [(m, one.low if one.low == one.low else one.mean) for m, one in points]
        band += [(m, one.high if one.high == one.high else one.mean) for m, one in reversed(points)]
        shape = " ".join(f"{x(m):.1f},{y(v):.1f}" for m, v in band)
        line = " ".join(f"{x(m):.1f},{y(one.mean):.1f}" for m, one in points)
        colour = COLOURS[side]
        parts.append(f'<polygon points="{shape}" fill="{colour}" opacity="0.18"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at, name = LEFT + 10, _legend(side, of[side])
        parts.append(f'<text x="{at}" y="{TOP + 14 + 18 * number}" fill="{colour}">{name}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12"'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{ground}\n{body}\n</svg>\n'


def _axes(steps: int, top: float, x, y) -> list[str]:
    parts = []
    for tick in range(6):
        value = top * tick / 5
        parts.append(
            f'<line x1="{x(0):.1f}" x2="{x(steps):.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
        step = round(steps * tick / 5)
        parts.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
        )
    middle = (LEFT + WIDTH) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">training step; mean reward, '
        "95% interval</text>"
    )
    return parts


def _legend(side: str, runs: Sequence[dict]) -> str:
    hours = fmean(run["engines"] * run["held_s"] / HOUR_S for run in runs)
    harm = fmean(len(run["harm"]) for run in runs)
    words = {
        "dedicated": "four dedicated engines",
        "borrowed": f"one dedicated engine and borrowed ones, harmed {harm:.0f} times",
    }
    return f"{words[side]}: {hours:.2f} device-hours"
