"""Compare ROSE's paper (arXiv 2605.06534) with the simulator, by one parameter set for all.

    python scripts/simulator/reproduce_rose.py                                   both settings and the +-20% table; long
    python scripts/simulator/reproduce_rose.py only=rose_8b seeds=1,2 sensitivity=false
    python scripts/simulator/reproduce_rose.py only=rose_8b systems=thunder sensitivity=false
    python scripts/simulator/reproduce_rose.py draw=true                         the tables again, from the CSV files

Writes docs/results/rose_*.csv (out=FOLDER: into FOLDER), and the tables between their marks in
docs/policies.md and docs/simulator.md, which explains how far ours differs from the paper. The
settings are conf/experiment/rose_8b.yaml and rose_32b.yaml. No value here or there is set for a
single system or row. Left out: results that the paper shows in figures only.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from rose import config as configuration
from rose.config.errors import value_at
from rose.launch import model
from rose.parts.simulator.config import Config
from rose.parts.simulator.hardware import EFFICIENCY
from rose.parts.simulator.study import runs, table
from rose.parts.simulator.study.gains import Interval, gain, interval
from rose.parts.simulator.study.outcome import Outcome, by_system, values
from scripts.csv_tables import RESULTS, bounded, draw, markdown, merge, show, with_bounds
from scripts.harness import keyed, listed, simulated

SYSTEMS = "roll_grpo,roll_dapo,rose_dapo,areal,rose_areal,rlboost,serverless,thunder,best,best_sync"
SETTINGS = {"rose_8b": "Qwen3-8B, FrozenLake", "rose_32b": "Qwen3-32B, ALFWorld"}


class Published(NamedTuple):
    """A number of the paper: `what` of `rival`, (low, high) per setting. `mine`: ROSE's side."""

    what: str
    rival: str
    rose_8b: tuple[float, float]
    rose_32b: tuple[float, float]
    mine: str = "rose"


NONE = (math.nan, math.nan)  # nothing published
PUBLISHED = (
    Published("throughput over", "roll_grpo", (1.31, 1.31), (1.46, 1.46)),
    # DAPO on both sides.
    Published("throughput over", "roll_dapo", (1.42, 1.42), (3.31, 3.31), "rose_dapo"),
    # The paper doesn't say which of the two it means ("orthogonal to asynchrony").
    Published("throughput over", "areal", (1.44, 1.44), (2.69, 2.69)),
    Published("throughput over", "areal", (1.44, 1.44), (2.69, 2.69), "rose_areal"),
    Published("rollout time under", "rlboost", (1.20, 1.20), (1.26, 1.26)),
    Published("allocation overhead", "rose", (0.003, 0.004), (0.003, 0.004)),
    Published("allocation overhead", "rlboost", (0.068, 0.073), (0.068, 0.073)),
    Published("allocation overhead", "serverless", (0.15, 0.26), (0.15, 0.26)),
    *(Published("throughput over", "rose", NONE, NONE, name) for name in ("best", "best_sync")),
)
ALONE = "serving alone"
# The paper's Table 1: our system -> setting -> (rollout s, P99 TTFT ms, P99 TPOT ms). Alone is its
# ServerlessLLM, uncontrolled the same with rollouts beside.
TABLE1 = {
    "rose": {"rose_8b": (496.3, 338.1, 136.1), "rose_32b": (960.1, 837.5, 398.1)},
    ALONE: {"rose_8b": (math.nan, 314.8, 117.8), "rose_32b": (math.nan, 716.1, 312.8)},
    "uncontrolled": {"rose_8b": (651.7, 1166.1, 135.6), "rose_32b": (1161.8, 2426.2, 565.3)},
    "prism": {"rose_8b": (731.7, 973.2, 115.4), "rose_32b": (1301.2, 1625.4, 351.7)},
}
SENSITIVITY = {  # parameter -> the keys that a factor multiplies
    "tokens per turn": ("sim.environment.factors.output",),
    "turns": ("sim.environment.factors.turns", "sim.environment.factors.failed_turns"),
    "observations": ("sim.environment.factors.observation",),
    "tool times": ("sim.environment.factors.tool_s", "sim.environment.factors.reset_s"),
    "engines' compute": ("sim.efficiency.compute",),
    "engines' memory bandwidth": ("sim.efficiency.memory",),
    "engines' step overhead": ("sim.efficiency.step_s",),
    "trainer's MFU": ("sim.trainer.mfu",),
    "way to cooperative workers": ("sim.pool.cooperative.link.gbit_s",),
    "time to wake a borrowed engine": ("sim.pool.cooperative.switch_s",),
    "size of differences": ("sim.delta_ratio",),
    "idle time lost to admission": ("sim.serving.overhead",),
    "online load": ("sim.serving.load",),
    "time to get a worker": tuple(f"sim.pool.{p}.allocation.start_s" for p in ("spot", "lend")),
}
# Parameters without a usual value, and the values that are tried.
VALUES = {"pace of online decodes": ("sim.serving.pace", (0.1, 0.25, 0.5, 1.0))}
VARIED_SYSTEMS = ("roll_grpo", "areal", "rlboost")
FACTORS = (0.8, 1.2)
SAME = 0.075  # largest change of any ratio with which a parameter has no row of its own
CONSOLE = Console(width=120)


