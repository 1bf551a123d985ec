"""Seer's divided rollout."""

from __future__ import annotations

from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class Seer:
    """A turn is generated in chunks of `chunk_tokens`; between two of them it goes back to the
    queue, and any worker takes the next: the least loaded one (Seer, arXiv 2511.14617, divided
    rollout).

    Seer keeps the KV of all engines in one pool (Mooncake), so that a move costs no prefill. No
    engine here shares its KV: live, the next worker prefills what its own prefix cache lacks, and
    the simulator charges for it in the same way. A turn that may make no more than a chunk is not
    divided. Its order is `longest_first` (context-aware scheduling); its speculative decoding is no
    matter of a scheduler. Of the paper the abstract was at hand, not the text: the choice of the
    least loaded worker and 8,192 tokens a chunk (an eighth of an output of 64k) are ours.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        return fleet.least(turn)

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        """New tokens of this attempt; 0: all that are left."""
        left = turn.max_new_tokens - turn.made_tokens
        return self.chunk_tokens if left > self.chunk_tokens else 0

    def kv_need(self, turn: TurnState) -> int:
        """Of the next chunk, not of the whole output: what a chunk needs is known, so engines are
        filled with no preemption (Seer's divided rollout does both with one cut)."""
        made = turn.made_tokens
        return turn.context_tokens + min(made + self.chunk_tokens, turn.max_new_tokens)
