"""Shared by scripts: options, a run's configuration, processes that answer in JSON. Not a command."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rose import config as cfg
from rose import front
from rose import protocol as p
from rose.launch import exclusions
from rose.parts.simulator import config as simulation
from rose.places import REPOSITORY, python_path
from rose.processes import die_with_parent

ANSWER_S, END_S = 900.0, 10.0
PATHS = {"PYTHONPATH": python_path()}  # environment of processes that a script starts


class Failed(SystemExit):
    """A script's error, which ends it with one message."""


def configured(*overrides: str) -> cfg.Config:
    """Compose conf/ with these overrides and check it as a run's."""
    return exclusions.from_dict(front.compose(REPOSITORY / "conf", list(overrides))[0])


def simulated(*overrides: str) -> simulation.Config:
    """Compose conf/ with these overrides for mode=simulate and check it."""
    tree = front.compose(REPOSITORY / "conf", ["mode=simulate", *overrides])[0]
    return simulation.from_dict(tree)


def keyed(words: Sequence[str], doc: str, **defaults: Any) -> dict[str, Any]:
    """Return `defaults` with the values that key=value `words` give, converted to the same types.
    --help prints `doc`. Raises `Failed` naming the word that is wrong.
    """
    if {"-h", "--help"} & set(words):
        print(doc)
        raise SystemExit(0)
    given = dict(defaults)
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or key not in defaults:
            raise Failed(f"{word!r}: no such option; there are {'=, '.join(defaults)}=")
        kind = type(defaults[key])
        try:
            given[key] = {"true": True, "false": False}[text] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise Failed(f"{word!r}: {text!r} is no {kind.__name__}") from None
    return given


def flagged(doc: str, words: Sequence[str] | None = None, rest: str = "", **defaults: Any) -> Any:
    """Return the options given as --NAME VALUE in `words`, by default the command line's.

    A default gives its option's type. A list takes several words, a list of names some of them.
    False is a switch. A type is that of an option that is None unless it is given. `rest` names the
    other words, which the field `words` then has. --help prints `doc`.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
            continue
        many, optional = isinstance(default, list), isinstance(default, type)
        kind = default if optional else type(*default[:1] or [""]) if many else type(default)
        parser.add_argument(
            flag,
            type=kind,
            nargs="+" if many else None,
            choices=default if many and default and kind is str else None,
            default=None if optional else default,
            help="default: %(default)s",
        )
    if rest:
        parser.add_argument("words", nargs="*", metavar=rest)
    return parser.parse_intermixed_args(words)


def listed(key: str, text: str, known: Iterable[str]) -> list[str]:
    """Return a comma-separated option's names, all of `known` if it is empty. Raises `Failed`."""
    found = [word for word in text.split(",") if word]
    if unknown := set(found) - set(known):
        raise Failed(f"{key}={text}: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return found or list(known)


class Child:
    """A command that dies with this process. Its stdout is read by line, stderr is its log."""

    def __init__(
        self, name: str, command: list[str], log: Path, env: dict[str, str] = {}, **popen
    ) -> None:
        self.name, self._log, self._rest = name, log, b""
        parent = os.getpid()
        with log.open("wb") as errors:
            self.popen: Any = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=REPOSITORY,
                env=os.environ | PATHS | env,
                preexec_fn=lambda: die_with_parent(parent),
                **popen,
            )

    def order(self, order: dict) -> None:
        try:
            self.popen.stdin.write(json.dumps(order).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise self.failed("is gone") from None

    def answer(self, deadline_s: float = ANSWER_S) -> dict:
        return json.loads(self.line(deadline_s))

    def ask(self, order: dict, deadline_s: float = ANSWER_S) -> dict:
        self.order(order)
        return self.answer(deadline_s)

    def line(self, deadline_s: float = ANSWER_S) -> str:
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise self.failed(f"printed nothing for {deadline_s:g} s")
                data = os.read(self.popen.stdout.fileno(), 1 << 16)
                if not data:
                    raise self.failed(f"ended with {self.popen.wait()}")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def end(self) -> None:
        stop(self.popen, END_S)
        self.popen.stdin.close()
        self.popen.stdout.close()

    def failed(self, what: str) -> Failed:
        log = self._log.read_text(errors="replace", encoding="utf-8").strip()[-3000:]
        return Failed(f"{Path(sys.argv[0]).stem}: {self.name} {what}: {log}")


def stop(process: subprocess.Popen, patience_s: float = 60.0) -> None:
    """End a process by SIGTERM, and by SIGKILL if it has not ended after `patience_s`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all processes below it, nothing if it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_s(*processes: psutil.Process) -> float:
    """Return the processor seconds of processes since their start, without those that have ended."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def each_thread(process: psutil.Process, do: Callable[[int], object]) -> None:
    """Call `do` with the id of each thread of the process. Threads that end meanwhile are skipped."""
    with suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            with suppress(ProcessLookupError):
                do(thread.id)


async def turn(engine: Any, request: p.TurnRequest) -> p.TurnResult:
    """Return the turn that an engine generates, as its first attempt."""
    tokens, logprobs, versions = list[int](), list[float](), list[int]()
    async for chunk in engine.generate(f"{request.turn}#1", request.tokens, request.sampling):
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        versions += [chunk.version] * len(chunk.tokens)
    packed = p.pack_tokens(tokens), p.pack_floats(logprobs), p.pack_tokens(versions)
    return p.TurnResult(request.turn, *packed, chunk.finish)


def answers() -> Callable[[dict], None]:
    """Return `say(answer)`, which prints to the parent. A `Child` calls this first: afterwards,
    output of libraries goes into its log."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=out, flush=True)
