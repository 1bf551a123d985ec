"""Jobs of a one-machine Slurm: the training job, serving jobs, their engines' quotas. Not a command."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil

from rose.launch import state
from rose.observe.status import read_status
from scripts.harness import family
from scripts.live_runs import Confined, Quota, engines_of
from scripts.runs import REPOSITORY, Run, launch

COMMAND_S, START_S, END_S = 60.0, 300.0, 120.0
# A step has trajectories under way when its rollout has lasted this many seconds.
AMID_S = 1.0
# The status file of an attempt that was killed stays; after this many seconds it counts no more.
STALE_S = 5.0
FAVOUR_EVERY_S = 10.0  # seconds between two looks for threads to favour, at 10 ms of CPU time each
NODES = 5  # trainer and hosts; dedicated engines; two serving devices; a spare engine
PORT = 19_000  # port of the cluster's daemons, the first of 130


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Start the cluster that Slurm's commands use inside. Raises `SystemExit` if it can't start."""
    settings = {"FOLDER": str(folder), "NODES": str(NODES), "PORT": str(PORT), "GPUS": "0"}
    _dev_cluster("stop", settings)  # cluster of a proof that was killed
    os.environ["SLURM_CONF"] = f"{folder}/etc/slurm.conf"
    try:
        _dev_cluster("start", settings)
        yield
    finally:
        _dev_cluster("stop", settings)


def _dev_cluster(word: str, settings: Mapping[str, str]) -> None:
    done = subprocess.run(
        [str(REPOSITORY / "slurm" / "dev_cluster.sh"), word],
        capture_output=True,
        text=True,
        env=os.environ | dict(settings),
        timeout=START_S,
        start_new_session=True,  # Ctrl-C is for this process, which then stops the cluster
    )
    if done.returncode:
        raise SystemExit(f"dev_cluster.sh: {(done.stderr or done.stdout).strip()}")


def command(*words: str, limit_s: float = COMMAND_S) -> str:
    """Run a Slurm command and return its output. Raises `SystemExit` with its error."""
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=limit_s)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:3])}: {done.stderr or done.stdout}")
    return done.stdout.strip()


class Job:
    """A Slurm job. `log` has its output."""

    def __init__(self, job: str, log: Path) -> None:
        self.id, self.log = job, log

    @property
    def over(self) -> bool | str:
        return not state.is_active(self.id)

    @property
    def words(self) -> str:
        return self.log.read_text(errors="replace", encoding="utf-8") if self.log.exists() else ""

    def end(self) -> None:
        """Cancel the job and wait until it is gone."""
        subprocess.run(["scancel", self.id], capture_output=True, timeout=COMMAND_S)
        end = time.monotonic() + END_S
        while not self.over and time.monotonic() < end:
            time.sleep(0.2)


def held(rows: Iterable[str], component: int, now: float) -> list[tuple[float, float]]:
    """Return from when to when a job held the nodes of one of its components, one pair per attempt,
    in seconds of the wall's clock.

    `rows` are those of sacct --duplicates --parsable2 --noheader --format=JobID,Start,End; an
    attempt that runs ends `now`. An attempt that never started has no pair."""
    found = []
    for row in rows:
        job, start, end = row.strip().split("|")
        if job.partition("+")[2] == str(component) and start[:1].isdigit():
            until = datetime.fromisoformat(end).timestamp() if end[:1].isdigit() else now
            found.append((datetime.fromisoformat(start).timestamp(), until))
    return sorted(found)


class Training(Job, Confined):
    """The training job, submitted by launch.py."""

    def __init__(self, folder: Path, name: str, overrides: Sequence[str], cores: float) -> None:
        Run.__init__(self, folder / name)
        self._cores, self._quotas = cores, {}
        self._step: tuple[float, int] | tuple[()] = ()  # (attempt's start, step) that rolls out
        self._begun = 0.0  # time.monotonic() when that rollout was first seen
        command(*launch(folder, name, "cluster=dev", "fresh=true", *overrides), limit_s=START_S)
        job = state.submitted(self.run) or ""
        super().__init__(job, self.run / "logs" / f"slurm-{job}.out")

    def amid(self) -> bool:
        """True while this attempt's step has rolled out for `AMID_S` and most of it has not
        arrived. It must be called often."""
        status = read_status(self.run)
        if status is None or status.phase != "rollout" or time.time() > status.time + STALE_S:
            self._step = ()
            return False
        step = status.started, status.step
        if step != self._step:
            self._step, self._begun = step, time.monotonic()
        going = status.finished < 0.6 * max(1, status.total)
        return going and time.monotonic() > self._begun + AMID_S

    def held(self) -> list[tuple[float, float]]:
        """Return from when to when the job held its dedicated engines' nodes, once per attempt."""
        fields = ("--duplicates", "--parsable2", "--noheader", "--allocations")
        rows = command("sacct", *fields, "--format=JobID,Start,End", "--jobs", self.id)
        return held(rows.splitlines(), 1, time.time())

    def close(self) -> None:
        if not self.over:
            self.end()
        for quota in self._quotas.values():
            quota.close()


