"""The episode that a scorer receives, and the score that it returns."""

from __future__ import annotations

from typing import Any

import msgspec

from rose.reward import values


class Said(msgspec.Struct, frozen=True):
    """A part of the transcript."""

    policy: bool  # True if the policy generated it, False for the prompt and tool results
    text: str


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that has ended."""

    trajectory: str
    domain: str  # the environment's name, or the member's in a mixture
    seed: int  # the environment's seed
    task: dict[str, Any]  # the environment's facts on the task (`Start.task`), such as the answer
    transcript: list[Said]
    reward: float  # the environment's own reward
    success: bool  # the environment's own verdict
    truncated: bool  # True if a limit ended it, not the environment
    turns: int

    @property
    def prompt(self) -> str:
        """All text before the policy's first token, as the chat template renders it."""
        return self.transcript[0].text if self.transcript else ""

    @property
    def response(self) -> str:
        """Text of the policy's last turn."""
        return next((said.text for said in reversed(self.transcript) if said.policy), "")


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of an episode."""

    reward: float
    success: bool | None = None  # None if the scorer gives no verdict
    timed_out: bool = False  # True if the answer exceeded its time limit, which is a valid result


class ScoringFailed(RuntimeError):
    """The scorer failed. Nothing is known about the answer, so a reward of 0 would be wrong."""


class Hung(ScoringFailed):
    """A plain function did not return in time. Its thread can't be ended, only its process."""


def score_of(value: Any, whose: str) -> Score:
    """Convert the value that a user's function returned: a number, (number, success), {"reward":
    ..., "success": ...} or a `Score`, as `rose.reward.values` reads them. Raises `ScoringFailed`
    for anything else, and for a reward that isn't finite or is too large. `whose` names the
    function."""
    late, success = False, None
    match value:
        case Score(reward=reward, success=success, timed_out=late):
            pass
        case {"reward": reward, **more}:
            success = more.get("success")
        case (reward, success):
            pass
        case _:
            reward = value
    try:
        found = values.reward(reward)
        return Score(
            reward=found,
            success=None if success is None else values.flag(success),
            timed_out=values.flag(late),
        )
    except ValueError as error:
        gave = str(error) if str(error).startswith("the reward") else f"a success, {error}"
        raise ScoringFailed(
            f"{whose} returned {values.shown(value)}: {gave}; a number, (number, success) or "
            '{"reward": number, "success": true or false} is needed'
        ) from None
