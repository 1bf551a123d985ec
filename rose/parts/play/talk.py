"""A conversation with the policy, in environments whose tasks are one question and one answer.

The user types, the policy answers, and both stay in the context until it is full. An empty line
plays a held-out task instead, which the environment judges.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Awaitable, Callable

from rose import protocol as p
from rose.agent import envs
from rose.agent.chat import ChatFormat
from rose.agent.guard import Guard
from rose.config import Config
from rose.parts.play import typed
from rose.parts.play.policy import Policy
from rose.parts.play.screen import Screen
from rose.parts.play.source import Task

HELP = (
    "Type a message, and the policy answers. An empty line plays held-out task {}; Ctrl-D leaves."
)


async def system_of(task: Task) -> list[dict[str, str]] | None:
    """Return the task's system messages, which precede the user's own. Return None if the task is
    not one question and one answer.

    Raises `EnvironmentFailure`.
    """
    env = task.env
    if envs.is_program(env) or env.max_turns > 1:
        return None
    made = envs.build(env)
    guard = Guard(made, "play", env.step_timeout_s, task.key)
    try:
        start = await guard.reset(task.seed)
    finally:
        await guard.close()
    if start.tools or made.requires_tool:
        return None
    return [message for message in start.messages if message["role"] == "system"]


class Talk:
    """A conversation with the policy. `screen` returns a new screen; `play` plays a held-out task
    by its number."""

    def __init__(
        self,
        task: Task,
        system: list[dict[str, str]],
        config: Config,
        chat: ChatFormat,
        policy: Policy,
        screen: Callable[[], Screen],
        play: Callable[[int], Awaitable[None]],
    ) -> None:
        self._task, self._system, self._config = task, system, config
        self._chat, self._policy, self._screen, self._play = chat, policy, screen, play
        self._sampling = p.Sampling(
            task.env.max_new_tokens, temperature=config.eval.of(task.domain)[1]
        )

    async def go(self) -> None:
        """Talk until the input ends. Without any input, play a held-out task."""
        numbers = itertools.count(self._task.number)
        number = next(numbers)
        screen = self._screen()
        if sys.stdin.isatty():
            screen.note(HELP.format(number))
        context: list[int] = []
        closed = True
        for turn in itertools.count():
            line = typed.ask("\nyou: ")
            if line is None:
                if turn == 0:
                    await self._play(number)
                return
            if not line.strip():
                await self._play(number)
                number, context, screen = next(numbers), [], self._screen()
                continue
            most = self._config.model.max_context
            if context:
                said = [("user", line)]
                context += self._chat.observations(said, closed, False, bool(self._system))
                if len(context) >= most:
                    screen.note(
                        f"The context is full (model.max_context={most} tokens); a new "
                        "conversation begins with this message."
                    )
                    context = []
            if not context:
                messages = [*self._system, {"role": "user", "content": line}]
                context = self._chat.start(messages, [])
            room = most - len(context)
            if room <= 0:
                screen.note(f"This message alone fills the context of {most} tokens.")
                context = []
                continue
            tokens = await self._answer(turn, context, room, screen)
            context += tokens
            closed = tokens[-1] in self._chat.eos_ids

    async def _answer(self, turn: int, context: list[int], room: int, screen: Screen) -> list[int]:
        """Return the tokens of the policy's answer, which the screen shows meanwhile."""
        most = min(self._sampling.max_new_tokens, room)
        sampling = p.Sampling(most, temperature=self._sampling.temperature)
        packed = p.pack_tokens(context)
        request = p.TurnRequest(f"talk.t{turn}", "talk", "talk", p.Phase.EVAL, packed, sampling)
        show = self._chat.decode
        result = await self._policy.turn(request, lambda tokens: screen.saying(show(tokens)))
        tokens = p.unpack_tokens(result.tokens).tolist()
        await screen.said(show(tokens), self._chat)
        return tokens
