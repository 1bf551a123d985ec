"""Make the table of prove_promise.py from its runs' figures. Pure; not a command."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rose.parts.simulator.study.gains import Interval
from scripts.csv_tables import markdown
from scripts.lending.promise_count import SLACK, curve, device_hours, difference, ratios, rewards

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
    return [
        *_rewards(of),
        *_steps(of, forecast),
        *_devices(of, forecast),
        *_online(of, forecast),
        *_trajectories(of),
        _harm(of),
        _machine(of),
    ]


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


def pairs(of: Of) -> list[tuple[dict, dict]]:
    """Return (serving alone, serving beside rollouts) of each seed."""
    return list(zip(of["alone"], of["borrowed"], strict=True))


def _online(of: Of, forecast: Forecast) -> list[Line]:
    """Compare all requests that came while both sides ran: an unanswered one is infinitely late."""

    def answered(runs: list[dict]) -> str:
        done = sum(request[3] for run in runs for request in run["requests"])
        return f"{done} of {sum(len(run['requests']) for run in runs)}"

    expected = forecast.get("borrowed", {})
    found = [
        Line(
            f"online {one.name}, at most {SLACK:g} times alone",
            "",
            f"{one.alone:.3f} s",
            f"{one.beside:.3f} s: {one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})",
            one.ratio <= SLACK,
            f"{expected[one.name]:.2f}" if one.name in expected else "",
        )
        for one in ratios(pairs(of))
    ]
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
