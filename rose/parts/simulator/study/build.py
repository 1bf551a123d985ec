"""Builds the simulator's input from a checked configuration: a `Spec` and a `Scheduler` per system.

The configuration of a live run (model, batch, engines, trainer) applies here, too. `sim` adds the
rest, and rose.parts.simulator.hardware turns published peaks into times. All systems share one set
of numbers: a `SimSystem` names policies, pools and the treatment of running turns at updates, but
no number.
"""

from __future__ import annotations

import dataclasses
import math

from rose import policies
from rose.config import ConfigError, ModelShape
from rose.parts.simulator import domains, environments, hardware, spec
from rose.parts.simulator.config import Config, SimSandboxes, SimSave, SimSystem
from rose.parts.simulator.study import pools
from rose.parts.simulator.study.pools import known
from rose.policies import registry
from rose.scheduler import Scheduler

MIB, GIB, MB = 2**20, 2**30, 1e6  # definition: bytes
HOUR_S = 3600.0  # definition: seconds of an hour


def ours(c: Config) -> SimSystem:
    """Return the system that the configuration itself composes."""
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
    """Return all systems: the rivals, then the configured one, which replaces a rival of the same
    name."""
    return {name: each for name, each in c.sim.systems.items() if name != c.sim.label} | {
        c.sim.label: ours(c)
    }


def make_scheduler(c: Config, system: SimSystem) -> Scheduler:
    """Return a new scheduler of the system. Raises `ConfigError`."""
    chosen, there = system.scheduler.provisioning, c.sim.pool
    asks = getattr(registry.policy("provisioning", chosen), "asks_for_jobs", False)
    if asks and not any(name in there and there[name].on_request for name in system.pools):
        raise ConfigError(
            f"scheduler.provisioning.name={chosen.name!r}: asks for workers, and none of "
            f"pools={system.pools} has on_request=true; add one, such as lend, or choose "
            "scheduler/provisioning=fixed"
        )
    return policies.build(system.scheduler, c.rollout.turn_timeout_s)


def make_spec(c: Config, name: str, system: SimSystem, seed: int) -> spec.Spec:
    """Return the `Spec` of a system. Raises `ConfigError` naming the key."""
    s, shape = c.sim, _shape(c)
    key = f"{'sim' if name == s.label else f'sim.systems.{name}'}.pools={system.pools}"
    for pool in system.pools:
        if pool not in s.pool:
            raise ConfigError(f"{key}: no pool {pool!r} in sim.pool; there are {', '.join(s.pool)}")
    if not system.pools or len(set(system.pools)) < len(system.pools):
        raise ConfigError(f"{key}: one or more different ones of {', '.join(s.pool)}")
    rolls = [n for n in system.pools if s.pool[n].kind == "hybrid" and not s.pool[n].split]
    if system.stream and rolls:
        where = "trainer" if name == s.label else f"sim.systems.{name}"
        raise ConfigError(
            f"{where}.stream=True: the trainer's GPUs roll out until the batch is complete "
            f"({key}: {', '.join(rolls)}); leave the pool out, or set stream=False"
        )
    if system.dynamic_sampling and c.rollout.group_size < 2:
        where = "algorithm" if name == s.label else f"sim.systems.{name}"
        raise ConfigError(
            f"rollout.group_size={c.rollout.group_size}: at least 2 with "
            f"{where}.dynamic_sampling=true, which refuses groups whose rewards are all equal"
        )
    environment = _environment(c)
    _check_affinity(c, name, system)
    trainer_gpu = known("sim.trainer.gpu", hardware.gpu, s.trainer.gpu)
    trainer = hardware.trainer(
        shape,
        trainer_gpu,
        c.trainer.ranks,
        c.trainer.gradient_checkpointing is not False,
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
            each for pool in system.pools for each in pools.make(c, pool, shape, system, seed)
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
    """Return the sandboxes; None without hosts. Raises `ConfigError`."""
    if not s.hosts:
        return None
    if not s.cores:
        raise ConfigError("sim.sandboxes.cores=[]: give the cores of at least one host")
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


def _save(s: SimSave | None) -> spec.Save | None:
    return s and spec.Save(s.capture_s, s.bytes)


def _forward_passes(c: Config) -> float:
    """Return the number of forward passes over the batch besides those of the updates. The default
    is the live trainer's (rose/trainer/trainer.py): it computes old log-probabilities for all of a
    step's updates but the first."""
    configured = c.sim.trainer.forward_passes
    return 1 - 1 / c.trainer.updates_per_step if configured is None else configured


def _check_affinity(c: Config, name: str, system: SimSystem) -> None:
    """Raise `ConfigError` if the hardware affinity of the RollArt policy names a domain or a device
    that the system doesn't have. No turn would match such a name."""
    routing = system.scheduler.routing
    systems = "" if name == c.sim.label else f"sim.systems.{name}."
    if routing.name != "rollart":
        return
    key = f"{systems}scheduler.routing.args"
    of_systems = [c.sim.pool[pool] for pool in system.pools]
    devices = sorted(
        {pools.device(pool, each) for pool in of_systems for each in pools.degrees(pool)}
    )
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


def _shape(c: Config) -> ModelShape:
    """Return the model's shape. Raises `ConfigError` without one."""
    if c.model.shape is None:
        raise ConfigError(
            f"model.shape=None: mode={c.mode} needs it; take model=qwen3_8b, or copy the numbers "
            "of the model's config.json"
        )
    return c.model.shape


def _environment(c: Config) -> environments.Environments:
    """Return the configured environments, scaled by `sim.environment.factors`."""
    e = c.sim.environment
    chosen = [known("sim.environment.domains", domains.domain, name) for name in e.domains]
    for parameter, factor in e.factors.items():
        try:
            chosen = [domain.scaled(parameter, factor) for domain in chosen]
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
            tuple(chosen), c.model.max_context, e.weights and tuple(e.weights)
        )
    except ValueError as error:
        scaled = f" with factors {e.factors}" if e.factors else ""
        raise ConfigError(f"sim.environment{scaled}: {error}") from None
