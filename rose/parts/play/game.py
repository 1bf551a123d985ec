"""Play one held-out task. The player is the policy, a program that calls the policy, or the user.

The policy plays by the agent loop of a run (`rose.agent.loop`), in an environment whose answers the
screen shows. A program is run by an environment host, and this module takes the place of the host's
coordinator.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rose import protocol as p
from rose.agent import envs
from rose.agent.chat import ChatFormat
from rose.agent.envs.base import Action, Environment, Start, Step
from rose.agent.guard import EnvironmentFailure, Guard
from rose.agent.host import TrajectoryHost
from rose.agent.loop import REMINDER, run_trajectory
from rose.agent.scoring import Scoring
from rose.agent.tool_calls import BadCall
from rose.comm.tasks import Tasks
from rose.config import Config, Reward
from rose.observe.recorder import NullRecorder
from rose.parts.play import typed
from rose.parts.play.policy import Policy
from rose.parts.play.screen import Screen
from rose.parts.play.source import Task
from rose.parts.rewards import scorers
from rose.reward.episode import Episode

NAME = "play"  # name of the trajectory, in errors
# Seconds beyond env.step_timeout_s in which a program's host ends the tasks that it started.
CLOSE_S = 10.0

_games = itertools.count()


@dataclass(frozen=True)
class Outcome:
    success: bool
    reward: float
    turns: int
    limit: str = ""  # the limit that ended the game, "" if the environment ended it


class LocalScoring(Scoring):
    """Compute the rewards of episodes in this process. A run has reward ranks for this."""

    def __init__(self, settings: Reward) -> None:
        super().__init__(settings, (), lambda *_: None)
        self._scorer = scorers.build(settings.name, settings.args)

    async def score(self, episode: Episode) -> p.TrajectoryScored:
        try:
            found = await self._scorer.score(episode, self._settings.timeout_s)
        except Exception as error:  # a user's function may raise anything
            return p.TrajectoryScored(episode.trajectory, error=f"{type(error).__name__}: {error}")
        return p.TrajectoryScored(episode.trajectory, found.reward, found.success)


def scoring_of(config: Config) -> LocalScoring | None:
    """Return the scoring of episodes; None if the environment itself gives the rewards. Raises
    `ConfigError`."""
    return LocalScoring(config.reward) if config.reward.pools else None


class Watched:
    """An environment whose answers the screen shows."""

    def __init__(self, env: Environment, screen: Screen) -> None:
        self._env, self._screen = env, screen
        self.tools: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def reset(self, seed: int) -> Start:
        start = await self._env.reset(seed)
        self.tools = start.tools
        self._screen.opening(start)
        return start

    async def step(self, action: Action) -> Step:
        step = await self._env.step(action)
        self._screen.observed(step)
        return step


def watched(env: Environment, screen: Screen) -> Watched:
    """Return `env` as a `Watched`. Its class has the name of the environment's own, for errors."""
    return type(type(env).__name__, (Watched,), {})(env, screen)


async def by_policy(
    task: Task,
    config: Config,
    chat: ChatFormat,
    policy: Policy,
    screen: Screen,
    ready: Callable[[], Awaitable[None]],
) -> Outcome:
    """Play `task`. `ready` loads the policy; it is awaited before every turn, or once before a
    program starts. Raises `EnvironmentFailure`, and the errors of `ready` and of the engine."""
    begin = _start_message(task)
    if envs.is_program(task.env):
        await ready()
        trajectory = await _run_program(begin, task, config, chat, policy, screen)
        return _outcome(trajectory, task, config)

    env = watched(envs.build(task.env), screen)

    async def turn(request: p.TurnRequest) -> p.TurnResult:
        await ready()
        result = await policy.turn(request, lambda tokens: screen.saying(chat.decode(tokens)))
        text = chat.decode(p.unpack_tokens(result.tokens))
        await screen.said(text, chat)
        if reply := _reply_of_the_loop(text, env, chat):
            screen.refused(reply)
        return result

    trajectory = await run_trajectory(
        begin,
        env,
        chat,
        turn,
        task.env,
        task.key,
        config.model.max_context,
        p.Sampling(task.env.max_new_tokens, temperature=config.eval.of(task.domain)[1]),
        time.time,
        scoring_of(config),
    )
    return _outcome(trajectory, task, config)


