"""What a scorer sees of an episode, and what it answers."""

from __future__ import annotations

from typing import Any

import msgspec

from rose.reward import values


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
    ...} or a `Score`, as `rose.reward.values` reads them. Raises `ScoringFailed` for anything
    else, and for what is not finite or too large; `whose` names the function."""
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
