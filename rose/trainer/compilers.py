"""The programs and packages that fused kernels need, as far as that can be said without torch."""

from __future__ import annotations

import importlib.util
import os
import shutil

from rose.config import Config, ConfigError, Trainer

# model_type of a config.json -> Liger 0.8 has norms, rotary positions and the MLP of it
LIGER_TYPES = ("llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe")
# whose decoder in transformers has its layers under another name than `layers`, or deeper
OTHER_LAYERS = (
    "bloom",
    "codegen",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "mpt",
    "opt",
)


def check(c: Config) -> None:
    """Raises `ConfigError` for what isn't here; a container or a Slurm job's nodes have their own
    programs, which ranks look for as they start."""
    slurm = c.cluster.slurm if c.cluster.kind == "slurm" else None
    contained = slurm is not None and slurm.container is not None
    if c.trainer.kernels == "liger" and not contained:
        for package, name in (("liger_kernel", "liger-kernel"), ("triton", "triton")):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"trainer.kernels='liger': the package {name} isn't installed here: "
                    "pip install 'rose-rl[liger]', or trainer.kernels=none"
                )
    if c.trainer.compile and slurm is None and (found := why_none(c.cluster.gpus > 0)):
        raise ConfigError(found)


def why_none(on_gpu: bool) -> str:
    """Why torch could not compile here; "" where it has a compiler: of C++ on a CPU, of C beside
    Triton."""
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    chosen = os.environ.get(variable)
    names = (chosen,) if chosen else names
    if any(map(shutil.which, names)):
        return ""
    return (
        f"trainer.compile=True: no {' or '.join(names)} here, which compiles what torch writes; "
        f"Debian: apt-get install g++, or name one by {variable}; or trainer.compile=false"
    )


def check_type(trainer: Trainer, kind: str) -> None:
    """Raises `ConfigError` for a model that Liger has no kernels for, or whose layers are not where
    `rose.trainer.kernels.compile_layers` looks for them."""
    if trainer.compile and kind in OTHER_LAYERS:
        raise ConfigError(
            f"trainer.compile=True: models of the type {kind} keep their layers where they are not "
            "looked for; trainer.compile=false"
        )
    if trainer.kernels == "liger" and kind not in LIGER_TYPES:
        raise ConfigError(
            f"trainer.kernels='liger': no kernels for models of the type {kind}; there are for "
            f"{', '.join(LIGER_TYPES)}; trainer.kernels=none"
        )