def _reply_of_the_loop(text: str, env: Watched, chat: ChatFormat) -> str:
    """Return the agent loop's answer to a missing or unreadable call; "" for a readable one."""
    action = chat.parse(text, env.tools) if env.tools or env.requires_tool else None
    if isinstance(action, BadCall):
        return action.message
    missing = action is not None and action.call is None and env.requires_tool
    return REMINDER.format(chat.format.form) if missing else ""


def _start_message(task: Task) -> p.StartTrajectory:
    name = f"{NAME}-{next(_games)}"
    return p.StartTrajectory(name, name, p.Phase.EVAL, task.domain, task.seed, None)


def _outcome(made: p.Trajectory, task: Task, config: Config) -> Outcome:
    limit = ""
    if made.truncated:
        context = f"model.max_context={config.model.max_context} tokens are full"
        limit = _turns_used_up(task) if made.turns >= task.env.max_turns else context
    return Outcome(made.success, made.reward, made.turns, limit)


async def _run_program(
    begin: p.StartTrajectory,
    task: Task,
    config: Config,
    chat: ChatFormat,
    policy: Policy,
    screen: Screen,
) -> p.Trajectory:
    """Run the program in an environment host, and answer its turns by the policy."""
    tasks = Tasks()
    ended: asyncio.Future[p.Trajectory] = asyncio.get_running_loop().create_future()

    async def answer(request: p.TurnRequest) -> None:
        result = await policy.turn(request, lambda tokens: None)
        screen.call(
            request.turn.rpartition(".t")[2],
            chat.decode(p.unpack_tokens(request.tokens)),
            chat.decode(p.unpack_tokens(result.tokens)),
        )
        host.handle(result)

    def send(message: p.Message) -> None:
        match message:
            case p.TurnRequest():
                tasks.spawn(answer(message))
            case p.TrajectoryFinished(trajectory):
                ended.set_result(trajectory)
            case p.TrajectoryFailed():
                cause = message.error.removeprefix(f"trajectory {begin.id}: ")
                ended.set_exception(EnvironmentFailure(begin.id, cause))

    async def until_ended() -> None:
        await asyncio.wait({ended})

    host = TrajectoryHost(config, chat, send, tasks.spawn, NullRecorder(), scoring_of(config))
    host.handle(begin)
    try:
        await tasks.run_until(until_ended())
        return ended.result()
    finally:
        await tasks.close(task.env.step_timeout_s + CLOSE_S)
        await host.close()


async def by_user(task: Task, screen: Screen) -> Outcome | None:
    """Let the user play `task`. Return None if the input ends before the game does.

    The reward is the environment's own. A scorer (`reward=`) is not used, since it would need text
    of the policy. Raises `EnvironmentFailure`.
    """
    env = watched(envs.build(task.env), screen)
    guard = Guard(env, NAME, task.env.step_timeout_s, task.key)
    reward, success, done, turns = 0.0, False, False, 0
    try:
        start = await guard.reset(task.seed)
        screen.note(typed.help_of(start.tools, task.env.max_turns, env.requires_tool))
        while not done and turns < task.env.max_turns:
            screen.frame()
            line = typed.ask(f"turn {turns + 1}: ")
            if line is None:
                return None
            action = typed.action(line, start.tools)
            if isinstance(action, str):
                screen.note(action)
                continue
            turns += 1
            step = await guard.step(action)
            reward, success, done = reward + step.reward, success or step.success, step.done
        if not done and (last := await guard.end()) is not None:
            reward, success = reward + last.reward, success or last.success
    finally:
        await guard.close()
    return Outcome(success, reward, turns, "" if done else _turns_used_up(task))


def _turns_used_up(task: Task) -> str:
    return f"{task.key}.max_turns allows no more"
