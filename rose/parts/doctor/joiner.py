"""Run the serving side of a join without an engine: one rank joins and is killed, another joins and
leaves.

    python -m rose.parts.doctor.joiner RUN_DIR          the RUN_DIR of rose.parts.doctor.host

Each rank is forked from here, as in `rose serve`, and is an MPI world of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from rose import config as configuration
from rose import protocol as p
from rose.comm import join, mpi_process
from rose.comm.wire import decode, encode
from rose.parts.doctor.finding import emit

FOUND_S = 30.0  # seconds for the host's endpoint to appear
ANSWER_S = 45.0  # seconds for the host to answer an application
STAY_S = 45.0  # seconds for the heartbeats and the dismissal after joining
BEATS = 2  # heartbeats of the host before the rank is killed or leaves


def main(run_dir: Path) -> int:
    emit("started")
    mpi = configuration.load(run_dir / "config.json").cluster.mpi
    for name in mpi_process.launchers():
        del os.environ[name]
    os.environ.update(mpi.env | mpi.join_env)
    end = time.monotonic() + FOUND_S
    while join.endpoint(run_dir) is None:
        if time.monotonic() > end:
            path = join.folder(run_dir) / "endpoint.json"
            print(f"no {path} here within {FOUND_S:g} s", file=sys.stderr)
            return 1
        time.sleep(join.POLL_S)
    for dies in (True, False):
        child = os.fork()
        if child == 0:
            _rank(run_dir, dies)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != (-signal.SIGKILL if dies else 0):
            return 1
    return 0


def _rank(run_dir: Path, dies: bool) -> NoReturn:
    """Run one rank in this forked process, and end the process."""
    code = 1
    try:
        code = _take_part(join.Application(run_dir), dies)
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)  # no MPI Finalize, as in `rose serve`


def _take_part(application: join.Application, dies: bool) -> int:
    """Join and answer heartbeats. After `BEATS` of them kill this process if it `dies`; otherwise
    leave. Raises `TimeoutError` if the host doesn't dismiss the rank within `STAY_S`."""
    answer = application.ask(ANSWER_S)
    from rose.comm.link import Link  # start of MPI, which reads its environment now

    link = Link(application.connect(answer.port))
    link.send(encode(p.JoinHello(application.token, answer.worker)))
    beats, end = 0, time.monotonic() + STAY_S
    while time.monotonic() < end:
        data = link.take()
        message = decode(data) if data is not None else None
        if isinstance(message, p.Heartbeat):
            beats += 1
            link.send(encode(p.WorkerLoad(answer.worker, 1, 0, 0, 0.0, 0, 0, 0)))
            if beats == BEATS and dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if beats == BEATS:
                link.send(encode(p.WorkerLeft(answer.worker, 1, "the doctor's rank is done")))
        elif isinstance(message, p.Shutdown):
            return 0
        time.sleep(0.002)
    raise TimeoutError(f"joined, and then nothing of the other side for {STAY_S:g} s")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
