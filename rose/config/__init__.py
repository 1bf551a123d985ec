"""The typed tree of all of conf/, validated once, before anything starts.

`from_dict` turns the composed Hydra tree into a frozen `Config` or raises `ConfigError`, whose text
names the key, its value and what would be right. Nothing else reads the YAML of conf/.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from rose.config import errors
from rose.config.checks import check, check_model
from rose.config.cluster import Cluster, Component, Container, Mpi, Slurm, cpus_of, nodes_of
from rose.config.common import Policy, Scheduler
from rose.config.errors import ConfigError
from rose.config.model import Model, ModelShape
from rose.config.rollout import (
    Branching,
    Draft,
    EarlyStop,
    Env,
    Eval,
    EvalSet,
    Member,
    Mixture,
    Reward,
    Rollout,
)
from rose.config.serving import Serving
from rose.config.trainer import Algorithm, Lora, Optimizer, Trainer, Transfer
from rose.config.tree import Config, MixedConfig, Observe
from rose.files import write_whole
from rose.processes import MOST_THREADS, cores

__all__ = [
    "Algorithm",
    "Branching",
    "Draft",
    "Cluster",
    "Component",
    "Config",
    "ConfigError",
    "Container",
    "EarlyStop",
    "Env",
    "Eval",
    "EvalSet",
    "Lora",
    "Member",
    "MixedConfig",
    "Mixture",
    "Model",
    "ModelShape",
    "Mpi",
    "Observe",
    "Optimizer",
    "Policy",
    "Reward",
    "Rollout",
    "Scheduler",
    "Serving",
    "Slurm",
    "Trainer",
    "Transfer",
    "check_model",
    "cpus_of",
    "from_dict",
    "keys",
    "load",
    "nodes_of",
    "read_shape",
    "save",
    "stored",
    "to_dict",
]

DETERMINISTIC_THREADS = 2  # threads per trainer rank; another number would change losses
MIXTURE = "mixture"  # `env.name` of a section with several environments


def from_dict(
    tree: dict[str, Any],
    checked: bool = True,
    kinds: tuple[type[Config], type[Config]] = (Config, MixedConfig),
) -> Config:
    """Convert the resolved tree, in dicts and lists, to a `Config`; check it unless `checked` is
    false. `kinds`: the class for a tree with one environment, and the class for a mixture. Raises
    `ConfigError`."""
    degrees = errors.value_at(tree, "rollout.tensor_parallel")
    if isinstance(degrees, list):
        raise ConfigError(
            f"rollout.tensor_parallel={degrees}: one number; engines of several degrees are "
            "simulated only (sim.pool.dedicated.tensor_parallel), where no clear gain over the "
            'best single one was found (docs/simulator.md, "Engines of several degrees")'
        )
    kind = kinds[_is_mixture(tree)]
    try:
        config = msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(errors.explain(str(error), tree, kind)) from None
    if checked:
        check(config)
    return _resolved(config)


def _is_mixture(tree: dict[str, Any]) -> bool:
    """True for a mixture of environments. Raises `ConfigError` for a mixture within a mixture."""
    if errors.value_at(tree, "env.name") != MIXTURE:
        return False
    members = errors.value_at(tree, "env.members")
    for name in members if isinstance(members, dict) else ():
        if errors.value_at(members, f"{name}.name") == MIXTURE:
            raise ConfigError(
                f"env.members.{name}.name={MIXTURE!r}: no mixture within a mixture; name its "
                "members"
            )
    return True


def _resolved(config: Config) -> Config:
    """Replace each null whose value follows from other keys, so that the value is stored. A null
    whose value depends on a policy stays, for `rose.policies.registry.resolved`."""
    replace, threads = msgspec.structs.replace, _threads(config)
    return replace(
        config,
        output_dir=os.path.expanduser(config.output_dir),
        trainer=replace(
            config.trainer,
            threads=config.trainer.threads or threads["trainer"],
            hpz=_hpz_ranks(config),
        ),
        rollout=replace(config.rollout, threads=config.rollout.threads or threads["rollout"]),
    )


def _hpz_ranks(config: Config) -> int | None:
    """Return `trainer.hpz` as a number of ranks, or None for no second copy of the weights. For
    hpz=node, return None if a node has one trainer rank or all: a copy would save nothing."""
    hpz, per_node = config.trainer.hpz, config.trainers_of_node
    if hpz != "node":
        return hpz
    return per_node if 1 < per_node < config.trainer.ranks else None


def _threads(config: Config) -> dict[str, int | None]:
    """Return the default numbers of threads of a trainer rank and of an engine.

    1. With GPUs the libraries choose (None).
    2. On CPUs each role divides all cores among its ranks, since the roles mostly compute in turn.
    3. Under Slurm each rank has the CPUs of `cpus_of`. An engine leaves one to its ROSE rank.
    4. A deterministic trainer on CPUs has the same number on every machine: losses depend on it.
    """
    ranks = {"trainer": config.trainer.ranks, "rollout": config.rollout.workers}
    if config.cluster.gpus:
        return dict.fromkeys(ranks)
    if config.cluster.kind == "slurm":
        cpus = {name: cpus_of(config.cluster, name, config.rollout) for name in ranks}
        cpus["rollout"] -= 1
    else:
        cpus = {role: cores() // count for role, count in ranks.items()}
    found = {role: min(MOST_THREADS, max(1, count)) for role, count in cpus.items()}
    return found | ({"trainer": DETERMINISTIC_THREADS} if config.deterministic else {})


def to_dict(config: Config) -> dict[str, Any]:
    return msgspec.to_builtins(config)


def keys() -> list[str]:
    """Return every dotted key of the tree, sections included."""
    return errors.keys(Config)


def load(path: Path, checked: bool = True) -> Config:
    """Read the configuration that `save` wrote into a run's folder. checked=False accepts a
    configuration that this machine could not run."""
    return from_dict(stored(path), checked)


def stored(path: Path, advice: str = "restore it from a copy") -> dict[str, Any]:
    """Read an object that a run stored as JSON, such as the tree that `save` wrote. Raises
    `ConfigError`, with `advice`, for a damaged file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(found, dict) and found:
            return found
        why = "no JSON object with values"
    except (OSError, ValueError) as error:
        why = str(error)
    raise ConfigError(f"{path}: is damaged ({why}); {advice}")


