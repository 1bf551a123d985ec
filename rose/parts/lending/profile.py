"""Measure this device for co-serving: step times of both engines, and how they delay each other.

    python -m rose.parts.lending.profile out=FILE serving.online.model=FOLDER name=RUN [KEY=VALUE]
    python -m rose.parts.lending.profile out=FILE serving.online.model=FOLDER model=FOLDER [...]

The rollout engine is that of the run (in output_dir=outputs), or one for the model in FOLDER with
the settings of conf/ and the command line. The measurement takes seconds= (60 by default), and the
time to start both engines. Run it on the device that will be lent, without other work on it. Set
serving.lending.profile to the file that it writes: without a profile nothing is lent.

Exit codes: 0 written, 1 an engine failed or there were too few steps, 2 bad arguments
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rose import config as configuration
from rose import models
from rose.config import ConfigError
from rose.engine import plugin, start
from rose.engine.start import EngineError
from rose.files import refusal, write_whole
from rose.parts.lending import settings, shared_device
from rose.parts.lending.config import Config
from rose.parts.lending.device_profile import AGAIN, FORMAT, fingerprint
from rose.parts.lending.operator import operate, server
from rose.parts.lending.rules.predictor import Predictor

OURS = ("name", "output_dir", "model", "out", "seconds")
SECONDS = 60.0
ALONE = 0.3  # share of the seconds for each engine alone; the others are for both together
# Factor on a request's KV cache at 2 bytes an element. Covers float32 and blocks that aren't full.
KV_MARGIN = 2.2
STOLEN = 0.05  # share of stolen CPU time above which the report warns


def main(arguments: list[str]) -> int:
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    began = time.monotonic()
    try:
        given = settings.parse([a for a in arguments if a.partition("=")[0] in OURS])
        out, seconds = _out(given), _seconds(given)
        config, model = configured(arguments, given)
        # The operator's server has these threads too: rollout.threads, by default one per core.
        written = measure(config, model, seconds, settings.parse(arguments).get("rollout.threads"))
        written["seconds"] = round(time.monotonic() - began, 1)
        write_whole(out, (json.dumps(written, indent=1) + "\n").encode())
    except ConfigError as error:
        print(f"rose.parts.lending.profile: {error}", file=sys.stderr)
        return 2
    except (EngineError, OSError) as error:
        print(f"rose.parts.lending.profile: {error}", file=sys.stderr)
        return 1
    print(table(written))
    print(f"{out}: set serving.lending.profile to it")
    return 0


def _out(given: dict[str, Any]) -> Path:
    """Return the file to write. Raises `ConfigError` if it can't be written. This is checked before
    the measurement, which takes minutes."""
    if not given.get("out"):
        raise ConfigError("out is missing: which file is to be written? as out=profile.json")
    out = Path(given["out"]).expanduser().resolve()
    if not out.parent.is_dir():
        raise ConfigError(f"out={str(out)!r}: no such folder as {out.parent}")
    if out.is_dir():
        raise ConfigError(f"out={str(out)!r}: is a folder; give a file, as out=profile.json")
    if refused := refusal(out.parent):
        raise ConfigError(
            f"out={str(out)!r}: {out.parent}: {refused.strerror}; give a file in another folder"
        )
    return out


def _seconds(given: dict[str, Any]) -> float:
    """Return the seconds for the measurement. Raises `ConfigError`."""
    value = given.get("seconds", SECONDS)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 5 <= value <= 3600:
        raise ConfigError(
            f"seconds={value!r}: must be a number from 5 to 3600; {SECONDS:g} is the usual"
        )
    return float(value)


def configured(arguments: list[str], given: dict[str, Any]) -> tuple[Config, Path]:
    """Return the engines' configuration and the rollout model's folder. Raises `ConfigError`."""
    overrides = [a for a in arguments if a.partition("=")[0] not in OURS]
    config = _configured(overrides, given)
    # The operator passes the same overrides to the lender.
    own = operate.beside_online(config.serving, config.cluster.gpus > 0, overrides)
    config = _configured([*overrides, *own], given)
    if config.serving.online.model is None:
        raise ConfigError(
            "serving.online.model=None: the folder of the model that the online engine serves is "
            "needed"
        )
    online = settings.online_folder(config.serving.online)
    config = msgspec.structs.replace(
        config, serving=msgspec.structs.replace(config.serving, online=online)
    )
    model = models.resolve(config.model)
    fingerprint(config, model)
    return config, model


def _configured(overrides: list[str], given: dict[str, Any]) -> Config:
    """Return the configuration of the run `name`, or conf/ with `model`. Raises `ConfigError`."""
    if "name" in given:
        if "model" in given:
            raise ConfigError(
                f"model={given['model']!r}: name={given['name']!r} has its own model; give one of "
                "them"
            )
        run_dir = Path(given.get("output_dir", "outputs"), given["name"]).expanduser().resolve()
        return settings.of_run(run_dir, overrides)
    if "model" in given:
        return settings.composed(
            [*overrides, "model.source=folder", f"model.path={given['model']}"]
        )
    raise ConfigError(
        "name or model is missing: whose rollouts? as name=frozenlake, a run's, or model=FOLDER"
    )


# ---------------------------------------------------------------------- the measurement


def measure(
    config: Config, model: Path, seconds: float, threads: int | None = None
) -> dict[str, Any]:
    """Measure both engines; return the profile without its duration. `threads`: threads of the
    online engine, None for one per core. Raises `EngineError`."""
    gpus = config.cluster.gpus > 0
    # Both engines use the KV layout of a shared device, though here each keeps its own cache.
    os.environ.update(start.environment(gpus, threads, shares_device=True) | config.cluster.env)
    # Without this variable the engines have no boards, and the rollout engine waits for no gate.
    os.environ.pop(plugin.FOLDER, None)
    log("importing vLLM")
    start.preload()
    found = fingerprint(config, model)
    began, stolen = time.monotonic(), stolen_s()
    with tempfile.TemporaryDirectory(prefix="rose-profile-") as scratch:
        predictors, interference = asyncio.run(
            _measure(config, model, gpus, seconds, Path(scratch))
        )
    stolen = (stolen_s() - stolen) / (time.monotonic() - began) / (os.cpu_count() or 1)
    for side, folder in (("online", config.serving.online.model), ("rollout", model)):
        found[side] = found[side] | {"model": str(folder), "predictor": predictors[side].to_dict()}
    found["interference"] = found["interference"] | interference
    return {"format": FORMAT} | found | {"stolen": round(stolen, 3)}


def stolen_s() -> float:
    """Return the CPU seconds of all cores that a hypervisor has given to other guests."""
    return getattr(psutil.cpu_times(), "steal", 0.0)


async def _measure(
    config: Config, model: Path, gpus: bool, seconds: float, scratch: Path
) -> tuple[dict[str, Predictor], dict[str, float]]:
    """Start and measure both engines; return their predictors and the interference."""
    from rose.parts.lending import measure as m

    engines: list[m.Measured] = []
    try:
        log(f"starting the online engine of {config.serving.online.model}")
        engines.append(m.Measured(online_side(config), gpus, scratch / "online.jsonl"))
        log("measuring it alone")
        online = await m.alone(engines[0], ALONE * seconds)
        log(f"starting the rollout engine of {model}")
        engines.append(
            m.Measured(rollout_side(config, model), gpus, scratch / "rollout.jsonl", seed=1)
        )
        log("measuring it alone")
        rollout = await m.alone(engines[1], ALONE * seconds)
        if not gpus and config.serving.lending.priority == "idle":
            engines[1].lower_priority()
        log("measuring both together")
        turns = min(m.TURNS, config.rollout.max_sequences) if gpus else m.CLIENTS
        left_s = (1 - 2 * ALONE) * seconds
        both = await m.together(engines[0], engines[1], online, rollout, left_s, turns)
        return {"online": online, "rollout": rollout}, both
    finally:
        for engine in engines:
            engine.shutdown()


def online_side(config: Config):
    """Describe the online engine as `rose serve` starts it, without its HTTP server."""
    from rose.parts.lending.measure import Side

    folder = start.local_folder(config.serving.online.model, "serving.online.model")
    args = server.engine_args(config.serving.online, config.cluster.gpus > 0)
    args = {name: value for name, value in args.items() if value is not None}
    args |= dict(
        model=str(folder),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        weight_transfer_config=None,
    )
    shape = configuration.read_shape(folder)
    if config.cluster.gpus > 0:
        args["kv_cache_memory_bytes"] = kv_part(
            config, shape, args["kv_cache_memory_bytes"], config.serving.online.max_context
        )
    return Side("online", args, {}, shape.vocab, None)


def rollout_side(config: Config, model: Path):
    """Describe the rollout engine as a borrowed rank starts it."""
    from rose.parts.lending.measure import Side

    folder = start.local_folder(model)
    args = start.engine_args(folder, config.rollout, config.model, deterministic=False, seed=0)
    if config.cluster.gpus > 0:
        args |= shared_device.steps_on_gpu(config.serving.lending, config.rollout)
        args |= config.rollout.engine_args
    environment = start.environment(
        config.cluster.gpus > 0, config.rollout.threads, shares_device=True
    )
    shape = configuration.read_shape(folder)
    if config.cluster.gpus > 0:
        args["kv_cache_memory_bytes"] = kv_part(
            config, shape, args["kv_cache_memory_bytes"], config.model.max_context
        )
    return Side("rollout", args | {"scheduler_cls": operate.SCHEDULER}, environment, shape.vocab, 0)


def kv_part(config: Config, shape: configuration.ModelShape, own: int, max_context: int) -> int:
    """Return the bytes of KV cache for one engine during the measurement of a GPU, in which no
    memory moves between the engines. This is half of the memory that they will share, at least one
    request's need, and at most `own`, the size that the engine would have."""
    lending, online = config.serving.lending, config.serving.online
    half = int((lending.kv_gib or online.kv_cache_gib) * 2**30) // 2
    one = KV_MARGIN * shape.kv_bytes_per_token * max_context
    return min(own, max(half, int(one)))


