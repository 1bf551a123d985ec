"""The types of the sections that a lender adds to its run's `serving`, and their checks."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from rose import config as core
from rose.config.checks import Need, check_serving, needs
from rose.config.common import Count, Natural, NotNegative, Positive, Section, Share

# Arguments of vLLM that serving.online.engine_args may not set.
OWN_ARGUMENTS = (
    "model",
    "host",
    "port",
    "served_model_name",
    "scheduler_cls",
    "stream_interval",
    "worker_extension_cls",
    "api_server_count",
    "data_parallel_size",
    "pipeline_parallel_size",
    "shutdown_timeout",
)
SHORTEST_STALE_S = 0.1  # live engines write their boards every 20 to 50 ms, later if busy


class Slo(Section):
    """Latency targets of an online model, seconds: time to first token (TTFT), and mean time per
    output token after it (TPOT)."""

    ttft_p50_s: Positive
    ttft_p99_s: Positive
    tpot_p50_s: Positive
    tpot_p99_s: Positive


class Online(Section):
    """The online server beside a borrowed engine: vLLM's OpenAI-compatible server."""

    # folder or hub id; null: ROSE starts no server, and the whole device is lent
    model: str | None
    served_name: str | None  # name that clients use; null: `model`
    host: str
    port: Natural  # 0: a free port, printed at start
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    max_context: Count
    max_sequences: Count
    max_batched_tokens: Count
    kv_cache_gib: Positive
    engine_args: dict[str, Any]  # passed to vLLM unchanged
    start_timeout_s: Positive
    slo: Slo | None  # null: unknown, so nothing is lent


class Lending(Section):
    """The conditions on which the online engine lends its device to the rollout engine."""

    # file that rose.parts.lending.profile wrote for this device and these models; null: no lending
    profile: str | None
    chunk_tokens: Count  # most prefill tokens of one step of the rollout engine
    step_share: Share  # longest delay of an online request by a rollout step, share of ttft_p99_s
    # CPU priority of the rollout engine's threads; without effect on a GPU
    priority: Literal["idle", "normal"]
    # where a rollout step stops for the online engine: between two layers, or only when it ends
    stops: Literal["layer", "step"]
    # the device's KV memory, one budget for both engines; null: online.kv_cache_gib
    kv_gib: Positive | None
    reserve: Share  # share of kv_gib that is never lent, beyond what online requests use
    high_watermark: Share  # share of kv_gib in use or lent above which the loan is halved
    stale_after_s: Positive  # seconds of silence of the online engine after which nothing is lent
    revoke_after_s: Positive  # seconds to return revoked memory; then the rollout engine is killed
    patience_s: Positive  # longest wait of a turn at the gate or at a stop; then it is returned
    # "22-06" (local time): share of the lendable memory; 1 in hours not named
    hours: dict[str, NotNegative]
    control_port: Natural  # port of metrics, report and stop switch; 0: a free port, printed
    stop_file: str | None  # nothing is lent while this file exists


class Serving(core.Serving):
    """The run's section `serving`, with the two sections that only a lender has."""

    online: Online
    lending: Lending


class Config(core.Config):
    """The configuration of a run, as its lender reads it."""

    serving: Serving


class MixedConfig(core.MixedConfig):
    """The configuration of a run on a mixture of environments, as its lender reads it."""

    serving: Serving


class ServingSide(Section):
    """The configuration of an online server, which may start before its run."""

    serving: Serving


def check(s: Serving) -> None:
    """Check the latency targets, thresholds and hours of lending. Raises `ConfigError`."""
    need = needs({"serving": msgspec.to_builtins(s)})
    check_serving(s, need)
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
        if name.replace("-", "_") == "tensor_parallel_size":
            need(
                type(online.engine_args[name]) is int and online.engine_args[name] >= 1,
                f"serving.online.engine_args.{name}",
                "must be a whole number of GPUs, at least 1",
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
    """Check that each span reads "HH-HH" (it may cross midnight), and that no spans overlap."""
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
