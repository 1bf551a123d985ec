"""The agent loop of one trajectory: request a turn, act on the environment, observe, repeat.

The loop owns the tokens and the environment; its caller provides `request_turn`. Tokens are
appended exactly as generated, never re-tokenised. Every call of the environment has a deadline.
Failed trajectories are replaced by the coordinator, not here. An environment must not block the
event loop; it should use `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from rose import config
from rose.agent import tool_calls
from rose.agent.chat import CannotExtend, ChatFormat, Observer
from rose.agent.envs.base import Action, Environment, Start, Step
from rose.agent.forks import Fork, Forks
from rose.agent.guard import EnvironmentFailure, Guard, TaskFailure
from rose.agent.scoring import Clock, Scoring, score, transcript
from rose.agent.snapshots import EpisodeSnapshots, Snapshots
from rose.agent.state import EpisodeState
from rose.protocol import (
    FinishReason,
    Sampling,
    StartTrajectory,
    Trajectory,
    TurnRequest,
    TurnResult,
    seed_of,
    unpack_tokens,
)
from rose.reward.episode import Episode

TOKEN_BYTES = 4  # bytes of an int32 token, a float32 log-probability and an int32 policy version
REMINDER = "Call a tool: write {}"

RequestTurn = Callable[[TurnRequest], Awaitable[TurnResult]]


async def run_trajectory(
    start: StartTrajectory,
    env: Environment,
    chat: ChatFormat,
    request_turn: RequestTurn,
    limits: config.Env,
    key: str,
    max_context: int,
    sampling: Sampling,
    clock: Clock,
    scoring: Scoring | None = None,
    snapshots: Snapshots | None = None,
    forks: Forks | None = None,
    fork: asyncio.Future[Fork | None] | None = None,
) -> Trajectory:
    """Run one episode on a fresh `env`, and close `env` in any case. The reward is the score by
    `scoring`, or without it the environment's. The episode begins from the first of these that
    exists: its newest usable snapshot, the parent's state that `fork` resolves to, the prompt. If
    `env` has `checkpoint`, it writes snapshots. Other trajectories may fork off it through `forks`.

    Each turn gets a copy of `sampling` with the turn's seed and its own max_new_tokens:
    the smaller of limits.max_new_tokens and the tokens left of `max_context` (prompt and answers).
    `clock` returns wall-clock seconds. `key` is the key of `limits` in the configuration, which
    failures name. Raises `EnvironmentFailure`; errors of `request_turn` and cancellation propagate.
    """
    guard = Guard(env, start.id, limits.step_timeout_s, key)
    taking = EpisodeSnapshots(snapshots, start, env, guard)
    rest = (limits, max_context, sampling, guard, scoring, taking, forks)
    episode = _Episode(start, env, chat, request_turn, *rest)
    try:
        trajectory = await episode.run(clock, fork)
        await taking.close()
    except BaseException as error:
        if episode.state.tokens:
            error.made = episode.made(0.0, clock(), {})
        try:
            await taking.close()
            await guard.close()
        except EnvironmentFailure as also:  # a note to the first error, which is raised
            error.add_note(str(also))
        raise
    try:
        await guard.close()
    except EnvironmentFailure as failure:
        failure.made = trajectory
        raise
    return trajectory


def turn_seed(sampling_seed: int | None, turn: str) -> int | None:
    """Return a turn's sampling seed, 31 bits, the same in every run; None without sampling_seed."""
    return None if sampling_seed is None else seed_of(sampling_seed, turn)


