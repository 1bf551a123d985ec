"""Write the texts that Slurm gets for a run: sbatch's script, and srun's command line in it. Pure.

The script's only command starts one process on the first node (rose/launch/slurm.py). That process
starts the ranks of all components as one MPI world, with one srun, and watches them. Left out:
submitting.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from submitit.slurm import slurm as submitit_slurm

from rose.config import Component, Config, cpus_of
from rose.launch import container
from rose.launch.batch import SHELL
from rose.launch.layout import Rank
from rose.places import CHECKOUT

BATCH = ("-u", "-m", "rose.launch.batch")
# Slurm warns the script's shell alone. The shell keeps signals until Python can note them, which
# takes seconds on a slow file system. Until then Python ignores signals that reach it directly.
KEPT = ("INT", "TERM", "USR2")
KEEP_SIGNALS = (
    "rose_signals= rose_ready=",
    'rose_pass() { [ -z "$rose_ready" ] || kill -s "$1" "$rose_python" || :; }',
    *(f"trap 'rose_signals=\"$rose_signals {name}\"; rose_pass {name}' {name}" for name in KEPT),
    "trap 'rose_ready=1; for rose_signal in $rose_signals; do rose_pass $rose_signal; done' USR1",
)


def folder(run_dir: Path) -> Path:
    """Return the folder where submitit keeps what it submitted."""
    return Path(run_dir) / "submitted"


def script(c: Config, ranks: Sequence[Rank], run_dir: Path, warning_s: int | None = None) -> str:
    """Return the batch script; `run_dir` is absolute. `warning_s`: seconds before the time limit at
    which Slurm warns the job; None: cluster.slurm.warning_s."""
    first, *others = _by_component(ranks)
    lines = []
    for members in others:
        lines += ["#SBATCH hetjob", *_sbatch_lines(_options(c, members))]
    lines += ["", *KEEP_SIGNALS, *_setup_lines(c)]
    options = _options(c, first) | {"signal": f"B:USR2@{warning_s or c.cluster.slurm.warning_s}"}
    command = _with_signals_passed_on(_submitted([sys.executable], run_dir))
    return _text(run_dir, c.name, "slurm", options, lines, command)


def helper_script(c: Config, component: str, gpus: int, run_dir: Path, name: str) -> str:
    """Return the batch script of a one-task job that helps the run: it lends an engine or computes
    rewards. `component` names the field of `Slurm` with its options; `run_dir` is absolute."""
    options = _component_options(c, component, 1, 1, gpus)
    python = container.alone(c, [run_dir.parent], options["cpus-per-task"])
    command = _submitted(python, run_dir)
    return _text(run_dir, f"{c.name}-{name}", name, options, _setup_lines(c), command)


def _text(
    run_dir: Path, job: str, log: str, options: dict[str, Any], setup: list[str], command: str
) -> str:
    """Return the text of a script whose output goes to logs/<log>-<job id>.out."""
    escaped = str(run_dir).replace("%", "%%")  # % begins a replacement: %x is the job's name
    return submitit_slurm._make_sbatch_string(
        command=command,
        folder=str(folder(run_dir)),
        job_name=job,
        wckey=None,
        use_srun=False,
        stderr_to_stdout=True,
        setup=setup,
        time=None,
        additional_parameters=options | {"output": f"{escaped}/logs/{log}-%j.out", "requeue": True},
    )


def _submitted(python: Sequence[str], run_dir: Path) -> str:
    """Return the command that runs what submitit has stored."""
    return f"exec {shlex.join([*python, *BATCH, str(folder(run_dir))])}"


def _with_signals_passed_on(command: str) -> str:
    """Return shell lines that start the command, pass signals on to it (`KEEP_SIGNALS`) and exit
    with its code. A signal ends the shell's `wait` early, so the lines wait in a loop. Once the
    command has ended they ignore signals, and the last `wait` gives its exit code. In POSIX mode,
    which the user's POSIXLY_CORRECT switches on, bash would forget the code at the first `wait`."""
    return "\n".join(
        (
            "set +o posix",
            f"(trap '' {' '.join(KEPT)}; export {SHELL}=$$; {command}) &",
            "rose_python=$!",
            'while kill -0 "$rose_python" 2>/dev/null; do wait "$rose_python" || :; done',
            f"trap '' {' '.join(KEPT)}",
            'wait "$rose_python"',
        )
    )


