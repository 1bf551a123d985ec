"""Runs the simulations of many systems and seeds in processes. Equal simulations run only once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rose import processes
from rose.observe.terminal import echo
from rose.parts.simulator.config import Config, SimSystem
from rose.parts.simulator.driver import simulate
from rose.parts.simulator.study import build
from rose.parts.simulator.study.outcome import Outcome, of

# Keys of the configuration that a job has fields for, and keys that don't change a simulation.
IN_JOB = ("name", "scheduler", "transfer")
UNREAD = (*IN_JOB, "mode", "fresh", "output_dir", "observe", "cluster", "eval")
# The same for keys of `sim`.
UNREAD_SIM = ("label", "pools", "executor", "systems", "plan", "processes", "seeds")


class SimulationFailed(RuntimeError):
    """An error that names the simulation that failed. `finished`: the outcomes of other jobs."""

    finished: Sequence[Outcome] = ()


class Job(msgspec.Struct, frozen=True):
    """A simulation to run."""

    config: Config
    point: str
    name: str
    system: SimSystem
    seed: int
    drawn: bool  # True: keep a timeline for the page

    @property
    def key(self) -> str:
        """A key that is equal for jobs with equal outcomes, apart from names."""
        tree = msgspec.to_builtins(self.config)
        sim = {key: value for key, value in tree.pop("sim").items() if key not in UNREAD_SIM}
        read = {key: value for key, value in tree.items() if key not in UNREAD}
        system = msgspec.to_builtins(self.system) | {"about": ""}
        return json.dumps([read, sim, system, self.seed], sort_keys=True)


def jobs_of(c: Config) -> list[Job]:
    """Return a job for every system and seed. Jobs of the first seed keep a timeline."""
    return [
        Job(c, c.name, name, system, seed, seed == c.sim.seeds[0])
        for seed in c.sim.seeds
        for name, system in build.systems(c).items()
    ]


def run(job: Job) -> Outcome:
    """Simulate one job. Raises `SimulationFailed`."""
    began = time.perf_counter()
    try:
        what = build.make_spec(job.config, job.name, job.system, job.seed)
        result = simulate(what, build.make_scheduler(job.config, job.system), job.seed)
    except (RuntimeError, ValueError) as error:
        raise SimulationFailed(f"{job.name}, seed {job.seed}: {error}") from error
    return of(
        result, job.point, job.name, job.config.sim.warmup, time.perf_counter() - began, job.drawn
    )


def carry_out(jobs: Sequence[Job], workers: int, console: Console) -> list[Outcome]:
    """Run all jobs and show their progress: a bar on a terminal, or a line per simulation."""

    def words(o: Outcome) -> str:
        return f"{o.system}, seed {o.seed}: {o.step_s:.1f} s a step"

    if not console.is_terminal:
        return run_all(jobs, workers, lambda o: echo(console, words(o)))
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len({job.key for job in jobs}))
        return run_all(jobs, workers, lambda o: bar.update(task, advance=1, description=words(o)))


def run_all(
    jobs: Sequence[Job], workers: int, on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Return the outcomes in the order of `jobs`. Equal jobs run once. `on_outcome` is called with
    each outcome as its run ends. Raises `SimulationFailed` at the first run that fails."""
    first: dict[str, Job] = {}
    for job in jobs:
        first.setdefault(job.key, job)
    found: dict[str, Outcome] = {}
    failure = None
    try:
        for key, outcome in _outcomes(first, workers):
            found[key] = outcome
            on_outcome(outcome)
    except SimulationFailed as error:
        failure = error
    outcomes = [
        msgspec.structs.replace(outcome, point=job.point, system=job.name)
        for job in jobs
        if (outcome := found.get(job.key)) is not None
    ]
    if failure:
        failure.finished = outcomes
        raise failure
    return outcomes


def _outcomes(jobs: dict[str, Job], workers: int) -> Iterator[tuple[str, Outcome]]:
    """Run the jobs in `workers` processes. Yield (key, outcome) as each job ends."""
    if workers == 1 or len(jobs) == 1:
        for key, job in jobs.items():
            yield key, run(job)
        return
    with _pool(min(workers, len(jobs))) as pool:
        keys: dict[Future[Outcome], str] = {pool.submit(run, job): key for key, job in jobs.items()}
        for done in as_completed(keys):
            try:
                yield keys[done], done.result()
            except BrokenProcessPool:
                job = jobs[keys[done]]
                raise SimulationFailed(
                    f"{job.name}, seed {job.seed}: its process died (out of memory?); fewer at "
                    f"once with sim.processes={max(1, workers // 2)}"
                ) from None


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes that inherit no threads and locks. An error terminates them."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _init_process, (os.getpid(),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    pool.shutdown()


def _init_process(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the parent handles the terminal's Ctrl-C.
    processes.die_with_parent(parent)


def cores(wanted: int | None) -> int:
    """Return the number of processes: `wanted`, or the cores that this process may use."""
    return wanted or processes.cores()
