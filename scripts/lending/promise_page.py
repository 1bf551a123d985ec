"""Make the table and the figure of prove_promise.py from its runs' figures. Pure; not a command.

Two panels of the figure, an SVG, show the mean reward of all seeds with its 95% interval, over
training steps and over hours of dedicated engines. Below each lies a row of marks per seed: what
was killed, preempted or requeued, and when. The strip at the bottom shows online users' latency
beside rollouts as a multiple of serving alone. Colours follow the reader's theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rose.parts.simulator.study.gains import Interval
from scripts.csv_tables import markdown
from scripts.lending.promise_count import (
    SLACK,
    Ratio,
    curve,
    device_hours,
    difference,
    ratios,
    rewards,
)

WINDOWS = 4  # parts of a run; a point of a reward curve is the mean of one part's steps
NAMES = {"dedicated": "four dedicated", "alone": "one alone", "borrowed": "one and borrowed"}
SIDES = tuple(NAMES)
CLAIMED = ("dedicated", "borrowed")  # the sides whose rewards are compared
NARROW = 0.05  # largest half-width of a reward's interval at the end, so that `SEEN` would show
SEEN = 0.1  # a difference of rewards that the claim excludes
GAP = 0.5  # least share that borrowed engines regain of the loss of one engine alone
# Beginning of each kind of harm in a run's log, and its name in the table and the figure.
HARM = {
    "killed borrowed": "engine killed",
    "preempted": "engine preempted",
    "killed environment": "environment host killed",
    "requeued": "job requeued",
}

Of = dict[str, list[dict]]  # runs by side


class Line(NamedTuple):
    what: str
    dedicated: str
    alone: str
    borrowed: str
    holds: bool | None = None  # null if it is no claim
    forecast: str = ""  # the simulator's figure, made before the runs


def by_side(runs: Sequence[dict]) -> Of:
    return {side: [run for run in runs if run["side"] == side] for side in SIDES}


def window(of: Of) -> int:
    """Return how many steps a point of a reward curve is the mean of."""
    return math.ceil(max(len(run["groups"]) for runs in of.values() for run in runs) / WINDOWS)


def half(one: Interval) -> float:
    return (one.high - one.low) / 2


Forecast = dict[str, dict[str, float]]  # the simulator's figures by side; may be empty


def lines(runs: Sequence[dict], forecast: Forecast) -> list[Line]:
    """Return the promise, line by line."""
    of = by_side(runs)
    found = [*_rewards(of), *_steps(of, forecast), *_devices(of, forecast), *_online(of, forecast)]
    return [*found, *_trajectories(of), _harm(of), _machine(of)]


def _cells(of: Of, shown: Callable[[list[dict]], str]) -> Any:
    return [shown(of[side]) for side in SIDES]


def _rewards(of: Of) -> list[Line]:
    found = {side: curve(of[side], window(of)) for side in SIDES}
    first = [f"{found[side][0][1].mean:.2f}" for side in SIDES]
    ends = {side: found[side][-1][1] for side in SIDES}
    last = [f"{end.mean:.3f} ± {half(end):.3f}" for end in ends.values()]
    last[1] = f"{ends['alone'].mean:.3f}, {len(of['alone'][0]['groups'])} steps"
    narrow = all(half(ends[side]) <= NARROW for side in CLAIMED)
    last_steps = window(of)
    theirs, ours = ([rewards(run)[-last_steps:] for run in of[side]] for side in CLAIMED)
    gap = difference(ours, theirs)
    each = ["; ".join(f"{fmean(seed):.3f}" for seed in side) for side in (theirs, ours)]
    alike = gap.low > -SEEN and gap.high < SEEN
    shown = f"{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
    return [
        Line(f"reward, first {last_steps} steps", *first),
        Line(f"reward, last {last_steps} steps; half-width at most {NARROW:g}", *last, narrow),
        Line("... of each seed", each[0], "", each[1]),
        Line(f"difference then, paired by seed, within {SEEN:g}", "", "", shown, alike),
    ]


def _steps(of: Of, forecast: Forecast) -> list[Line]:
    """Compare the steps that all sides have, without the first, in which engines are confined."""
    last = min(len(run["step_s"]) for runs in of.values() for run in runs)
    by_seed = {side: [fmean(run["step_s"][1:last]) for run in of[side]] for side in SIDES}
    gains = [_gain(*three) for three in zip(*(by_seed[side] for side in SIDES), strict=True)]
    share = fmean(share for run in of["borrowed"] for share in run["borrowed_share"])
    gain = fmean(gains)
    shown = f"{gain:.0%} ({min(gains):.0%} to {max(gains):.0%})"
    steps = [f"{fmean(by_seed[side]):.1f} s" for side in SIDES]
    words = f"{GAP:.0%} of what one alone loses is brought back"
    expected = ["", "", ""]
    if forecast:
        expected[0] = "; ".join(f"{forecast[side]['step_s']:.1f} s" for side in SIDES)
        expected[1] = f"{_gain(*(forecast[side]['step_s'] for side in SIDES)):.0%}"
        expected[2] = f"{forecast['borrowed']['borrowed_share']:.0%}"
    return [
        Line(f"mean step, 2 to {last}", *steps, None, expected[0]),
        Line(words, "", "", shown, gain >= GAP, expected[1]),
        Line("tokens by borrowed engines", "0%", "0%", f"{share:.0%}", None, expected[2]),
    ]


def _gain(dedicated: float, alone: float, borrowed: float) -> float:
    """Return the share of the seconds between the first two; 0 if there are none to gain."""
    return (alone - borrowed) / (alone - dedicated) if alone > dedicated else 0.0


def _devices(of: Of, forecast: Forecast) -> list[Line]:
    held = {side: fmean(device_hours(run) / run["engines"] for run in of[side]) for side in SIDES}
    found = []
    for words, own, others in (
        ("dedicated engines' device-hours, half at most", 0, 0),
        ("... and the trainer's", 1, 0),
        ("... and the spare one's, and those of lent devices as if they served nobody", 1, 3),
    ):
        count = {side: of[side][0]["engines"] + own for side in SIDES}
        count["borrowed"] += others
        dedicated, alone, borrowed = (held[side] * count[side] for side in SIDES)
        share, expected = borrowed / dedicated, ""
        if forecast:
            theirs, ours = (count[side] * forecast[side]["held_s"] for side in CLAIMED)
            expected = f"{ours / theirs:.0%}"
        cells = f"{dedicated:.3f}", f"{alone:.3f}, fewer steps", f"{borrowed:.3f} ({share:.0%})"
        found.append(Line(words, *cells, None if own else share <= 0.5, expected))
    return found


def pairs(of: Of, beside: str = "borrowed") -> list[tuple[dict, dict]]:
    """Return (serving alone, serving on the side `beside`) of each seed."""
    return list(zip(of["alone"], of[beside], strict=True))


def _online(of: Of, forecast: Forecast) -> list[Line]:
    """Compare all requests that came while both sides ran: an unanswered one is infinitely late."""

    def answered(runs: list[dict]) -> str:
        done = sum(request[3] for run in runs for request in run["requests"])
        return f"{done} of {sum(len(run['requests']) for run in runs)}"

    expected = forecast.get("borrowed", {})
    found = []
    for one, other in zip(ratios(pairs(of)), ratios(pairs(of, "dedicated")), strict=True):
        what = f"online {one.name}, at most {SLACK:g} times alone"
        beside = f"{one.beside:.3f} s: {one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
        foreseen = f"{expected[one.name]:.2f}" if one.name in expected else ""
        cells = f"{other.beside:.3f} s: {other.ratio:.2f}", f"{one.alone:.3f} s", beside
        found.append(Line(what, *cells, one.ratio <= SLACK, foreseen))
    return [*found, Line("online requests answered", *_cells(of, answered))]


def _trajectories(of: Of) -> list[Line]:
    def total(runs: list[dict], part: str, *keys: str) -> int:
        return sum(run[part][key] for run in runs for key in keys)

    def wrong(runs: list[dict]) -> str:
        lost, doubled = total(runs, "counts", "lost", "replaced"), total(runs, "counts", "doubled")
        return f"{lost} and {doubled} of {total(runs, 'counts', 'trained'):,}"

    def repeated(runs: list[dict]) -> str:
        restarted = total(runs, "repeated", "trajectories_restarted")
        return f"{restarted}; {total(runs, 'repeated', 'resumed_turns')}"

    holds = not total(of["borrowed"], "counts", "lost", "replaced", "doubled", "short")
    words = "trajectories begun again; turns answered again from records"
    return [
        Line("trajectories lost, counted twice", *_cells(of, wrong), holds),
        Line(words, *_cells(of, repeated)),
    ]


def kind_of(what: str) -> str:
    """Return the kind of harm that a run's log names, as a key of `HARM`."""
    return next(kind for kind in HARM if what.startswith(kind))


