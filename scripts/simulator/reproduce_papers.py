"""Compare the gain in each rival's paper with its gain in the simulator.

    python scripts/simulator/reproduce_papers.py                            every row; half an hour on two cores
    python scripts/simulator/reproduce_papers.py only=seer_72b,rlboost_8b seeds=1,2
    python scripts/simulator/reproduce_papers.py draw=true                  the table again, from the CSV file

Writes docs/results/papers.csv (out=FOLDER: into FOLDER), and the table between its marks in
docs/simulator.md. A setting is conf/experiment/papers/NAME.yaml, for users `mode=simulate
+experiment=papers/NAME`. The sources of its numbers are there and in rose/parts/simulator/domains.py. No value
is set for a single row, and none was fitted to one. Left out: mechanisms that the simulator lacks
(reward scheduling, elastic parallelism, stream training, engines of several degrees), mixtures of
experts, and learning curves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.parts.simulator.study import runs
from rose.parts.simulator.study.gains import Interval
from rose.parts.simulator.study.outcome import Outcome, by_system
from scripts.csv_tables import RESULTS, draw, markdown, merge, show, with_bounds
from scripts.harness import keyed, listed
from scripts.simulator.reproduce_rose import CONSOLE, composed, number


class Row(NamedTuple):
    """A number of a paper: that of `system` in `setting`, for ratios over `rival` in
    `rival_setting` ("" is the same). `paper`: (lowest, highest) published value. `overrides` are
    for both."""

    setting: str
    what: str  # "throughput over", "rollout time under", or "tokens/s" of `system` itself
    system: str
    rival: str
    paper: tuple[float, float]
    source: str
    remark: str
    rival_setting: str = ""
    overrides: tuple[str, ...] = ()


TAIL = "rollouts are a larger share of our steps; of lengths the paper gives P75 and the longest"
DRAFTS = "acceptance of SmolLM2-135M's tool calls (conf/sim/draft/calls.yaml), not of its models"
STREAM = "its trainer takes micro-batches while rollouts go on; ours waits for all groups"
ROWS = (
    *(
        Row(f"rollpacker_{size}", "throughput over", "verl_tail_batching", "verl", (paper, paper),
            "table 2, tail batching alone", TAIL)
        for size, paper in (("7b", 1.30), ("14b", 1.48), ("32b", 2.21))
    ),
    Row("seer_72b", "rollout time under", "seer_ordered", "verl_dedicated", (1.27, 1.56),
        "table 4, divided and context-aware, of three models",
        "not explained: ours computes moved prefixes again, which costs it time; one model here"),
    *(
        Row("seer_72b", "rollout time under", "seer", rival, paper, source, DRAFTS,
            overrides=("sim/draft=calls",))
        for rival, paper, source in (
            ("seer_ordered", (1.25, 1.38), "ablation, drafts alone, of three models"),
            ("verl_dedicated", (1.74, 2.04), "abstracts of its versions 2 and 3, up to"),
        )
    ),
    Row("rlboost_8b", "tokens/s", "verl", "", (10_000, 10_000), "its artifact's REPRODUCE.md",
        "lengths are ours"),
    *(
        Row("rlboost_8b", "throughput over", "rlboost", "verl", (paper, paper),
            f"its artifact's REPRODUCE.md, {count} preemptible engines", STREAM,
            overrides=(f"sim.n_serving={count}",))
        for count, paper in ((1, 1.2), (2, 1.4), (3, 1.6), (4, 1.8))
    ),
    Row("areal_7b", "throughput over", "areal", "verl", (2.27, 2.27),
        "table 1: 57.7 and 25.4 hours",
        "its steps: 366 and 831 s, scaled to this size; ours: 397 and 406 s",
        rival_setting="areal_7b_sync"),
    Row("libra_14b", "throughput over", "libra", "balanced", (763 / 423, 763 / 423),
        "its ladder, all of it", "engines of 1, 2 and 4 GPUs (its buckets) are one size here"),
    Row("libra_14b", "throughput over", "libra", "libra_queue", (763 / 666, 763 / 666),
        "its ladder, the elastic pool alone", "the authors' values: at most one plan in 20 steps"),
    Row("thunder_8b", "rollout time under", "thunder", "gateway", (1.79, 1.79),
        "table 2, mini-SWEAgent", "as much KV memory a program; lengths, tool times and model differ, "
        "and our step has a tail"),
)  # fmt: skip


def settings_of(rows: Sequence[Row]) -> list[tuple[str, tuple[str, ...]]]:
    """Return each (setting, overrides) that these rows need, without duplicates."""
    wanted = [(row.setting, row.overrides) for row in rows]
    wanted += [(row.rival_setting, row.overrides) for row in rows if row.rival_setting]
    return list(dict.fromkeys(wanted))


def simulated(rows: Sequence[Row], overrides: Sequence[str], processes: int) -> list[Outcome]:
    configs = []
    for setting, own in settings_of(rows):
        name = f"name='{_point(setting, own)}'"
        configs.append(composed(f"papers/{setting}", [*own, *overrides, name]))
    systems = {name for row in rows for name in (row.system, row.rival)}
    jobs = [job for c in configs for job in runs.jobs_of(c) if job.name in systems]
    return runs.carry_out(jobs, processes, CONSOLE)


def _point(setting: str, overrides: Sequence[str]) -> str:
    """Return the name of a run, which is the point of its outcomes."""
    return ",".join([setting, *overrides]).replace("/", ".")


def ours(row: Row, outcomes: Sequence[Outcome]) -> Interval:
    """Return our number for a row."""

    def found(setting: str, system: str) -> list[Outcome]:
        point = _point(setting, row.overrides)
        return by_system([o for o in outcomes if o.point == point])[system]

    rival = found(row.rival_setting or row.setting, row.rival) if row.rival else []
    return number(row.what, found(row.setting, row.system), rival)


def compared(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        mine = ours(row, outcomes)
        middle = (row.paper[0] * row.paper[1]) ** 0.5
        setting, what = " ".join([row.setting, *row.overrides]), f"{row.what} {row.rival}".strip()
        one: dict[str, Any] = {"setting": setting, "system": row.system, "what": what}
        keys = ("paper_low", "paper_high", "ours", "ours_low", "ours_high", "ratio")
        one |= dict(zip(keys, (*row.paper, *mine, mine.mean / middle), strict=True))
        found.append(one | {"source": row.source, "remark": row.remark})
    return found


def words(rows: Sequence[dict[str, str]]) -> str:
    """Format papers.csv as a table of Markdown. Sources and remarks stay in the file."""
    lines = []
    for row in rows:
        form = ",.0f" if row["what"] == "tokens/s" else ".2f"
        ends = [format(float(row[f"paper_{end}"]), form) for end in ("low", "high")]
        what = f"{row['setting'].replace('sim.n_serving=', '')}: {row['system']}, {row['what']}"
        mine = with_bounds(row, "ours", "ours_low", "ours_high", form)
        line = [what, " to ".join(dict.fromkeys(ends)), mine, f"{float(row['ratio']):.2f}"]
        lines.append(line)
    return markdown(["setting: system, its", "paper", "ours [95%]", "ours / paper"], lines)


def main(arguments: Sequence[str]) -> int:
    given = keyed(
        arguments,
        __doc__,
        **{"only": "", "seeds": "1,2,3", "processes": 0, "steps": 0},
        **{"out": str(RESULTS), "draw": False},
    )
    only = listed("only", given["only"], dict.fromkeys(row.setting for row in ROWS))
    path = Path(given["out"]) / "papers.csv"
    if not given["draw"]:
        rows = [row for row in ROWS if row.setting in only]
        overrides = [f"sim.seeds=[{given['seeds']}]"]
        if given["steps"]:  # all steps but the first count
            overrides += [f"sim.steps={given['steps']}", "sim.warmup=1"]
        processes = runs.cores(given["processes"] or None)
        found = compared(rows, simulated(rows, overrides, processes))
        short = [{key: row[key] for key in row if key not in ("source", "remark")} for row in found]
        show(short, "Each paper and ours")
        order = [" ".join([row.setting, *row.overrides]) for row in ROWS]
        merge(path, found, lambda row: row["setting"], lambda row: order.index(row["setting"]))
    draw(path, "simulator.md", "papers", words)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
