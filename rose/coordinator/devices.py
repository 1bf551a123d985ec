"""Chooses how the trainer and the engines divide the devices."""

from __future__ import annotations

from pathlib import Path

from rose import extensions
from rose.config import Config
from rose.coordinator.hybrid_devices import HybridDevices
from rose.coordinator.members import Members
from rose.coordinator.records import Records
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
    everything = config, run_dir, members, changes, training, hub, records
    if (of_part := extensions.build("division", *everything)) is not None:
        return of_part
    base = config, members.ranks, members.send
    if config.hybrids:
        return HybridDevices(*base, records.recorder, training, hub, records.fault)
    return Devices(*base, changes.until, records.recorder, training)
