"""Measure the gain from engines of several tensor-parallel degrees over the best single degree, in
both settings of ROSE's paper, synchronous (`best_sync`) and with staleness 1 (`best`).

    python scripts/simulator/study_shapes.py                        every row; an hour of one core
    python scripts/simulator/study_shapes.py only=rose_8b systems=best_sync seeds=1 steps=3 warmup=1
    python scripts/simulator/study_shapes.py draw=true              the table again, from the CSV file

Writes docs/results/shapes.csv (out=FOLDER: into FOLDER), and the table between its marks in
docs/simulator.md. The degrees of dedicated engines are varied. If all have a single degree, the
trainer's own GPUs have it, too; beside a mix they have the best single degree. Borrowed engines
keep the degree of the online engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.parts.simulator.study import runs
from rose.parts.simulator.study.gains import gain
from rose.parts.simulator.study.outcome import Outcome, mean, values
from scripts.csv_tables import RESULTS, draw, markdown, merge, show, with_bounds
from scripts.harness import keyed, listed
from scripts.simulator.reproduce_rose import CONSOLE, SETTINGS, composed

SYSTEMS = ("best_sync", "best")
FILE = "shapes.csv"
SEQUENCES = 16  # sequences of each GPU, as in both settings of the paper


class Shapes(NamedTuple):
    """The `degrees` of the dedicated engines, and how often: `workers` times each, or, when
    switching, as many as fill the GPUs of `workers` engines of the first degree. `hybrid`: the
    degree of the trainer's engines; None for the best single one."""

    kind: str
    degrees: tuple[int, ...]
    workers: int
    hybrid: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {'+'.join(map(str, self.degrees))}"

    @property
    def point(self) -> str:
        """The row's part of a run's name."""
        return str(self).replace(" ", "-")

    def overrides(self, system: str, best: int) -> list[str]:
        degrees = self.degrees[0] if self.kind == "single" else list(self.degrees)
        pool, trainers = "sim.pool.dedicated", self.hybrid or best
        found = [
            f"{pool}.tensor_parallel={degrees}".replace(" ", ""),
            f"{pool}.workers={self.workers}",
            f"{pool}.max_sequences={SEQUENCES * degrees if self.kind == 'single' else 'null'}",
            f"sim.pool.hybrid.tensor_parallel={trainers}",
            f"sim.pool.hybrid.max_sequences={SEQUENCES * trainers}",
        ]
        if self.kind == "switching":
            policy = f"sim.systems.{system}.scheduler.provisioning"
            found += [f"{pool}.elastic=true", f"{policy}.name=elastic", f"+{policy}.args.gain=0.05"]
            # Seconds to wake, as in sim.pool.cooperative, and those that the policy expects.
            found += [f"{pool}.switch_s=1.0", f"+{policy}.args.switch_s=1.5"]
        return found


def single(degree: int, gpus: int) -> Shapes:
    return Shapes("single", (degree,), gpus // degree, degree)


ROWS = {  # GPUs of the papers' dedicated engines: 8, and 32
    "rose_8b": (
        *(single(degree, 8) for degree in (1, 2, 4, 8)),
        Shapes("mix", (4, 2, 2), 1),
        Shapes("mix", (4, 2, 1, 1), 1),
        Shapes("mix", (4, 1, 1, 1, 1), 1),
        Shapes("switching", (1, 8), 8),
        Shapes("switching", (2, 4, 8), 4),
        Shapes("switching", (4, 8), 2),
    ),
    "rose_32b": (
        *(single(degree, 32) for degree in (2, 4, 8)),
        Shapes("mix", (8, 4, 4), 2),
        Shapes("mix", (8, 8, 8, 4, 4), 1),
        Shapes("switching", (2, 8), 16),
        Shapes("switching", (4, 8), 8),
    ),
}


def simulated(
    setting: str, system: str, rows: Sequence[Shapes], best: int, given: Sequence[str], n: int
) -> list[Outcome]:
    jobs = []
    for row in rows:
        own = [f"sim/systems=[{system}]", f"name={row.point}", *row.overrides(system, best), *given]
        jobs += [job for job in runs.jobs_of(composed(setting, own)) if job.name == system]
    return runs.carry_out(jobs, n, CONSOLE)


def study(setting: str, system: str, given: Sequence[str], processes: int) -> list[dict]:
    """Return a row a shape: throughput (trained tokens/s) over the best single degree."""
    rows = ROWS[setting]
    alone = [row for row in rows if row.kind == "single"]
    outcomes = simulated(setting, system, alone, 0, given, processes)

    def of(row: Shapes) -> list[Outcome]:
        return [o for o in outcomes if o.point == row.point]

    best = max(alone, key=lambda row: mean(of(row), "tokens_s"))
    others = [row for row in rows if row.kind != "single"]
    outcomes += simulated(setting, system, others, best.degrees[0], given, processes)
    theirs, found = values(of(best), "tokens_s"), []
    for row in rows:
        over = gain(values(of(row), "tokens_s"), theirs)
        made: dict = {"setting": setting, "system": system, "shapes": str(row)}
        made |= {key: mean(of(row), key) for key in ("step_s", "rollout_s")}
        made |= zip(("gain", "low", "high"), over, strict=True)
        found.append(made | {"seeds": len(theirs)})
    return found


def drawn(rows: Sequence[dict[str, str]]) -> str:
    """Format the table: each single degree, and the mix and the switching with the largest mean
    gain. Cells have degrees, seconds a step, and tokens a second over the best single degree."""

    def cell(setting: str, system: str, kind: str, degrees: str) -> str:
        found = [row for row in rows if (row["setting"], row["system"]) == (setting, system)]
        found = [row for row in found if row["shapes"].startswith(f"{kind} {degrees}")]
        if not found:
            return "–"
        row = max(found, key=lambda row: float(row["gain"]))
        which = "" if degrees else f"{row['shapes'].removeprefix(kind)}:"
        return f"{which} {float(row['step_s']):,.0f} s, {with_bounds(row, 'gain', 'low', 'high')}"

    table: list[tuple[str, ...]] = []
    for setting, name in SETTINGS.items():
        alone = [str(row.degrees[0]) for row in ROWS[setting] if row.kind == "single"]
        for kind, degrees in (
            *(("single", each) for each in alone),
            ("mix", ""),
            ("switching", ""),
        ):
            cells = [cell(setting, system, kind, degrees).strip() for system in SYSTEMS]
            first = all(row[0] != name for row in table)
            table.append((name if first else "", f"{kind} {degrees}".strip(), *cells))
    return markdown(["setting", "engines", *SYSTEMS], table)


def main() -> None:
    options = keyed(sys.argv[1:], __doc__, only="", systems="", seeds="1,2,3", steps=6, warmup=2,
                    processes=1, draw=False, out=str(RESULTS))  # fmt: skip
    path = Path(options["out"]) / FILE
    given = [
        f"sim.seeds=[{options['seeds']}]",
        *(f"sim.{k}={options[k]}" for k in ("steps", "warmup")),
    ]
    order = [(s, name, str(row)) for s in ROWS for name in SYSTEMS for row in ROWS[s]]

    def key(row) -> tuple[str, str, str]:
        return row["setting"], row["system"], row["shapes"]

    for setting in [] if options["draw"] else listed("only", options["only"], ROWS):
        for system in listed("systems", options["systems"], SYSTEMS):
            found = study(setting, system, given, options["processes"])
            show(found, f"{setting}, {system}")
            merge(path, found, key, lambda row: order.index(key(row)))
    draw(path, "simulator.md", "shapes", drawn)


if __name__ == "__main__":
    main()