def composed(setting: str, overrides: Sequence[str]) -> Config:
    return model.known(simulated(f"+experiment={setting}", *overrides))


def times(c: Config, keys: Sequence[str], factor: float) -> list[str]:
    """Return overrides that multiply the values of `keys` in `c`. An efficiency that `c` doesn't
    set is that of rose.parts.simulator.hardware."""
    tree = configuration.to_dict(c)
    tree["sim"]["efficiency"] = asdict(EFFICIENCY) | tree["sim"]["efficiency"]
    return [f"++{key}={factor * (value_at(tree, key) or 1.0):g}" for key in keys]


def outcomes_of(configs: Sequence[Config], processes: int) -> list[Outcome]:
    return runs.carry_out([job for c in configs for job in runs.jobs_of(c)], processes, CONSOLE)


def number(what: str, mine: Sequence[Outcome], rival: Sequence[Outcome]) -> Interval:
    """Return our number for a row of a paper. Throughput is trained trajectories per second."""
    if what == "throughput over":
        return gain(values(mine, "trajectories_s"), values(rival, "trajectories_s"))
    if what == "rollout time under":
        return gain(values(rival, "rollout_s"), values(mine, "rollout_s"))
    if what == "tokens/s":
        return interval(values(mine, "tokens_s"))
    return interval(values(rival, "allocation"))


