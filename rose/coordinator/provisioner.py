"""Carries out requests for capacity: submits, polls and cancels Slurm jobs that lend an engine or
compute rewards.

A provisioning policy of the scheduler, or rose/parts/rewards, decides when to request one.
rose/launch/sbatch.py writes the job's script.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rose import extensions
from rose.comm import mpi_process
from rose.comm.tasks import Tasks
from rose.config import Config
from rose.launch import commands, lent, state
from rose.scheduler import events as ev

POLL_S = 5.0  # seconds between two queries of Slurm, each about all jobs
COMMAND_S = 60.0  # seconds that sbatch or scancel may take
Outcome = ev.CapacityQueued | ev.CapacityGranted | ev.CapacityRefused | ev.CapacityEnded


@dataclass
class _Job:
    id: str
    since: float  # monotonic seconds, when last seen to run; at first when submitted or adopted
    ran: bool = False  # A poll has seen it run.


class Provisioner:
    """Submits and cancels the jobs of one `kind` (rose/launch/lent.py).

    `feed` gets an event for each outcome of a request; no two requests have the same name.
    `on_fault` and `on_change` get (what, detail). The jobs are listed in the run's folder, so that
    the next attempt finds them.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        feed: Callable[[ev.Event], None],
        on_fault: Callable[[str, str], None],
        on_change: Callable[[str, str], None],
        kind: str = lent.ENGINES,
    ) -> None:
        self._kind = kind
        self._config, self._run_dir, self._feed = config, Path(run_dir), feed
        self._on_fault, self._on_change = on_fault, on_change
        self._jobs: dict[str, _Job] = {}
        # Jobs that are being cancelled. They stay in the run's list, so that the end of the run
        # cancels a job for which scancel got no answer.
        self._cancelling: dict[str, _Job] = {}
        # Released requests whose jobs are not cancelled yet. The scheduler has forgotten them, so
        # it gets no events about them.
        self._released: set[str] = set()
        self._submitting: set[str] = set()
        self._tasks: Tasks | None = None
        self._actions: asyncio.Queue[ev.Action] = asyncio.Queue()

    def do(self, action: ev.RequestCapacity | ev.ReleaseCapacity) -> None:
        """Begin to carry out the action; `feed` gets the outcome."""
        if isinstance(action, ev.ReleaseCapacity):
            self._released.add(action.request)
        self._actions.put_nowait(action)

    async def run(self) -> None:
        """Carry out actions and poll jobs until cancelled. The jobs then continue: a requeued run
        adopts them, and rose/launch/slurm.py cancels them when a run ends without a requeue."""
        self._tasks = Tasks()
        try:
            await self._adopt()
            await self._tasks.run_until(self._carry_out(), self._watch())
        finally:
            await self._tasks.close(1.0)

    async def _carry_out(self) -> None:
        while True:
            match await self._actions.get():
                case ev.RequestCapacity(request) if request in self._jobs:
                    pass  # An adopted job of an earlier attempt serves the request of its name.
                case ev.RequestCapacity(request):
                    self._submitting.add(request)
                    self._tasks.spawn(self._submit(request))
                case ev.ReleaseCapacity(request) if request not in self._submitting:
                    self._tasks.spawn(self._cancel(request, "not needed any more"))

    async def _adopt(self) -> None:
        """Take over jobs of an earlier attempt, except those that Slurm reports as ended. If Slurm
        doesn't answer, `_watch` asks again later."""
        noted = lent.noted(self._run_dir, self._kind)
        # Each answer rewrites the run's list, which must keep the jobs that are not checked yet.
        self._jobs = {request: _Job(job, time.monotonic()) for request, job in noted.items()}
        for request, job in noted.items():
            try:
                active = await asyncio.to_thread(state.is_active, job)
            except RuntimeError as error:
                self._on_fault("Slurm does not answer", str(error))
                active = True
            if active:
                self._queued(request, job)
            else:
                del self._jobs[request]
                self._write_list()
                self._report(ev.CapacityEnded(at=time.time(), request=request))

    async def _submit(self, request: str) -> None:
        program = extensions.merged("commands", "JOBS")[self._kind]
        code, out, err = await _command(sys.executable, "-m", program, str(self._run_dir), request)
        self._submitting.discard(request)
        if code:
            self._on_fault("capacity refused", f"{request}: {err}")
            self._report(ev.CapacityRefused(at=time.time(), request=request, reason=err))
            self._released.discard(request)
        elif request in self._released:
            self._jobs[request] = _Job(out.split()[-1], time.monotonic())
            await self._cancel(request, "not needed any more")
        else:
            self._queued(request, out.split()[-1])

    def _queued(self, request: str, job: str) -> None:
        self._jobs[request] = _Job(job, time.monotonic())
        self._write_list()
        self._on_change("capacity asked for", f"{request}: job {job}")
        self._report(ev.CapacityQueued(at=time.time(), request=request))

    def _report(self, event: Outcome) -> None:
        if event.request not in self._released:
            self._feed(event)

    async def _cancel(self, request: str, why: str) -> None:
        job = self._jobs.pop(request, None)
        if job is None:
            self._released.discard(request)
            return  # The job has ended by itself.
        self._cancelling[request] = job
        self._write_list()
        end = time.monotonic() + commands.PATIENCE_S
        while True:
            code, _, err = await _command("scancel", job.id)
            answered = not code or commands.refuses(err)
            if answered or time.monotonic() > end:
                break
            await asyncio.sleep(commands.PAUSE_S)
        self._released.discard(request)
        if answered:
            del self._cancelling[request]
        self._write_list()
        if code:
            self._on_fault("scancel failed", f"{request}, job {job.id}: {err}")
        else:
            self._on_change("capacity given back", f"{request}: job {job.id}, {why}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for request, job in list(self._jobs.items()):
                try:
                    found = await asyncio.to_thread(state.components, job.id)
                except RuntimeError as error:
                    self._on_fault("Slurm does not answer", str(error))
                    continue
                if self._jobs.get(request) is job:  # False if it was cancelled during the query
                    await self._judge(request, job, {component.state for component in found})

    async def _judge(self, request: str, job: _Job, states: set[str]) -> None:
        """Apply the states that Slurm reports for the components of a job."""
        if states and not states & state.ACTIVE:
            self._job_ended(request, f"job {job.id} ended: {', '.join(sorted(states))}")
        elif states & state.STARTED:
            if not job.ran:
                self._report(ev.CapacityGranted(at=time.time(), request=request))
            job.ran, job.since = True, time.monotonic()
        elif time.monotonic() - job.since > self._config.cluster.slurm.pending_s:
            reason = (
                f"pending for {self._config.cluster.slurm.pending_s:g} s (cluster.slurm.pending_s)"
            )
            self._report(ev.CapacityRefused(at=time.time(), request=request, reason=reason))
            await self._cancel(request, "it waited too long in the queue")

    def _job_ended(self, request: str, what: str) -> None:
        job = self._jobs.pop(request)
        self._write_list()
        if job.ran:
            self._on_change("capacity ended", f"{request}: {what}")
            self._report(ev.CapacityEnded(at=time.time(), request=request))
        else:
            self._on_fault("capacity refused", f"{request}: {what}")
            self._report(ev.CapacityRefused(at=time.time(), request=request, reason=what))

    def _write_list(self) -> None:
        jobs = {request: job.id for request, job in (self._jobs | self._cancelling).items()}
        lent.note(self._run_dir, jobs, self._kind)


async def _command(*command: str) -> tuple[int, str, str]:
    """Run the command; return (exit code, stdout, stderr), with code 124 after `COMMAND_S`. On this
    timeout, and on cancellation, it is killed with the processes that it has started, such as
    sbatch. Otherwise they might submit a job that is unknown here."""
    # A task of its own: a cancellation while asyncio connects the pipes would leave the process.
    start = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *command,
            env=mpi_process.environment({}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            process = await asyncio.shield(start)
            out, err = await process.communicate()
    except TimeoutError:
        return 124, "", f"{command[0]} did not answer within {COMMAND_S:g} s"
    finally:
        process = await start
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # It may have ended just now.
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out.decode().strip(), err.decode().strip()[-500:]
