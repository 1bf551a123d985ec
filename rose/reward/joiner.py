"""A rank of a Slurm job that computes rewards for a run, started by the job (job.py):

    python -m rose.reward.joiner --run RUN --pool INDEX

It starts a worker, joins the pool over MPI when the worker is up, and forwards their messages. As
the scorer runs in another process, it can't keep the rank from sending heartbeats. The rank is a
singleton MPI world, whose death harms no other rank. Exit codes are `Ended`.
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

START_S = 120.0  # longest start of the worker; user code may import large packages
ANSWER_S = 20.0  # longest wait for the pool's answer; its file system may be slow
GOODBYE_S = 2.0  # longest wait for the last message to leave
# Seconds that an answer is held back. If Slurm ends the job, it may have killed the program that
# checks an answer just before it signals this process, and that answer is wrong.
HOLD_S = 0.2
# Seconds between two polls of MPI: after a message, and the most to which silence raises them.
LEAST_PAUSE_S = 0.001
MOST_PAUSE_S = 0.01


class Ended(enum.IntEnum):
    DONE = 0  # not needed any more, or asked to end
    AGAIN = 10  # lost its worker or its pool; another rank may join
    NOT_NOW = 12  # could not join; a later attempt may succeed
    REFUSED = 11  # refused, as every later attempt would be


def folder(run_dir: Path, pool: int) -> Path:
    """Return a pool's folder, with its door, its token and its workers' logs."""
    return run_dir / "rewards" / f"pool-{pool}"


def start_worker(
    run_dir: Path, home: Path, place: socket.socket
) -> tuple[subprocess.Popen, socket.socket, bytes]:
    """Start a worker and wait until it connects to `place`, which takes the role of the pool's
    socket. Return (worker, connection, its first message). Raises `JoinError`."""
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
            continue  # no connection yet, or one from another process of this node
    raise JoinError(f"no reward worker was up within {START_S:g} s, see above", temporary=True)


class Relay:
    """Forwards messages between a worker's socket and the pool until one of them ends."""

    def __init__(self, channel: socket.socket, link) -> None:
        self._channel, self._link = channel, link
        self._received = Frames(channel, FRAME_BYTES)
        self._held: deque[tuple[float, bytes]] = deque()  # (monotonic time to send it, answer)
        self._pause_s = LEAST_PAUSE_S
        self.signalled = False

    def run(self, hello: bytes) -> Ended:
        """Forward messages until the worker, the pool or the job ends. Raises `LinkError`."""
        self._link.send(hello)
        beat_at = time.monotonic()
        while not self.signalled:
            readable, _, _ = select.select([self._channel], [], [], self._pause_s)
            if readable and not self._from_worker():
                return self._leave("its worker has ended", True, Ended.AGAIN)
            self._pause_s = min(self._pause_s * 1.5, MOST_PAUSE_S)
            while (message := self._link.take()) is not None:
                if message in (STOP, AGAIN):
                    ended = Ended.DONE if message == STOP else Ended.AGAIN
                    return self._leave("dismissed", False, ended)
                if message != BEAT:
                    self._pause_s = LEAST_PAUSE_S
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
        """Take answers from the worker. False if it has closed the connection."""
        try:
            answers = self._received.take()
        except OSError:
            return False
        due = time.monotonic() + HOLD_S
        self._held.extend((due, answer) for answer in answers or [])
        return answers is not None

    def _leave(self, why: str, fault: bool, ended: Ended) -> Ended:
        if fault:  # if Slurm ends this process meanwhile, the held answers are not sent
            time.sleep(HOLD_S)
        while self._held and not self.signalled:
            self._link.send(self._held.popleft()[1])
        self._link.send(msgspec.msgpack.encode(Leaving(why, fault)))
        end = time.monotonic() + GOODBYE_S
        while not self._link.push() and time.monotonic() < end:
            time.sleep(LEAST_PAUSE_S)
        return ended


def run(run_dir: Path, pool: int) -> Ended:
    """Start a worker, join the pool, and serve until the membership ends. Raises `JoinError`."""
    config = configuration.load(run_dir / "config.json")
    home = folder(run_dir, pool)
    if endpoint(home) is None:
        raise JoinError(f"{run_dir} doesn't run now", temporary=True)
    with tempfile.TemporaryDirectory(prefix="rose-reward-") as scratch:
        os.environ["TMPDIR"] = scratch
        with socket.create_server((LOOPBACK, 0)) as place:
            worker, channel, hello = start_worker(run_dir, home, place)
        mpi = config.cluster.mpi
        # MPI reads these when it is initialised.
        os.environ.update(config.cluster.interface_env | mpi.env | mpi.join_env)
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
