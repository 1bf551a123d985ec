"""Counts what the engines decode."""

from __future__ import annotations

from rose import protocol as p


class Decoding:
    """Counters of all engines since `begin_step`: they generated `tokens` in `steps` engine steps,
    and accepted `accepted` of `drafted` draft tokens. Heartbeats bring them up to 1 s late."""

    NAMES = ("steps", "drafted", "accepted", "generated_tokens")

    def __init__(self) -> None:
        # (worker, incarnation) -> last counts, in the order of `NAMES`
        self._last: dict[tuple[str, int], tuple[int, ...]] = {}
        self.begin_step()

    def begin_step(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0

    def count(self, m: p.WorkerLoad) -> None:
        now = tuple(getattr(m, name) for name in self.NAMES)
        before = self._last.get((m.worker, m.incarnation), (0,) * len(now))
        self._last[m.worker, m.incarnation] = now
        steps, drafted, accepted, tokens = (b - a for a, b in zip(before, now, strict=True))
        self.steps, self.drafted = self.steps + steps, self.drafted + drafted
        self.accepted, self.tokens = self.accepted + accepted, self.tokens + tokens

    def row(self) -> dict[str, float]:
        """Return the step's values for metrics.jsonl."""
        each = {"tokens_per_engine_step": self.tokens / self.steps} if self.steps else {}
        drafts = {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}
        return each | (drafts if self.drafted else {})
