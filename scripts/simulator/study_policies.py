"""Simulate all compositions of the scheduler's policies, to find the fastest at each staleness.

    python scripts/simulator/study_policies.py                     both settings and every composition: a day on one core
    python scripts/simulator/study_policies.py only=rose_8b staleness=1 order=fifo,due_first
    python scripts/simulator/study_policies.py draw=true           the table again, from the CSV file

Writes docs/results/policies_search.csv (out=FOLDER: into FOLDER), and its front between the marks
in docs/policies.md. First, every composition runs on half of a setting (conf/experiment/rose_8b and
rose_32b) with one seed. Then the fastest few of each largest staleness, by trained tokens per
second, run on the whole setting with all seeds, beside ROSE's own compositions, `best` and
`best_sync`. A quarter of a setting is too little: there `carry_over` seems faster than
`bounded_staleness`, which it is not. All compositions have ROSE's pools: dedicated and borrowed
engines, with `all_idle` also the trainer's GPUs. Left out: `dapo` and RollPacker's spare
trajectories (they leave long ones untrained for good), `libra` (its planner and buckets need other
pools or degrees), `rollart` (on one kind of hardware it is cache_affine), `static` (`rose` uses all
devices, too, if n_serving is their number) and policies that hold no borrowed devices.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.config import Policy, Scheduler
from rose.parts.simulator.config import Config, SimSystem
from rose.parts.simulator.study import runs
from rose.parts.simulator.study.gains import gain
from rose.parts.simulator.study.outcome import Outcome, by_system, mean, values
from scripts.csv_tables import REPOSITORY, RESULTS, draw, markdown, with_bounds
from scripts.harness import keyed, listed, simulated
from scripts.simulator.reproduce_rose import (
    SETTINGS,
    composed,
    merge_settings,
    outcomes_of,
    settings_in,
)

CONF = REPOSITORY / "conf" / "scheduler"
FILE = "policies_search.csv"
BATCHING: dict[str, tuple[dict[str, Any], ...]] = {
    "synchronous": ({},),
    "tail_batching": ({"spare": 0.0},),
    "one_step_off": ({},),
    "bounded_staleness": tuple(
        {"eta": eta, "running": running} for eta in (1, 2, 4) for running in (1.0, 1.5, 2.0)
    ),
    "trajectory_async": ({"alpha": 1}, {"alpha": 2}),
    "carry_over": tuple(
        {"staleness": s, "carry": c} for s, c in ((1, 0.5), (1, 1.0), (2, 1.0), (2, 2.0), (4, 4.0))
    ),
}
ORDER: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("fifo", "due_first", "longest_first"), ({},)),
    "mlfq": ({"first": "short"}, {"first": "long"}),
    "shortest_first": ({},),
}
ROUTING: dict[str, tuple[dict[str, Any], ...]] = dict.fromkeys(
    ["rose", "earliest_finish", "seer", "least_loaded", "cache_affine", "round_robin", "thunder"],
    ({},),
)
PROVISIONING: dict[str, tuple[dict[str, Any], ...]] = {"rose": ({},), "all_idle": ({},)}
KINDS = {"batching": BATCHING, "order": ORDER, "routing": ROUTING, "provisioning": PROVISIONING}
POOLS = {"rose": ["dedicated", "cooperative"], "all_idle": ["dedicated", "hybrid", "cooperative"]}
# Batching policies whose waiting turns are all of one version, so that due_first is fifo.
ONE_VERSION = ("synchronous", "tail_batching", "one_step_off")
BASE = "rose"  # the setting's own system, over which all gains are computed


class Choice(NamedTuple):
    """An option of a kind, with the arguments that differ from those of its file."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        args = (f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.args)
        return " ".join([self.name, *args])


class Composition(NamedTuple):
    batching: Choice
    order: Choice
    routing: Choice
    provisioning: Choice

    def __str__(self) -> str:
        return ", ".join(map(str, self))


class Round(NamedTuple):
    """A round of the search: the divisor of a setting's size, its length, and the number of
    compositions of each largest staleness that go on to the next round."""

    divided: int
    seeds: int
    steps: int
    warmup: int
    kept: int


# An even number of steps counts: with two batches at once, steps are long and short by turns.
ROUNDS = (Round(2, 1, 6, 2, 3), Round(1, 3, 8, 4, 0))
# Arguments that bound staleness. one_step_off has none, and its bound is 1.
BOUNDS = ("eta", "alpha", "staleness")


KEPT = (  # compositions that go through all rounds, and are named in the tables
    ("ROSE", "synchronous, fifo, rose, rose"),
    ("ROSE, one step off", "one_step_off, fifo, rose, rose"),
    ("ROSE, bounded staleness 1", "bounded_staleness eta=1 running=1, fifo, rose, rose"),
    ("best before this search", "carry_over staleness=1 carry=1, due_first, earliest_finish, rose"),
)


