"""Draw the figure of prove_promise.py as SVG, from its runs' figures. Pure; not a command.

Two panels show the mean reward of all seeds with its 95% interval, over training steps and over
hours of dedicated engines. Below each lies a row of marks per seed: what was killed, preempted or
requeued, and when. The strip at the bottom shows online users' latency beside rollouts as a
multiple of serving alone. Colours follow the reader's theme, the ground included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

import numpy as np

from rose.parts.simulator.study.gains import Interval
from scripts.lending.promise_count import SLACK, Ratio, curve, device_hours, ratios
from scripts.lending.promise_page import HARM, SIDES, Of, by_side, kind_of, pairs, window

WIDTH, MARGIN = 860, 20
PLOT_W, PLOT_H = 340, 210
PANEL_LEFTS, PANEL_TOP = (64, 496), 102
ROW = 15  # height of a seed's row of marks
STRIP_ROW, STRIP_LEFT, STRIP_W = 24, 252, 400
MOST_RATIO = 4.0  # larger ratios are drawn at the edge
WORDS = {
    "dedicated": "four dedicated engines",
    "borrowed": "one dedicated engine and borrowed ones",
    "alone": "one dedicated engine alone, fewer steps",
}
SHAPES = dict(zip(HARM, ("triangle", "diamond", "circle", "square"), strict=True))
STYLE = """
text{fill:#1f2328;font:12px sans-serif}.big{font-size:15px;font-weight:600}.soft{fill:#59636e}
.ground{fill:#ffffff}.grid{stroke:#d8dee4}.line{stroke:#59636e}.mark{fill:#1f2328;stroke:#ffffff}
.dedicated{stroke:#3b6fb6}.borrowed{stroke:#c2185b}.alone{stroke:#9a6b00;stroke-dasharray:5 3}
.band{stroke:none;opacity:.2}.band.dedicated{fill:#3b6fb6}.band.borrowed{fill:#c2185b}
.curve{fill:none;stroke-width:2}.dot{fill:#c2185b}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9aa4af}.ground{fill:#0d1117}
.grid{stroke:#30363d}.line{stroke:#9aa4af}.mark{fill:#e6edf3;stroke:#0d1117}.dedicated{stroke:#79b0ff}
.borrowed{stroke:#ff7eb0}.alone{stroke:#e0b050}.band.dedicated{fill:#79b0ff}
.band.borrowed{fill:#ff7eb0}.dot{fill:#ff7eb0}}
"""


class Axis(NamedTuple):
    """Maps values from 0 to `most` to pixels from `start` on, over `length`."""

    start: float
    length: float
    most: float

    def __call__(self, value: float) -> float:
        return self.start + self.length * min(max(value, 0.0), self.most) / self.most


def figure(runs: Sequence[dict], title: str) -> str:
    of = by_side(runs)
    seeds = len(of["borrowed"])
    found = ratios(pairs(of))
    strip = PANEL_TOP + PLOT_H + ROW * seeds + 122
    height = strip + STRIP_ROW * len(found) + 30
    parts = [
        _text(MARGIN, 26, f"The promise, measured: {title}", "big"),
        *_legend(),
        *_panel(of, 0, "training step", _by_step),
        *_panel(of, 1, "hours of dedicated engines", device_hours),
        *_strip(found, strip),
    ]
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}"/>'
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return f"{head}\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{ground}\n{body}\n</svg>\n"


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {at}{style}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, more: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{kind}" {ends}{more}/>'


def _mark(kind: str, x: float, y: float) -> str:
    """Draw a kind of harm, 8 pixels wide."""
    shape = SHAPES[kind]
    if shape == "circle":
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    corners = {
        "triangle": ((-4.5, -4), (4.5, -4), (0, 4.5)),
        "diamond": ((-5, 0), (0, -5), (5, 0), (0, 5)),
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="mark" points="{points}"/>'


def _legend() -> list[str]:
    parts = []
    for y, named in ((46, WORDS), (66, HARM)):
        x = float(MARGIN)
        for kind, words in named.items():
            line = named is WORDS
            parts.append(
                _line(x, y, x + 24, y, f"curve {kind}") if line else _mark(kind, x + 12, y)
            )
            parts.append(_text(x + 30, y + 4, words))
            x += 30 + 6.4 * len(words) + 26
    return parts


def _by_step(run: dict, at: float) -> float:
    """Return how many steps a run had done at a time, with the share of the one that ran."""
    ends = [0.0, *run["at_s"]]
    return float(np.interp(at, ends, range(len(ends))))


def _panel(of: Of, number: int, words: str, place: Callable[[dict, float], float]) -> list[str]:
    """Draw the curves over `place(run, seconds)`."""
    most = _rounded(max(place(run, math.inf) for runs in of.values() for run in runs))
    x = Axis(PANEL_LEFTS[number], PLOT_W, most)
    y = Axis(PANEL_TOP + PLOT_H, -PLOT_H, 1.0)
    seeds = len(of["borrowed"])
    bottom = PANEL_TOP + PLOT_H + ROW * seeds + 18
    parts = []
    for tick in range(6):
        parts.append(_line(x(0), y(tick / 5), x(most), y(tick / 5), "grid"))
        parts.append(_text(x(0) - 8, y(tick / 5) + 4, f"{tick / 5:.1f}", "soft", "end"))
        at = most * tick / 5
        parts.append(_line(x(at), bottom, x(at), bottom + 4, "line"))
        parts.append(_text(x(at), bottom + 18, f"{at:.3g}", "soft", "middle"))
    parts.append(_line(x(0), bottom, x(most), bottom, "line"))
    parts.append(_text(x(most / 2), bottom + 36, words, "", "middle"))
    parts.append(_text(x(0) - 44, PANEL_TOP - 8, "mean reward, 95% interval", "soft"))
    for side in ("alone", *(one for one in SIDES if one != "alone")):
        parts += _curve(side, _points(of[side], place, window(of)), x, y)
    for row, run in enumerate(of["borrowed"]):
        middle = PANEL_TOP + PLOT_H + 20 + ROW * row
        parts.append(_text(x(0) - 8, middle + 4, f"seed {run['seed']}", "soft", "end"))
        parts += [_mark(kind_of(what), x(place(run, at)), middle) for at, what in run["harm"]]
    return parts


def _points(
    runs: Sequence[dict], place: Callable[[dict, float], float], steps: int
) -> list[tuple[float, Interval]]:
    """Return (where, mean reward over seeds) of each window of steps, at its middle."""
    found = []
    for middle, reward in curve(runs, steps):
        at = [np.interp(middle, range(1, len(run["at_s"]) + 1), run["at_s"]) for run in runs]
        where = fmean(place(run, float(one)) for run, one in zip(runs, at, strict=True))
        found.append((where, reward))
    return found


def _curve(side: str, points: Sequence[tuple[float, Interval]], x: Axis, y: Axis) -> list[str]:
    parts = []
    if side != "alone" and not any(math.isnan(one.low) for _, one in points):
        around = [(at, one.low) for at, one in points]
        around += [(at, one.high) for at, one in reversed(points)]
        shape = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in around)
        parts.append(f'<polygon class="band {side}" points="{shape}"/>')
    line = " ".join(f"{x(at):.1f},{y(one.mean):.1f}" for at, one in points)
    return [*parts, f'<polyline class="curve {side}" points="{line}"/>']


def _rounded(most: float) -> float:
    """Return the end of an axis of five steps that holds `most`."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    ends = (5 * power * factor for factor in (1, 1.2, 1.6, 2, 2.5, 3, 4, 5, 6, 8, 10))
    return next(end for end in ends if end >= most * 0.999)


def _strip(found: Sequence[Ratio], top: float) -> list[str]:
    """Draw the ratios of latency with their intervals, beside 1 and the target."""
    finite = [one.high for one in found if math.isfinite(one.high)]
    most = min(MOST_RATIO, max(2.0, math.ceil(2 * max(finite, default=2.0)) / 2))
    x = Axis(STRIP_LEFT, STRIP_W, most)
    bottom = top + STRIP_ROW * len(found)
    words = "Online users' latency beside rollouts, as a multiple of serving alone under the same "
    parts = [_text(MARGIN, top - 38, f"{words}traffic, 95% interval")]
    for tick in range(int(most * 2) + 1):
        parts.append(_line(x(tick / 2), top - 6, x(tick / 2), bottom, "grid"))
        parts.append(_text(x(tick / 2), bottom + 16, f"{tick / 2:g}", "soft", "middle"))
    parts.append(_line(x(1), top - 6, x(1), bottom, "line", ' stroke-width="1.5"'))
    more = ' stroke-width="1.5" stroke-dasharray="3 3"'
    parts.append(_line(x(SLACK), top - 6, x(SLACK), bottom, "line", more))
    parts.append(_text(x(SLACK), top - 10, f"target {SLACK:g}", "", "middle"))
    for number, one in enumerate(found):
        y = top + STRIP_ROW * (number + 0.5)
        words = f"{one.name}: {one.alone:.3f} s alone, {one.beside:.3f} s"
        parts.append(_text(MARGIN, y + 4, words))
        parts.append(_line(x(one.low), y, x(one.high), y, "borrowed", ' stroke-width="3"'))
        parts.append(f'<circle class="dot" cx="{x(one.ratio):.1f}" cy="{y:.1f}" r="5"/>')
        shown = f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
        parts.append(_text(STRIP_LEFT + STRIP_W + 16, y + 4, shown))
    return parts
