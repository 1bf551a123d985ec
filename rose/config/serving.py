"""The types of `serving`: the online engines, and the share of their devices that they lend."""

from __future__ import annotations

from typing import Any, Literal

from rose.config.common import Count, Natural, NotNegative, Positive, Section, Share


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

    # output of python -m rose.parts.lending.profile for this device and these models; null: lend
    # nothing
    profile: str | None
    chunk_tokens: Count  # most prefill tokens of one step of the rollout engine
    step_share: Share  # longest delay of an online request by a rollout step / ttft_p99_s
    priority: Literal["idle", "normal"]  # CPU priority of the rollout engine's threads
    # the device's KV memory, one budget for both engines; null: online.kv_cache_gib
    kv_gib: Positive | None
    reserve: Share  # share of kv_gib that is never lent, beyond what online requests use
    high_watermark: Share  # share of kv_gib in use or lent above which the loan is halved
    stale_after_s: Positive  # silence of the online engine after which nothing is lent
    revoke_after_s: Positive  # seconds to return revoked memory; then the rollout engine is killed
    patience_s: Positive  # longest wait of a turn at the gate; then the scheduler gets it back
    # "22-06" (local time): share of the lendable memory; 1 in hours not named
    hours: dict[str, NotNegative]
    control_port: Natural  # port of metrics, report and stop switch; 0: a free port, printed
    stop_file: str | None  # nothing is lent while this file exists


class Serving(Section):
    """Ranks of serving jobs that join the run while it runs."""

    borrow: bool  # true: they may join
    # kind that such a rank reports; provisioning policies distinguish them
    kind: Literal["cooperative", "spot", "serverless"]
    max_ranks: Natural  # most that have joined at once; 0: none
    heartbeat_s: Positive  # seconds between two heartbeats, in both directions
    lost_after_s: Positive  # seconds of silence after which a rank's turns go elsewhere
    drain_s: NotNegative  # seconds for a rank to finish its turns after SIGUSR2
    wait_s: Positive  # seconds that a serving rank waits for its run before it ends
    online: Online
    lending: Lending
