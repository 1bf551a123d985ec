"""Chooses how the trainer and the engines divide the devices."""

from __future__ import annotations

from pathlib import Path

from rose.config import Config
from rose.coordinator.hybrid_devices import HybridDevices
from rose.coordinator.members import Members
from rose.coordinator.records import Records
from rose.coordinator.replicas import Replicas, remove_left
from rose.coordinator.shared_devices import Devices
from rose.coordinator.training import Training
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes


def build(
    config: Config,
    run_dir: Path,
    members: Members,
    changes: Changes,
    training: Training,
    hub: TurnHub,
    records: Records,
) -> Devices:
    remove_left(run_dir)
    base = config, members.ranks, members.send
    if config.hybrids:
        return HybridDevices(*base, records.recorder, training, hub, records.fault)
    if config.elastic_replicas:
        return Replicas(*base, run_dir, changes, training, hub, records)
    return Devices(*base, changes.until, records.recorder, training)
