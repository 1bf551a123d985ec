"""The entry point of `python launch.py mode=simulate` and `mode=plan`. It takes checked
configurations, one per point of a sweep; rose/front.py composes them.

The exit status is 0 when done, 1 if a simulation failed or a report was not written, and 2
(ConfigError) if none was started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
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
    mode, seeds = configs[0].mode, configs[0].sim.seeds
    for c in configs:
        check(c, mode)
        if mode == "simulate" and c.sim.seeds != seeds:
            raise ConfigError(
                f"name={c.name!r}: sim.seeds={c.sim.seeds}, the sweep's first point has "
                f"sim.seeds={seeds}; points are compared seed by seed, so give all the same"
            )
    for c in configs:
        try:
            c.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # Fail now, not after hours of simulations.
            raise ConfigError(f"output_dir={c.output_dir!r}: {error}") from None
    if mode == "simulate":
        return _simulate(configs, console, command)
    return max([_code_of(partial(sizing.answer, c, console, command)) for c in configs])


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


def _code_of(action: Callable[[], None]) -> int:
    """Call `action` and return the exit status: 1, with the error printed, if a simulation fails or
    a file can't be written."""
    try:
        action()
        return 0
    except BrokenPipeError:  # The reader of the output has gone; no file failed.
        raise
    except runs.SimulationFailed as error:
        echo(Console(stderr=True), str(error), label="[red]simulation failed:[/]")
    except OSError as error:
        echo(Console(stderr=True), str(error), label="[red]error:[/]")
    return 1


def _simulate(configs: Sequence[Config], console: Console, command: str) -> int:
    """Simulate all points. After a failure, report the points whose simulations have all ended."""
    outcomes: list[Outcome] = []

    def carry_out() -> None:
        jobs = [job for c in configs for job in runs.jobs_of(c)]
        try:
            outcomes.extend(runs.carry_out(jobs, runs.cores(configs[0].sim.processes), console))
        except runs.SimulationFailed as error:
            outcomes.extend(error.finished)
            raise

    def report(c: Config, rows: list[Outcome]) -> None:
        show(console, table.table(rows, c.sim.label, c.name))
        table.write(c.run_dir, rows, c.sim.label, {"command": command})
        page.report(c.run_dir / "report.html", c, rows, command)
        echo(console, f"{c.run_dir / 'report.html'}")

    codes = [_code_of(carry_out)]
    for c in configs:
        rows = [o for o in outcomes if o.point == c.name]
        if len(rows) == len(runs.jobs_of(c)):
            codes.append(_code_of(partial(report, c, rows)))
    if len(configs) > 1 and not codes[0]:
        codes.append(_code_of(lambda: echo(console, f"{compare(configs, outcomes, command)}")))
    return max(codes)


def compare(configs: Sequence[Config], outcomes: Sequence[Outcome], command: str) -> Path:
    """Write the page that compares the points of a sweep, and return its path."""
    base = re.split(r"-(?=[^-,=]+=)", configs[0].name, maxsplit=1)[0]
    labels = {c.name: c.sim.label for c in configs}
    axis = configs[0].name.removeprefix(base).lstrip("-").rsplit("=", 1)[0] or "points"
    path = Path(configs[0].output_dir) / f"{base}-sweep.html"
    page.sweep(path, base, axis, labels, outcomes, command)
    return path