def _harm(of: Of) -> Line:
    """Check that each kind befell each seed, and the requeue once, with an attempt after it."""
    by_seed = [
        [sum(kind_of(what) == kind for _, what in run["harm"]) for kind in HARM]
        for run in of["borrowed"]
    ]
    total = [sum(kind) for kind in zip(*by_seed, strict=True)]
    once = all(run["attempts"] == 2 for run in of["borrowed"])
    holds = once and all(min(kinds) >= 1 and kinds[-1] == 1 for kinds in by_seed)
    words = "harm in each seed: engines killed, preempted; hosts killed; one requeue"
    return Line(words, "none", "none", "{}, {}; {}; {}".format(*total), holds)


def _machine(of: Of) -> Line:
    def shown(runs: list[dict]) -> str:
        stolen, load = max(run["stolen"] for run in runs), max(run["load"] for run in runs)
        return f"{stolen:.1%}; {load:.1f}"

    words = "most that the hypervisor took; load before"
    return Line(words, *_cells(of, shown))


def table(found: Sequence[Line]) -> str:
    verdict = {True: "holds", False: "does not hold", None: ""}
    header = ("", *NAMES.values(), "forecast", "verdict")
    return markdown(header, [(*line[:4], line.forecast, verdict[line.holds]) for line in found])


# --------------------------------------------------------------------------- the figure

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