class Serving(Job):
    """A serving job of one device on `node`: with an online server, or a spare engine.
    All its engines share one quota, and run on `core` if one is given."""

    def __init__(
        self,
        folder: Path,
        run: str,
        node: str,
        cores: float,
        online: Sequence[str],
        core: int | None = None,
    ) -> None:
        self.node, self.online = node, bool(online)
        log = folder / f"{run}-{node}.log"
        log.unlink(missing_ok=True)
        options = [f"--partition={'serve' if online else 'spare'}", f"--output={log}"]
        options += [f"--nodelist={node}", "--cpus-per-task=8"]
        script = str(REPOSITORY / "slurm" / "serving.sbatch")
        own = (f"name={run}", f"output_dir={folder}", "rollout.threads=1", *online)
        job = command("sbatch", "--parsable", *options, script, *own)
        super().__init__(job.partition(";")[0], log)
        self._quota, self._limited = Quota(f"device-{node}", cores, core), False
        self._confined: set[int] = set()
        self._favour_at = 0.0  # when threads that came or were lowered since are favoured again

    @property
    def url(self) -> str:
        """The address of the online server, empty until it serves."""
        found = re.findall(r"(http://\S+) serves", self.words)
        return found[-1] if found else ""

    @property
    def lends_nothing(self) -> str:
        """The reasons why the device lends nothing, empty if there are none."""
        return "; ".join(re.findall(r"nothing is lent: (.*)", self.words))

    def members(self) -> list[tuple[int, str]]:
        """Return (pid, worker) of each membership so far."""
        found = re.findall(r"rose serve\[(\d+)\] \S+ (borrowed-\d+): joined", self.words)
        return [(int(pid), worker) for pid, worker in found]

    @property
    def member(self) -> psutil.Process | None:
        """The process that lends now, None if there is none."""
        for pid, _ in self.members()[-1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(pid)
        return None

    def confine(self) -> None:
        """Confine the online server and the lending process, each once its engine has started,
        because the quota stands for a device's compute."""
        server, now = self._operator if self.online and self.url else None, time.monotonic()
        if again := now > self._favour_at:
            self._favour_at = now + FAVOUR_EVERY_S
        for process in filter(None, (self.member, server)):
            if again and process.pid in self._confined:
                self._quota.favour(process.pid)
            if process.pid not in self._confined and engines_of(process.pid):
                self._quota.add(process.pid)
                self._quota.favour(process.pid)
                self._confined.add(process.pid)
                if not self._limited:
                    self._quota.limit()
                    self._limited = True

    @property
    def _operator(self) -> psutil.Process | None:
        """The process that has the online server below it, None if it isn't known."""
        found = re.findall(r"stop lending: kill -USR1 (\d+)", self.words)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            return psutil.Process(int(found[-1]))
        return None

    def kill(self) -> str:
        """Kill the lending process and its engine. Return what was killed, '' if nothing lends."""
        member = self.member
        if member is None:
            return ""
        for process in reversed(family(member.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return f"killed {self.members()[-1][1]}"

    def preempt(self, seconds: float) -> str:
        """Preempt the job by a more urgent job of `seconds` seconds on its node. Slurm then
        requeues it, and it joins again. Return what was preempted, '' if nothing lends."""
        member = self.member
        if member is None:
            return ""
        words = ("--partition=serve", f"--nodelist={self.node}", "--cpus-per-task=8")
        command("sbatch", "--parsable", *words, "--output=/dev/null", f"--wrap=sleep {seconds:g}")
        return f"preempted {self.members()[-1][1]}"

    def close(self) -> None:
        self.end()
        self._quota.close()