@cache
def shipped(name: str) -> Composition:
    """Return the composition of conf/sim/systems/NAME.yaml, with the arguments that KINDS varies.
    Their values may keep it out of the search."""
    scheduler = simulated(f"sim/systems=[{name}]").sim.systems[name].scheduler
    chosen = [(options, getattr(scheduler, kind)) for kind, options in KINDS.items()]
    return Composition(
        *(
            Choice(policy.name, tuple((key, policy.args[key]) for key in options[policy.name][0]))
            for options, policy in chosen
        )
    )


def bound(batching: Choice) -> int:
    """Return the largest staleness that a batching policy allows."""
    bounds = [value for key, value in batching.args if key in BOUNDS]
    return int(bounds[0] if bounds else batching.name == "one_step_off")


def compositions(only: dict[str, Sequence[str]], staleness: float = math.inf) -> list[Composition]:
    """Return all compositions that make sense, of the options named in `only` (kind -> names; a
    kind that isn't in it has all options) and of at most `staleness`."""
    each = [
        [
            Choice(name, tuple(args.items()))
            for name, variants in options.items()
            if name in only.get(kind, options)
            for args in variants
        ]
        for kind, options in KINDS.items()
    ]
    return [
        found
        for found in (Composition(*chosen) for chosen in product(*each))
        if bound(found.batching) <= staleness
        and not (found.order.name == "due_first" and found.batching.name in ONE_VERSION)
    ]


def system(what: Composition, c: Config) -> SimSystem:
    """Return a composition as a system of the simulator. Arguments that a file takes from elsewhere
    (the number of devices that may be borrowed) are those of the configuration."""
    policies = {}
    for kind, chosen in zip(KINDS, what, strict=True):
        option = yaml.safe_load((CONF / kind / f"{chosen.name}.yaml").read_text(encoding="utf-8"))
        policies[kind] = Policy(name=option["name"], args=option["args"] | dict(chosen.args))
    if "n_serving" in policies["provisioning"].args:
        policies["provisioning"].args["n_serving"] = c.sim.n_serving
    scheduler = Scheduler(**policies, queue_depth=c.scheduler.queue_depth)
    own = {"executor": "gate", "dynamic_sampling": False, "in_flight": c.transfer.in_flight}
    return SimSystem(about="", scheduler=scheduler, pools=POOLS[what.provisioning.name], **own)


def divided(c: Config, by: int) -> list[str]:
    """Return overrides that divide engines, borrowed devices, trainer GPUs and batch by `by`."""
    return [
        f"rollout.workers={c.rollout.workers // by}",
        f"trainer.ranks={c.trainer.ranks // by}",
        f"sim.n_serving={c.sim.n_serving // by}",
        f"trainer.batch_size={c.trainer.batch_size // by}",
    ]


def of_round(
    setting: str, which: Round, seeds: Sequence[int], candidates: Iterable[Composition]
) -> Config:
    base = ["sim/systems=[]", f"sim.steps={which.steps}", f"sim.warmup={which.warmup}"]
    base.append(f"sim.seeds=[{','.join(map(str, seeds[: which.seeds]))}]")
    if which.divided > 1:
        base += divided(composed(setting, base), which.divided)
    c = composed(setting, base)
    systems = {str(each): system(each, c) for each in candidates}
    return msgspec.structs.replace(c, sim=msgspec.structs.replace(c.sim, systems=systems))


# --------------------------------------------------------------------------- what is found


def rows_of(
    setting: str, number: int, which: Round, outcomes: Sequence[Outcome]
) -> list[dict[str, Any]]:
    """Return a row per composition, fastest first, with gains over the setting's own system."""
    systems = by_system(outcomes)
    base, rows = values(systems[BASE], "tokens_s"), []
    for name, each in systems.items():
        if name == BASE:
            continue
        over = gain(values(each, "tokens_s"), base)
        row: dict[str, Any] = {"setting": setting, "round": number, "divided": which.divided}
        row |= dict(zip(KINDS, name.split(", "), strict=True)) | {"seeds": len(each)}
        row |= {key: mean(each, key) for key in ("step_s", "tokens_s")}
        row |= dict(zip(("over_rose", "low", "high"), over, strict=True))
        row |= {"staleness": mean(each, "staleness")}
        row |= {"staleness_max": max(values(each, "staleness_max"))}
        rows.append(row | {"dropped": mean(each, "dropped")})
    rows.sort(key=lambda row: -row["tokens_s"])
    for row in rows:
        row["front"] = int(on_front(row, rows))
    return rows


