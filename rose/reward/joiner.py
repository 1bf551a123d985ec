"""A rank of a Slurm job that computes rewards for a run, started by the job (job.py):

    python -m rose.reward.joiner --run RUN --pool INDEX

It starts a worker, joins the pool over MPI when that one is up, and passes on what the two send
each other; so that nothing that a scorer does keeps it from saying that it lives. A singleton MPI
world of its own, whose death touches nobody else. Exit codes are `Ended`.
"""

from __future__ import annotations

import argparse
import enum
import hmac
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import msgspec

from rose import config as configuration
from rose.comm import mpi_process
from rose.comm.address import LOOPBACK
from rose.comm.frames import FrameError, Frames, frame
from rose.comm.join import Application, JoinError, endpoint
from rose.processes import die_with_parent
from rose.reward.messages import (
    AGAIN,
    BEAT,
    BEAT_S,
    FRAME_BYTES,
    HELLO_BYTES,
    LOST_S,
    STOP,
    Hello,
    Leaving,
)

START_S = 120.0  # for the worker to be up: user code may import much
ANSWER_S = 20.0  # of the pool, whose file system may be slow
GOODBYE_S = 2.0  # for the last word to leave
# An answer waits so long: Slurm may have ended the program that was to check it, a moment before it
# ends this process, and then the answer isn't right.
HOLD_S = 0.2
PAUSE_S = (0.001, 0.01)  # between two looks at MPI: while words come, and at most


class Ended(enum.IntEnum):
    DONE = 0  # not needed any more, or asked to end
    AGAIN = 10  # its worker or its pool is gone
    NOT_NOW = 12
    REFUSED = 11  # and will be again


def folder(run_dir: Path, pool: int) -> Path:
    """Of a pool: its door, its token and its workers' words."""
    return run_dir / "rewards" / f"pool-{pool}"


def start_worker(run_dir: Path, home: Path, place: socket.socket) -> tuple[subprocess.Popen, bytes]:
    """A worker that is up and has connected to `place`, which is put in its stead; its first words.
    Raises `JoinError`."""
    token = (home / "token").read_text(encoding="utf-8").strip()
    command = [sys.executable, "-m", "rose.reward.worker", "--run", str(run_dir)]
    command += ["--pool", "{}:{}".format(*place.getsockname()), "--token", str(home / "token")]
    worker = subprocess.Popen([*command, "--number", "0"], stdin=subprocess.DEVNULL)
    end = time.monotonic() + START_S
    place.settimeout(0.5)
    while worker.poll() is None and time.monotonic() < end:
        try:
            channel, _ = place.accept()
            channel.settimeout(START_S)
            received = Frames(channel, HELLO_BYTES)
            while not (whole := received.take()):
                if whole is None:
                    raise EOFError
            hello = msgspec.msgpack.decode(whole[0], type=Hello)
            if hmac.compare_digest(hello.token, token):
                return worker, channel, whole[0]
        except (OSError, EOFError, FrameError, msgspec.DecodeError):
            continue  # nobody yet, or somebody else of this node
    raise JoinError(f"no reward worker was up within {START_S:g} s, see above", temporary=True)


class Relay:
    """Between a worker's socket and the pool, until one of them ends."""

    def __init__(self, channel: socket.socket, link) -> None:
        self._channel, self._link = channel, link
        self._received = Frames(channel, FRAME_BYTES)
        self._held: deque[tuple[float, bytes]] = deque()  # (when it goes, monotonic; an answer)
        self._pause_s = PAUSE_S[0]
        self.signalled = False

    def run(self, hello: bytes) -> Ended:
        """Raises `LinkError`."""
        self._link.send(hello)
        beat_at = time.monotonic()
        while not self.signalled:
            readable, _, _ = select.select([self._channel], [], [], self._pause_s)
            if readable and not self._from_worker():
                return self._leave("its worker has ended", True, Ended.AGAIN)
            self._pause_s = min(self._pause_s * 1.5, PAUSE_S[1])
            while (message := self._link.take()) is not None:
                if message in (STOP, AGAIN):
                    ended = Ended.DONE if message == STOP else Ended.AGAIN
                    return self._leave("dismissed", False, ended)
                if message != BEAT:
                    self._pause_s = PAUSE_S[0]
                    self._channel.sendall(frame(message))
            now = time.monotonic()
            while self._held and self._held[0][0] < now:
                self._link.send(self._held.popleft()[1])
            if now - beat_at > BEAT_S:
                beat_at = now
                self._link.send(BEAT)
            if now - self._link.last_seen > LOST_S:
                return Ended.AGAIN
        return self._leave("its job ends", False, Ended.DONE)

    def _from_worker(self) -> bool:
        """Whether it is still there."""
        try:
            answers = self._received.take()
        except OSError:
            return False
        due = time.monotonic() + HOLD_S
        self._held.extend((due, answer) for answer in answers or [])
        return answers is not None

    def _leave(self, why: str, fault: bool, ended: Ended) -> Ended:
        if fault:  # its last answers are right, unless Slurm ends this process, too
            time.sleep(HOLD_S)
        while self._held and not self.signalled:
            self._link.send(self._held.popleft()[1])
        self._link.send(msgspec.msgpack.encode(Leaving(why, fault)))
        end = time.monotonic() + GOODBYE_S
        while not self._link.push() and time.monotonic() < end:
            time.sleep(PAUSE_S[0])
        return ended


def run(run_dir: Path, pool: int) -> Ended:
    """One membership. Raises `JoinError`."""
    config = configuration.load(run_dir / "config.json")
    home = folder(run_dir, pool)
    if endpoint(home) is None:
        raise JoinError(f"{run_dir} doesn't run now", temporary=True)
    with tempfile.TemporaryDirectory(prefix="rose-reward-") as scratch:
        os.environ["TMPDIR"] = scratch
        with socket.create_server((LOOPBACK, 0)) as place:
            worker, channel, hello = start_worker(run_dir, home, place)
        mpi = config.cluster.mpi
        os.environ.update(config.cluster.interface_env | mpi.env | mpi.join_env)  # before MPI looks
        application = Application(home)
        try:
            answer = application.ask(ANSWER_S)
            from rose.comm.link import Link, LinkError

            relay = Relay(channel, Link(application.connect(answer.port)))

            def leave(*_) -> None:
                relay.signalled = True

            for number in (signal.SIGTERM, signal.SIGUSR2):
                signal.signal(number, leave)
            print(f"joined pool {pool} of {run_dir}", flush=True)
            try:
                return relay.run(hello)
            except (LinkError, OSError) as error:
                print(f"lost pool {pool} of {run_dir}: {error}", flush=True)
                return Ended.AGAIN
        finally:
            application.withdraw()
            worker.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="a reward rank of a Slurm job; started by the job")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--pool", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    for name in mpi_process.launchers():
        del os.environ[name]
    try:
        code = run(args.run, args.pool)
    except JoinError as error:
        print(error, flush=True)
        code = Ended.NOT_NOW if error.temporary else Ended.REFUSED
    sys.stdout.flush()
    os._exit(code)  # MPI is not finalised: after a peer's death that can abort


if __name__ == "__main__":
    main()
