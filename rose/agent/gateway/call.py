"""Calls Python functions as agents' programs, and as their rewards.

    python -m rose.agent.gateway.call module:function

imports what the function's file imports, once, and forks a process for each line on its standard
input (forks.py writes them): a JSON object with the trajectory's `name`, its `variables`, the `log`
for what it prints, and further `arguments`. It answers on its standard output with the process's
`pid`, and with its `code` when that has ended; it ends with its input. The file itself is imported
by each process anew, as a client made at its top needs the trajectory's key.

An agent's function gets the task, the object in the file ROSE_TASK; what it returns, unless None,
is the reward. A reward's function gets the conversations, in the file that is its argument, and the
task. Either may be async.
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

from rose.agent.gateway import reaper
from rose.agent.gateway.program import LOG_MODE
from rose.reward import function, values

KEPT: list[Any] = []  # of the server's, which to free takes a process time


def preload(name: str) -> None:
    """Import what the function's file imports at its top. What fails here fails again, and is
    told, in the processes."""
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
                with contextlib.suppress(Exception):
                    importlib.import_module(module)


def call(name: str, arguments: list[str]) -> None:
    """Call the function and write what it returns, if anything, as the reward."""
    task = json.loads(Path(os.environ["ROSE_TASK"]).read_text(encoding="utf-8"))
    found = function.load(name, "env.args.reward" if arguments else "env.args.function")
    given = [json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments]
    result = function.result(found(*given, task))
    if result is not None:
        written = json.dumps(result, default=values.to_json)
        Path(os.environ["ROSE_REWARD"]).write_text(written, encoding="utf-8")


def _become(called: str, order: dict[str, Any], server: int, foreign: tuple[int, ...]) -> None:
    """In the forked process: never returns. `foreign`: files of the server's."""
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
    except OSError:  # The log's folder may be gone.
        traceback.print_exc()
    finally:
        os._exit(1)  # It must not go on as a second server.


def _call(called: str, order: dict[str, Any]) -> NoReturn:
    """Call the function and end this process, which is its own, with its code."""
    code = 1
    try:
        # What is to be finalised of the imports, temporary folders among it, is the server's; torch
        # has so much of it that this process would spend more time on that than on its agent.
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
        threading._shutdown()  # waits for threads, those of executors too
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reseed(seed: int) -> None:
    """What was imported before the fork has the same random state in every process."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def serve(called: str) -> None:
    """Fork for each order until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    preload(called)
    gc.collect()
    gc.freeze()  # else each process copies the pages of what it looks through
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
                pid = os.fork()
                if pid == 0:
                    _become(called, order, server, (answers, woken, wake))
                names[pid] = order["name"]
                answer(name=order["name"], pid=pid)


def _ended(names: dict[int, str]) -> list[tuple[int, int]]:
    """(pid, exit code) of those that have ended."""
    found = []
    for pid in names:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


if __name__ == "__main__":
    serve(sys.argv[1])
