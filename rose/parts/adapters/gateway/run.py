"""Run one trajectory of an agent's program and collect its reward and its tree of tokens.

If a program crashes, is idle for env.step_timeout_s, floods the gateway, or ends without a reward
or a call, `EnvironmentFailure` is raised. The trajectory is then replaced, as with any environment.
If a program crashes because its context or its calls are used up, the policy is the cause. Then the
trajectory is truncated, with the reward that the program reported, or 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rose import config, scratch
from rose.agent import returned
from rose.agent.chat import ChatFormat
from rose.agent.envs import _workers
from rose.agent.guard import EnvironmentFailure
from rose.agent.loop import RequestTurn
from rose.agent.scoring import Clock, Scoring, score, transcript
from rose.config import ConfigError
from rose.parts.adapters.envs.agent import Agent
from rose.parts.adapters.envs.verifiers import Verifiers
from rose.parts.adapters.gateway import program
from rose.parts.adapters.gateway.history import Message
from rose.parts.adapters.gateway.players import Playing
from rose.parts.adapters.gateway.program import Program
from rose.parts.adapters.gateway.server import Gateway, reward_of
from rose.parts.adapters.gateway.session import Session
from rose.protocol import Sampling, StartTrajectory, Trajectory
from rose.reward import values
from rose.reward.episode import Episode

# Most bytes of the file ROSE_REWARD. A reward is short, but an agent may add notes to it.
REWARD_BYTES = 2**16
FILES = ("reward.json", "log", "judge.log")  # files in a program's folder
SCRATCH = "rose-agent-"  # start of the names of programs' temporary folders
BEGIN_S = 30.0  # most seconds that a command without a call delays the next command
KEPT_BYTES = 2**16  # bytes of a failed program's output that are kept
POLL_S = 0.25  # seconds between two polls of a program


async def run_agent(
    start: StartTrajectory,
    agent: Agent,
    gateway: Gateway,
    chat: ChatFormat,
    request_turn: RequestTurn,
    limits: config.Env,
    key: str,
    max_context: int,
    sampling: Sampling,
    clock: Clock,
    scoring: Scoring | None = None,
) -> Trajectory:
    """Run one episode of a program, as `rose.agent.loop.run_trajectory` does for an environment.
    `key`: the configuration key of `limits`. Raises `EnvironmentFailure`; a cancellation is passed
    on. When this returns, all processes of the program have ended."""
    session = Session(start, chat, request_turn, limits, max_context, sampling)
    gateway.admit(session)
    started = clock()
    try:
        with _folder(start.id) as folder:
            run = _Run(start, agent, gateway, session, limits, key, chat.folder, folder)
            try:
                reward, success = await run.go(required=scoring is None)
                if not session.history.leaves():
                    raise _without_a_turn(session)
            except BaseException as error:  # keeps the failed trajectory, for people
                error.made = _trajectory(start, session, 0.0, False, {}, started, clock())
                error.output = program.printed(run.log, KEPT_BYTES)
                raise
            output = program.printed(run.log, KEPT_BYTES) if scoring is not None else ""
    finally:
        gateway.dismiss(session)
    made = _trajectory(start, session, reward, success, run.metrics, started, clock())
    if scoring is None:
        return made
    episode = Episode(
        trajectory=start.id,
        domain=start.domain,
        seed=start.env_seed,
        task=agent.task(start.env_seed),
        transcript=transcript(chat, made.tokens, made.mask),
        reward=reward,
        success=success,
        truncated=made.truncated,
        turns=made.turns,
    )
    try:
        reward, success, stats = await score(scoring, episode, clock)
    except BaseException as error:
        error.made, error.output = made, output
        raise
    return msgspec.structs.replace(
        made, reward=reward, success=success, stats=made.stats | stats, finished=clock()
    )


@contextlib.contextmanager
def _folder(trajectory: str) -> Iterator[Path]:
    """Context of a program's temporary folder. An OSError in it becomes an `EnvironmentFailure`:
    the disk is full, or the program has changed the folder."""
    try:
        with tempfile.TemporaryDirectory(
            prefix=scratch.prefix(SCRATCH), ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
    except OSError as error:
        failure = EnvironmentFailure(trajectory, f"the program's temporary folder: {error}")
        failure.made = getattr(error, "made", None)
        failure.output = getattr(error, "output", "")
        raise failure from error


def _without_a_turn(session: Session) -> EnvironmentFailure:
    """Return the failure of a program that received no answer of the model."""
    cause = "the program ended without a call of the model"
    if session.too_long and not session.turns:
        cause = f"the agent's first call was refused: {session.too_long}"
    return EnvironmentFailure(session.start.id, cause)


def remove_stale() -> None:
    """Remove temporary folders of this user's killed hosts."""
    scratch.remove_stale(SCRATCH)


