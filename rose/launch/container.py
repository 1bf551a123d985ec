"""Build the command that starts Python on a compute node: this interpreter, or the one in the job's
container. Pure.

A container holds what ranks need: vLLM, DeepSpeed and MPI (slurm/rose.def, slurm/Dockerfile). ROSE
itself is mounted from this checkout; if ROSE is installed as a package, the image must have the
same version. Processes that submit and watch stay outside, since they need Slurm's commands. Left
out: one machine without Slurm, where launch.py as a whole runs in the container.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rose.config import Config, ConfigError, Container
from rose.places import CHECKOUT


def command(c: Config, folders: Sequence[Path]) -> list[str]:
    """Return the command that follows srun and its options: [more options of srun,] program,
    arguments. `folders` (the run's, or output_dir), this checkout and the model's folder have the
    same path inside the container as outside. Raises `ConfigError` as `check` does."""
    box = _container(c)
    if box is None:
        return [sys.executable]
    mounts = [*map(str, _mounts(c, folders)), *box.mounts]
    if box.runtime == "pyxis":
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        options = [f"--container-image={box.image}", f"--container-mounts={pairs}"]
        return [*options, *box.args, box.python]
    options = [*(["--nv"] if c.cluster.gpus else []), "--bind", ",".join(mounts)]
    return [box.runtime, "exec", *options, *box.args, box.image, box.python]


def alone(c: Config, folders: Sequence[Path], cpus: int) -> list[str]:
    """Return the command that starts Python without an srun before it, in the batch script of a job
    with one task of `cpus` CPUs. pyxis works through srun only, so its command begins with srun."""
    box = _container(c)
    # From Slurm 22.05 to 23.02 a step has one CPU unless it asks for those of its job.
    starter = ["srun", "--mpi=none", "--ntasks=1", f"--cpus-per-task={cpus}"]
    return [*(starter if box is not None and box.runtime == "pyxis" else []), *command(c, folders)]


def check(c: Config) -> None:
    """Raise `ConfigError` for a path of the run that the container's runtime would split in two."""
    if _container(c) is not None:
        _mounts(c, [Path(c.output_dir).resolve()])


def _container(c: Config) -> Container | None:
    return c.cluster.slurm.container if c.cluster.kind == "slurm" else None


def _mounts(c: Config, folders: Sequence[Path]) -> list[Path]:
    """Return the paths to mount, without paths inside another of them. Raises `ConfigError`."""
    wanted = {} if CHECKOUT is None else {CHECKOUT: "this checkout"}
    wanted |= {folder.absolute(): "output_dir" for folder in folders}
    # The path of a hub's model is its id and not a folder.
    model = c.model.snapshot if c.model.source == "hub" else c.model.path
    if model is not None and Path(model).is_absolute():
        wanted[_folder_with_links(Path(model))] = "the model's folder"
    if c.rollout.replay is not None:
        # The parent, since the replayed run's own name may have commas.
        wanted[Path(c.rollout.replay).absolute().parent] = "rollout.replay"
    if c.transfer.relay is not None:
        wanted[Path(c.transfer.relay_token_file).absolute()] = "transfer.relay_token_file"
    for path, key in wanted.items():
        if {",", ":"} & set(str(path)):
            raise ConfigError(
                f"{key}: {path} can't be mounted in cluster.slurm.container, whose runtime "
                f"{_container(c).runtime} takes a comma or colon for the end of a path; use one "
                "without them"
            )
    return [folder for folder in wanted if not any(other in folder.parents for other in wanted)]


def _folder_with_links(model: Path) -> Path:
    """Return the folder to mount for a model. The files of a snapshot in a hub's cache are links
    into the folder of its repository, so the repository's folder is mounted."""
    return model.parents[1] if model.parent.name == "snapshots" else model
