"""Run `python launch.py`: compose every configuration, check them all, then run them one after the
other.

Exit codes: 0 done, 1 the run failed, 2 bad configuration and nothing started, 130 Ctrl-C,
143 SIGTERM.

In other modules: the checks of a configuration (checks.py), processes (supervise.py), and the rules
for a run that continues (resume.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import hydra
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from rose import checks, extensions, processes
from rose.config import Config, ConfigError
from rose.files import write_whole
from rose.launch import (
    errors,
    exclusions,
    local,
    logs,
    model,
    plan,
    resume,
    sbatch,
    slurm,
    state,
    supervise,
)
from rose.observe import terminal
from rose.observe.terminal import echo

# Flags with which Hydra prints something instead of composing a configuration.
INSTEAD_OF_RUNNING = frozenset(
    (
        "--help",
        "-h",
        "--hydra-help",
        "--version",
        "--cfg",
        "-c",
        "--info",
        "-i",
        "--shell-completion",
        "-sc",
    )
)
TRAIN = "train"  # the mode that needs no part
NAME_LIMIT = 151  # characters of a run's name; rose/config/checks refuses longer names


def main(conf: Path, arguments: list[str], program: str = "python launch.py") -> int:
    """Run the command line `arguments` of `program` on the Hydra folder `conf`. Return the
    process's exit code."""
    complaints = Console(stderr=True)
    try:
        with _signals_raise():
            code = _main(conf, arguments, Console(), program)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except errors.COMPLAINTS as error:
        typed = [*_groups_of_mode(arguments), *arguments]
        return _refuse(complaints, errors.explain(error, conf, typed))
    except ConfigError as error:
        return _refuse(complaints, str(error))
    except BrokenPipeError:
        if not terminal.reader_has_left():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:
        (number,) = interrupt.args
        echo(complaints, f"ended by {signal.Signals(number).name}")
        return 128 + number


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt(number), so that locks are released and child
    processes end. While a job runs, supervise.py handles them instead."""

    def interrupt(number: int, _) -> None:
        raise KeyboardInterrupt(number)

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _main(conf: Path, arguments: list[str], console: Console, program: str) -> int:
    """Compose, check and run all configurations; return the exit code."""
    trees = compose(conf, arguments)
    names = [str(tree["name"]) for tree in trees]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"name={twice!r}: two points of the sweep have this name; give them different ones"
        )
    command = f"{program} {shlex.join(arguments)}".strip()
    modes, mode = extensions.modes(), str(trees[0]["mode"]) if trees else TRAIN
    if mode != TRAIN and mode not in modes:
        raise ConfigError(f"mode={mode!r}: no such mode; there are {', '.join([TRAIN, *modes])}")
    if other := [tree["mode"] for tree in trees if tree["mode"] != mode]:
        raise ConfigError(
            f"mode={other[0]!r}: the sweep's first point has mode={mode!r}; one sweep is of one "
            "mode"
        )
    if mode != TRAIN:
        return modes[mode].main(trees, console, command)
    plans = [checks.check(tree) for tree in trees]
    for number, each in enumerate(plans, 1):
        if len(plans) > 1:
            console.rule(f"{number} of {len(plans)}: {each.config.name}")
        if code := launch(each, console, command):
            return code
    return 0


def compose(conf: Path, arguments: list[str]) -> list[dict]:
    """Return the resolved tree of each point of a sweep (-m), or one tree without -m. With --help
    and similar flags the list is empty. Raises `ConfigError` for a sweep without points."""
    arguments = errors.with_home([*_groups_of_mode(arguments), *arguments])
    trees: list[dict] = []
    refused: list[ConfigError] = []
    swept = errors.swept_keys(arguments)
    places = (place.removeprefix("file://") for place in errors.searched(arguments))
    errors.check_options(arguments, [conf, *map(Path, places)])
    if not any(word.startswith(("-", "hydra.")) for word in arguments):
        # Composed without `hydra.main`, which would compose twice, first to find hydra.mode.
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            return [_tree(hydra.compose("config", arguments), arguments)]

    def collect(composed) -> None:
        try:
            tree = _tree(composed, arguments)
        except ConfigError as error:  # raised later, because Hydra would add a text of its own
            refused.append(error)
            return
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            tree["name"] = point_name(tree["name"], list(HydraConfig.get().overrides.task), swept)
        trees.append(tree)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting
    program, sys.argv = sys.argv, [sys.argv[0], *errors.options_first(arguments)]
    with tempfile.TemporaryDirectory(prefix="rose-hydra-") as scratch:
        # Hydra writes multirun.yaml to this folder (conf/config.yaml).
        os.environ["ROSE_HYDRA_SCRATCH"] = scratch
        decorate = hydra.main(version_base="1.3", config_path=str(conf), config_name="config")
        try:
            decorate(collect)()
        except SystemExit:  # Hydra has printed a text.
            if sys.stdout is not None:
                sys.stdout.flush()
            raise
    sys.argv = program
    if refused:
        raise refused[0]
    if (
        swept
        and not trees
        and not INSTEAD_OF_RUNNING.intersection(a.split("=")[0] for a in arguments)
    ):
        values = ", ".join(f"{key}={errors.value_of(key, arguments)}" for key in swept)
        raise ConfigError(f"{values}: a sweep over no values; range(1,4) is 1, 2, 3")
    return trees


def _groups_of_mode(arguments: list[str]) -> tuple[str, ...]:
    """Return the overrides that the command line's mode needs. They come before all others."""
    asked = errors.value_of("mode", arguments).split(",")
    return next((part.GROUPS for mode, part in extensions.modes().items() if mode in asked), ())


