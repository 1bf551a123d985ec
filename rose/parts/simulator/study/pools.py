"""Builds the pools of simulated workers from `sim.pool`, `rollout` and
rose.parts.simulator.hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rose.config import ConfigError, ModelShape
from rose.parts.simulator import hardware, spec
from rose.parts.simulator.config import Config, SimPool, SimSystem
from rose.parts.simulator.study import devices
from rose.parts.simulator.traces import spot

BITS = 8  # definition: bits of a byte
RATES = ("compute", "memory", "nvlink")  # fields of hardware.Efficiency that must not be 0
# Seconds of generated spot availability, which stays constant afterwards.
SPOT_S = 24 * 3600.0  # ours: a day, longer than the steps that are counted


def make(c: Config, name: str, shape: ModelShape, system: SimSystem, seed: int) -> list[spec.Pool]:
    """Return the pools of a `sim.pool` entry: one for each degree of tensor parallelism of its
    engines. Raises `ConfigError`."""
    p = c.sim.pool[name]
    _check_degrees(c, name, system)
    return [_pool(c, name, shape, system, seed, degree) for degree in degrees(p)]


def _check_degrees(c: Config, name: str, system: SimSystem) -> None:
    """Raise `ConfigError` if the pool can't have its list of degrees of tensor parallelism."""
    p = c.sim.pool[name]
    several = isinstance(p.tensor_parallel, list)
    key = f"sim.pool.{name}.tensor_parallel={p.tensor_parallel}"
    if several and (p.kind != "dedicated" or not p.tensor_parallel or p.workers is None):
        raise ConfigError(f"{key}: a list needs a degree, kind=dedicated and workers")
    if not p.elastic:
        return
    if not several:
        raise ConfigError(f"sim.pool.{name}.elastic=True: needs a list of degrees, not {key}")
    if (policy := system.scheduler.provisioning.name) != "elastic":
        raise ConfigError(
            f"sim.pool.{name}.elastic=True: needs scheduler/provisioning=elastic, not {policy}"
        )
    total = p.workers * gpus(p)
    widest = max(degrees(p))
    if unfit := [degree for degree in degrees(p) if widest % degree]:
        raise ConfigError(
            f"{key}: engines of {unfit[0]} GPUs overlap two of {widest}; with elastic=true each "
            "degree must divide the widest"
        )
    if total % widest:
        raise ConfigError(f"{key}: engines of {widest} GPUs don't fill the pool's {total}")


def known(key: str, find: Callable[[str], Any], value: str) -> Any:
    """Return `find(value)`, and turn its `ValueError` into a `ConfigError` about `key`."""
    try:
        return find(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value!r}: {error}") from None


def _efficiency(c: Config) -> hardware.Efficiency:
    """Return the efficiency with the values of `sim.efficiency`. Raises `ConfigError`."""
    known = [field.name for field in dataclasses.fields(hardware.Efficiency)]
    for name, value in c.sim.efficiency.items():
        if name not in known:
            raise ConfigError(
                f"sim.efficiency.{name}={value}: no such number; there are {', '.join(known)}"
            )
        if name in RATES and not value:
            raise ConfigError(
                f"sim.efficiency.{name}={value}: a share of the device's peak, above 0"
            )
    return dataclasses.replace(hardware.EFFICIENCY, **c.sim.efficiency)


def degrees(p: SimPool) -> list[int]:
    """Return the distinct degrees of tensor parallelism of the pool's engines."""
    given = p.tensor_parallel
    return list(dict.fromkeys(given)) if isinstance(given, list) else [given]


def gpus(p: SimPool) -> int:
    """Return the number of GPUs that one of the pool's `workers` stands for."""
    given = p.tensor_parallel
    return given if isinstance(given, int) else given[0] if p.elastic else sum(given)


def device(p: SimPool, degree: int) -> str:
    """Return `WorkerJoined.hardware`: the GPU, and the degree if the pool has several."""
    return f"{p.gpu}x{degree}" if isinstance(p.tensor_parallel, list) else p.gpu


def _workers(c: Config, p: SimPool, degree: int) -> int:
    """Return the number of engines of this degree."""
    if not isinstance(p.tensor_parallel, list):
        return p.workers if p.workers is not None else c.trainer.ranks // degree
    return (
        p.workers * gpus(p) // degree if p.elastic else p.workers * p.tensor_parallel.count(degree)
    )


def _first_gpu(p: SimPool, degree: int) -> int | None:
    """Return the index of the first GPU of this degree's engines; None if there is one degree."""
    given = p.tensor_parallel
    if not isinstance(given, list):
        return None
    before = degrees(p)[: degrees(p).index(degree)]
    return 0 if p.elastic else p.workers * sum(each for each in given if each in before)


def _pool(
    c: Config, name: str, shape: ModelShape, system: SimSystem, seed: int, degree: int
) -> spec.Pool:
    """Return the pool of the engines of this degree."""
    p = c.sim.pool[name]
    gpu = known(f"sim.pool.{name}.gpu", hardware.gpu, p.gpu)
    workers = _workers(c, p, degree)
    serving = None
    if p.kind == "cooperative" and workers:
        serving = devices.make(
            c.sim.serving, _online_engine(c, gpu, degree, shape), workers, system.executor, seed
        )
    wakes = p.kind == "cooperative" or p.elastic
    switch_s = p.switch_s + (hardware.wake_s(shape, gpu, degree) if wakes else 0.0)
    allocation = spec.Allocation(p.allocation.queue_s, p.allocation.start_s, p.allocation.refused)
    return spec.Pool(
        name=f"{name}-tp{degree}" if isinstance(p.tensor_parallel, list) else name,
        kind=p.kind,
        gpu=dataclasses.replace(gpu, name=device(p, degree)),
        tensor_parallel=degree,
        engine=_engine(c, name, degree, gpu, shape, system),
        link=_link(c, p, shape, degree),
        allocation=allocation,
        count=workers,
        on_request=p.on_request,
        serving=serving,
        switch_s=switch_s,
        split=p.split,
        first_gpu=_first_gpu(p, degree),
        available=_available(c, workers, seed) if p.kind == "spot" else None,
    )


