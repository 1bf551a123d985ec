"""Chooses how the trainer and the engines divide the devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rose import protocol as p
from rose.config import Config
from rose.coordinator.hybrid_devices import HybridDevices
from rose.coordinator.replicas import Replicas, remove_left
from rose.coordinator.shared_devices import Devices
from rose.coordinator.training import Training
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes
from rose.observe.recorder import NullRecorder


def build(
    config: Config,
    run_dir: Path,
    ranks: dict[p.Role, dict[int, int]],
    send: Callable[[int, p.Message], None],
    changes: Changes,
    recorder: NullRecorder,
    training: Training,
    hub: TurnHub,
    on_fault: Callable[[str, str], None],
    on_change: Callable[[str, str, str], None],
) -> Devices:
    """`ranks` maps role -> index -> rank; `on_fault` gets (what, detail), `on_change` also the kind
    of the row."""
    remove_left(run_dir)
    if config.hybrids:
        return HybridDevices(config, ranks, send, recorder, training, hub, on_fault)
    if config.elastic_replicas:
        return Replicas(
            config, run_dir, ranks, send, changes, recorder, training, hub, on_fault, on_change
        )
    return Devices(config, ranks, send, changes.until, recorder, training)
