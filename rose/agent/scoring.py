"""Requests episodes' scores from the reward ranks, on behalf of an environment host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec

from rose import protocol as p
from rose.agent.chat import ChatFormat
from rose.agent.guard import ScoringFailure
from rose.config import Reward
from rose.reward.episode import Episode, Said

Clock = Callable[[], float]


def transcript(chat: ChatFormat, tokens: bytes, mask: bytes) -> list[Said]:
    """Decode tokens, int32 (T,), to one text per run of equal `mask`, uint8 (T,), 1 = policy."""
    ids = p.unpack_tokens(tokens)
    parts, at = [], 0
    for policy, run in groupby(mask):
        end = at + sum(1 for _ in run)
        parts.append(Said(bool(policy), chat.decode(ids[at:end])))
        at = end
    return parts


class Scoring:
    """Requests scores from `ranks`, the reward ranks. All answers to a prompt go to the same rank.
    `send(rank, message)` sends a message to a rank."""

    def __init__(
        self, settings: Reward, ranks: Sequence[int], send: Callable[[int, p.Message], None]
    ) -> None:
        self._settings, self._ranks, self._send = settings, ranks, send
        self._waiting: dict[str, asyncio.Future[p.TrajectoryScored]] = {}

    async def score(self, episode: Episode) -> p.TrajectoryScored:
        """Return the score, or the failure in `error`. Cancelling this cancels the request."""
        prompt = f"{episode.domain}/{p.seed_of(episode.prompt):08x}"
        rank = self._ranks[p.seed_of(prompt) % len(self._ranks)]
        try:
            asked = p.ScoreTrajectory(episode.trajectory, prompt, msgspec.json.encode(episode))
        except (TypeError, ValueError, RecursionError) as error:
            return p.TrajectoryScored(
                episode.trajectory,
                error=f"what {episode.domain} says of its task (Start.task) is not plain JSON: "
                f"{error}",
            )
        future = asyncio.get_running_loop().create_future()
        self._waiting[episode.trajectory] = future
        self._send(rank, asked)
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await future
        except TimeoutError:
            return p.TrajectoryScored(
                episode.trajectory,
                error=f"rank {rank} gave no score within reward.deadline_s="
                f"{self._settings.deadline_s:g} s",
            )
        finally:
            del self._waiting[episode.trajectory]
            if not future.done() or future.cancelled():
                self._send(rank, p.CancelScore(episode.trajectory))

    def handle(self, scored: p.TrajectoryScored) -> None:
        """Pass a received score to the call of `score` that waits for it."""
        future = self._waiting.get(scored.id)
        if future is not None and not future.done():
            future.set_result(scored)

    def turn_rewards(self, own: list[float], reward: float) -> list[float]:
        """Distribute an episode's score `reward` over its turns. Each turn but the last gets its
        reward by the environment (`own`) times environment_weight; the last gets the remainder. If
        the weight is 0, return [], because then the score says nothing about single turns."""
        weight = self._settings.environment_weight
        if not weight:
            return []
        *earlier, _ = (weight * each for each in own)
        return [*earlier, reward - sum(earlier)]

    def success(self, scored: p.TrajectoryScored) -> bool:
        """Return the scorer's verdict; without it, True if the reward is at least success_from."""
        if scored.success is not None:
            return scored.success
        return scored.reward >= self._settings.success_from


async def score(
    scoring: Scoring, episode: Episode, clock: Clock
) -> tuple[float, bool, dict[str, float]]:
    """Return (reward, success, statistics) from the reward ranks. Raises `ScoringFailure`."""
    asked = clock()
    scored = await scoring.score(episode)
    if scored.error:
        raise ScoringFailure(episode.trajectory, f"its reward: {scored.error}")
    stats = {
        "reward_wait_s": clock() - asked,
        "reward_queue_s": scored.queue_s,
        "reward_score_s": scored.score_s,
        "reward_timed_out": float(scored.timed_out),
        "reward_by_job": float(scored.by_job),
    }
    return scored.reward, scoring.success(scored), stats