def table(found: dict[str, Any]) -> str:
    """Format a profile for the operator: coefficients, errors, interference and duration."""
    rows = [
        (
            "",
            "any step",
            "floor",
            "prompt token",
            "x 1k context",
            "decode",
            "x 1k context",
            "mean error",
            "P99 residual",
            "steps",
        )
    ]
    for side in ("online", "rollout"):
        p = found[side]["predictor"]
        c0, c1, c2, c3, c4, c5 = p["coefficients"]
        rows.append(
            (
                side,
                _ms(c5),
                _ms(c0),
                _ms(c1),
                _ms(1000 * c2),
                _ms(c3),
                _ms(1000 * c4),
                f"{100 * p['mape']:.1f}%",
                f"x {p['p99']:.2f}",
                str(p["samples"]),
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        for row in rows
    ]
    i = found["interference"]
    lines.append(
        f"a rollout step holds a concurrent online step up for {100 * i['hold_mean']:.1f}% of its "
        f"time, {100 * i['hold_p99']:.1f}% at P99 (priority {i['priority']})"
    )
    if "progress" in i:
        lines.append(
            f"beside busy online traffic rollouts go on at {100 * i['progress']:.0f}% of their "
            "speed alone"
        )
    if found["stolen"] > STOLEN:
        lines.append(
            f"the hypervisor took {100 * found['stolen']:.0f}% of this machine's time for other "
            f"guests meanwhile: step times are too long by that; {AGAIN} when it takes less"
        )
    device = ", ".join(f"{name} {value}" for name, value in found["device"].items())
    return "\n".join([*lines, f"{device}; took {found['seconds']:g} s"])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def log(text: str) -> None:
    print(f"rose.parts.lending.profile {time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
