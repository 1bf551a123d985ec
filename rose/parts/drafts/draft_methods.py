"""Drafts from the text of a turn's group, rollout/draft=group (a hook of rose/extensions.py)."""

from __future__ import annotations

from typing import Any

from rose.config import Draft
from rose.parts.drafts.siblings import Receiver, Sender

__all__ = ["METHODS", "Receiver", "Sender", "engine_args"]

METHODS = ("group",)


def engine_args(draft: Draft) -> dict[str, Any]:
    """Return vLLM's arguments of an engine that drafts."""
    return {
        "worker_extension_cls": "rose.parts.drafts.worker_extension.DraftingWorker",
        "speculative_config": {
            "method": "custom_class",
            "model": "rose.parts.drafts.proposer.GroupProposer",
            "num_speculative_tokens": draft.tokens,
        },
    }
