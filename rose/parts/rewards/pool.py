"""An elastic pool of reward workers, processes that each compute `per_worker` scores at a time.

The pool starts workers while answers wait and none is free, up to `max_workers`, and ends those
that were idle for `idle_s`, down to `min_workers`. Its own workers and those of Slurm jobs
(*joined* ones) connect over TCP. Failures:

1. A worker dies, or its scorer fails: another worker scores the answer. After `TRIES` tries the
   answer fails.
2. A worker exceeds an answer's limit by `GRACE_S`: it is killed, and case 1 applies.
3. A Slurm job is preempted or killed: other workers score its answers. The first losses of an
   answer don't count as tries; from loss number `LOSSES` on, each does.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose.comm import frames
from rose.comm.address import LOOPBACK, listen
from rose.config import Reward
from rose.files import write_whole
from rose.parts.rewards.anchors import Anchors
from rose.parts.rewards.messages import (
    FRAME_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    STOP,
    Answer,
    Hello,
    PoolFile,
    Work,
    end_when_lost,
    proof,
)
from rose.reward.episode import Score, ScoringFailed

TRIES = 2  # most tries of an answer, by different workers where there are several
# From this number of losses on, a Slurm job's end counts as a try of each answer that it was
# scoring, since the answer may have ended it.
LOSSES = 4
GRACE_S = 5.0  # seconds after an answer's limit for the worker to report that it was reached
START_S = 120.0  # longest start of a worker; user code may import large packages
HELLO_S = 10.0  # longest wait for the first message of a connection
BAD_STARTS = 3  # failed starts in a row after which all waiting answers fail
START_PAUSE_S = 30.0  # seconds from `BAD_STARTS` failed starts to the next start
SAVE_S = 5.0  # seconds between two writes of the anchors, from which time limits follow
POLL_S = 0.2  # seconds between two polls of the workers


@dataclass(frozen=True)
class Scored:
    score: Score
    queue_s: float  # seconds until a worker took the answer
    seconds: float  # seconds from then to the score
    joined: bool  # True: scored by a worker of a Slurm job


# Starts a task of the rank. An exception of the task ends the rank.
Spawn = Callable[[Coroutine], asyncio.Task]
Start = Callable[[int, Path], subprocess.Popen]  # (worker, the pool's file) -> its process


@dataclass(eq=False)
class _Job:  # a request to score an answer
    number: int
    trajectory: str
    prompt: str
    episode: bytes
    future: asyncio.Future[Scored]
    asked: float  # monotonic time of the request
    tried: list[int] = field(default_factory=list)  # numbers of workers
    losses: int = 0
    error: str = ""
    begun: float = 0.0  # monotonic time at which a worker took the answer
    deadline: float = 0.0


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen | None  # None: a joined worker, in a Slurm job
    started: float  # monotonic
    writer: asyncio.StreamWriter | None = None  # None until it has connected
    jobs: dict[int, _Job] = field(default_factory=dict)
    free_since: float = 0.0

    @property
    def joined(self) -> bool:
        return self.process is None


class Pool:
    """A reward rank's workers. `folder`: where it writes `pool.json`, which only the run's user can
    read, and `anchors.json` (anchors.py). `addresses`: where it listens besides loopback."""

    def __init__(
        self,
        settings: Reward,
        folder: Path,
        start: Start,
        spawn: Spawn,
        addresses: Iterable[str] = (),
    ):
        self._settings, self._folder, self._start, self._spawn = settings, folder, start, spawn
        self._addresses = addresses
        self._anchors = Anchors(folder / "anchors.json", settings.timeout_s, settings.adaptive)
        self._token = secrets.token_hex(32)
        self._numbers = itertools.count()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[str, _Job] = {}  # waiting and running, by trajectory
        self._workers: dict[int, _Worker] = {}
        self._worker_numbers = itertools.count()
        self._bad_starts, self._resume_at = 0, 0.0
        self._servers: list[asyncio.Server] = []
        self.failures = self.retries = self.timeouts = 0  # printed at the end

    # ----------------------------------------------------------------- calls of the rank

    async def open(self) -> None:
        """Listen, and start `min_workers` workers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        sockets = listen([LOOPBACK, *self._addresses])
        self._servers = [await asyncio.start_server(self._connected, sock=each) for each in sockets]
        places = [each.getsockname()[:2] for each in sockets]
        reachable = PoolFile(socket.gethostname(), places, self._token)
        write_whole(self._folder / "pool.json", msgspec.json.encode(reachable), private=True)
        self._spawn(self._watch())
        self._start_workers()

    async def score(self, trajectory: str, prompt: str, episode: bytes) -> Scored:
        """Return the score of an episode. Calls for the same episode share one computation. If a
        trajectory was played again because its host died, its new episode replaces the first.
        Raises `ScoringFailed`."""
        job = self._jobs.get(trajectory)
        if job is not None and job.episode != episode:
            self.cancel(trajectory)
            job = None
        if job is None:
            future = asyncio.get_running_loop().create_future()
            job = _Job(next(self._numbers), trajectory, prompt, episode, future, time.monotonic())
            self._jobs[trajectory] = job
            self._queue.append(job)
            self._dispatch()
        return await asyncio.shield(job.future)

    def cancel(self, trajectory: str) -> None:
        """Drop the request. If a worker is scoring the answer, its result is ignored."""
        job = self._jobs.pop(trajectory, None)
        if job is not None:
            with suppress(ValueError):
                self._queue.remove(job)
            job.future.cancel()

    async def close(self) -> None:
        """Dismiss all workers, and save the anchors."""
        print(
            f"scores tried again {self.retries}, failed {self.failures}; answers that used their "
            f"time up {self.timeouts}",
            flush=True,
        )
        for server in self._servers:
            server.close()
        for worker in self._workers.values():
            self._dismiss(worker, for_good=True)
        self._save()

    def _save(self) -> None:
        """Save the anchors. A failed write only makes the limits longer after a requeue, so it is
        printed and the run goes on."""
        try:
            self._anchors.save()
        except OSError as error:
            print(f"the rewards' time limits are not kept: {error}", flush=True)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def workers(self) -> int:
        """Number of the pool's own workers, without joined ones."""
        return len(self._workers) - self.joined

    @property
    def joined(self) -> int:
        return sum(worker.joined for worker in self._workers.values())

    def unmet(self) -> tuple[int, float]:
        """Return the number of answers that wait although all own workers are up, and for how many
        seconds the oldest has waited."""
        up = sum(w.writer is not None and not w.joined for w in self._workers.values())
        if not self._queue or up < self._settings.max_workers:
            return 0, 0.0
        oldest = min(job.asked for job in self._queue)
        return len(self._queue), time.monotonic() - oldest

    # ----------------------------------------------------------------- dispatch

    def _dispatch(self) -> None:
        """Give waiting answers to workers with room, and start workers for the remaining ones."""
        for job in list(self._queue):
            number = self._worker_for(job)
            if number is None:
                continue
            self._queue.remove(job)
            self._give(number, job)
        self._start_workers()

    def _worker_for(self, job: _Job) -> int | None:
        """Return the connected worker that has the most room and hasn't tried the answer. If the
        pool can have no other worker, return one that has tried it. None if none has room."""
        candidates = [
            (len(worker.jobs), number)
            for number, worker in self._workers.items()
            if worker.writer is not None and len(worker.jobs) < self._settings.per_worker
        ]
        untried = [each for each in candidates if each[1] not in job.tried]
        others = self._settings.max_workers > 1 or self._workers.keys() - set(job.tried)
        retried = [] if others else candidates
        return min(untried or retried, default=(0, None))[1]

    def _give(self, number: int, job: _Job) -> None:
        """Send an answer to a worker, with its time limit."""
        worker = self._workers[number]
        # The adaptive limit is for the pool's own workers: a job's node may be slower than theirs.
        limit_s = self._settings.timeout_s if worker.joined else self._anchors.limit_s(job.prompt)
        job.tried.append(number)
        job.begun = time.monotonic()
        job.deadline = job.begun + limit_s + GRACE_S
        worker.jobs[job.number] = job
        work = Work(job.number, limit_s, job.episode)
        worker.writer.write(frames.frame(msgspec.msgpack.encode(work)))

    def _start_workers(self) -> None:
        """Start as many workers as the waiting answers need, within the bounds."""
        s = self._settings
        coming = sum(worker.writer is None for worker in self._workers.values())
        wanted = self.workers + -(-len(self._queue) // s.per_worker) - coming
        while self.workers < min(s.max_workers, max(s.min_workers, wanted)):
            if time.monotonic() < self._resume_at:
                return
            number = next(self._worker_numbers)
            try:
                process = self._start(number, self._folder / "pool.json")
            except OSError as error:
                self._bad_start(f"a reward worker could not be started: {error}")
                continue
            self._workers[number] = _Worker(process, time.monotonic())

    # ----------------------------------------------------------------- workers

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit a worker, and serve its connection to the end."""
        try:
            number = await self._admit(reader, writer)
            if number is not None:
                await self._serve(number, reader)
        except (OSError, EOFError, TimeoutError, frames.FrameError, msgspec.DecodeError):
            pass  # a sender without the token may send anything
        finally:
            writer.close()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """Admit a worker that knows the token, and return its number. None if it isn't admitted."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(frames.frame(nonce))
        async with asyncio.timeout(HELLO_S):
            hello = msgspec.msgpack.decode(await frames.read(reader, HELLO_BYTES), type=Hello)
        here = writer.get_extra_info("sockname")
        if not hmac.compare_digest(hello.proof, proof(self._token, "worker", nonce, here)):
            return None
        number = next(self._worker_numbers) if hello.worker is None else hello.worker
        if hello.worker is None:
            self._workers[number] = _Worker(None, time.monotonic())
        worker = self._workers.get(number)
        if worker is None or worker.writer is not None:
            return None
        end_when_lost(writer)
        writer.write(frames.frame(proof(self._token, "pool", hello.nonce, here)))
        worker.writer = writer
        if not worker.joined:
            self._bad_starts = 0
        return number

    async def _serve(self, number: int, reader: asyncio.StreamReader) -> None:
        """Receive the messages of an accepted worker until it is lost or dismissed."""
        worker = self._workers[number]
        worker.free_since = time.monotonic()
        try:
            self._dispatch()
            while True:
                data = await frames.read(reader, FRAME_BYTES)
                self._answered(number, msgspec.msgpack.decode(data, type=Answer))
        except (OSError, EOFError, frames.FrameError, msgspec.DecodeError) as error:
            self._lost(number, f"worker {number} is gone: {error!r}", fault=not worker.joined)

    def _answered(self, number: int, answer: Answer) -> None:
        """Handle a worker's message: deliver the score, or try again after an error."""
        worker = self._workers.get(number)
        job = worker.jobs.pop(answer.number, None) if worker else None
        if job is None:
            return
        worker.free_since = time.monotonic()
        if answer.score is None:
            self._retry(job, answer.error)
        elif self._forget(job):
            if answer.score.success and not answer.score.timed_out:
                self._anchors.correct(job.prompt, answer.seconds)
            self.timeouts += answer.score.timed_out
            queue_s = job.begun - job.asked
            job.future.set_result(Scored(answer.score, queue_s, answer.seconds, worker.joined))
        self._dispatch()

    def _retry(self, job: _Job, error: str) -> None:
        """Queue the answer again for another worker; after `TRIES` tries let it fail."""
        if self._jobs.get(job.trajectory) is not job:
            return  # cancelled
        job.error = error
        if len(job.tried) < TRIES:
            self.retries += 1
            self._queue.append(job)
            return
        self._fail(job)

    def _fail(self, job: _Job) -> None:
        """Drop the request, and raise `ScoringFailed` where its score is awaited."""
        self.failures += 1
        self._forget(job)
        if not job.future.done():
            job.future.set_exception(ScoringFailed(job.error))

    def _forget(self, job: _Job) -> bool:
        """Remove the request. False if it was cancelled or replaced before."""
        wanted = self._jobs.get(job.trajectory) is job
        if wanted:
            del self._jobs[job.trajectory]
        return wanted

    def _lost(self, number: int, why: str, fault: bool = True) -> None:
        """Drop a worker and retry its answers. `fault`: an answer may have caused the loss, so the
        loss counts as a try of each of them."""
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        self._dismiss(worker)
        for job in worker.jobs.values():
            job.losses += not fault
            if not fault and job.losses < LOSSES:
                job.tried.remove(number)
            self._retry(job, why)
        self._dispatch()

    @staticmethod
    def _dismiss(worker: _Worker, for_good: bool = False) -> None:
        """Close the connection, and kill a worker of the pool's own. A joined worker's job starts
        another worker unless `for_good` is True."""
        if worker.writer is not None:
            if worker.joined and for_good:
                worker.writer.write(frames.frame(STOP))
            worker.writer.close()
        if worker.process is not None:
            worker.process.kill()

    # ----------------------------------------------------------------- time

    async def _watch(self) -> None:
        """End workers that hang, failed to start, or are idle; save the anchors."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            for number, worker in list(self._workers.items()):
                if worker.writer is None and (
                    worker.process.poll() is not None or now - worker.started > START_S
                ):
                    self._start_failed(number)
                elif any(job.deadline < now for job in worker.jobs.values()):
                    self._lost(number, f"worker {number} did not answer within the time limit")
                elif self._idle_for_long(worker, now):
                    del self._workers[number]
                    self._dismiss(worker, for_good=True)
            self._start_workers()
            if now - saved > SAVE_S:
                saved = now
                await asyncio.to_thread(self._save)

    def _idle_for_long(self, worker: _Worker, now: float) -> bool:
        return (
            worker.writer is not None
            and not worker.jobs
            and (worker.joined or self.workers > self._settings.min_workers)
            and now - worker.free_since > self._settings.idle_s
        )

    def _start_failed(self, number: int) -> None:
        self._lost(number, "")
        self._bad_start(
            f"{BAD_STARTS} reward workers in a row ended, or did not connect within {START_S:g} s; "
            f"their logs are in {self._folder}"
        )

    def _bad_start(self, why: str) -> None:
        """Count a failed start. After `BAD_STARTS` in a row all waiting answers fail, and the next
        start waits for `START_PAUSE_S`."""
        self._bad_starts += 1
        if self._bad_starts >= BAD_STARTS:
            self._bad_starts, self._resume_at = 0, time.monotonic() + START_PAUSE_S
            waiting, self._queue = list(self._queue), deque()
            for job in waiting:
                job.error = why
                self._fail(job)
