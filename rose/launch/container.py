"""The command that starts Python on a compute node: this interpreter, or the one in the container
of the job. Pure.

A container holds what ranks need (vLLM, DeepSpeed, MPI: slurm/rose.def, slurm/Dockerfile); ROSE
itself is mounted from this checkout; where it is installed, the image has the same version. What
submits and watches stays outside, since it needs Slurm's commands. Left out: one machine without
Slurm, where launch.py as a whole runs in the container.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rose.config import Config, ConfigError, Container
from rose.places import CHECKOUT


def command(c: Config, folders: Sequence[Path]) -> list[str]:
    """Behind srun's options: [further options of srun,] program, arguments. `folders`, of or in
    output_dir, are seen inside under the same path, beside this checkout and the model's folder.
    Raises `ConfigError` as `check` does."""
    box = _box(c)
    if box is None:
        return [sys.executable]
    mounts = [*map(str, _mounts(c, folders)), *box.mounts]
    if box.runtime == "pyxis":
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        return [
            f"--container-image={box.image}",
            f"--container-mounts={pairs}",
            *box.args,
            box.python,
        ]
    nvidia = ["--nv"] if c.cluster.gpus else []
    return [
        box.runtime,
        "exec",
        *nvidia,
        "--bind",
        ",".join(mounts),
        *box.args,
        box.image,
        box.python,
    ]


def alone(c: Config, folders: Sequence[Path], cpus: int) -> list[str]:
    """The same where no srun stands before it, as in the batch script of a job with one task of
    `cpus` CPUs."""
    box = _box(c)
    # from Slurm 22.05 to 23.02 a step has one CPU unless it asks for those of its job
    starter = ["srun", "--mpi=none", "--ntasks=1", f"--cpus-per-task={cpus}"]
    return [*(starter if box is not None and box.runtime == "pyxis" else []), *command(c, folders)]


def check(c: Config) -> None:
    """Raises `ConfigError` for a path of the run that the container's runtime would take for
    several."""
    if _box(c) is not None:
        _mounts(c, [Path(c.output_dir).resolve()])


def _box(c: Config) -> Container | None:
    return c.cluster.slurm.container if c.cluster.kind == "slurm" else None


def _mounts(c: Config, folders: Sequence[Path]) -> list[Path]:
    """Each once, without those within another."""
    wanted = {} if CHECKOUT is None else {CHECKOUT: "this checkout"}
    wanted |= {folder.absolute(): "output_dir" for folder in folders}
    model = c.model.snapshot if c.model.source == "hub" else c.model.path  # a hub's path is its id
    if model is not None and Path(model).is_absolute():
        wanted[_whole(Path(model))] = "the model's folder"
    if c.rollout.replay is not None:
        wanted[Path(c.rollout.replay).absolute().parent] = (
            "rollout.replay"  # of a run, whose name may have commas
        )
    if c.transfer.relay is not None:
        wanted[Path(c.transfer.relay_token_file).absolute()] = "transfer.relay_token_file"
    for path, key in wanted.items():
        if {",", ":"} & set(str(path)):
            raise ConfigError(
                f"{key}: {path} can't be mounted in cluster.slurm.container, whose runtime "
                f"{_box(c).runtime} takes a comma or colon for the end of a path; use one without "
                "them"
            )
    return [folder for folder in wanted if not any(other in folder.parents for other in wanted)]


def _whole(model: Path) -> Path:
    """A snapshot in a hub's cache is links into the folder beside it."""
    return model.parents[1] if model.parent.name == "snapshots" else model
