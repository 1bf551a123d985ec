"""What the doctor finds of a part, and the processes by which it finds out, here or by srun.
Imports nothing but the standard library."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rose.config import Component, Config

DEADLINE_S = 55.0  # of one check; they run side by side
IMPORT_S = 300.0  # thousands of files, read for the first time from a busy parallel file system
END_S = 5.0
QUEUE_S = 40  # the backfill scheduler, which starts heterogeneous jobs, looks every 30 s by default
GPUS_S = IMPORT_S + DEADLINE_S  # for torch to be read from a busy file system, and then to compute
CPUS_PER_GPU = 2  # a process per GPU imports torch, and NCCL has a thread beside it
_MAX_BYTES = 2**20
_POLL_S = 0.02
_EVENT = '{"what": '
_DECODER = json.JSONDecoder()


class Finding(NamedTuple):
    state: str  # ok, warning, failed
    part: str
    words: str
    remedy: str = ""


class Ended(NamedTuple):
    """How a process ended (124: not by itself), and its output."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The line that probably says what was wrong."""
        lines = (self.err.strip() or self.out.strip() or f"exit code {self.code}").splitlines()
        ours = [line for line in lines if not line.startswith(("srun: ", "slurmstepd: "))]
        return (ours or lines)[-1].strip()

    def events(self) -> list[dict[str, Any]]:
        """What it printed by `emit`, in order. An event may begin within a line: a launcher that
        merges the output of several ranks can put it between another's and their line break."""
        found, at = [], self.out.find(_EVENT)
        while at >= 0:
            try:
                content, end = _DECODER.raw_decode(self.out, at)
            except ValueError:
                end = at + 1  # a library's or Slurm's own words, or an event that was cut
            else:
                found.append(content)
            at = self.out.find(_EVENT, end)
        return found


def emit(what: str, **details: Any) -> None:
    """One event of a program that the doctor started, for `Ended.events`."""
    # in one write, unlike print's
    sys.stdout.write(json.dumps({"what": what, "node": node(), **details}) + "\n")
    sys.stdout.flush()


def node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


class Child:
    """A process whose words are read while it runs, and that does not outlive the `with`."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._err = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._out.close()
        self._err.close()

    def so_far(self) -> Ended:
        code = self._process.poll()
        out, err = (
            os.pread(file.fileno(), _MAX_BYTES, 0).decode(errors="replace")
            for file in (self._out, self._err)
        )
        return Ended(124 if code is None else code, out, err)

    def until(self, enough: Callable[[Ended], object], deadline_s: float) -> bool:
        """Wait until `enough`: True; False when it ended without, or after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not enough(self.so_far()):
            if self._process.poll() is not None or time.monotonic() > end:
                return bool(enough(self.so_far()))
            time.sleep(_POLL_S)
        return True

    def wait(self, deadline_s: float) -> Ended:
        """Its end, or ended by us after `deadline_s`."""
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._end()
            ended = self.so_far()
            return Ended(124, ended.out, f"{ended.err}\nno end within {deadline_s:g} s")
        return self.so_far()

    def _end(self) -> None:
        """SIGTERM first: srun gives its job back, and mpiexec ends its ranks."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def run(
    argv: Sequence[str], env: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> Ended:
    with Child(argv, env) as child:
        return child.wait(deadline_s)


def srun(*options: str, queue_s: int = QUEUE_S, work_s: float = 60.0) -> list[str]:
    """A job of `work_s` seconds at most, in whole minutes; ends unless it starts in `queue_s`."""
    return ["srun", f"--immediate={queue_s}", f"--time={math.ceil(work_s / 60)}", *options]


def task(c: Config, component: Component, gpus: int = 1) -> list[str]:
    """Options for one task on a node of this component; with GPUs only if the run has some."""
    options = {n: getattr(component, n) for n in ("partition", "account", "qos", "constraint")}
    named = [f"--{name}={value}" for name, value in options.items() if value is not None]
    with_gpus = [f"--gpus-per-node={gpus}"] if c.cluster.gpus else []
    return ["--nodes=1", "--ntasks=1", *named, *with_gpus]


def gpu_task(c: Config, component: Component, gpus: int) -> list[str]:
    """The same for one that computes on `gpus` of the node's: with CPUs for them, and the memory
    that ranks have, but for all of a node's ("0"), which a node with other jobs hasn't."""
    memory = [f"--mem={component.mem}"] if component.mem not in (None, "0") else []
    return [*task(c, component, gpus), f"--cpus-per-task={CPUS_PER_GPU * gpus}", *memory]
