"""The table and the figure of prove_promise.py, from its runs' figures. Pure; not a command."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

import numpy as np
from csv_tables import markdown
from promise_count import HOUR_S, apart, curve, difference

from rose.sim.study.gains import Interval

BLOCKS = 5  # of a reward curve
TARGET_S = {"ttft_s": 2.0, "tpot_s": 0.5}  # P99, of bench_live.SLO
NAMES = {"dedicated": "four dedicated", "alone": "one alone", "borrowed": "one and borrowed"}
SIDES = tuple(NAMES)
CLAIMED = ("dedicated", "borrowed")  # the reward curves that are compared
COLOURS = {"dedicated": "#5b6b7b", "alone": "#c9a227", "borrowed": "#c2185b"}
GAP = 0.5  # of what one engine alone loses, that the borrowed ones bring back at least
HARM = ("killed borrowed", "preempted", "killed environment", "requeued")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 300, 56, 44, 40

Of = dict[str, list[dict]]  # runs by side


class Line(NamedTuple):
    what: str
    dedicated: str
    alone: str
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
        *_steps(of, forecast),
        *_devices(of, forecast),
        *(_online(of, forecast, key) for key in TARGET_S),
        *_trajectories(of),
        _harm(of),
        _machine(of),
    ]


def _cells(of: Of, shown: Callable[[list[dict]], str]) -> list[str]:
    return [shown(of[side]) for side in SIDES]


def _forecast(forecast: dict[str, dict[str, float]], key: str, shown: str) -> str:
    """Of all sides."""
    return "; ".join(shown.format(forecast[side][key]) for side in SIDES if forecast)


def _curves(of: Of) -> dict[str, list[tuple[float, Interval]]]:
    block = block_of(max(len(run["rewards"]) for runs in of.values() for run in runs))
    return {side: curve([run["rewards"] for run in of[side]], block) for side in SIDES}


def _rewards(of: Of) -> list[Line]:
    curves = _curves(of)
    ends = [f"{curves[side][0][1].mean:.2f}, {curves[side][-1][1].mean:.2f}" for side in SIDES]
    ends[1] += f" (of {len(of['alone'][0]['rewards'])} steps)"
    rewards = {side: [run["rewards"] for run in of[side]] for side in CLAIMED}
    means = {side: fmean(map(fmean, rewards[side])) for side in CLAIMED}
    found = difference(rewards["borrowed"], rewards["dedicated"])
    equal = found.low <= 0 <= found.high and not apart(curves["borrowed"], curves["dedicated"])
    shown = f"{means['borrowed']:.3f}; {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    least = (found.high - found.low) / 2
    words = f"reward, all steps; difference, where {least:.3f} would be seen"
    return [
        Line("reward, first and last fifth of the steps", *ends, "", None),
        Line(words, f"{means['dedicated']:.3f}", "", shown, "", equal),
    ]


def _steps(of: Of, forecast: dict[str, dict[str, float]]) -> list[Line]:
    """Of the steps that all sides have, without the first, in which engines are confined."""
    last = min(len(run["step_s"]) for runs in of.values() for run in runs)
    by_seed = {side: [fmean(run["step_s"][1:last]) for run in of[side]] for side in SIDES}
    gains = [_gain(*three) for three in zip(*(by_seed[side] for side in SIDES), strict=True)]
    share = fmean(share for run in of["borrowed"] for share in run["borrowed_share"])
    steps = [f"{fmean(by_seed[side]):.1f} s" for side in SIDES]
    predicted = _forecast(forecast, "step_s", "{:.1f} s")
    gain = fmean(gains)
    expected = [forecast[side]["step_s"] for side in SIDES if forecast]
    return [
        Line(f"mean step, of 2 to {last}", *steps, predicted, None),
        Line(
            f"borrowed engines bring back {GAP:.0%} of what one alone loses",
            "",
            "",
            f"{gain:.0%} ({min(gains):.0%} to {max(gains):.0%})",
            f"{_gain(*expected):.0%}" if expected else "",
            gain >= GAP,
        ),
        Line(
            "tokens by borrowed engines",
            "0%",
            "0%",
            f"{share:.0%}",
            f"{forecast['borrowed']['borrowed_share']:.0%}" if forecast else "",
            None,
        ),
    ]


def _gain(dedicated: float, alone: float, borrowed: float) -> float:
    """Share of the seconds between the first two; none if there are none to gain."""
    return (alone - borrowed) / (alone - dedicated) if alone > dedicated else 0.0


def _devices(of: Of, forecast: dict[str, dict[str, float]]) -> list[Line]:
    found = []
    for words, own, others in (
        ("dedicated engines' device-hours, half at most", 0, 0),
        ("... and the trainer's", 1, 0),
        ("... and the spare one's, and those of lent devices as if they served nobody", 1, 3),
    ):
        more = {side: own + others * (side == "borrowed") for side in SIDES}
        hours = {
            side: fmean((run["engines"] + more[side]) * run["held_s"] / HOUR_S for run in of[side])
            for side in SIDES
        }
        share = hours["borrowed"] / hours["dedicated"]
        predicted = [
            (of[side][0]["engines"] + more[side]) * forecast[side]["held_s"]
            for side in CLAIMED
            if forecast
        ]
        found.append(
            Line(
                words,
                f"{hours['dedicated']:.3f}",
                f"{hours['alone']:.3f}, fewer steps",
                f"{hours['borrowed']:.3f} ({share:.0%})",
                f"{predicted[1] / predicted[0]:.0%}" if predicted else "",
                None if own else share <= 0.5,
            )
        )
    return found


def _online(of: Of, forecast: dict[str, dict[str, float]], key: str) -> Line:
    """Of all requests that came: an unanswered one is infinitely late."""
    p99 = {side: _p99(of[side], key) for side in SIDES}
    target, name = TARGET_S[key], key.removesuffix("_s").upper()

    def shown(runs: list[dict]) -> str:
        asked = sum(run["requests"] for run in runs)
        answered = asked - sum(run["unanswered"] for run in runs)
        return f"{_p99(runs, key):.2f} s; {answered} of {asked} answered"

    return Line(
        f"online {name} P99 (target {target:g} s)",
        *_cells(of, shown),
        _forecast(forecast, key.replace("_s", "_p99_s"), "{:.2f} s"),
        p99["borrowed"] <= target,
    )


def _p99(runs: list[dict], key: str) -> float:
    values = [v for run in runs for v in run[key] + [math.inf] * run["unanswered"]]
    return float(np.percentile(values, 99, method="higher")) if values else math.inf


def _trajectories(of: Of) -> list[Line]:
    def wrong(runs: list[dict]) -> str:
        lost, replaced, doubled, trained = (
            sum(run["counts"][key] for run in runs)
            for key in ("lost", "replaced", "doubled", "trained")
        )
        return f"{lost + replaced} and {doubled} of {trained:,}"

    def repeated(runs: list[dict]) -> str:
        return "; ".join(
            f"{sum(run['repeated'][key] for run in runs)}"
            for key in ("trajectories_restarted", "resumed_turns")
        )

    bad = ("lost", "replaced", "doubled", "short")
    holds = not any(run["counts"][key] for run in of["borrowed"] for key in bad)
    words = "trajectories begun again; turns answered again from records"
    return [
        Line("trajectories lost, counted twice", *_cells(of, wrong), "", holds),
        Line(words, *_cells(of, repeated), "", None),
    ]


def _harm(of: Of) -> Line:
    """Claimed: each kind befell each seed, and the requeue once, with an attempt after it."""
    by_seed = [
        [sum(what.startswith(kind) for what in run["harm"]) for kind in HARM]
        for run in of["borrowed"]
    ]
    total = [sum(kind) for kind in zip(*by_seed, strict=True)]
    once = all(run["attempts"] == 2 for run in of["borrowed"])
    holds = once and all(min(kinds) >= 1 and kinds[-1] == 1 for kinds in by_seed)
    words = "harm in each seed: engines killed, preempted; hosts killed; one requeue"
    return Line(words, "none", "none", "{}, {}; {}; {}".format(*total), "", holds)


def _machine(of: Of) -> Line:
    def shown(runs: list[dict]) -> str:
        stolen, load = max(run["stolen"] for run in runs), max(run["load"] for run in runs)
        return f"{stolen:.1%}; {load:.1f}"

    words = "most that the hypervisor took; load before"
    return Line(words, *_cells(of, shown), "", None)


def table(found: Sequence[Line]) -> str:
    verdict = {True: "holds", False: "does not hold", None: ""}
    header = ("", *NAMES.values(), "forecast", "verdict")
    return markdown(header, [(*line[:5], verdict[line.holds]) for line in found])


def figure(runs: Sequence[dict], title: str) -> str:
    """Reward curves of all sides with their intervals, as SVG."""
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
        "alone": "one dedicated engine",
        "borrowed": f"one dedicated engine and borrowed ones, harmed {harm:.0f} times",
    }
    step_s = fmean(second for run in runs for second in run["step_s"][1:])
    return f"{words[side]}: {step_s:.1f} s a step, {hours:.2f} device-hours"
