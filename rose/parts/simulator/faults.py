"""Planned failures: parts of a `Spec` for a run in which engines and environment hosts are killed
at known times. scripts/lending/prove_promise.py predicts such live runs.

A borrowed engine that is killed needs a pool of its own, with `count` 1, `serving` and
`available=up(...)`: each restart is then on the same device. `hosts(...)` builds environment hosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rose.parts.simulator import spec

FREE = 1e18  # numerics: bytes, bytes/s and cores that are never exhausted


def up(down: Sequence[tuple[float, float]]) -> spec.Available:
    """Return the availability of one engine that is down in these spans, (from, until) in seconds.
    Raises `ValueError` unless the spans are ascending, apart, and after 0 s."""
    edges = [0.0, *(edge for span in down for edge in span)]
    if any(a >= b for a, b in zip(edges, edges[1:], strict=False)):
        raise ValueError(f"spans {list(down)}: must be ascending and apart, the first after 0 s")
    return spec.Available(np.array(edges), np.array([1, 0] * len(down) + [1], np.int32))


def hosts(
    count: int,
    killed: Sequence[tuple[float, int]],
    recovery: spec.Recovery,
    start_s: float,
    detect_s: float,
    restart_s: float,
) -> spec.Sandboxes:
    """Return `count` environment hosts, with planned failures `killed` as (seconds, host). Only the
    start of a sandbox costs time. Raises `ValueError` for a host outside 0..count - 1."""
    for at, host in killed:
        if not 0 <= host < count:
            raise ValueError(f"host {host}, killed at {at:g} s: there are {count}, from 0")
    free = spec.Save(0.0, 0.0)
    return spec.Sandboxes(
        cores=(FREE,) * count,
        memory_bytes=FREE,
        sandbox_bytes=0.0,
        start_s=start_s,
        turn_s=0.0,
        look_s=0.0,
        changes=(spec.Change(1.0, free),),
        full=free,
        restore_s=0.0,
        restore_bytes=0.0,
        staging_bytes=FREE,
        host_bytes_s=FREE,
        store_bytes_s=FREE,
        recovery=recovery,
        mtbf_s=math.inf,
        restart_s=restart_s,
        detect_s=detect_s,
        load_s=60.0,  # ours: no trajectory moves, so that the interval has no effect
        failures=tuple(killed),
    )