def _tree(composed: DictConfig, arguments: list[str]) -> dict:
    """Return the tree of a composed configuration. Raises `ConfigError` if a file sets a mode that
    needs further groups, because only a mode on the command line adds them."""
    mode = str(composed.mode)
    if mode in extensions.modes() and not _groups_of_mode(arguments):
        raise ConfigError(
            f"mode={mode!r}: is given by a file; give it on the command line, mode={mode}, which "
            f"adds the section {extensions.modes()[mode].SECTION}"
        )
    return own_sections(errors.to_tree(composed))


def own_sections(tree: dict) -> dict:
    """Return the tree without the sections that only other modes read, so that an experiment with
    values for a simulation can also be trained."""
    sections = {mode: part.SECTION for mode, part in extensions.modes().items()}
    others = {*sections.values()} - {sections.get(tree["mode"])}
    return {name: value for name, value in tree.items() if name not in others}


def point_name(name: str, overrides: list[str], swept: list[str]) -> str:
    """Return the name of a sweep point: the run's name and the swept overrides, as in
    `frozenlake-seed=2,algorithm=rloo`."""
    parts = [o.lstrip("+") for o in overrides if o.split("=", 1)[0].lstrip("+") in swept]
    if not parts or any(part.startswith("name=") for part in parts):
        return name
    found = f"{name}-{re.sub(r'[^A-Za-z0-9._,=+-]', '.', ','.join(parts))}"
    if len(found) <= NAME_LIMIT:
        return found
    digest = hashlib.sha256(",".join(parts).encode()).hexdigest()[:8]
    return f"{found[: NAME_LIMIT - 9]}-{digest}"


def _active_job(c: Config) -> str | None:
    """Return the id of the run's Slurm job if it is pending or running. Raises `ConfigError` if
    Slurm doesn't answer, because a second job would write into the same folder."""
    try:
        job = state.submitted(c.run_dir)
        return job if job and state.is_active(job) else None
    except RuntimeError as error:
        raise ConfigError(
            f"{c.run_dir}: Slurm does not report whether the run's job still exists: {error}; try "
            "again, or give the run another name"
        ) from None


def _report_active_job(c: Config, job: str, console: Console) -> int:
    """Print the state of the run's active job, and new values that don't apply to it."""
    if kept := resume.not_applied(c.run_dir / "config.json", c):
        warning = f"job {job} goes on with its own values, until it is submitted again:"
        echo(console, "\n  ".join([warning, *kept]), label="[yellow]warning:[/]")
    try:
        what_now = state.cannot_start(job) or f"to end it: scancel {job}"
        echo(console, f"{c.name} is job {job} already; {what_now}")
        state.show(c.run_dir, console)
    except RuntimeError as error:  # Slurm answered a moment ago
        echo(console, f"{c.name} is job {job} already; {error}")
    return 0


