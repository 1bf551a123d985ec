"""The entry point of `python launch.py mode=simulate` and `mode=plan`. It takes checked
configurations, one per point of a sweep; rose/front.py composes them.

The exit status is 0 when done, 1 if a simulation failed, and 2 (ConfigError) if none was started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rose.config import ConfigError
from rose.observe.terminal import echo, show
from rose.parts.simulator.config import Config
from rose.parts.simulator.study import build, page, runs, sizing, table
from rose.parts.simulator.study.outcome import Outcome

MODES = ("simulate", "plan")
# Names in a run's folder by which a training run is recognized.
OF_A_RUN = ("checkpoints", "rollouts", "metrics.jsonl", "journal")


def main(configs: Sequence[Config], console: Console, command: str) -> int:
    """Simulate, report, and return the exit status. Raises `ConfigError` before it simulates."""
    for c in configs:
        check(c, configs[0].mode)
    for c in configs:
        try:
            c.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # Fail before hours of simulations, not when they are written.
            raise ConfigError(f"output_dir={c.output_dir!r}: {error}") from None
    try:
        if configs[0].mode == "plan":
            for c in configs:
                sizing.answer(c, console, command)
        else:
            _simulate(configs, console, command)
    except runs.SimulationFailed as error:
        echo(Console(stderr=True), str(error), label="[red]simulation failed:[/]")
        return 1
    return 0


def check(c: Config, mode: str) -> None:
    """Check everything that can be wrong before an expensive simulation. Raises `ConfigError`."""
    s = c.sim
    if c.mode != mode:
        raise ConfigError(
            f"mode={c.mode!r}: the sweep's first point has mode={mode!r}; one sweep is of one mode"
        )
    if not s.seeds or len(set(s.seeds)) < len(s.seeds) or min(s.seeds) < 0:
        raise ConfigError(f"sim.seeds={s.seeds}: one or more different numbers, none negative")
    if not s.label.strip():
        raise ConfigError(f"sim.label={s.label!r}: the configured system needs a name in tables")
    if s.warmup >= s.steps:
        raise ConfigError(
            f"sim.warmup={s.warmup}: must be below sim.steps={s.steps}, or no step is counted"
        )
    for name, system in build.systems(c).items():
        try:
            build.make_scheduler(c, system)
        except ConfigError as error:
            raise ConfigError(
                f"sim.systems.{name}.{error}" if name != s.label else str(error)
            ) from None
        build.make_spec(c, name, system, s.seeds[0])
    if mode == "plan":
        sizing.target(c)
        sizing.pair_configs(c)
    for name in ("report.html", "result.json", "result.csv"):
        if (c.run_dir / name).is_dir():
            raise ConfigError(
                f"name={c.name!r}: {c.run_dir / name} is a folder, and the simulation writes a "
                "file of this name; remove it, or give another name"
            )
    if any((c.run_dir / name).exists() for name in OF_A_RUN):
        raise ConfigError(
            f"name={c.name!r}: {c.run_dir} holds a training run; give the simulation another name"
        )


def _simulate(configs: Sequence[Config], console: Console, command: str) -> None:
    jobs = [job for c in configs for job in runs.jobs_of(c)]
    outcomes = runs.carry_out(jobs, runs.cores(configs[0].sim.processes), console)
    for c in configs:
        rows = [o for o in outcomes if o.point == c.name]
        show(console, table.table(rows, c.sim.label, c.name))
        table.write(c.run_dir, rows, c.sim.label, {"command": command})
        page.report(c.run_dir / "report.html", c, rows, command)
        echo(console, f"{c.run_dir / 'report.html'}")
    if len(configs) > 1:
        echo(console, f"{compare(configs, outcomes, command)}")


def compare(configs: Sequence[Config], outcomes: Sequence[Outcome], command: str) -> Path:
    """Write the page that compares the points of a sweep, and return its path."""
    base = re.split(r"-(?=[^-,=]+=)", configs[0].name, maxsplit=1)[0]
    points = [c.name for c in configs]
    axis = points[0].removeprefix(base).lstrip("-").rsplit("=", 1)[0] or "points"
    path = Path(configs[0].output_dir) / f"{base}-sweep.html"
    page.sweep(path, base, axis, points, outcomes, configs[0].sim.label, command)
    return path
