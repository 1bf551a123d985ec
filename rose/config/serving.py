"""The types of `serving`: the online engines and what they lend."""

from __future__ import annotations

from typing import Any, Literal

from rose.config.common import Count, Natural, NotNegative, Positive, Section, Share


class Slo(Section):
    """Latency targets of one online model: time to first token, and mean time per output token
    after it; seconds."""

    ttft_p50_s: Positive
    ttft_p99_s: Positive
    tpot_p50_s: Positive
    tpot_p99_s: Positive


class Online(Section):
    """The online server beside a borrowed engine: vLLM's OpenAI-compatible one."""

    # folder or hub id; null: no server of ours beside it, the whole device is lent
    model: str | None
    served_name: str | None  # as clients call it; null: the model as given
    host: str
    port: Natural  # 0: a free one, printed at start
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    max_context: Count
    max_sequences: Count
    max_batched_tokens: Count
    kv_cache_gib: Positive
    engine_args: dict[str, Any]  # of vLLM, as they are
    start_timeout_s: Positive
    slo: Slo | None  # null: unknown, so nothing is lent


class Lending(Section):
    """When and how much of the device the online engine lends to the rollout engine."""

    # file of python -m rose.lending.profile for this device and these models; null: lend nothing
    profile: str | None
    chunk_tokens: Count  # the most that one step of the rollout engine takes in
    # of ttft_p99_s that a rollout step may hold up a request that comes just after, at most
    step_share: Share
    priority: Literal["idle", "normal"]  # of the rollout engine's threads, on a CPU
    # the device's KV memory, one budget for both; null: online.kv_cache_gib
    kv_gib: Positive | None
    reserve: Share  # of it that is never lent, beyond what online requests use
    high_watermark: Share  # of it in use or lent: above, the rollout engine's budget is halved
    stale_after_s: Positive  # an online engine silent for so long lends nothing
    revoke_after_s: Positive  # a rollout engine that has not given back by then is killed
    patience_s: Positive  # turns held up at the gate for so long go back to the scheduler
    # "22-06": share of what could be lent, local time; hours not named: all of it
    hours: dict[str, NotNegative]
    control_port: Natural  # of metrics, report and stop switch; 0: a free one, printed at start
    stop_file: str | None  # while it exists nothing is lent


class Serving(Section):
    """Ranks of serving jobs that join the run while it runs."""

    borrow: bool  # whether they may
    # what such a rank says it is; provisioning tells them apart
    kind: Literal["cooperative", "spot", "serverless"]
    max_ranks: Natural  # at once; 0: none
    heartbeat_s: Positive  # between two signs of life, both ways
    lost_after_s: Positive  # of silence: its turns go elsewhere
    drain_s: NotNegative  # a rank asked to leave politely (SIGUSR2) finishes its turns for so long
    wait_s: Positive  # a serving rank waits for its run so long, then ends
    online: Online
    lending: Lending
