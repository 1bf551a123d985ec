"""The processes of bench_coserving.py: servers, rollout sides and the operator.

One core stands for the device. Engine processes are confined to it, and everything else (HTTP front
ends, clients, this bench) to the other cores, as the host's processors are separate from the GPU.
Processes that take no part in a run are stopped by SIGSTOP, so that they use none of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rose.engine.start import environment
from rose.parts.lending import board
from rose.parts.lending.config import Lending
from rose.parts.lending.operator import control, metrics
from scripts.harness import Child, each_thread, family
from scripts.live_runs import engines_of
from tests.ports import free_port

START_S, ANSWER_S, END_S = 300.0, 60.0, 10.0
LEAVE_S = 5.0  # seconds for the other processes of a group after its first has ended
EPOCH_S = 10.0  # seconds of a training step; a frozen KV budget may grow again at the next one
NICE = 19  # priority of R's front end, which shares the host's cores with S's
VARIABLES = environment(gpus=False, threads=1)

# A program that reads process groups from stdin, and kills them when stdin ends. It does so even if
# the bench itself was killed by SIGKILL.
GUARD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    word, group = line.split()
    (groups.add if word == "add" else groups.discard)(int(group))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Guard:
    """A child process that ends every process group of the bench, however the bench ends."""

    def __init__(self) -> None:
        self._process: Any = subprocess.Popen(
            [sys.executable, "-c", GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def say(self, word: str, group: int) -> None:
        self._process.stdin.write(f"{word} {group}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(END_S)


class Process(Child):
    """A command in a process group of its own, with a log. All commands are in one session: Linux
    gives each session an equal share of a core (autogroup), so nice only counts within one."""

    def __init__(
        self, guard: Guard, name: str, command: list[str], log: Path, env: dict[str, str] = {}
    ) -> None:
        self._guard = guard
        super().__init__(name, command, log, VARIABLES | env, process_group=0)
        guard.say("add", self.popen.pid)

    # ----------------------------------------------------------------- where and when it runs

    def engine(self) -> int:
        """Return the pid of the process of its engine. Raises `Failed`."""
        for process in engines_of(self.popen.pid):
            return process.pid
        raise self.failed("has no engine")

    def park(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGSTOP)

    def wake(self) -> None:
        if self.popen.poll() is not None:
            raise self.failed(f"ended with {self.popen.returncode}")
        os.killpg(self.popen.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill all at once, except Python's resource tracker, which then unlinks shared memory."""
        for one in family(self.popen.pid):
            with suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in " ".join(one.cmdline()):
                    one.kill()

    def end(self) -> None:
        """End the process group: by SIGTERM, then by SIGKILL, until no process of it is left."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGCONT)
            self.popen.terminate()
            try:
                self.popen.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < 2 * LEAVE_S:
            try:
                os.killpg(self.popen.pid, signal.SIGKILL if passed > LEAVE_S else 0)
            except ProcessLookupError:
                break  # no process of the group left
            self.popen.poll()
            time.sleep(0.02)
        self._guard.say("drop", self.popen.pid)
        self.popen.stdin.close()
        self.popen.stdout.close()


class Server(Process):
    """vLLM's OpenAI server. It serves once `ready` has returned."""

    def __init__(
        self, guard: Guard, name: str, args: dict, folder: Path, port: int | None, env: dict
    ) -> None:
        self.port, self.served = port or free_port(), "s"
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        args |= {"host": "127.0.0.1", "port": self.port, "served_model_name": self.served}
        for key, value in (args | {"generation_config": "vllm"}).items():
            command += [] if value is None else [f"--{key.replace('_', '-')}", str(value)]
        command += ["--enforce-eager", "--disable-uvicorn-access-log"]
        super().__init__(guard, name, command, folder / f"{name}.log", env)

    def ready(self) -> None:
        """Wait until the server is healthy. Raises `Failed` if it ends or takes over START_S."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.popen.poll() is not None:
                raise self.failed(f"ended with {self.popen.returncode} instead of serving")
            try:
                self.get("/health", 1.0)
                return
            except OSError:
                time.sleep(0.25)
        raise self.failed(f"did not answer {self.url}/health within {START_S:g} s")

    def get(self, path: str, timeout_s: float = ANSWER_S) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """Return the sum of a Prometheus metric over its labels."""
        lines = self.get("/metrics").splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name
        )


class Rollouts(Process):
    """A process of bench_coserving_rollout.py. It accepts orders once `ready` has returned."""

    def __init__(
        self, guard: Guard, name: str, kind: str, job: dict, folder: Path, env: dict[str, str] = {}
    ) -> None:
        script = str(Path(__file__).with_name("bench_coserving_rollout.py"))
        command = [sys.executable, script, kind, json.dumps(job)]
        super().__init__(guard, name, command, folder / f"{name}.log", env)

    def ready(self) -> None:
        self.pid = self.answer(START_S)["engine"]  # None if it has no engine of its own
        for process in family(self.popen.pid):
            if process.pid != self.pid:
                each_thread(process, lambda it: os.setpriority(os.PRIO_PROCESS, it, NICE))

    def engine(self) -> int | None:
        return self.pid

    def ask(self, order: str) -> dict:
        return super().ask({"do": order}, ANSWER_S)


class Operator(control.ControlBoard):
    """The operator of a lent device, whose thread writes the board. A training step lasts
    `EPOCH_S`. `close` removes the folder of the boards."""

    def __init__(self, name: str, lending: Lending) -> None:
        self._began, self._ends = time.monotonic(), threading.Event()
        super().__init__(board.folder(name), lending, "", str)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ends.wait(control.BEAT_S):
            self.write()

    def _epoch(self, before: float) -> float:
        return float((time.monotonic() - self._began) // EPOCH_S)

    def boards(self) -> metrics.Boards:
        """Return the states of the boards, however old."""
        return metrics.read(self.folder, living=False)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        super().close()
        shutil.rmtree(self.folder)


# --------------------------------------------------------------------------- the machine


def confine(processes: list[Process], device: set[int], host: set[int]) -> None:
    """Confine engines to the device's cores and all other processes to the host's."""
    for process in processes:
        engine = process.engine()
        for one in family(process.popen.pid):
            cores = device if one.pid == engine else host
            each_thread(one, lambda thread: os.sched_setaffinity(thread, cores))