def compared(setting: str, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows, systems = [], by_system(outcomes)
    for row in PUBLISHED:
        if row.rival not in systems or row.mine not in systems:
            continue
        low, high = getattr(row, setting)
        found = number(row.what, systems[row.mine], systems[row.rival])
        one = {"setting": setting, "mine": row.mine, "what": row.what, "rival": row.rival}
        one |= {"paper_low": low, "paper_high": high}
        one |= dict(zip(("ours", "ours_low", "ours_high"), found, strict=True))
        rows.append(one | {"difference": found.mean / fmean((low, high)) - 1})
    return rows


def table1(setting: str, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return rollout seconds and P99 latencies in milliseconds of the paper's Table 1 and ours,
    means over the seeds. Serving alone is that of ROSE's runs, without their rollouts."""
    systems, rows = by_system(outcomes), []
    for name, published in TABLE1.items():
        ran, alone = systems["rose" if name == ALONE else name], "alone_" if name == ALONE else ""
        theirs = published[setting]
        ttft, tpot, gap = (
            1e3 * fmean(values(ran, f"{alone}{what}_p99_s")) for what in ("ttft", "tpot", "gap")
        )
        row = {"setting": setting, "system": name, "paper_rollout_s": theirs[0]}
        row |= {"rollout_s": math.nan if alone else fmean(values(ran, "rollout_s"))}
        row |= {"paper_ttft_ms": theirs[1], "ttft_ms": ttft, "paper_tpot_ms": theirs[2]}
        rows.append(row | {"tpot_ms": tpot, "gap_ms": gap})
    return rows


def sensitivity(setting: str, overrides: Sequence[str], processes: int) -> list[dict[str, Any]]:
    """Return ROSE's gains over some rivals with each parameter at 0.8 and 1.2 of its value."""
    base = composed(setting, overrides)
    points: list[tuple[str, float, list[str]]] = [("as it is", 1.0, [])]
    for name, keys in SENSITIVITY.items():
        points += [(name, factor, times(base, keys, factor)) for factor in FACTORS]
    for name, (key, tried) in VALUES.items():
        points += [(f"{name}: {value:g}", 1.0, [f"{key}={value:g}"]) for value in tried]
    configs = [
        composed(setting, [*overrides, *words, f"name={setting}-{number}"])
        for number, (*_, words) in enumerate(points)
    ]
    outcomes, rows = outcomes_of(configs, processes), []
    for (name, factor, _), c in zip(points, configs, strict=True):
        systems = by_system([o for o in outcomes if o.point == c.name])
        speed = {name: values(of, "trajectories_s") for name, of in systems.items()}
        over = {f"over {each}": gain(speed["rose"], speed[each]).mean for each in VARIED_SYSTEMS}
        rows.append({"setting": setting, "parameter": name, "factor": factor} | over)
    return rows


# --------------------------------------------------------------------------- tables of the docs


def settings_in(rows: Sequence[Mapping[str, str]]) -> list[str]:
    return [name for name in SETTINGS if any(row["setting"] == name for row in rows)]


def effects(rows: Sequence[dict[str, str]]) -> str:
    """Format rose_systems.csv as a table of Markdown: the throughput of each system over the
    resource-fixed one, and the share of online requests within both targets."""
    settings, names = settings_in(rows), dict.fromkeys(row["system"] for row in rows)
    header = ["system"]
    for setting in settings:
        header += [f"{SETTINGS[setting]}: over roll_grpo [95%]", "step, s", "staleness, dropped"]

    def of(system: str, setting: str, key: str) -> list[float]:
        mine = (row for row in rows if (row["system"], row["setting"]) == (system, setting))
        return [float(row[key]) if row[key] else math.nan for row in mine]

    lines, attained = [], []
    for name in names:
        line = [name]
        for setting in settings:
            if not (speed := of(name, setting, "trajectories_s")):
                line += ["", "", ""]
                continue
            over = bounded(*gain(speed, of("roll_grpo", setting, "trajectories_s")))
            keys = ("step_s", "staleness", "dropped", "attainment")
            step_s, stale, dropped, kept = (fmean(of(name, setting, key)) for key in keys)
            attained += [] if math.isnan(kept) else [kept]
            line += ["1" if name == "roll_grpo" else over, f"{step_s:.0f}"]
            line += [f"{stale:.2f}, {dropped:.1%}"]
        lines.append(line)
    text = markdown(header, lines)
    if attained:
        text += "\n\nOnline requests within both targets where GPUs are borrowed from serving: "
        text += f"{min(attained):.2%} to {max(attained):.2%}."
    return text


def beside(rows: Sequence[dict[str, str]]) -> str:
    """Format rose_paper.csv as a table of Markdown: the paper's number and ours, per setting."""
    settings = settings_in(rows)
    header = ["system, its"]
    for name in settings:
        header += [f"{SETTINGS[name]}: paper", "ours [95%], off by"]
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for row in rows:
        share = row["what"] == "allocation overhead"
        form = ".1%" if share else ".2f"
        ends = [format(float(row[k]), form) for k in ("paper_low", "paper_high") if row[k]]
        paper = " to ".join(dict.fromkeys(ends)) or "none"
        mine = with_bounds(row, "ours", "ours_low", "ours_high", form)
        off = f", {float(row['difference']):+.0%}" if row["difference"] else ""
        what = f"{row['mine']}, {row['what']}{' of' if share else ''} {row['rival']}"
        found.setdefault(what, {})[row["setting"]] = (paper, mine + off)
    lines = []
    for what, cells in found.items():
        lines.append([what, *(cell for name in settings for cell in cells.get(name, ("", "")))])
    return markdown(header, lines)


def table1_words(rows: Sequence[dict[str, str]]) -> str:
    """Format rose_table1.csv as a table of Markdown."""
    lines = []
    for row in rows:
        n = {key: f"{float(row[key]):.0f}" if row[key] else "–" for key in row if key.endswith("s")}
        line = [f"{SETTINGS[row['setting']].split(',')[0]}, {row['system']}"]
        line += [f"{n[f'paper_{key}']}, {n[key]}" for key in ("rollout_s", "ttft_ms")]
        lines.append([*line, f"{n['paper_tpot_ms']}; {n['tpot_ms']}, {n['gap_ms']}"])
    header = ["system", "rollout, s: paper, ours", "P99 TTFT, ms: paper, ours"]
    return markdown([*header, "P99 TPOT, ms: paper; ours of a request, between tokens"], lines)


def varied_words(rows: Sequence[dict[str, str]]) -> str:
    """Format rose_sensitivity.csv as tables of Markdown: the ratios at 0.8 and 1.2 times a
    parameter's value. Those that change no ratio by more than `SAME` share a line."""
    rivals = [key for key in rows[0] if key.startswith("over ")]
    tables = []
    for setting in settings_in(rows):
        found: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            if row["setting"] == setting:
                found.setdefault(row["parameter"], []).append(row)
        base, lines, same = found["as it is"][0], [], []
        for name, each in found.items():
            changes = (abs(float(row[key]) - float(base[key])) for row in each for key in rivals)
            if name != "as it is" and max(changes) <= SAME:
                same.append(name)
                continue
            cells = (", ".join(f"{float(row[key]):.2f}" for row in each) for key in rivals)
            lines.append([name, *cells])
        tables.append(markdown([SETTINGS[setting], *rivals], lines))
        if same:
            tables.append(f"No ratio changes by more than {SAME} with: {', '.join(same)}.")
    return "\n\n".join(tables)


def main(arguments: Sequence[str]) -> int:
    given = keyed(
        arguments,
        __doc__,
        **{"only": "", "systems": SYSTEMS, "seeds": "1,2,3", "steps": 12, "warmup": 6},
        **{"sensitivity": True, "processes": 0, "draw": False, "out": str(RESULTS)},
    )
    out, settings = Path(given["out"]), listed("only", given["only"], SETTINGS)
    processes = runs.cores(given["processes"] or None)
    timing = [f"sim.steps={given['steps']}", f"sim.warmup={given['warmup']}"]
    timing.append(f"sim.seeds=[{given['seeds']}]")
    for setting in [] if given["draw"] else settings:
        _measure_table1(out, setting, timing, processes)
        _measure(out, setting, given["systems"], timing, processes, given["sensitivity"])
    draw(out / "rose_table1.csv", "simulator.md", "table1", table1_words)
    draw(out / "rose_systems.csv", "policies.md", "measured", effects)
    draw(out / "rose_paper.csv", "simulator.md", "paper", beside)
    draw(out / "rose_sensitivity.csv", "simulator.md", "sensitivity", varied_words)
    return 0


def _measure_table1(out: Path, setting: str, timing: list[str], processes: int) -> None:
    rivals = ",".join(name for name in TABLE1 if name not in ("rose", ALONE))
    c = composed(setting, [*timing, f"sim/systems=[{rivals}]"])
    rows = table1(setting, outcomes_of([c], processes))
    show(rows, f"{SETTINGS[setting]}: the paper's Table 1 and ours")
    merge_settings(out / "rose_table1.csv", rows)


def _measure(
    out: Path, setting: str, systems: str, timing: list[str], processes: int, varied: bool
) -> None:
    """Simulate the systems in a setting, and merge the rows into the files' other rows."""
    c, name = composed(setting, [*timing, f"sim/systems=[{systems}]"]), SETTINGS[setting]
    outcomes = outcomes_of([c], processes)
    rows = compared(setting, outcomes)
    CONSOLE.print(table.table(outcomes, "rose", setting))
    show(rows, f"{name}: the paper and ours")
    merge_settings(out / "rose_paper.csv", rows, "mine", "what", "rival")
    each = csv.DictReader(table.csv_text(outcomes).splitlines())
    merge_settings(out / "rose_systems.csv", [{"setting": setting} | row for row in each], "system")
    if varied:
        few = [*timing, "sim.seeds=[1]", f"sim/systems=[{','.join(VARIED_SYSTEMS)}]"]
        rows = sensitivity(setting, few, processes)
        show(rows, f"{name}: one parameter at 0.8 and 1.2 times its value")
        merge_settings(out / "rose_sensitivity.csv", rows)


def merge_settings(path: Path, rows: list[dict[str, Any]], *parts: str) -> None:
    """Merge rows into a file of several settings. They replace those of the same `parts`."""
    order = list(SETTINGS)

    def key(row: Mapping[str, Any]) -> tuple:
        return tuple(row[part] for part in ("setting", *parts))

    merge(path, rows, key, lambda row: order.index(row["setting"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