def save(config: Config, path: Path) -> None:
    write_whole(Path(path), (json.dumps(to_dict(config), indent=2) + "\n").encode(), sync=True)


def read_shape(folder: Path) -> ModelShape:
    """Read a model's shape from the config.json of its folder. Raises `ConfigError` if the file is
    missing or unreadable, or if it isn't a decoder's."""
    path = Path(folder) / "config.json"
    where = f"model.path={str(folder)!r}"
    try:
        return _shape(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: no config.json there; give the folder of a Hugging Face model"
        ) from None
    except (KeyError, TypeError, ZeroDivisionError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: config.json is no decoder model's ({error!r})") from None


def _shape(raw: dict[str, Any]) -> ModelShape:
    """Convert the contents of a config.json. Raises `KeyError`, `TypeError`, `ZeroDivisionError` or
    msgspec's `ValidationError` for a missing value, or for a value that no decoder can have."""
    heads = raw["num_attention_heads"]
    found = {
        "layers": raw["num_hidden_layers"],
        "hidden": raw["hidden_size"],
        "intermediate": raw["intermediate_size"],
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads", heads),
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "vocab": raw["vocab_size"],
        "tied_embeddings": raw.get("tie_word_embeddings", False),
        # Folders on the hub have the first name; transformers 5 writes the second name.
        "experts": raw.get("num_experts") or raw.get("num_local_experts") or 0,
        "experts_per_token": raw.get("num_experts_per_tok") or 0,
        "expert_intermediate": raw.get("moe_intermediate_size") or 0,
        "type": raw.get("model_type") or "",
    }
    return msgspec.convert(found, ModelShape)