def srun_argv(
    c: Config, ranks: Sequence[Rank], run_dir: Path, attempt: int, rank_command: Sequence[str] = ()
) -> list[str]:
    """Return the command line of one srun over all components, whose ranks find their roles by
    their number."""
    # Mount the parent: a sweep's run folder may have commas in its name, which separate mounts.
    rank_command = rank_command or (*container.command(c, [run_dir.parent]), "-m", "rose.main")
    components = _by_component(ranks)
    argv = ["srun", *c.cluster.mpi.srun]
    for number, members in enumerate(components):
        argv += [":"] if number else []
        argv += [f"--het-group={number}"] if len(components) > 1 else []
        argv += [
            f"--nodes={_nodes(members)}",
            f"--ntasks={len(members)}",
            f"--ntasks-per-node={len(members) // _nodes(members)}",
            "--distribution=block",
            # By a site's own defaults, the first rank to end might end the others.
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--export=ALL",
            *_step_options(c, members),
            *rank_command,
            "--run",
            str(run_dir),
            "--attempt",
            str(attempt),
        ]
    return argv


def _setup_lines(c: Config) -> list[str]:
    if CHECKOUT is None:
        return ["", *c.cluster.slurm.setup]
    path = shlex.quote(str(CHECKOUT))
    return ["", f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}", *c.cluster.slurm.setup]


def _by_component(ranks: Sequence[Rank]) -> list[list[Rank]]:
    return [list(members) for _, members in groupby(ranks, lambda rank: rank.component)]


def _nodes(members: Sequence[Rank]) -> int:
    return 1 + max(rank.node for rank in members)


def _step_options(c: Config, members: Sequence[Rank]) -> list[str]:
    """Return the options that srun does not take from its component of the job (Slurm 22.05 and
    later)."""
    taken = _options(c, members)
    if c.cluster.gpus:
        taken["gpu-bind"] = "none"  # all of the node's GPUs for each rank (rose/launch/gpus.py)
    return [
        f"--{name}={taken[name]}"
        for name in ("cpus-per-task", "gpus-per-node", "gpu-bind", "mem")
        if name in taken
    ]


def _options(c: Config, members: Sequence[Rank]) -> dict[str, Any]:
    """Return sbatch's options of one component; True for an option without a value."""
    component = "rollout" if members[0].component else "trainer"
    gpus = max((gpu for rank in members for gpu in rank.gpus), default=-1) + 1
    return _component_options(c, component, _nodes(members), len(members) // _nodes(members), gpus)


def _component_options(
    c: Config, section: str, nodes: int, ranks_per_node: int, gpus: int
) -> dict[str, Any]:
    """Return sbatch's options for `section`, a field of `Slurm`. `gpus`: the most GPUs that ranks
    use on one node. No more are requested, since other jobs may use the node's other GPUs, and the
    user would pay for them."""
    component: Component = getattr(c.cluster.slurm, section)
    options: dict[str, Any] = {
        "nodes": nodes,
        "ntasks-per-node": ranks_per_node,
        "cpus-per-task": cpus_of(c.cluster, section, c.rollout),
    }
    if c.cluster.gpus and gpus:
        options["gpus-per-node"] = gpus
    for name in ("partition", "account", "qos", "constraint", "mem", "time"):
        if getattr(component, name) is not None:
            options[name] = getattr(component, name)
    if component.exclusive:
        options["exclusive"] = True
    for option in component.sbatch:
        name, equals, value = option.removeprefix("--").partition("=")
        if name != "gpus-per-node":
            options[name] = value if equals else True
        elif name in options:
            # TYPE or TYPE:N. Components inherit the value, but need different numbers of GPUs.
            options[name] = f"{value.partition(':')[0]}:{gpus}"
    return options


def _sbatch_lines(options: dict[str, Any]) -> list[str]:
    return [submitit_slurm._as_sbatch_flag(name, options[name]) for name in sorted(options)]
