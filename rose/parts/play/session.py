"""Decide which games `rose play` plays, who plays them, and in which order."""

from __future__ import annotations

import asyncio
import random
import secrets
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rose.agent import envs
from rose.agent.chat import ChatFormat
from rose.config import Config, ConfigError
from rose.parts.play import game, source, typed
from rose.parts.play.game import Outcome
from rose.parts.play.policy import FIRST, Policy
from rose.parts.play.screen import Screen, screen_for
from rose.parts.play.source import Source, Task
from rose.parts.play.talk import Talk, system_of

ANY_OF = 128  # held-out tasks to choose from if eval.episodes is 0
LOADING = "The policy is loaded, which takes a moment ..."


class Session:
    """Games that are played one after the other. `interactive`: a person sits at the terminal and
    can be asked. `screens` has all screens, which must release the terminal at the end."""

    def __init__(self, args: Namespace, console: Console, interactive: bool, scratch: Path) -> None:
        self._args, self._console, self._interactive = args, console, interactive
        self._source: Source = source.find(args.place, args.overrides)
        self._config: Config = self._source.config
        if args.temperature is not None:
            self._config = source.with_temperature(self._config, args.temperature)
        seed = secrets.randbits(31) if args.seed is None else args.seed
        self._policy = Policy(self._source, seed, scratch)
        self._loaded = False
        self.screens: list[Screen] = []

    async def run(self) -> None:
        """Play the games. Raises `ConfigError`, `EnvironmentFailure`, `EngineError` and
        `TransferError`."""
        args = self._args
        asked = "--before" if args.before else "--version" if args.version is not None else ""
        if asked and not self._source.is_run:
            raise ConfigError(
                f"{asked}: {args.place} is an exported model, which has one version; give the "
                "run's folder"
            )
        number = args.task
        if number is None:
            number = random.randrange(self._config.eval.episodes or ANY_OF)
        task = source.held_out(self._config, number, args.env)
        # In a thread, since some checks run an event loop of their own.
        await asyncio.to_thread(envs.check, task.env)
        if args.human:
            await self._by_user(task)
            return
        # Refuse a version that the run doesn't have, before anything starts.
        self._policy.choose(args.version)
        chat = ChatFormat.of(self._source.model, self._config.model)
        try:
            await self._by_policy(task, chat)
        finally:
            await self._policy.close()

    async def _by_user(self, task: Task) -> None:
        if envs.is_program(task.env):
            raise ConfigError(
                f"--human: {task.key}.name={task.env.name!r} runs a program that calls the policy, "
                "which a person can't stand in for; leave --human out"
            )
        self._heading(task.domain, _numbered(task), "you play")
        screen = self._new_screen(task, human=True)
        outcome = await game.by_user(task, screen)
        screen.ended(Text("You left the game") if outcome is None else verdict(outcome))

    async def _by_policy(self, task: Task, chat: ChatFormat) -> None:
        """Compare two versions, hold a conversation, or play tasks until the user has enough."""
        args = self._args
        if args.before:
            await self._compared(task, chat)
            return
        if args.task is None and (system := await system_of(task)) is not None:
            self._heading(task.domain, f"a conversation with the policy {self._policy.label}")
            await self._load(self._new_screen(task))

            async def play(number: int) -> None:
                await self._game(source.held_out(self._config, number, task.domain), chat)

            new_screen = lambda: self._new_screen(task)  # noqa: E731
            await Talk(task, system, self._config, chat, self._policy, new_screen, play).go()
            return
        while True:
            await self._game(task, chat)
            if not self._interactive or not _wants_more():
                return
            task = source.held_out(self._config, task.number + 1, args.env)

    async def _compared(self, task: Task, chat: ChatFormat) -> None:
        """Play one task with the first version, then with the version that the user chose."""
        self._policy.choose(FIRST)
        before = await self._game(task, chat)
        self._policy.choose(self._args.version)
        self._loaded = False
        self._console.print()
        after = await self._game(task, chat)
        self._console.print(
            Text(f"\nHeld-out task {task.number}: before training ", "bold")
            + _short(before)
            + Text(f"; {self._policy.label} ", "bold")
            + _short(after)
            + ".",
            soft_wrap=True,
        )

    async def _game(self, task: Task, chat: ChatFormat) -> Outcome:
        """Play one task by the policy, on a screen of its own."""
        self._heading(task.domain, _numbered(task), self._policy.label)
        screen = self._new_screen(task)

        async def ready() -> None:
            await self._load(screen)

        try:
            outcome = await game.by_policy(task, self._config, chat, self._policy, screen, ready)
            screen.ended(verdict(outcome))
        finally:
            screen.close()
        return outcome

    async def _load(self, screen: Screen) -> None:
        """Load the chosen version of the policy, at the first call only."""
        if self._loaded:
            return
        screen.waiting(LOADING)
        chosen = self._policy.label
        await self._policy.load()
        self._loaded = True
        if self._policy.label != chosen:
            screen.note(f"The trainer has removed that version: {self._policy.label} instead.")

    def _new_screen(self, task: Task, human: bool = False) -> Screen:
        made = screen_for(task.env, self._console, human)
        self.screens.append(made)
        return made

    def _heading(self, *words: str) -> None:
        of = f"{self._args.place}: {', '.join(words)}"
        self._console.print(Text(of, "bold"), soft_wrap=True)


def _numbered(task: Task) -> str:
    return f"held-out task {task.number}"


def verdict(outcome: Outcome) -> Text:
    """Return how a game ended, in one line."""
    how = Text("Success", "bold green") if outcome.success else Text("Failure", "bold red")
    turns = f"{outcome.turns} turn{'s' * (outcome.turns != 1)}"
    limit = f": {outcome.limit}" if outcome.limit else ""
    return how + Text(f" after {turns}, reward {outcome.reward:g}{limit}")


def _short(outcome: Outcome) -> Text:
    """Return how a game ended, without reward and limit, as a part of a sentence."""
    word, style = ("success", "bold green") if outcome.success else ("failure", "bold red")
    turns = f"{outcome.turns} turn{'s' * (outcome.turns != 1)}"
    return Text(word, style) + Text(f" after {turns}")


def _wants_more() -> bool:
    """Ask the user whether to play another task."""
    line = typed.ask("\nEnter plays the next task, q ends: ")
    return line is not None and not line.strip()
