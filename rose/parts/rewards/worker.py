"""A reward worker, started by a pool, or by a Slurm job (job.py) without a number:

    python -m rose.parts.rewards.worker --run RUN --pool FILE [--number N]

FILE has the pool's addresses and its token. The worker builds the run's scorer once. It computes
the scores that the pool requests, several at once if the pool sends several, until the pool closes
the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import hmac
import os
import secrets
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from rose import config as configuration
from rose import inputs
from rose.comm import frames
from rose.comm.address import LOOPBACK
from rose.config import ConfigError, Reward
from rose.parts.rewards import command, scorers
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
from rose.parts.rewards.scorers import Scorer
from rose.processes import die_with_parent, run_to_its_end
from rose.reward.episode import Episode, Hung, score_of

ERROR_CHARACTERS = 2_000  # longest error text in an `Answer`
# Seconds after an answer's limit at which the worker stops its scorer. Less than the pool's
# `GRACE_S`, so that the worker can report it.
MARGIN_S = 2.0
# Seconds after an answer's limit at which a worker of a Slurm job exits if its scorer keeps
# Python's lock. More than the pool's `GRACE_S`, after which the pool counts a try. The pool would
# take an earlier exit for the end of the job.
STUCK_S = 10.0
REACH_S = 5.0  # longest wait for a pool's answer at one of its addresses
JOIN_S = 60.0  # seconds without a pool after which a worker ends
PAUSE_S = 2.0  # seconds between two attempts to find a pool
# Seconds for which a worker of a Slurm job holds a score back. When Slurm ends the job, it may kill
# the program that checks an answer just before it signals the worker. The score would then be
# wrong, and the worker exits before it sends the score.
HOLD_S = 0.2

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(file: Path, number: int | None) -> Connection | None:
    """Connect to a pool at the first of its addresses at which it answers. Return None if it
    answers at none."""
    try:
        pool = msgspec.json.decode(file.read_bytes(), type=PoolFile)
    except (OSError, msgspec.DecodeError):
        return None  # a run that has not started, or that starts again
    for address in pool.addresses:
        if address[0] == LOOPBACK and pool.host != socket.gethostname():
            continue
        writer = None
        try:
            async with asyncio.timeout(REACH_S):
                reader, writer = await asyncio.open_connection(*address)
                end_when_lost(writer)
                there = writer.get_extra_info("peername")
                nonce = await frames.read(reader, HELLO_BYTES)
                shown = proof(pool.token, "worker", nonce, there)
                hello = Hello(number, shown, secrets.token_bytes(NONCE_BYTES))
                writer.write(frames.frame(msgspec.msgpack.encode(hello)))
                shown = await frames.read(reader, HELLO_BYTES)
            if hmac.compare_digest(shown, proof(pool.token, "pool", hello.nonce, there)):
                return reader, writer
        except (OSError, EOFError, TimeoutError, frames.FrameError):
            pass
        if writer is not None:
            writer.close()
    return None


async def join(file: Path, number: int | None) -> Connection | None:
    """Try to connect to a pool for `JOIN_S` seconds: it may be busy, or start. None if it fails."""
    end = time.monotonic() + JOIN_S
    while (found := await connect(file, number)) is None and time.monotonic() < end:
        await asyncio.sleep(PAUSE_S)
    return found


async def exit_when_stuck(limit_s: float) -> None:
    """Exit if the event loop is blocked for `limit_s` seconds: a scorer keeps Python's lock."""
    while True:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        await asyncio.sleep(1.0)


async def serve(scorer: Scorer, file: Path, number: int | None, settings: Reward) -> int:
    """Compute scores until the connection ends, and return the exit code. It is 0 if the pool needs
    no further worker; otherwise a Slurm job starts another. Synchronous functions run in as many
    threads as scores run at once. With asyncio's default (six on two cores) a score could wait for
    a thread until its time limit."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(settings.per_worker))
    found = await join(file, number)
    if found is None:
        print(f"no pool answers at the addresses in {file}", flush=True)
        return 0
    reader, writer = found
    running: set[asyncio.Task] = set()
    hold_s = 0.0
    if number is None:
        hold_s = HOLD_S
        running.add(asyncio.create_task(exit_when_stuck(settings.timeout_s + STUCK_S)))
    try:
        while (data := await frames.read(reader, FRAME_BYTES)) != STOP:
            work = msgspec.msgpack.decode(data, type=Work)
            running.add(task := asyncio.create_task(answer(scorer, work, writer, hold_s)))
            task.add_done_callback(running.discard)
        return 0
    except (asyncio.IncompleteReadError, OSError):
        return 1
    finally:
        for task in running:
            task.cancel()
        writer.close()


async def answer(
    scorer: Scorer, work: Work, writer: asyncio.StreamWriter, hold_s: float = 0.0
) -> None:
    """Compute a score and send it after `hold_s` seconds. If there is no score, send the error. If
    a function hangs, exit, because a thread can't be stopped and would occupy a slot."""
    began, score, error, hung = time.monotonic(), None, "", False
    try:
        async with asyncio.timeout(work.limit_s + MARGIN_S) as limit:
            found = await scorer.score(
                msgspec.json.decode(work.episode, type=Episode), work.limit_s
            )
        score = score_of(found, type(scorer).__name__)
    except Hung as raised:
        error, hung = str(raised), True
    except (Exception, SystemExit) as raised:  # any error of a user's function
        error = f"{type(raised).__name__}: {raised}"[:ERROR_CHARACTERS]
        if limit.expired():
            error = f"no score within its limit of {work.limit_s:g} s"
        error = error.encode("utf-8", "backslashreplace").decode()  # lone surrogates escaped
    said = Answer(work.number, score, error, time.monotonic() - began)
    await asyncio.sleep(hold_s)
    writer.write(frames.frame(msgspec.msgpack.encode(said)))
    if hung:
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="a reward worker; started by a pool or a job")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--number", type=int)
    args = parser.parse_args()
    die_with_parent()
    if args.number is None:
        for each in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(each, lambda *_: os._exit(0))
    else:
        # Slurm signals all processes of a job, but only the pool ends this worker. SIG_IGN would be
        # inherited by the programs that check answers.
        signal.signal(signal.SIGTERM, lambda *_: None)
    settings = configuration.load(args.run / "config.json").reward
    inputs.expect(args.run)
    try:
        scorer = scorers.build(settings.name, settings.args)
    except ConfigError as error:  # an edited file, for which a traceback says no more
        raise SystemExit(str(error)) from None
    if settings.name == "command" and not command.isolation():
        print(
            "no namespaces here (unshare): programs that check answers see the network and other "
            "processes",
            flush=True,
        )

    async def run() -> None:
        code = await serve(scorer, args.pool, args.number, settings)
        sys.stdout.flush()
        os._exit(code)  # Threads in which functions still run are not awaited.

    run_to_its_end(run())


if __name__ == "__main__":
    main()
