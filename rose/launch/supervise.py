"""Watch a started job until it ends. Afterwards none of its processes is left, and no shared memory
of processes that were killed on this machine.

The job is ended when a rank dies, when a trainer rank keeps the others waiting too long, or when no
file can be written to the run's folder. SIGINT, SIGTERM or SIGUSR2 (Slurm's warning) asks the
coordinator to stop:
1. during a rollout or an evaluation it saves the last finished step at once;
2. during training it waits for the end of the step, if that comes soon enough
   (`resume.step_end_s`), and saves it; otherwise the run continues from its last checkpoint.

The coordinator then dismisses the other ranks. All of this may take `resume.end_s` from the signal:
cluster.stop_timeout_s, more if saves are slow, less if Slurm's warning is shorter. Then every
process is killed, as after a second signal.
Every wait has a deadline. Left out: decisions inside the run, which are the coordinator's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from rose import files
from rose.comm import mpi_process
from rose.config import Cluster
from rose.launch import batch, logs, rank_status, resume
from rose.launch.beats import Beats
from rose.launch.layout import Rank
from rose.launch.rank_status import RankStatus
from rose.observe import disk
from rose.observe.status import write_failure
from rose.protocol import Role
from rose.transfer import mirror

POLL_S = 0.2  # seconds between two polls of the ranks and their status files
POLL_SLURM_S = 1.0  # seconds between two polls on a cluster, whose file system others use too
# Seconds from finding a dead rank to naming the cause. Another rank may have died earlier, and its
# guard may still be writing.
SETTLE_S = 0.6
FAILURE_GRACE_S = 5.0  # seconds for the other ranks to end by themselves once one is dead
PROBE_S = 5.0  # seconds between two tries to write a small file into the run's folder
# Seconds for counting the run's use of the disk, when an attempt begins and when the disk is full.
MEASURE_S = 5.0
UNREAD_S = 60.0  # seconds for which the ranks' status files may be unreadable
READ_MAPS_S = 1.0  # seconds for reading processes' memory maps; thousands take some 10 ms
KILL_S = 10.0  # seconds for the kernel to carry out SIGKILL
TAIL_LINES = 15  # lines of a rank's log in the message of a failure
# Parts of CUDA's messages about failed hardware. Another attempt may run on other hardware.
FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
)


@dataclass(frozen=True)
class Outcome:
    """The end of a job: in failure, by a signal, or in success."""

    failure: str = ""
    interrupted: int = 0  # the signal that asked the job to end; 0: none
    lost_rank: bool = False  # True if `Job.lost`: another attempt may succeed

    @property
    def code(self) -> int:
        return 128 + self.interrupted if self.interrupted else int(bool(self.failure))

    @property
    def requeues(self) -> bool:
        """True if Slurm shall start another attempt. A rank that is lost after SIGTERM is no
        reason, since a user cancelled the job (scancel)."""
        return self.interrupted == signal.SIGUSR2 or (self.lost_rank and not self.interrupted)


@dataclass
class Job:
    """A running mpiexec or srun. This process must have become a subreaper
    (`processes.adopt_orphans`) before `process` started."""

    process: subprocess.Popen
    ranks: Sequence[Rank]
    run_dir: Path
    attempt: int
    cluster: Cluster
    starter: str = "mpiexec"  # name of `process` and of its log
    signals: list[int] = field(default_factory=list)
    handled: bool = False  # True if the batch process notes its signals in `signals`
    probed: float = 0.0  # monotonic seconds: the last try to write into the run's folder
    beats: Beats = field(default_factory=Beats)
    before: tuple[dict[str, disk.Use], bool] = ({}, True)  # use of the disk at the start
    lost: bool = False  # True if the failed rank was killed, vanished, hangs or lost its GPU
    read: dict[int, RankStatus] = field(default_factory=dict)  # the last good read of `statuses`
    read_at: float = field(default_factory=time.monotonic)
    unread: str = ""  # why the last read failed
    # An earlier attempt's mark of the finished run; None if it could not be read.
    finished: bytes | None = b""

    @property
    def _poll_s(self) -> float:
        return POLL_SLURM_S if self.cluster.kind == "slurm" else POLL_S

    def statuses(self) -> dict[int, RankStatus]:
        """Return the status of every rank that has reported, by rank. If a file can't be read,
        return the last statuses that could: on NFS this happens while a rank replaces its file."""
        try:
            self.read = rank_status.read_all(self.run_dir, self.attempt)
            self.read_at, self.unread = time.monotonic(), ""
        except (OSError, msgspec.MsgspecError) as error:
            self.unread = str(error)
        return self.read

    def wait(self) -> Outcome:
        """Wait until the job ends and return how it ended. Meanwhile, handle SIGINT, SIGTERM and
        Slurm's warning, unless the batch process does (`handled`)."""
        before = {
            number: signal.signal(number, lambda got, _: self.signals.append(got))
            for number in batch.SIGNALS
            if not self.handled
        }
        try:
            self.finished = resume.finished_mark(self.run_dir)
            self.before = disk.measure(self.run_dir, MEASURE_S)
            outcome = self._watch()
            if outcome.failure:
                write_failure(self.run_dir, self.attempt, outcome.failure)
            return outcome
        finally:
            end_all(self.process)
            for number, handler in before.items():
                signal.signal(number, handler)
            mirror.remove_left(self.run_dir)  # mirrors of ranks that were killed

    def _watch(self) -> Outcome:
        # Monotonic seconds by which the ranks must appear, the coordinator stop, the others leave.
        deadlines = {"appear": time.monotonic() + self.cluster.start_timeout_s}
        asked = False  # True once the coordinator was asked to stop
        while True:
            failure = self._failure(deadlines)
            if failure and (self._stopped() or self._finished(failure)):
                return Outcome(interrupted=self._interrupted())
            if failure:
                outcome = self._explained(failure)
                self._end_ranks(FAILURE_GRACE_S)
                return outcome
            states = self.statuses()
            if self._all_done(states):
                with contextlib.suppress(subprocess.TimeoutExpired):  # left to `end_all`
                    self.process.wait(FAILURE_GRACE_S)
                return Outcome(interrupted=self._interrupted())
            if len(self.signals) > 1:
                return Outcome("killed by the second signal", self._interrupted())
            if self.signals and not asked:
                # The time runs from the signal, even if the coordinator has not started yet.
                end_s = resume.end_s(self.run_dir, self.cluster, self._warned)
                deadlines.setdefault("stop", time.monotonic() + end_s)
                asked = self._signal_coordinator(states)
            coordinator = states.get(0)
            if coordinator and coordinator.state == "done":
                deadlines.setdefault("leave", time.monotonic() + self.cluster.stop_timeout_s)
                if time.monotonic() > deadlines["leave"]:
                    # All is saved, so the remaining ranks are killed.
                    return Outcome(interrupted=self._interrupted())
            time.sleep(self._poll_s)

    def _all_done(self, states: dict[int, RankStatus]) -> bool:
        return all(r.rank in states and states[r.rank].state == "done" for r in self.ranks)

    def _interrupted(self) -> int:
        return self.signals[0] if self.signals else 0

    @property
    def _warned(self) -> bool:
        """True if Slurm asked the job to end, before its time limit."""
        return self.cluster.slurm is not None and self.signals[:1] == [signal.SIGUSR2]

    def _stopped(self) -> bool:
        """True if the coordinator was asked to stop and has ended: with code 0, or by SIGTERM
        before it handled signals, when it had nothing to save. The other ranks may then be slow or
        fail without consequence, since they may not have received the request."""
        coordinator = self.statuses().get(0)
        return (
            bool(self.signals)
            and coordinator is not None
            and coordinator.exit_code in (0, -signal.SIGTERM)
        )

    def _finished(self, failure: str) -> bool:
        """True if the run has finished in this attempt, so that all is saved. In this case print
        `failure`, which happened while the ranks were leaving."""
        mark = resume.finished_mark(self.run_dir)
        if not mark or self.finished in (None, mark):
            return False
        print(f"the run is finished; afterwards {files.printable(failure)}", file=sys.stderr)
        return True

    def _failure(self, deadlines: dict[str, float]) -> str:
        """Return what has failed by now; "" if nothing has."""
        states, now, slurm = self.statuses(), time.monotonic(), self.cluster.slurm
        if self.unread and now > self.read_at + UNREAD_S:
            folder = rank_status.folder(self.run_dir, self.attempt)
            return f"{folder}: no rank's status could be read for {UNREAD_S:g} s: {self.unread}"
        if failure := self._ended_early(states):
            return failure
        if len(states) == len(self.ranks) and all(status.joined for status in states.values()):
            deadlines.pop("appear", None)
        if now > deadlines.get("appear", now) and not self.unread:
            return self._start_failure(states)
        if failure := self._hanging(states, now):
            return failure
        if now > deadlines.get("stop", now):
            key = f"cluster.stop_timeout_s={self.cluster.stop_timeout_s:g}"
            if self._warned:
                key += f", or Slurm's warning, cluster.slurm.warning_s={slurm.warning_s}"
            return f"the coordinator did not stop within {key}"
        if now > self.probed + PROBE_S:
            self.probed = now
            if files.refusal(self.run_dir):
                return "the launcher could not write there"
        return ""

    def _ended_early(self, states: dict[int, RankStatus]) -> str:
        """Return what failed if a rank or the starter (mpiexec, srun) has ended early; "" if none
        has. Also return "" while statuses can't be read: a rank that has ended well since the last
        read would seem to have vanished."""
        starter_gone = self.process.poll() is not None and not self._all_done(states)
        if self.unread or not (starter_gone or self._dead(states)):
            return ""
        time.sleep(SETTLE_S)  # time for other dead ranks, and guards, to write
        states = self.statuses()
        dead = self._dead(states) or self._dead(states, starter_gone)
        if self.unread:
            return ""
        if dead:
            return self._first(dead)
        return self._without_starter(states) if starter_gone else ""

    def _without_starter(self, states: dict[int, RankStatus]) -> str:
        """Return which ranks are not done after the starter has ended; "" if all are."""
        if self._all_done(states):
            return ""
        missing = [rank.rank for rank in self.ranks if rank.rank not in states]
        without = f"; ranks {missing} never started" if missing else ""
        return (
            f"{self.starter} exited with code {self.process.returncode}{without}\n"
            f"{self._tail(self.starter + '.log')}"
        )

    def _hanging(self, states: dict[int, RankStatus], now: float) -> str:
        """Return a text on the trainer ranks that hang while others wait for them; "" if none."""
        if self.unread:
            return ""  # instead of taking old statuses for silence
        trainers = [s for s in states.values() if s.role is Role.TRAINER]
        hanging, most = self.beats.hanging(trainers, now)
        self.lost |= bool(hanging)
        return "\n".join(
            f"rank {s.rank} (trainer {s.index}, pid {s.pid} on {s.host}) hangs: others wait for it "
            f"after {most} collectives and micro-batches, it last reported {s.begun or 0} "
            f"(trainer.step_timeout_s says how long they may)\n"
            f"{self._tail(logs.rank_log(self.run_dir, self.attempt, s.role, s.rank).name)}"
            for s in hanging
        )

    def _start_failure(self, states: dict[int, RankStatus]) -> str:
        """Return which ranks did not start or join in time. MPI's own start has no deadline: ranks
        that cannot reach each other wait in it for ever."""
        within = f"within cluster.start_timeout_s={self.cluster.start_timeout_s:g}"
        missing = [
            f"{rank.role.value} rank {rank.rank}" for rank in self.ranks if rank.rank not in states
        ]
        if missing:
            return (
                f"{', '.join(missing)} did not start {within}\n{self._tail(self.starter + '.log')}"
            )
        out = [
            f"{status.role.value} rank {status.rank} on {status.host}"
            for rank, status in sorted(states.items())
            if not status.joined
        ]
        return (
            f"{', '.join(out)} did not join the MPI world {within}: MPI may have taken a network "
            "by which hosts do "
            "not reach each other; name one that they share "
            f"(cluster.interface={self.cluster.interface!r})\n"
            f"{self._tail(self.starter + '.log')}"
        )

    def _explained(self, failure: str) -> Outcome:
        """Return the outcome of a failure. If no more files can be written to the run's folder, add
        that as the cause: a rank that dies of a full disk may not be able to report it."""
        refused = files.refusal(self.run_dir)
        if refused and self.lost:
            failure = (
                "what the ranks could still write is in "
                f"{logs.attempt_folder(self.run_dir, self.attempt)}"
            )
        grown = refused and disk.growth(self.before, disk.measure(self.run_dir, MEASURE_S))
        text = "\n".join(filter(None, [files.advice(refused, failure), grown, failure]))
        text = files.printable(text)  # since it quotes logs, with text of agents' programs
        return Outcome(text, self._interrupted(), self.lost and refused is None)

    def _first(self, dead: list[RankStatus]) -> str:
        """Describe the rank that failed first, which is why the others failed. Set `lost`."""
        first = min(dead, key=lambda status: status.since)
        self.lost = (
            first.exit_code is None
            or first.exit_code < 0
            or any(fault in first.error for fault in FAULTS)
        )
        return self._describe(first)

    def _dead(self, states: dict[int, RankStatus], starter_gone: bool = False) -> list[RankStatus]:
        """Return the ranks that failed, and the ranks that are gone without a report because their
        guard died too. Ranks on other hosts count as alive while the starter, which watches them,
        is alive."""
        gone = [
            s.rank
            for s in states.values()
            if s.state == "running" and (_is_gone(s) if _is_here(s) else starter_gone)
        ]
        # A guard may have written its report after `states` was read and before it ended.
        states = states | (self.statuses() if gone else {})
        return [
            s
            for s in states.values()
            if s.state == "failed" or (s.rank in gone and s.state == "running")
        ]

    def _signal_coordinator(self, states: dict[int, RankStatus]) -> bool:
        """Ask the coordinator to stop. Return False if it has not started yet; the next poll asks
        again."""
        if 0 not in states:
            return False
        if states[0].state == "running" and psutil.pid_exists(states[0].pid):
            if self.signals[0] == signal.SIGUSR2:
                resume.note_warned(self.run_dir, self.attempt)
            _terminate(states[0].pid)
        return True

    def _describe(self, status: RankStatus) -> str:
        log = logs.rank_log(self.run_dir, self.attempt, status.role, status.rank)
        return (
            f"rank {status.rank} ({status.role.value} {status.index}, pid {status.pid} on "
            f"{status.host}) "
            f"{status.how_it_ended()}\n{self._tail(log.name)}"
        )

    def _tail(self, name: str) -> str:
        path = logs.attempt_folder(self.run_dir, self.attempt) / name
        return "\n".join(
            [f"last lines of {path}:", *(f"  {line}" for line in logs.tail(path, TAIL_LINES))]
        )

    def _end_ranks(self, grace_s: float) -> None:
        """Send SIGTERM to every rank, on other hosts through srun. Wait `grace_s` seconds for the
        starter to end. Guards and mpiexec get no signal, because they end with their ranks."""
        running = [status for status in self.statuses().values() if status.state == "running"]
        for status in running:
            if _is_here(status) and psutil.pid_exists(status.pid):
                _remove_shared([status.pid])
                _terminate(status.pid)
        if not all(map(_is_here, running)) and self.process.poll() is None:
            self.process.terminate()
        deadline = time.monotonic() + grace_s
        while self.process.poll() is None and time.monotonic() < deadline and len(self.signals) < 2:
            time.sleep(self._poll_s)