class _Run:
    """A run of an agent's program."""

    def __init__(
        self,
        start: StartTrajectory,
        agent: Agent,
        gateway: Gateway,
        session: Session,
        limits: config.Env,
        key: str,
        tokenizer: str,
        folder: Path,
    ) -> None:
        self.start, self.agent, self.session, self.limits = start, agent, session, limits
        self.gateway, url = gateway, gateway.url
        self.key, self.tokenizer, self.folder = key, tokenizer, folder
        self.metrics: dict[str, float] = {}  # name -> value, from the environment itself
        self.task = folder / "task.json"
        self.reward, self.log, self.judged = (folder / name for name in FILES)
        own = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",  # LiteLLM's name for OPENAI_BASE_URL
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            program.GATEWAY: url,
            "ROSE_TASK": str(self.task),
            "ROSE_SEED": str(start.env_seed),
            "ROSE_REWARD": str(self.reward),
            program.MARK: start.id,
        }
        self.variables = program.environment(own, agent.environment)
        self._write(self.task, agent.task(start.env_seed) | {"phase": start.phase.value})

    async def go(self, required: bool) -> tuple[float, bool]:
        """Run the program, then the reward function if there is one. Return (reward, success);
        without a reward, (0, False) unless it is `required`."""
        agent = self.agent
        try:
            agent.verify()
        except ConfigError as error:
            raise self._failure(str(error)) from None
        if isinstance(agent, Verifiers):
            begin, name = self._start_episode(agent), "id: the episode"
        elif agent.function is None:
            begin, name = self._start_command(agent.command), "command"
        else:
            begin, name = self._start_function(agent.function, self.variables, self.log), "function"
        await self._execute(begin, name, agents=True)
        required = required and not self._crash_is_truncation
        if agent.reward is None:
            return self._read_reward(required)
        conversations = [_shown(leaf.conversation) for leaf in self.session.history.leaves()]
        transcript = self.folder / "transcript.json"
        self._write(transcript, conversations)
        self.reward.unlink(missing_ok=True)  # replaced by the function's reward
        self.session.reward = None
        # The reward function gets no key, because it must not call the policy.
        without = {k: v for k, v in self.variables.items() if v != self.session.key}
        reward_program = self._start_function(agent.reward, without, self.judged, str(transcript))
        await self._execute(reward_program, "reward")
        return self._read_reward(required)

    @property
    def _crash_is_truncation(self) -> bool:
        """True if a crash of the program counts as truncation, because its context or its calls are
        used up. An episode of `Verifiers` doesn't crash then, so its errors come from scoring."""
        return bool(self.session.limit) and not isinstance(self.agent, Verifiers)

    async def _start_command(self, argv: list[str]) -> Program:
        """Start the agent's command with a permit of `gateway.beginning`. The permit is held until
        the command's first call, for `BEGIN_S` at most. Until then commands are busy with imports,
        and without permits a batch of them would delay all first calls. Raises OSError."""
        places = self.gateway.beginning
        with _workers.QUEUED.get()():
            await places.acquire()
        held = [places]

        def release(*_: object) -> None:
            if held:
                held.pop().release()

        try:
            running = await Program.start(self.start.id, argv, self.variables, self.log)
        except BaseException:
            release()
            raise
        running.code.add_done_callback(release)
        self.session.called.add_done_callback(release)
        asyncio.get_running_loop().call_later(BEGIN_S, release)
        return running

    def _start_function(
        self, function: str, variables: dict[str, str], log: Path, *arguments: str
    ) -> Awaitable[Program]:
        given, forks = self.agent.environment, self.gateway.forks
        return forks.start(self.start.id, function, arguments, given, variables, log)

    def _start_episode(self, verifiers: Verifiers) -> Awaitable[Playing]:
        def take(answer: dict[str, Any]) -> None:
            """Take an episode's reward and metrics. Raises `ValueError`."""
            reward, _ = reward_of(answer["reward"], "the episode")
            self.session.reward = reward, reward >= verifiers.success_at
            self.metrics = returned.stats(
                {f"verifiers/{k}": v for k, v in answer["metrics"].items()}
            )

        order = {
            "name": self.start.id,
            "seed": self.start.env_seed,
            "url": self.gateway.url,
            "key": self.session.key,
            "tokenizer": self.tokenizer,
        }
        return self.gateway.players.start(verifiers, order, take)

    async def _execute(
        self, begin: Awaitable[Program | Playing], name: str, agents: bool = False
    ) -> None:
        """Run the program of env.args.`name` to its end. Raises `EnvironmentFailure` if it fails.
        The agent's own program (`agents`) may crash if its context or its calls are used up."""
        what = f"{self.key}.args.{name}"
        try:
            running = await begin
        except OSError as error:
            raise self._failure(f"{what} can't be started: {error}") from error
        try:
            code = await self._watch(running)
        except OSError as error:  # the end of the process that forked it
            raise self._failure(f"{what}: {error}", running) from error
        finally:
            await asyncio.shield(running.end())
        if code and not (agents and self._crash_is_truncation):
            raise self._failure(f"{what} ended with code {code}", running)

    async def _watch(self, running: Program | Playing) -> int:
        """Wait for the program's end and return its exit code. Raises `EnvironmentFailure` if it is
        idle for too long, or if its session fails."""
        began, limit = time.monotonic(), self.limits.step_timeout_s
        ends = {running.code, self.session.failed}
        while True:
            await asyncio.wait(ends, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            running.cut_log()
            if running.code.done():
                return running.code.result()
            if self.session.failed.done():
                raise self._failure(self.session.failed.result(), running)
            if min(self.session.idle_s, time.monotonic() - began) > limit:
                raise self._failure(
                    f"the program neither called nor ended within {self.key}.step_timeout_s="
                    f"{limit:g} s",
                    running,
                )

    def _read_reward(self, required: bool) -> tuple[float, bool]:
        if self.session.reward is not None:
            return self.session.reward
        try:
            return reward_of(_json(self.reward), "the agent")
        except FileNotFoundError:
            if not required:
                return 0.0, False
            raise self._failure(
                "the program ended without a reward: it writes one into the file ROSE_REWARD, "
                f"posts it to /reward, or {self.key}.args.reward names a function"
            ) from None
        except (ValueError, RecursionError, OSError) as error:
            raise self._failure(f"the file ROSE_REWARD: {error}") from None

    def _failure(self, cause: str, running: Program | Playing | None = None) -> EnvironmentFailure:
        output = running.last_words() if running else ""
        return EnvironmentFailure(self.start.id, f"{cause}; it said: {output}" if output else cause)

    def _write(self, path: Path, value: Any) -> None:
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            json.dump(value, file)


def _json(path: Path) -> Any:
    """Return the JSON in a file. The program may have written anything, or left a pipe, which must
    not block the read. Raises OSError, `RecursionError`, `ValueError`."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is no file")
        if about.st_size > REWARD_BYTES:
            raise ValueError(
                f"it has {about.st_size:,} bytes; a reward has {REWARD_BYTES:,} at most"
            )
        data = os.read(file, REWARD_BYTES)
    finally:
        os.close(file)
    try:
        return json.loads(data)
    except ValueError:
        raise ValueError(
            f"it holds {values.shown(data)}, which is no JSON; a number is needed, or "
            '{"reward": number, "success": true or false}'
        ) from None


def _shown(conversation: tuple[Message, ...]) -> list[dict[str, Any]]:
    """Return the conversation in the form that reward functions get."""
    return [
        {
            "role": message.role,
            "content": message.text,
            "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in message.calls],
        }
        for message in conversation
    ]


def _trajectory(
    start: StartTrajectory,
    session: Session,
    reward: float,
    success: bool,
    metrics: dict[str, float],
    started: float,
    finished: float,
) -> Trajectory | None:
    """Return the session's trajectory; None if it has no answer of the model."""
    branches = session.history.branches()
    if not branches:
        return None
    first, *others = branches
    ends = (leaf.limit for leaf in session.history.leaves() if leaf.limit)
    limit = session.limit or next(ends, "")
    return Trajectory(
        id=start.id,
        group=start.group,
        phase=start.phase,
        tokens=first.tokens,
        mask=first.mask,
        logprobs=first.logprobs,
        versions=first.versions,
        reward=reward,
        success=success,
        turns=session.turns,
        response_tokens=sum(sum(branch.mask) for branch in branches),
        truncated=bool(limit),
        limit=limit,
        invalid_calls=session.invalid_calls,
        stats={
            "migrations": float(session.migrations),
            "branches": float(len(branches)),
            "cut_turns": float(session.cut),
        }
        | metrics,
        started=started,
        finished=finished,
        domain=start.domain,
        branches=others,
        turn_tokens=first.turn_tokens,
    )
