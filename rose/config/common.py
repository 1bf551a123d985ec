"""Types that the sections of the tree share: bounded numbers, the base class of sections, and the
scheduler's five policies."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]  # vLLM's bounds


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base class of all sections. An unknown key is an error."""


class Policy(Section):
    name: str
    args: dict[str, Any]


class Scheduler(Section):
    provisioning: Policy
    routing: Policy
    order: Policy
    batching: Policy
    # extra turns of a worker, as a share of its `max_sequences`; they hide dispatch latency
    queue_depth: NotNegative
    # places trajectories on environment hosts
    placement: Policy = Policy(name="stay", args={})
