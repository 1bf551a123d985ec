"""A `Finding`, the doctor's result about one part, and the processes that findings come from, here
or by srun. Imports nothing but the standard library."""

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

DEADLINE_S = 55.0  # seconds for one check; checks run side by side
# Seconds for an import: thousands of files, read for the first time from a busy file system.
IMPORT_S = 300.0
END_S = 5.0  # seconds for a process to end after SIGTERM
# Seconds that a job may wait in the queue. Slurm's backfill scheduler, which starts heterogeneous
# jobs, runs every 30 s by default.
QUEUE_S = 40
GPUS_S = IMPORT_S + DEADLINE_S  # seconds to import torch and then compute on the GPUs
CPUS_PER_GPU = 2  # CPUs for the GPU's process and its NCCL thread
_MAX_BYTES = 2**20  # bytes of a process's output that are read
_POLL_S = 0.02  # seconds between two polls of a process and its output
_EVENT = '{"what": '
_DECODER = json.JSONDecoder()


class Finding(NamedTuple):
    state: str  # ok, warning, failed
    part: str
    words: str
    remedy: str = ""


class Ended(NamedTuple):
    """The exit code of a process (124: it runs, or was ended at its deadline), and its output."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """Return the line that probably names the error."""
        lines = (self.err.strip() or self.out.strip() or f"exit code {self.code}").splitlines()
        ours = [line for line in lines if not line.startswith(("srun: ", "slurmstepd: "))]
        return (ours or lines)[-1].strip()

    def events(self) -> list[dict[str, Any]]:
        """Return the events that the process printed by `emit`, in order. An event may begin within
        a line: a launcher that merges the output of several ranks can insert it before another
        event's line break."""
        found, at = [], self.out.find(_EVENT)
        while at >= 0:
            try:
                content, end = _DECODER.raw_decode(self.out, at)
            except ValueError:
                end = at + 1  # other output, of a library or of Slurm, or an incomplete event
            else:
                found.append(content)
            at = self.out.find(_EVENT, end)
        return found


def emit(what: str, **details: Any) -> None:
    """Print an event of a program that the doctor started, for `Ended.events`."""
    # One write: print writes the line break separately, perhaps after other output.
    sys.stdout.write(json.dumps({"what": what, "node": node(), **details}) + "\n")
    sys.stdout.flush()


def node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


class Child:
    """A process whose output can be read while it runs. It ends with the `with` block."""

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
        """Wait until `enough` is true of the output, and return True. Return False after
        `deadline_s`, or if the process ends first."""
        end = time.monotonic() + deadline_s
        while not enough(self.so_far()):
            if self._process.poll() is not None or time.monotonic() > end:
                return bool(enough(self.so_far()))
            time.sleep(_POLL_S)
        return True

    def wait(self, deadline_s: float) -> Ended:
        """Wait for the process to end; end it after `deadline_s`."""
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._end()
            ended = self.so_far()
            return Ended(124, ended.out, f"{ended.err}\nno end within {deadline_s:g} s")
        return self.so_far()

    def _end(self) -> None:
        """End the process, by SIGTERM first: then srun releases its job, and mpiexec ends its
        ranks."""
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
    """Return the beginning of a command that runs as a Slurm job. Its time limit is `work_s`,
    rounded up to minutes. It fails if the job doesn't start within `queue_s` seconds."""
    return ["srun", f"--immediate={queue_s}", f"--time={math.ceil(work_s / 60)}", *options]


def task(c: Config, component: Component, gpus: int = 1) -> list[str]:
    """Return srun's options for one task on a node of this component, with GPUs if the run has
    some."""
    options = {n: getattr(component, n) for n in ("partition", "account", "qos", "constraint")}
    named = [f"--{name}={value}" for name, value in options.items() if value is not None]
    with_gpus = [f"--gpus-per-node={gpus}"] if c.cluster.gpus else []
    return ["--nodes=1", "--ntasks=1", *named, *with_gpus]


def gpu_task(c: Config, component: Component, gpus: int) -> list[str]:
    """Return srun's options for a task that computes on `gpus` GPUs of the node: with CPUs for
    them, and with the memory that ranks request. If ranks request all of a node's memory ("0"),
    request none, since a node with other jobs can't give all."""
    memory = [f"--mem={component.mem}"] if component.mem not in (None, "0") else []
    return [*task(c, component, gpus), f"--cpus-per-task={CPUS_PER_GPU * gpus}", *memory]