def launch(made: plan.Plan, console: Console, command: str) -> int:
    """Start a local run, submit a Slurm run or show a dry run. Return the exit code. `command`, the
    command line, is saved with the run."""
    c = made.config
    if c.why_not_borrowed:
        echo(console, c.why_not_borrowed, label="[yellow]warning:[/]")
    if c.cluster.dry_run:
        plan.show(made, console)
        if c.cluster.kind == "slurm":
            print(sbatch.script(c, made.ranks, c.run_dir.resolve()))
        return 0
    if c.cluster.kind == "slurm":
        slurm.check_environment(c)
        if job := _active_job(c):
            return _report_active_job(c, job, console)
    local.check_sandbox_folders(c)
    with _aside(c, console), local.locked(c.run_dir):
        if resume.is_finished(c.run_dir, c):
            early = resume.stopped_early(c.run_dir)
            count = resume.finished_steps(c.run_dir)
            steps = f"{count} steps" if early is None else f"eval.stop, step {early}"
            on = "a larger trainer.steps" if early is None else "another eval.stop.patience"
            echo(
                console,
                f"{c.run_dir} is finished ({steps}); {on} trains on, fresh=true starts over",
            )
            terminal.final_table(c.run_dir, console)
            return 0
        c = model.fetch(c, c.run_dir / "config.json")
        # The plan must fit the hub's model, whose shape may differ from the one in conf/.
        if c.model != made.config.model:
            again = plan.make(c, c.model.shape, made.doubts, checks.host_gib(c))
            made = replace(again, chosen=made.chosen)  # `c` has these choices
        plan.show(made, console)
        if note := resume.other_shape(c.run_dir, c):
            echo(console, note)
        for warning in (resume.check_inputs(c.run_dir, c.name), resume.other_rates(c.run_dir, c)):
            if warning:
                echo(console, warning, label="[yellow]warning:[/]")
        local_run = c.cluster.kind == "local"
        if local_run:
            c = model.prepare(c)
            exclusions.check(c, c.model.shape)
        checks.check_formats(c)
        checks.check_rows(c, lambda note: echo(console, note))
        write_whole(c.run_dir / "command.txt", f"{command}\n".encode())
        if local_run:
            return _run(c, made, console)
        slurm.submit(c, made.ranks, console)
        return 0


@contextmanager
def _aside(c: Config, console: Console) -> Iterator[None]:
    """Move an earlier run of this name aside, if `fresh` is set. Move it back if the new run is
    refused or ended by a signal before it has created its folder."""
    if not (c.fresh and os.path.exists(c.run_dir)):
        yield
        return
    with local.locked(c.run_dir):
        aside = resume.move_aside(c.run_dir)
    echo(console, f"the earlier run is now {aside}")
    try:
        yield
    except BaseException:
        with suppress(OSError):  # another launch may have created the folder meanwhile
            if not c.run_dir.exists():
                aside.rename(c.run_dir)
                echo(console, f"the earlier run is {c.run_dir} again")
        raise


def _run(c: Config, made: plan.Plan, console: Console) -> int:
    """Run one attempt on this machine, print its outcome and return the exit code."""
    attempt = logs.new_attempt(c.run_dir)
    local.write_config(c, c.run_dir)
    if note := resume.last_saved(c.run_dir):
        echo(console, note)
    echo(console, f"logs: {logs.attempt_folder(c.run_dir, attempt)}")
    processes.adopt_orphans()
    job = supervise.Job(
        local.start(c, made.ranks, c.run_dir.resolve(), attempt),
        made.ranks,
        c.run_dir,
        attempt,
        c.cluster,
    )
    with terminal.shown(c.run_dir, console) if c.observe.terminal else nullcontext():
        outcome = job.wait()
    for part in extensions.modules("views").values():
        part.write(c.observe, c.run_dir)
    if outcome.failure:
        echo(Console(stderr=True), outcome.failure, label=f"[red]{c.name} failed:[/]")
    elif outcome.interrupted:
        echo(console, f"{c.name}: stopped; the same command continues it")
        terminal.show_cost(c.run_dir, console)
    elif resume.is_finished(c.run_dir, c):
        terminal.final_table(c.run_dir, console)
    return outcome.code


def _refuse(complaints: Console, message: str) -> int:
    echo(complaints, message, label="[red]bad configuration:[/]")
    return 2
