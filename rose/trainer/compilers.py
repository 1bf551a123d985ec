"""The programs and packages that fused kernels need, checked without importing torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig

from rose.config import Config, ConfigError, Trainer

# The `model_type`s of a config.json whose norms, rotary positions and MLP Liger 0.8 implements.
LIGER_TYPES = ("llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe")
# The `model_type`s whose decoder in transformers has no `base_model.layers`: its layers have
# another name, or are a level deeper.
OTHER_TYPES = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt")


def check(c: Config) -> None:
    """Raise `ConfigError` for a missing package or compiler. A container and the nodes of a Slurm
    job have packages and compilers of their own, which the ranks check as they start."""
    if c.trainer.kernels == "liger" and not c.cluster.contained and (package := missing()):
        raise ConfigError(
            f"trainer.kernels='liger': the package {package} isn't installed here: "
            "pip install 'rose-rl[liger]', or trainer.kernels=none"
        )
    on_gpu = c.cluster.gpus > 0
    if c.trainer.compile and c.cluster.kind == "local" and (why := why_not_compile(on_gpu)):
        raise ConfigError(why)


def missing() -> str:
    """Return the first package that Liger's kernels need and that isn't installed, else ""."""
    needed = {"liger_kernel": "liger-kernel", "triton": "triton"}
    return next((n for p, n in needed.items() if importlib.util.find_spec(p) is None), "")


def why_not_compile(on_gpu: bool) -> str:
    """Return why `trainer.compile` is impossible on this host, or ""."""
    found = no_compiler(on_gpu)
    return found and f"trainer.compile=True: {found}; or trainer.compile=false"


def no_compiler(on_gpu: bool) -> str:
    """Return an error text if this host lacks the compiler that torch's code needs, or Python's
    headers, else "". On a CPU it is a C++ compiler, on a GPU a C compiler, which Triton calls."""
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    chosen = os.environ.get(variable)
    names = (chosen,) if chosen else names
    if not any(map(shutil.which, names)):
        return (
            f"no {' or '.join(names)} here, to compile the code that torch generates; "
            f"Debian: apt-get install g++, or name a compiler by {variable}"
        )
    headers = sysconfig.get_path("include")
    named = ":".join(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))
    if not any(os.path.isfile(f"{it}/Python.h") for it in (headers, *named.split(":"))):
        return (
            f"no Python.h in {headers}, which the code that torch generates includes; Debian: "
            "apt-get install python3-dev"
        )
    return ""


def check_type(trainer: Trainer, kind: str) -> None:
    """Raise `ConfigError` for a model type that Liger has no kernels for, or whose layers are not
    where `rose.trainer.kernels.compile_layers` expects them."""
    if trainer.compile and kind in OTHER_TYPES:
        raise ConfigError(
            f"trainer.compile=True: a model of the type {kind} has no base_model.layers, which "
            "trainer.compile compiles; set trainer.compile=false"
        )
    if trainer.kernels == "liger" and kind not in LIGER_TYPES:
        raise ConfigError(
            f"trainer.kernels='liger': no kernels for models of the type {kind}; Liger has some "
            f"for {', '.join(LIGER_TYPES)}; trainer.kernels=none"
        )
