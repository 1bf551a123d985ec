"""From a checked configuration to what the simulator takes: a `Spec` and a `Scheduler` per system.

What the configuration says of a live run (model, batch, engines, trainer) holds here too; `sim`
says the rest, and rose.sim.hardware turns published peaks into times. One parameter set for all
systems: a `SimSystem` names policies, pools and how updates meet running turns, and no number.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from rose import policies
from rose.config import Config, ConfigError, ModelShape, SimPool, SimSandboxes, SimSave, SimSystem
from rose.scheduler import Scheduler
from rose.sim import environments, hardware, spec
from rose.sim.study import devices
from rose.sim.traces import spot

BITS = 8  # definition: of a byte
MIB, GIB, MB = 2**20, 2**30, 1e6  # definition: bytes
HOUR_S = 3600.0  # definition: of an hour
RATES = ("compute", "memory", "nvlink")  # of hardware.Efficiency, what times are divided by
# of availability; after that nothing changes any more
SPOT_S = 24 * 3600.0  # ours: a day, longer than the steps that are counted


def ours(c: Config) -> SimSystem:
    """The system that the configuration itself composes."""
    return SimSystem(
        about="as configured",
        scheduler=c.scheduler,
        pools=c.sim.pools,
        executor=c.sim.executor,
        dynamic_sampling=c.algorithm.dynamic_sampling,
        in_flight=c.transfer.in_flight,
        stream=c.trainer.stream,
        draft="group" if c.rollout.draft.method == "group" else "none",
    )


def systems(c: Config) -> dict[str, SimSystem]:
    """Rivals first; the configured one takes the place of a rival of its name."""
    return {name: each for name, each in c.sim.systems.items() if name != c.sim.label} | {
        c.sim.label: ours(c)
    }


def make_scheduler(c: Config, system: SimSystem) -> Scheduler:
    """A new one. Raises `ConfigError`."""
    return policies.build(system.scheduler, c.rollout.turn_timeout_s)


def make_spec(c: Config, name: str, system: SimSystem, seed: int) -> spec.Spec:
    """Raises `ConfigError` naming the key."""
    s, shape = c.sim, _shape(c)
    pools = f"{'sim' if name == s.label else f'sim.systems.{name}'}.pools={system.pools}"
    for pool in system.pools:
        if pool not in s.pool:
            raise ConfigError(
                f"{pools}: no pool {pool!r} in sim.pool; there are {', '.join(s.pool)}"
            )
    if not system.pools or len(set(system.pools)) < len(system.pools):
        raise ConfigError(f"{pools}: one or more different ones of {', '.join(s.pool)}")
    rolls = [n for n in system.pools if s.pool[n].kind == "hybrid" and not s.pool[n].split]
    if system.stream and rolls:
        where = "trainer" if name == s.label else f"sim.systems.{name}"
        raise ConfigError(
            f"{where}.stream=True: the trainer's GPUs roll out until the batch is complete "
            f"({pools}: {', '.join(rolls)}); leave the pool out, or set it to false"
        )
    if system.dynamic_sampling and c.rollout.group_size < 2:
        where = "algorithm" if name == s.label else f"sim.systems.{name}"
        raise ConfigError(
            f"rollout.group_size={c.rollout.group_size}: at least 2 with "
            f"{where}.dynamic_sampling=true, which refuses groups whose rewards are all equal"
        )
    environment = _environment(c)
    _check_affinity(c, name, system)
    trainer_gpu = _known("sim.trainer.gpu", hardware.gpu, s.trainer.gpu)
    trainer = hardware.trainer(
        shape,
        trainer_gpu,
        c.trainer.ranks,
        c.trainer.gradient_checkpointing,
        s.trainer.mfu,
        _forward_passes(c),
    )
    return spec.Spec(
        name=name,
        steps=s.steps,
        environment=environment,
        trainer=trainer,
        batch=spec.Batch(
            c.trainer.batch_size // c.rollout.group_size,
            c.rollout.group_size,
            system.dynamic_sampling,
        ),
        pools=tuple(
            _pool(c, pool, shape, system, seed, each)
            for pool in system.pools
            for each in degrees(s.pool[pool])
        ),
        tick_s=s.tick_s,
        progress_s=s.progress_s,
        dispatch_s=s.dispatch_s,
        answer_s=s.dispatch_s,
        in_flight=system.in_flight,
        stream=system.stream,
        sandboxes=_sandboxes(s.sandboxes, system.recovery),
    )


def _sandboxes(s: SimSandboxes, recovery: str | None) -> spec.Sandboxes | None:
    """Raises `ConfigError`."""
    if not s.hosts:
        return None
    if not s.cores:
        raise ConfigError("sim.sandboxes.cores=[]: those of at least one host")
    if s.sandbox_mib * MIB > s.memory_gib * GIB:
        raise ConfigError(
            f"sim.sandboxes.sandbox_mib={s.sandbox_mib:g}: no host has room for one with "
            f"sim.sandboxes.memory_gib={s.memory_gib:g}"
        )
    shares = sum(change.share for change in s.changes.values())
    if abs(shares - 1) > 1e-3:  # numerics: shares are written with three digits
        raise ConfigError(
            f"sim.sandboxes.changes: the shares of {', '.join(s.changes)} are {shares:g} together; "
            "1 is all turns"
        )
    return spec.Sandboxes(
        cores=tuple(s.cores[at % len(s.cores)] for at in range(s.hosts)),
        memory_bytes=s.memory_gib * GIB,
        sandbox_bytes=s.sandbox_mib * MIB,
        start_s=s.start_s,
        turn_s=s.turn_s,
        look_s=s.look_s,
        changes=tuple(spec.Change(c.share, _save(c.save)) for c in s.changes.values()),
        full=_save(s.full),
        restore_s=s.restore_s,
        restore_bytes=s.restore_bytes,
        staging_bytes=s.staging_mib * MIB,
        host_bytes_s=s.host_mb_s * MB,
        store_bytes_s=s.store_mb_s * MB,
        recovery=recovery or s.recovery,
        mtbf_s=s.mtbf_h * HOUR_S if s.mtbf_h else math.inf,
        restart_s=s.restart_s,
        detect_s=s.detect_s,
        load_s=s.load_s,
    )


def _drafts(c: Config) -> spec.Drafts | None:
    """Raises `ConfigError`."""
    s, tokens = c.sim.draft, c.rollout.draft.tokens
    if not s.siblings:
        return None
    found = {each.tokens: each for each in s.lengths}
    if tokens not in found:
        raise ConfigError(
            f"rollout.draft.tokens={tokens}: sim.draft.lengths has drafts of at most "
            f"{', '.join(map(str, found))} tokens; scripts/replay_drafts.py counts others"
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


def _save(s: SimSave | None) -> spec.Save | None:
    return s and spec.Save(s.capture_s, s.bytes)


def _forward_passes(c: Config) -> float:
    """Over the batch, beside those of the update: as many as are configured, or as the trainer of a
    live run makes for old log-probabilities (rose/trainer/trainer.py)."""
    configured = c.sim.trainer.forward_passes
    return 1 - 1 / c.trainer.updates_per_step if configured is None else configured


def _check_affinity(c: Config, name: str, system: SimSystem) -> None:
    """A domain or a device that the simulation doesn't have is a slip of the pen: nothing would go
    there."""
    routing, systems = (
        system.scheduler.routing,
        "" if name == c.sim.label else f"sim.systems.{name}.",
    )
    if routing.name != "rollart":
        return
    key = f"{systems}scheduler.routing.args"
    of_systems = [c.sim.pool[pool] for pool in system.pools]
    devices = sorted({_device(pool, each) for pool in of_systems for each in degrees(pool)})
    for domain, device in {**routing.args["hardware"], "": routing.args["default"]}.items():
        here = f"{key}.hardware.{domain}={device!r}" if domain else f"{key}.default={device!r}"
        if domain and domain not in c.sim.environment.domains:
            raise ConfigError(
                f"{here}: no such domain in sim.environment.domains; there are "
                f"{', '.join(c.sim.environment.domains)}"
            )
        if device and device not in devices:
            raise ConfigError(
                f"{here}: no pool of this system has that device; its pools have "
                f"{', '.join(devices)}"
            )


def _known(key: str, find, value: str):
    """`find(value)`, whose `ValueError` becomes one of the configuration."""
    try:
        return find(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value!r}: {error}") from None


def _shape(c: Config) -> ModelShape:
    if c.model.shape is None:
        raise ConfigError(
            f"model.shape=None: mode={c.mode} needs it; take model=qwen3_8b, or copy the numbers "
            "of the model's config.json"
        )
    return c.model.shape


def _environment(c: Config) -> environments.Environments:
    e = c.sim.environment
    domains = [_known("sim.environment.domains", environments.domain, name) for name in e.domains]
    for parameter, factor in e.factors.items():
        try:
            domains = [domain.scaled(parameter, factor) for domain in domains]
        except (ValueError, AttributeError):
            numbers = [
                f.name
                for f in dataclasses.fields(environments.Domain)
                if f.type in ("Heavy", "Drift", "float")
            ]
            raise ConfigError(
                f"sim.environment.factors.{parameter}={factor}: no parameter that can be scaled; "
                f"parameters are {', '.join(numbers)}"
            ) from None
    try:
        return environments.Environments(
            tuple(domains), c.model.max_context, e.weights and tuple(e.weights)
        )
    except ValueError as error:
        scaled = f" with factors {e.factors}" if e.factors else ""
        raise ConfigError(f"sim.environment{scaled}: {error}") from None


def _efficiency(c: Config) -> hardware.Efficiency:
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
    """Different ones, of the pool's engines."""
    given = p.tensor_parallel
    return list(dict.fromkeys(given)) if isinstance(given, list) else [given]


