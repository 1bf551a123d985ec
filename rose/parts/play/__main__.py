"""Watch the trained policy play a held-out task, play it yourself, or talk with the policy.

    rose play outputs/NAME                     the newest version plays a held-out task
    rose play outputs/NAME --before            the first version, then the newest, on one task
    rose play outputs/NAME --human             you play
    rose play outputs/NAME --task 17 --version 40 --temperature 0
    rose play my-model env=frozen_lake         a model that rose export wrote, in any environment

Environments of one question and one answer (env=prompts) are a conversation: you type, the policy
answers. Programs (env=agent, env=verifiers) run, and each of their calls is shown. The command can
be used while the run goes on, and doesn't disturb it. Without a terminal it prints plain text.

    0 played   1 the engine or the environment failed   2 bad arguments   130 Ctrl-C
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rose.agent.guard import EnvironmentFailure, Interrupted
from rose.config import ConfigError
from rose.observe.terminal import echo

TAIL_LINES = 15  # lines of the engine's log below its error


def main(arguments: list[str]) -> int:
    """Play as the command line says. Return the exit code."""
    args = _parsed(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="rose-play-"))
    try:
        with _quiet(scratch / "log") as complaints, _signals_raise():
            return _run(args, scratch, complaints)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(args: argparse.Namespace, scratch: Path, complaints: Console) -> int:
    """Play. Return the exit code, also after a bad configuration or a signal."""
    try:
        return asyncio.run(_play(args, scratch, complaints))
    except ConfigError as error:
        echo(complaints, str(error), label="[red]rose play:[/]")
        return 2
    except Interrupted as interrupt:
        print()
        return 128 + interrupt.args[0]


async def _play(args: argparse.Namespace, scratch: Path, complaints: Console) -> int:
    """Play. Return the exit code, also after a failure of the engine or the environment."""
    from rose.engine.start import EngineError
    from rose.parts.play.session import Session
    from rose.transfer.errors import TransferError

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session = Session(args, Console(), interactive, scratch)
    try:
        await session.run()
    except (EngineError, TransferError, EnvironmentFailure) as error:
        _close(session)
        echo(complaints, str(error), label="[red]rose play:[/]")
        if isinstance(error, EngineError):
            log = (scratch / "log").read_text(errors="replace", encoding="utf-8")
            for line in log.splitlines()[-TAIL_LINES:]:
                echo(complaints, f"  {line}", style="dim")
        return 1
    finally:
        _close(session)
    return 0


def _close(session) -> None:
    """Release the terminal, so that later output appears below the game."""
    for screen in session.screens:
        screen.close()


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rose play", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("place", metavar="RUN", type=Path, help="a run's folder, or an exported model's")
    add(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="of an exported model: the environment, as for rose train",
    )
    add("--task", metavar="N", type=int, help="held-out task N, from 0; default: a random one")
    add("--env", metavar="NAME", help="one environment of a mixture or of eval.sets")
    add("--before", action="store_true", help="play with the first version, too, and compare")
    add("--human", action="store_true", help="play it yourself; needs no engine")
    add("--version", metavar="N", type=int, help="after N training steps; default: the newest")
    add("--temperature", metavar="T", type=float, help="default: that of the run's evaluations")
    add("--seed", metavar="N", type=int, help="of the engine's random numbers; default: random")
    args = parser.parse_intermixed_args(arguments)
    for each in args.overrides:
        if "=" not in each:
            parser.error(f"{each}: no KEY=VALUE")
    for name in ("task", "version", "seed"):
        if (given := getattr(args, name)) is not None and given < 0:
            parser.error(f"--{name} {given}: must not be negative")
    if args.temperature is not None and not 0 <= args.temperature <= 2:
        parser.error(f"--temperature {args.temperature:g}: must be from 0 to 2")
    for name in ("before", "version", "temperature", "seed"):
        given = getattr(args, name)
        if args.human and given is not None and given is not False:
            parser.error(f"--human --{name}: with --human no policy plays")
    return args


@contextmanager
def _quiet(log: Path) -> Iterator[Console]:
    """Send standard error to the file `log`, since vLLM and its processes print a lot there. Yield
    a console for errors that the user shall see."""
    before = os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    try:
        with os.fdopen(
            before, "w", errors="replace", closefd=False, encoding="utf-8"
        ) as complaints:
            yield Console(file=complaints, stderr=True)
    finally:
        os.dup2(before, 2)
        os.close(before)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise `Interrupted` at SIGINT, SIGTERM and SIGHUP, also while a person types, so that the
    engine and the environment end in order."""

    def interrupt(number: int, _) -> None:
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):
        if stream is not None:
            stream.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
