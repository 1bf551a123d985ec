"""Chooses how the trainer and the engines divide the devices."""

from __future__ import annotations

from rose.config import Config
from rose.coordinator.hybrid_devices import HybridDevices
from rose.coordinator.members import Members
from rose.coordinator.records import Records
from rose.coordinator.shared_devices import Devices
from rose.coordinator.turns import TurnHub
from rose.coordinator.waiting import Changes


def build(
    config: Config, members: Members, changes: Changes, hub: TurnHub, records: Records
) -> Devices:
    base = config, members.ranks, members.send
    if config.hybrids:
        return HybridDevices(*base, records.recorder, hub, records.fault)
    return Devices(*base, changes.until, records.recorder)