def _device(p: SimPool, degree: int) -> str:
    """As `WorkerJoined.hardware` says it; policies compare engines of unlike degrees by it."""
    return f"{p.gpu}x{degree}" if isinstance(p.tensor_parallel, list) else p.gpu


def _workers(c: Config, name: str, degree: int) -> int:
    """Engines of the degree. Raises `ConfigError`."""
    p = c.sim.pool[name]
    key = f"sim.pool.{name}.tensor_parallel={p.tensor_parallel}"
    if not isinstance(p.tensor_parallel, list):
        if p.elastic:
            raise ConfigError(f"sim.pool.{name}.elastic=True: {key} has to be a list of shapes")
        return p.workers if p.workers is not None else c.trainer.ranks // degree
    if p.kind != "dedicated" or not p.tensor_parallel or p.workers is None:
        raise ConfigError(f"{key}: one or more degrees, of a dedicated pool with workers")
    if not p.elastic:
        return p.workers * p.tensor_parallel.count(degree)
    gpus = p.workers * p.tensor_parallel[0]
    if gpus % degree:
        raise ConfigError(f"{key}: engines of {degree} GPUs don't fill the pool's {gpus}")
    return gpus // degree


def _first_gpu(p: SimPool, degree: int) -> int | None:
    given = p.tensor_parallel
    if not isinstance(given, list):
        return None
    before = degrees(p)[: degrees(p).index(degree)]
    return 0 if p.elastic else p.workers * sum(each for each in given if each in before)


