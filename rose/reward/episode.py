"""What a scorer sees of an episode, and what it answers."""

from __future__ import annotations

import math
from typing import Any

import msgspec


class Said(msgspec.Struct, frozen=True):
    """A stretch of the transcript: by the policy, or by anybody else (prompt, tools)."""

    policy: bool
    text: str


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that has ended. `task` is what the environment says of it (`Start.task`), such as
    the right answer."""

    trajectory: str
    domain: str  # the environment's name, in a mixture the member's
    seed: int  # the environment's
    task: dict[str, Any]
    transcript: list[Said]
    reward: float  # the environment's own
    success: bool  # likewise
    truncated: bool  # ended by a limit, not by the environment
    turns: int

    @property
    def prompt(self) -> str:
        """All before the policy's first token, as the chat template renders it."""
        return self.transcript[0].text if self.transcript else ""

    @property
    def response(self) -> str:
        """The policy's last turn."""
        return next((said.text for said in reversed(self.transcript) if said.policy), "")


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """`success`: null where the scorer has no word on it. `timed_out`: the answer used its time up,
    and that is its result."""

    reward: float
    success: bool | None = None
    timed_out: bool = False


class ScoringFailed(RuntimeError):
    """No score could be had: nothing is known about the answer, so it is no reward of 0."""


class Hung(ScoringFailed):
    """A plain function did not return in time. Its thread can't be ended, so its process must."""


def score_of(value: Any, whose: str) -> Score:
    """What a user's function may return: a number, (number, success), {"reward": ..., "success":
    ...} or a `Score`. Raises `ScoringFailed` for anything else, and for what is not finite."""
    try:
        match value:
            case Score(reward=reward, success=success, timed_out=late):
                sure = None if success is None else bool(success)
                score = Score(reward=float(reward), success=sure, timed_out=bool(late))
            case {"reward": reward, **more}:
                success = more.get("success")
                score = Score(
                    reward=float(reward), success=None if success is None else bool(success)
                )
            case (reward, success):
                score = Score(reward=float(reward), success=bool(success))
            case _:
                score = Score(reward=float(value))
    except (TypeError, ValueError):
        raise ScoringFailed(
            f"{whose} returned {value!r:.80}; a number, (number, success) or "
            '{"reward": number, "success": bool} is needed'
        ) from None
    if not math.isfinite(score.reward):
        raise ScoringFailed(f"{whose} gave the reward {score.reward}, which is not finite")
    return score