def _engine(
    c: Config, name: str, degree: int, gpu: spec.Gpu, shape: ModelShape, system: SimSystem
) -> spec.Engine:
    """Return the rollout engine on `degree` GPUs. Raises `ConfigError`."""
    p, efficiency = c.sim.pool[name], _efficiency(c)
    sequences = p.max_sequences or c.rollout.max_sequences
    # With several degrees, all engines have the same number of sequences per GPU.
    if isinstance(p.tensor_parallel, list) and not p.max_sequences:
        sequences = max(sequences * degree // c.rollout.tensor_parallel, 1)
    online = hardware.BF16 * _online_shape(c).parameters if p.kind == "cooperative" else 0.0
    try:
        step = hardware.step_time(shape, gpu, degree, sequences, efficiency)
        tokens = hardware.kv_tokens(shape, gpu, degree, efficiency, online)
    except ValueError as error:
        raise ConfigError(f"sim.pool.{name}.tensor_parallel={p.tensor_parallel}: {error}") from None
    return spec.Engine(
        step,
        sequences,
        c.rollout.max_batched_tokens,
        tokens,
        c.rollout.prefix_caching,
        # Live cooperative engines don't draft: the gate predicts users' latency without drafts.
        _drafts(c) if system.draft == "group" and p.kind != "cooperative" else None,
    )


def _online_shape(c: Config) -> ModelShape:
    return known("sim.serving.model", hardware.shape, c.sim.serving.model)


def _online_engine(c: Config, gpu: spec.Gpu, degree: int, rolls: ModelShape) -> spec.Engine:
    """Return the online engine. Its KV cache has the memory that both models' weights leave."""
    shape, s, efficiency = _online_shape(c), c.sim.serving, _efficiency(c)
    try:
        tokens = hardware.kv_tokens(
            shape, gpu, degree, efficiency, hardware.BF16 * rolls.parameters
        )
        step = hardware.step_time(shape, gpu, degree, s.max_sequences, efficiency)
    except ValueError as error:
        raise ConfigError(f"sim.serving.model={s.model!r} beside {c.model.name}: {error}") from None
    return spec.Engine(step, s.max_sequences, s.max_batched_tokens, tokens, True)  # vLLM's default


def _link(c: Config, p: SimPool, shape: ModelShape, degree: int) -> spec.Link:
    link = hardware.link(
        shape, p.link.gbit_s * 1e9 / BITS, p.link.latency_s, p.link.delta, p.link.relay, degree
    )
    if p.link.delta:
        return dataclasses.replace(
            link, version_bytes=hardware.BF16 * shape.parameters / c.sim.delta_ratio
        )
    return link


def _available(c: Config, most: int, seed: int) -> spec.Available:
    """Return the number of spot machines over time, at most `most`, from a file or generated."""
    s = c.sim.spot
    try:
        found = spot.read(Path(s.trace), seed) if s.trace else spot.generate(seed, SPOT_S, **s.args)
    except (OSError, ValueError, TypeError) as error:
        key = f"sim.spot.trace={s.trace!r}" if s.trace else f"sim.spot.args={s.args}"
        raise ConfigError(f"{key}: {error}") from None
    found = found.limited(most)
    at = np.unique(np.concatenate([[0.0], found.begin, found.end[found.end < found.seconds]]))
    return spec.Available(at, found.count(at).astype(np.int32))


def _drafts(c: Config) -> spec.Drafts | None:
    """Return the measured numbers of drafted and accepted tokens (`sim.draft`) for this
    `rollout.draft.tokens`; None if no siblings were measured. Raises `ConfigError`."""
    s, tokens = c.sim.draft, c.rollout.draft.tokens
    if not s.siblings:
        return None
    found = {each.tokens: each for each in s.lengths}
    if tokens not in found:
        raise ConfigError(
            f"rollout.draft.tokens={tokens}: sim.draft.lengths has drafts of at most "
            f"{', '.join(map(str, found))} tokens; scripts/drafts/replay_drafts.py counts others"
        )
    if s.siblings[0] or s.siblings != sorted(set(s.siblings)):
        raise ConfigError(f"sim.draft.siblings={s.siblings}: ascending from 0")
    shape = len(s.siblings), len(s.chances)
    for name in ("drafted", "accepted"):
        rows = getattr(found[tokens], name)
        if [len(row) for row in rows] != [shape[1]] * shape[0] or not shape[1]:
            raise ConfigError(
                f"sim.draft.lengths: {name} of tokens={tokens} has rows of "
                f"{[len(row) for row in rows]} numbers; {shape[0]} (siblings) of {shape[1]} "
                "(chances) are needed"
            )
    return spec.Drafts(
        tuple(s.siblings),
        np.array(found[tokens].drafted),
        np.array(found[tokens].accepted),
        s.lookup_s,
        c.rollout.draft.adaptive,
    )