def _pool(
    c: Config, name: str, shape: ModelShape, system: SimSystem, seed: int, degree: int
) -> spec.Pool:
    p = c.sim.pool[name]
    gpu = _known(f"sim.pool.{name}.gpu", hardware.gpu, p.gpu)
    workers = _workers(c, name, degree)
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
        gpu=dataclasses.replace(gpu, name=_device(p, degree)),
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
    p, efficiency = c.sim.pool[name], _efficiency(c)
    # of an engine over rollout.tensor_parallel GPUs; as many for each GPU of others
    sequences = max(c.rollout.max_sequences * degree // c.rollout.tensor_parallel, 1)
    online = hardware.BF16 * _online(c).parameters if p.kind == "cooperative" else 0.0
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
        # live: not beside users' requests, whose latency is predicted without drafts
        _drafts(c) if system.draft == "group" and p.kind != "cooperative" else None,
    )


def _online(c: Config) -> ModelShape:
    return _known("sim.serving.model", hardware.shape, c.sim.serving.model)


def _online_engine(c: Config, gpu: spec.Gpu, degree: int, rolls: ModelShape) -> spec.Engine:
    """The online engine, with the KV memory that both models' weights leave, of which what is
    unused is lent."""
    shape, s, efficiency = _online(c), c.sim.serving, _efficiency(c)
    try:
        tokens = hardware.kv_tokens(
            shape, gpu, degree, efficiency, hardware.BF16 * rolls.parameters
        )
        step = hardware.step_time(shape, gpu, degree, s.max_sequences, efficiency)
    except ValueError as error:
        raise ConfigError(f"sim.serving.model={s.model!r} beside {c.model.name}: {error}") from None
    return spec.Engine(step, s.max_sequences, s.max_batched_tokens, tokens, True)  # vLLM's default


def _link(c: Config, p: SimPool, shape: ModelShape, degree: int) -> spec.Link:
    made = hardware.link(
        shape, p.link.gbit_s * 1e9 / BITS, p.link.latency_s, p.link.delta, p.link.relay, degree
    )
    if p.link.delta:
        return dataclasses.replace(
            made, version_bytes=hardware.BF16 * shape.parameters / c.sim.delta_ratio
        )
    return made


def _available(c: Config, most: int, seed: int) -> spec.Available:
    """Of a file from its beginning, or made; at most `most` machines at once."""
    s = c.sim.spot
    try:
        found = spot.read(Path(s.trace), seed) if s.trace else spot.generate(seed, SPOT_S, **s.args)
    except (OSError, ValueError, TypeError) as error:
        key = f"sim.spot.trace={s.trace!r}" if s.trace else f"sim.spot.args={s.args}"
        raise ConfigError(f"{key}: {error}") from None
    found = found.limited(most)
    at = np.unique(np.concatenate([[0.0], found.begin, found.end[found.end < found.seconds]]))
    return spec.Available(at, found.count(at).astype(np.int32))
