"""Call Python functions as agents' programs, and as their rewards.

    python -m rose.parts.adapters.gateway.call module:function

This server imports the modules that the function's file imports. For each line of its standard
input (written by forks.py) it then forks a process. The line is a JSON object with the trajectory's
`name` and `variables`, the path of its `log`, and `arguments`. The server answers on its standard
output with the process's `pid`, and later with its exit `code`. If the fork fails, it answers with
the `error`. The server ends with its input. Each process imports the function's own file itself: if
this file creates an API client at its top level, the client needs the trajectory's key.

An agent's function gets the task (the object in the file ROSE_TASK). Its result, unless None, is
the reward. A reward function gets the conversations (from a file) and the task. Both may be async.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import random
import select
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any, NoReturn

from rose.parts.adapters.gateway import reaper
from rose.parts.adapters.gateway.program import LOG_MODE
from rose.reward import function, values

KEPT: list[Any] = []  # the server's finalizers, because freeing them takes a process time


def preload(name: str) -> None:
    """Import the modules that the function's file imports at its top. Ignore errors: such an import
    fails again in each process, which reports it."""
    place = name.rpartition(":")[0]
    sys.path.insert(0, str(Path(place).parent) if place.endswith(".py") else os.getcwd())
    with contextlib.suppress(Exception):
        origin = place if place.endswith(".py") else importlib.util.find_spec(place).origin
        for node in ast.parse(Path(origin).read_text(encoding="utf-8")).body:
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    modules = []
            for module in modules:
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(module)


def call(name: str, arguments: list[str]) -> None:
    """Call the function and write its result, unless None, as the reward. `arguments`: paths."""
    task = json.loads(Path(os.environ["ROSE_TASK"]).read_text(encoding="utf-8"))
    found = function.load(name, "env.args.reward" if arguments else "env.args.function")
    given = [json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments]
    result = function.result(found(*given, task))
    if result is not None:
        written = json.dumps(result, default=values.to_json)
        Path(os.environ["ROSE_REWARD"]).write_text(written, encoding="utf-8")


def _run_reaper(called: str, order: dict[str, Any], server: int, foreign: tuple[int, ...]) -> None:
    """Turn the forked process into a reaper that runs the function in a child. Never return.
    `foreign`: the server's file descriptors, which are closed here."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(order["log"], LOG_MODE, 0o600)
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, target)
        for file in (log, *foreign):
            os.close(file)
        reaper.run(lambda: _call(called, order), server)
    except OSError:  # such as a log whose folder is gone
        traceback.print_exc()
    finally:
        os._exit(1)  # instead of a second server


def _call(called: str, order: dict[str, Any]) -> NoReturn:
    """Call the function, then end this process with the function's exit code."""
    code = 1
    try:
        # Finalizers that imports have registered belong to the server: they remove its temporary
        # folders. torch registers so many that running them takes longer than the agent.
        KEPT.append(weakref.finalize._registry)
        weakref.finalize._registry = {}
        os.environ.clear()
        os.environ.update(order["variables"])
        _reseed(int(os.environ["ROSE_SEED"]))
        call(called, order["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        code = code & 255 or int(code != 0)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # all threads, including those of executors
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reseed(seed: int) -> None:
    """Seed the random generators. Modules that were imported before the fork would otherwise draw
    the same numbers in every process."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def serve(called: str) -> None:
    """Fork for each order until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # stderr in place of stdout, so that prints of imports are no answers
    preload(called)
    gc.collect()
    # Otherwise garbage collection in each process would touch, and copy, the shared pages.
    gc.freeze()
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    names: dict[int, str] = {}
    unread, server = b"", os.getpid()

    def answer(**fields: Any) -> None:
        os.write(answers, json.dumps(fields).encode() + b"\n")

    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        for pid, code in _ended(names):
            answer(name=names.pop(pid), code=code)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                try:
                    pid = os.fork()
                except OSError as error:  # too little memory, or too many processes
                    answer(name=order["name"], error=f"no process can be forked: {error}")
                    continue
                if pid == 0:
                    _run_reaper(called, order, server, (answers, woken, wake))
                names[pid] = order["name"]
                answer(name=order["name"], pid=pid)


def _ended(names: dict[int, str]) -> list[tuple[int, int]]:
    """Return (pid, exit code) of each process that has ended."""
    found = []
    for pid in names:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


if __name__ == "__main__":
    serve(sys.argv[1])
