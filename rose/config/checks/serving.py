"""Checks of the serving side's targets, thresholds and hours."""

from __future__ import annotations

import re

from rose.config.checks.need import Need
from rose.config.serving import Serving

# Arguments of vLLM that serving.online.engine_args may not set.
OWN_ARGUMENTS = (
    "model",
    "host",
    "port",
    "served_model_name",
    "scheduler_cls",
    "worker_extension_cls",
    "api_server_count",
    "data_parallel_size",
)
SHORTEST_STALE_S = 0.1  # live engines write their boards every 20 to 50 ms, later if busy


def check(s: Serving, need: Need) -> None:
    """Check the latency targets, thresholds and hours of lending."""
    need(
        s.lost_after_s >= 2 * s.heartbeat_s,
        "serving.lost_after_s",
        f"at least twice serving.heartbeat_s={s.heartbeat_s:g}, or a late heartbeat is a loss",
    )
    online, lending = s.online, s.lending
    if online.slo is not None:
        for kind in ("ttft", "tpot"):
            p50, p99 = getattr(online.slo, f"{kind}_p50_s"), getattr(online.slo, f"{kind}_p99_s")
            need(
                p50 <= p99,
                f"serving.online.slo.{kind}_p50_s",
                f"at most serving.online.slo.{kind}_p99_s={p99:g}",
            )
    need(
        online.max_batched_tokens >= online.max_sequences,
        "serving.online.max_batched_tokens",
        f"at least serving.online.max_sequences={online.max_sequences}: each takes one token of a "
        "step",
    )
    for name in online.engine_args:
        need(
            name.replace("-", "_") not in OWN_ARGUMENTS,
            f"serving.online.engine_args.{name}",
            "is set by ROSE, from serving.online or for one engine of a device",
        )
    need(
        online.port == 0 or online.port != lending.control_port,
        "serving.lending.control_port",
        "is serving.online.port too; another one, or 0 for a free one",
    )
    for key, port in (("online.port", online.port), ("lending.control_port", lending.control_port)):
        need(port < 2**16, f"serving.{key}", "must be below 65536")
    need(
        lending.kv_gib is None or lending.kv_gib >= online.kv_cache_gib,
        "serving.lending.kv_gib",
        f"at least serving.online.kv_cache_gib={online.kv_cache_gib:g}, which is part of it",
    )
    need(
        lending.reserve < lending.high_watermark,
        "serving.lending.reserve",
        f"below serving.lending.high_watermark={lending.high_watermark:g}, or nothing is ever lent",
    )
    need(
        lending.stale_after_s >= SHORTEST_STALE_S,
        "serving.lending.stale_after_s",
        f"at least {SHORTEST_STALE_S:g}: engines that live renew their boards every 0.02 to 0.05 "
        "s, and later on a busy machine",
    )
    _check_hours(lending.hours, need)


def _check_hours(hours: dict[str, float], need: Need) -> None:
    """Check that each span reads "HH-HH" (it may cross midnight), and that no hour is in two."""
    taken: dict[int, str] = {}
    for span, share in hours.items():
        key = f"serving.lending.hours.{span}"
        need(share <= 1, key, "a share, 0 to 1")
        found = hours_of(span)
        need(bool(found), key, 'the hours must be written as "08-20" or "22-06", from 00 to 24')
        for hour in found:
            need(hour not in taken, key, f"hour {hour:02d} is in {taken.get(hour)!r} too")
            taken[hour] = span


def hours_of(span: str) -> list[int]:
    """Return the hours of a span: [22, 23, 0, 1] for "22-02", [] for a text that is no span."""
    found = re.fullmatch(r"(\d\d)-(\d\d)", span)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if low == high or low > 23 or high > 24:
        return []
    return [hour % 24 for hour in range(low, high if high > low else high + 24)]
