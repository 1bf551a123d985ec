"""Find out which parts of ROSE will work on this machine or cluster, mostly in under a minute.
Print a line per part: ok, warning, or failed with the remedy.

    rose doctor [--folder SHARED_FOLDER] [HYDRA OVERRIDES, such as cluster=slurm]

Starts a few processes. With cluster=slurm it also submits short jobs: one with a task in each of a
run's two components, a job that another job joins, and jobs with GPUs if cluster.gpus isn't 0. With
env=terminal env.args.tasks=FOLDER it runs the tests of each task. Leaves nothing behind. Exit code
0 if nothing failed. Left out: whether an experiment fits (launch.py with cluster.dry_run=true).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from rose import front
from rose.config import Config, ConfigError
from rose.files import at_home, printable
from rose.launch import container, errors, exclusions
from rose.parts.doctor import join, machine, slurm
from rose.parts.doctor.finding import Finding
from rose.places import CONF


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="rose doctor", description=__doc__, formatter_class=raw)
    where = "where runs will be written; default: output_dir"
    parser.add_argument("--folder", type=at_home, help=where)
    args, overrides = parser.parse_known_args()
    console = Console(soft_wrap=True, highlight=False)
    try:
        trees = front.compose(CONF, overrides)
        if len(trees) != 1:
            raise ConfigError(f"{' '.join(overrides)}: the doctor takes no sweep")
        c = exclusions.from_dict(trees[0])
        container.check(c)
    except errors.COMPLAINTS as error:
        return _refuse(errors.explain(error, CONF, overrides))
    except ConfigError as error:
        return _refuse(str(error))
    failed = 0
    for finding in examine(c, (args.folder or Path(c.output_dir)).resolve()):
        colour = {"ok": "green", "warning": "yellow", "failed": "red"}[finding.state]
        console.print(f"[{colour}]{finding.state:8}[/] {finding.part}: ", end="")
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        console.print(printable(finding.words.removesuffix(".") + remedy), markup=False)
        failed += finding.state == "failed"
    return int(failed > 0)


def _refuse(words: str) -> int:
    """Print why the configuration is bad; return the exit code."""
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    console.print(f"bad configuration: {words}")
    return 2


def examine(c: Config, folder: Path) -> Iterator[Finding]:
    """Yield every finding, in the order of the parts; the checks run side by side."""
    holds_runs = machine.file_system(folder)  # first, since other checks write there
    shared = folder if holds_runs.state != "failed" else None
    checks: list[Callable[[], list[Finding]]] = [
        lambda name=name: [machine.package(name)] for name in machine.PACKAGES
    ]
    checks += [lambda: machine.gpus(c), lambda: [*machine.parts(), *machine.tasks(c)]]
    if c.cluster.kind == "slurm":
        checks.append(lambda: slurm.examine(c, shared))
    else:
        checks += [lambda: [machine.local_world(c)], lambda: [join.local(c, shared)]]
    with ThreadPoolExecutor(len(checks)) as pool:
        found = [pool.submit(check) for check in checks]
        yield holds_runs
        for each in found:
            yield from each.result()


if __name__ == "__main__":
    sys.exit(main())
