"""Read the file with a device's profile, and compare it with the device and the engines here.

`rose.parts.lending.profile` writes the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rose.config import ConfigError
from rose.engine import start
from rose.parts.lending.config import Config
from rose.parts.lending.rules.predictor import Predictor

FORMAT = 1
AGAIN = "measure again with python -m rose.parts.lending.profile"


def load(path: str | Path) -> dict[str, Any]:
    """Read a profile. Raises `ConfigError` naming the file and what is wrong with it."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}, and this version of ROSE reads {FORMAT}")
        for side in ("online", "rollout"):
            Predictor.from_dict(found[side]["predictor"])
        for name in ("hold_p99", "hold_mean"):
            value = found["interference"][name]
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ValueError(f"interference.{name}={value!r} must be a finite number >= 0")
        found["device"], found["interference"]["priority"]
    except OSError as error:
        raise ConfigError(
            f"serving.lending.profile={str(path)!r}: {error.strerror}; python -m "
            "rose.parts.lending.profile writes one"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        text = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"serving.lending.profile={str(path)!r}: no profile of a device: {text}; {AGAIN}"
        ) from None
    return found


def fingerprint(config: Config, model: Path) -> dict[str, Any]:
    """Return the properties of the device and the engines on which step times depend. `model`:
    folder of the rollout engine's model. Raises `ConfigError` if a model has no config.json."""
    gpus, online, rollout = config.cluster.gpus > 0, config.serving.online, config.rollout
    return {
        "device": _device(gpus),
        "online": {
            "model_digest": _digest(online.model, "serving.online.model"),
            "dtype": online.dtype,
        },
        "rollout": {
            "model_digest": _digest(model, "model"),
            "dtype": config.model.dtype,
            "threads": None if gpus else rollout.threads,
            "tensor_parallel": rollout.tensor_parallel,
            # With stops, each piece of a step has a CUDA graph of its own.
            "stops": config.serving.lending.stops if gpus else None,
        },
        "interference": {"priority": config.serving.lending.priority},
    }


def check(found: dict[str, Any], path: str | Path, config: Config, model: Path) -> None:
    """Raise `ConfigError`, with every difference, if the profile `found` from `path` doesn't fit
    this device and the engines of `config`. `model`: folder of the rollout engine's model."""
    wanted = fingerprint(config, model)
    differ = [
        f"{key} was {was!r} and is now {now!r}" for key, was, now in _differences(found, wanted)
    ]
    if differ:
        raise ConfigError(
            f"serving.lending.profile={str(path)!r} is of other engines or another device: "
            f"{'; '.join(differ)}; {AGAIN}"
        )


def _differences(
    found: dict[str, Any], wanted: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in `found`, value in `wanted`) for each value of `wanted` that differs."""
    for name, now in wanted.items():
        was = found.get(name) if isinstance(found, dict) else None
        if isinstance(now, dict):
            yield from _differences(was, now, f"{prefix}{name}.")
        elif was != now:
            yield f"{prefix}{name}", was, now


def _digest(model: str | Path, key: str) -> str:
    """Return a digest of the model's config.json."""
    folder = Path(model).expanduser()
    path = (folder if folder.is_dir() else start.local_folder(model, key)) / "config.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(
            f"{key}={str(model)!r}: {path}: {error.strerror}; give the folder of a Hugging Face "
            "model"
        ) from None


def _device(gpus: bool) -> dict[str, Any]:
    """Identify this device: the GPU's name, or the CPU's name and number of usable cores."""
    if gpus:
        from vllm.platforms import current_platform

        return {"gpu": current_platform.get_device_name()}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0))}