def _terminate(pid: int) -> None:
    """Send SIGTERM, unless the process has ended since the caller saw it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _is_here(status: RankStatus) -> bool:
    return status.host == socket.gethostname()


def _is_gone(status: RankStatus) -> bool:
    """True if the process of a rank on this host and its guard are both gone. While the guard
    lives, it may still be writing how the rank ended, for seconds on a busy machine."""
    return not psutil.pid_exists(status.pid) and not psutil.pid_exists(status.guard_pid)


def end_all(process: subprocess.Popen) -> None:
    """Kill every descendant of this process, adopted orphans too, until none is left. Remove the
    shared memory of ranks whose MPI world was not complete. A process may survive for `KILL_S`,
    because it hangs in the kernel or is another user's. Then print its pid and return, so that the
    caller can still report how the job ended."""
    deadline = time.monotonic() + KILL_S
    while left := psutil.Process().children(recursive=True):
        _remove_shared([child.pid for child in left])
        for child in left:
            with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
                child.kill()
        process.poll()
        for child in left:
            if child.pid != process.pid:
                # A grandchild's parent reaps it, or this process adopts it by the next round.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        if time.monotonic() > deadline:
            pids = [child.pid for child in left]
            print(f"processes {pids} survive SIGKILL; see dmesg", file=sys.stderr, flush=True)
            return
        time.sleep(0.05)
    process.poll()


def _remove_shared(pids: list[int]) -> None:
    """Call `mpi_process.remove_shared` for each process, in a thread that may take `READ_MAPS_S`.
    Reading the memory maps of a process that hangs in the kernel may hang too, and the caller must
    still kill the others."""
    remover = threading.Thread(
        target=lambda: [mpi_process.remove_shared(pid) for pid in pids], daemon=True
    )
    remover.start()
    remover.join(READ_MAPS_S)