@dataclass(eq=False)
class _Episode:
    """A trajectory while it runs."""

    start: StartTrajectory
    env: Environment
    chat: ChatFormat
    request_turn: RequestTurn
    limits: config.Env
    max_context: int
    sampling: Sampling
    guard: Guard
    scoring: Scoring | None
    snapshots: EpisodeSnapshots
    forks: Forks | None
    state: EpisodeState = field(default_factory=EpisodeState)
    truncated: bool = False
    turn_cut: bool = False  # True: a token limit ended the last turn
    limit: str = ""  # value of `Trajectory.limit`
    rewards_turns: bool = False
    stats: dict[str, float] = field(default_factory=dict)
    played: list[tuple[Action, Step]] = field(default_factory=list)  # filled if `forks` is given

    @property
    def room(self) -> int:
        """Tokens left in the context."""
        return self.max_context - len(self.state.mask)

    async def run(self, clock: Clock, fork: asyncio.Future[Fork | None] | None) -> Trajectory:
        if (resumed := await self.snapshots.resume(self._restore)) is None:
            first, started = await self._begin_or_fork(clock, fork)
        else:
            first, started = resumed
            if fork is not None:
                fork.cancel()
        self.rewards_turns = self.guard.flag("rewards_turns")
        if self.forks is not None:
            self.forks.passed(self.start.id, self.state.turns)
        done = False
        while not done and not self.truncated:
            if self.forks is not None and self.forks.wanted(self.start.id, self.state.turns):
                self.forks.give(self.start.id, self.state.turns, await self._fork(first))
            text, closed = await self._turn()
            await self.snapshots.captured()
            began = time.monotonic()
            steps, observed = await self._act(text, first.tools)
            self.state.commands_s += time.monotonic() - began
            invalid = any(step.invalid for step in steps)
            by_user = observed[0][0] == "user" and not invalid
            self.state.outcome = "" if by_user else "failed" if invalid else "ok"
            self.state.turn_rewards.append(sum(step.reward for step in steps))
            for step in steps:
                self.state.reward += step.reward
                self.state.success = self.state.success or step.success
                self.state.invalid_calls += step.invalid
                done = done or step.done
            if not done:
                await self._prepare_next(observed, closed, first)
            if not done and not self.truncated:
                self.snapshots.take(first, started, self.state)
        if not done and (last := await self.guard.end()) is not None:
            self.state.reward += last.reward
            self.state.turn_rewards[-1] += last.reward
            self.state.success = self.state.success or last.success
        if self.turn_cut:
            self.truncated, self.limit = True, "answer" if self.room > 0 else "context"
        if self.scoring is not None:
            await self._score(self.scoring, first.task, clock)
        return self.made(started, clock(), self.guard.stats())

    async def _begin(self) -> Start:
        """Reset the environment, and append the tokens of the first prompt."""
        first = await self.guard.reset(self.start.env_seed)
        self.state.has_system = any(m["role"] in ("system", "developer") for m in first.messages)
        size = sum(len(message.get("content") or "") for message in first.messages)
        if (least := self.chat.least_tokens(size)) >= self.max_context:
            raise self._prompt_too_long(f"at least {least}")
        size += len(json.dumps(first.tools))  # excluded above, as the template may omit tools
        prompt = await self._tokens_of("reset", size, self.chat.start, first.messages, first.tools)
        if len(prompt) >= self.max_context:
            raise self._prompt_too_long(str(len(prompt)))
        self.state.observe(prompt)
        return first

    def _prompt_too_long(self, tokens: str) -> TaskFailure:
        return TaskFailure(
            self.start.id,
            f"the first prompt has {tokens} tokens, which leaves no room in model.max_context="
            f"{self.max_context}; raise it or make {self.guard.key}.args smaller",
        )

    async def _tokens_of(
        self, method: str, size: int, write: Callable[..., list[int]], *given: Any
    ) -> list[int]:
        """Return `write(*given)`, the tokens of `size` characters that the environment's `method`
        returned. Raises `EnvironmentFailure` if the template refuses them: the environment is at
        fault, because the template was checked with other messages."""
        try:
            return await self.chat.in_thread(size, write, *given)
        except CannotExtend as error:
            raise EnvironmentFailure(
                self.start.id,
                f"{type(self.env).__name__}.{method} gave what can't be written: {error}",
            ) from error

    async def _begin_or_fork(
        self, clock: Clock, fork: asyncio.Future[Fork | None] | None
    ) -> tuple[Start, float]:
        """Begin from the state of another trajectory, if `fork` resolves to one, else from the
        prompt. Return the environment's start, and the wall-clock time at which the episode began.
        """
        found = await fork if fork is not None else None
        started = clock()
        if found is None:
            return await self._begin(), started
        # Written first, because the other trajectory plays on and can't give this state again.
        await self.snapshots.write(found, started)
        return await self._restore(found), started

    async def _fork(self, first: Start) -> Fork:
        """Return the state of this episode before its next turn."""
        await self.snapshots.captured()
        state = self.state.copy()
        state.inherited.append((self.start.id, state.own_turns()[0]))
        state.migrations = 0
        return Fork(first, tuple(self.played), await self.guard.checkpoint(), state)

    async def _restore(self, fork: Fork) -> Start:
        """Take over the state of `fork`. The environment resumes, or repeats the fork's actions."""
        if fork.saved is not None:
            await self.guard.resume(fork.saved)
        else:
            first = await self.guard.reset(self.start.env_seed)
            self._check_repeated(
                "reset", (fork.first.messages, fork.first.tools), (first.messages, first.tools)
            )
            for number, (action, step) in enumerate(fork.played):
                self._check_repeated(f"step {number}", step, await self.guard.step(action))
        self.played = list(fork.played)
        self.state = fork.state.copy()
        return fork.first

    def _check_repeated(self, what: str, recorded: Any, got: Any) -> None:
        """Raise `EnvironmentFailure` if a repeated call returned another result than recorded."""
        if got != recorded:
            raise EnvironmentFailure(
                self.start.id,
                f"{type(self.env).__name__} is not determined by its seed and its actions, or has "
                f"no checkpoint and resume: {what}, repeated to fork off {self.start.follows}, "
                f"gave {got!r:.200}, not {recorded!r:.200}; rollout/branch needs one or the other",
            )

    async def _score(self, scoring: Scoring, task: dict[str, Any], clock: Clock) -> None:
        """Request the episode's score and take it as the reward. Raises `ScoringFailure`."""
        episode = Episode(
            trajectory=self.start.id,
            domain=self.start.domain,
            seed=self.start.env_seed,
            task=task,
            transcript=transcript(self.chat, self.state.tokens, self.state.mask),
            reward=self.state.reward,
            success=self.state.success,
            truncated=self.truncated,
            turns=self.state.turns,
        )
        self.state.reward, self.state.success, self.stats = await score(scoring, episode, clock)
        self.state.turn_rewards = scoring.turn_rewards(self.state.turn_rewards, self.state.reward)

    async def _turn(self) -> tuple[str, bool]:
        """Request one turn and append its tokens. Return its text, and True if it ends with an
        end-of-turn token."""
        turn = f"{self.start.id}.t{self.state.turns}"
        sampling = msgspec.structs.replace(
            self.sampling,
            seed=turn_seed(self.start.sampling_seed, turn),
            max_new_tokens=min(self.limits.max_new_tokens, self.room),
        )
        result = await self.request_turn(
            TurnRequest(
                turn=turn,
                trajectory=self.start.id,
                group=self.start.group,
                phase=self.start.phase,
                tokens=bytes(self.state.tokens),
                sampling=sampling,
                domain=self.start.domain,
                outcome=self.state.outcome,
                routed=self.state.routed,
            )
        )
        tokens = checked(result, turn, sampling.max_new_tokens)
        self.state.append(result, len(tokens))
        closed = int(tokens[-1]) in self.chat.eos_ids
        self.turn_cut = is_cut(result.finish, closed)
        return self.chat.decode(tokens), closed

    async def _act(
        self, text: str, tools: list[dict[str, Any]]
    ) -> tuple[list[Step], list[tuple[Observer, str]]]:
        """Act on a turn's text. Return the environment's steps and (role, observation) pairs. For a
        malformed or missing call the loop creates both. Without tools, calls aren't parsed."""
        requires_tool = self.guard.flag("requires_tool")
        action = self.chat.parse(text, tools) if tools or requires_tool else Action(text)
        if isinstance(action, tool_calls.BadCall):
            role = "tool" if requires_tool else "user"
            return [Step(observation=action.message, invalid=True)], [(role, action.message)]
        if action.call is None and requires_tool:
            reminder = REMINDER.format(self.chat.format.form)
            return [Step(observation=reminder, invalid=True)], [("user", reminder)]
        action = replace(action, truncated=self.turn_cut, said=self.chat.said(text))
        if len(action.calls) > 1 and self.guard.flag("several_calls"):
            return await self._act_at_once(action)
        role = "user" if action.call is None else "tool"
        steps: list[Step] = []
        for call in action.calls or (None,):
            one = replace(action, call=call, calls=(call,) if call else ())
            steps.append(await self._step(one))
            if steps[-1].done:
                break
        return steps, [(role, step.observation) for step in steps]

    async def _step(self, action: Action) -> Step:
        """Pass an action to the environment, and record it for forks."""
        step = await self.guard.step(action)
        if self.forks is not None:
            self.played.append((action, step))
        return step

    async def _act_at_once(self, action: Action) -> tuple[list[Step], list[tuple[Observer, str]]]:
        """Pass all calls of a turn to the environment in one step."""
        step = await self._step(action)
        if not step.done and len(step.observations) != len(action.calls):
            raise EnvironmentFailure(
                self.start.id,
                f"{type(self.env).__name__}.step got {len(action.calls)} calls and gave "
                f"{len(step.observations)} observations; one for each is needed",
            )
        results = step.observations or (step.observation,)
        return [step], [("tool", result) for result in results]

    async def _prepare_next(
        self, observed: list[tuple[Observer, str]], closed: bool, first: Start
    ) -> None:
        """Append the observations if another turn can follow. Otherwise set `truncated`."""
        size = sum(len(text) for _, text in observed)
        last = self.state.turns >= self.limits.max_turns
        ends = last or self.chat.least_tokens(size) >= self.room
        if not ends:
            given = observed, closed, bool(first.tools), self.state.has_system
            tokens = await self._tokens_of("step", size, self.chat.observations, *given)
            ends = len(tokens) >= self.room
        if ends:
            self.truncated, self.limit = True, "turns" if last else "context"
        else:
            self.state.observe(tokens)

    def made(self, started: float, finished: float, stats: dict[str, float]) -> Trajectory:
        """Return the trajectory so far. `stats`: the environment's own statistics."""
        return Trajectory(
            id=self.start.id,
            group=self.start.group,
            phase=self.start.phase,
            tokens=bytes(self.state.tokens),
            mask=bytes(self.state.mask),
            logprobs=bytes(self.state.logprobs),
            versions=bytes(self.state.versions),
            reward=self.state.reward,
            success=self.state.success,
            turns=self.state.turns,
            response_tokens=sum(self.state.mask),
            truncated=self.truncated,
            limit=self.limit,
            invalid_calls=self.state.invalid_calls,
            stats=stats | {"migrations": float(self.state.migrations)} | self.stats,
            started=started,
            finished=finished,
            domain=self.start.domain,
            turn_tokens=self.state.turn_tokens,
            turn_rewards=self.state.turn_rewards if self.rewards_turns else [],
            inherited=self.state.inherited,
            experts=bytes(self.state.experts),
        )


def is_cut(finish: FinishReason, closed: bool) -> bool:
    """True if a token limit ended the turn. `closed`: it ends with an end-of-turn token, which may
    be the last token that the limit allows."""
    return finish is FinishReason.LENGTH and not closed


def checked(result: TurnResult, turn: str, most: int):
    """Check that a result fits its request, and return its tokens, int32 (n,). Raises `ValueError`
    if it doesn't, which is a bug of the sender."""
    tokens = unpack_tokens(result.tokens)
    lengths = {len(result.tokens), len(result.logprobs), len(result.versions)}
    if (
        result.turn != turn
        or result.finish is FinishReason.ABORT
        or lengths != {TOKEN_BYTES * len(tokens)}
        or not 1 <= len(tokens) <= most
    ):
        raise ValueError(
            f"turn {turn}: got turn {result.turn}, finish {result.finish.value}, {len(tokens)} "
            f"tokens of {most} at most, {len(result.logprobs)} B of logprobs, "
            f"{len(result.versions)} of versions"
        )
    return tokens