def on_front(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> bool:
    """True unless one of `rows` is better in speed, mean or largest staleness and worse in none."""

    def points(each: dict[str, Any]) -> tuple[float, float, float]:
        return -each["tokens_s"], each["staleness"], each["staleness_max"]

    mine = points(row)
    better = (other for other in map(points, rows) if other != mine)
    return not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in better)


def survivors(rows: Sequence[dict[str, Any]], kept: int) -> list[str]:
    """Return the names of the `kept` fastest of each largest staleness, freshest first. `rows` are
    sorted by speed."""
    found: dict[float, list[str]] = {}
    for row in rows:
        found.setdefault(row["staleness_max"], []).append(_name(row))
    return [name for most in sorted(found) for name in found[most][:kept]]


def _name(row: dict[str, Any]) -> str:
    return ", ".join(row[kind] for kind in KINDS)


def named() -> dict[str, str]:
    """Return the compositions that go through all rounds, with their names in the tables."""
    found: dict[str, str] = {}
    for is_, what in [*KEPT, *((name, str(shipped(name))) for name in ("best", "best_sync"))]:
        found[what] = f"{found[what]}, {is_}" if what in found else is_
    return found


def search(
    setting: str,
    candidates: Sequence[Composition],
    rounds: Sequence[Round],
    seeds: Sequence[int],
    carried_out: Callable[[Config], list[Outcome]],
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each round as it ends. `carried_out` simulates a configuration."""
    always = list(named())
    known = [*candidates, *compositions({}), shipped("best"), shipped("best_sync")]
    all_of_them = {str(each): each for each in known}
    left = list(dict.fromkeys([*map(str, candidates), *always]))
    for number, which in enumerate(rounds, 1):
        c = of_round(setting, which, seeds, [all_of_them[name] for name in left])
        found = rows_of(setting, number, which, carried_out(c))
        yield found
        left = list(dict.fromkeys([*survivors(found, which.kept), *always]))


def words(rows: Sequence[dict[str, str]]) -> str:
    """Format the last round of each setting in policies_search.csv as a table of Markdown: the
    compositions on the front and those with a name, freshest first."""
    names, settings = named(), settings_in(rows)
    found: dict[str, dict[str, dict[str, str]]] = {}
    header = ["batching, order, routing, provisioning", "is", "staleness: mean, largest"]
    header.append("dropped, at most")
    for setting in settings:
        mine = [row for row in rows if row["setting"] == setting]
        last = [row for row in mine if row["round"] == max(each["round"] for each in mine)]
        for row in last:
            if _name(row) in names or row["front"] == "1":
                found.setdefault(_name(row), {})[setting] = row
        part = last[0]
        size = "" if part["divided"] == "1" else f", 1/{part['divided']}, {part['seeds']} seed"
        header += [f"{SETTINGS[setting]}{size}: tokens/s over ROSE [95%]", "step, s"]

    def freshness(name: str) -> tuple[float, float]:
        row = next(iter(found[name].values()))
        return float(row["staleness_max"]), -float(row["tokens_s"])

    lines = []
    for name in sorted(found, key=freshness):
        stale, most, lost = (
            max(float(row[key]) for row in found[name].values())
            for key in ("staleness", "staleness_max", "dropped")
        )
        line = [name, names.get(name, ""), f"{stale:.2f}, {most:.0f}", f"{lost:.1%}"]
        for row in map(found[name].get, settings):
            front = "*" if row and row["front"] == "1" else ""
            over = with_bounds(row, "over_rose", "low", "high") + front if row else ""
            line += [over, f"{float(row['step_s']):.0f}" if row else ""]
        lines.append(line)
    return markdown(header, lines) + "\n\n\\* on the front of speed and staleness"


def main(arguments: Sequence[str]) -> int:
    given = keyed(
        arguments,
        __doc__,
        **{"only": "", "staleness": math.inf, "rounds": len(ROUNDS), "seeds": "1,2,3"},
        **{"processes": 0, "draw": False, "out": str(RESULTS)},
        **dict.fromkeys(KINDS, ""),
    )
    out, rounds = Path(given["out"]), ROUNDS[: given["rounds"]]
    settings = listed("only", given["only"], SETTINGS)
    processes = runs.cores(given["processes"] or None)
    seeds = [int(seed) for seed in given["seeds"].split(",")]
    only = {kind: listed(kind, given[kind], options) for kind, options in KINDS.items()}
    for setting in [] if given["draw"] else settings:
        rows: list[dict[str, Any]] = []
        tried = compositions(only, given["staleness"])
        for found in search(setting, tried, rounds, seeds, lambda c: outcomes_of([c], processes)):
            rows += found
            merge_settings(out / FILE, rows)
    draw(out / FILE, "policies.md", "search", words)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
