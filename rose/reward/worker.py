"""A reward worker, started by a pool:

    python -m rose.reward.worker --run RUN --pool HOST:PORT --token FILE --number N

It builds the run's scorer once. It computes the scores that the pool requests, several at once if
the pool sends several, until the pool closes the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from rose import config as configuration
from rose import inputs
from rose.comm import frames
from rose.config import ConfigError
from rose.processes import die_with_parent, run_to_its_end
from rose.reward import command, scorers
from rose.reward.episode import Episode, Hung, score_of
from rose.reward.messages import FRAME_BYTES, Answer, Hello, Work
from rose.reward.scorers import Scorer

ERROR_CHARACTERS = 2_000  # longest error text in an `Answer`
# Seconds after an answer's limit at which the worker stops a scorer that exceeds it. Less than the
# pool's `GRACE_S`, so that the worker can report it.
MARGIN_S = 2.0


async def serve(scorer: Scorer, host: str, port: int, hello: Hello, at_once: int) -> None:
    """Compute scores until the connection ends. Plain functions run in `at_once` threads. With
    asyncio's default (six on two cores) a score could spend its time limit waiting for a thread."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(at_once))
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(frames.frame(msgspec.msgpack.encode(hello)))
    running: set[asyncio.Task] = set()
    try:
        while True:
            work = msgspec.msgpack.decode(await frames.read(reader, FRAME_BYTES), type=Work)
            running.add(task := asyncio.create_task(answer(scorer, work, writer)))
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the pool needs this worker no more
    finally:
        for task in running:
            task.cancel()
        writer.close()


async def answer(scorer: Scorer, work: Work, writer: asyncio.StreamWriter) -> None:
    """Compute a score and send it, or the error for which there is none. If a function hangs, the
    process exits, since a thread can't be stopped and would occupy a slot."""
    began, score, error, hung = time.monotonic(), None, "", False
    try:
        async with asyncio.timeout(work.limit_s + MARGIN_S):
            found = await scorer.score(
                msgspec.json.decode(work.episode, type=Episode), work.limit_s
            )
        score = score_of(found, type(scorer).__name__)
    except Hung as raised:
        error, hung = str(raised), True
    except TimeoutError:
        error = f"no score within its limit of {work.limit_s:g} s"
    except (Exception, SystemExit) as raised:  # A user's function may raise anything.
        error = f"{type(raised).__name__}: {raised}"[:ERROR_CHARACTERS]
        error = error.encode("utf-8", "backslashreplace").decode()  # A message carries no halves.
    said = Answer(work.number, score, error, time.monotonic() - began)
    writer.write(frames.frame(msgspec.msgpack.encode(said)))
    if hung:
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="a reward worker; started by a reward rank")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--token", type=Path, required=True)
    parser.add_argument("--number", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    # Slurm signals all processes of a job, but the process that started this one ends it. SIG_IGN
    # would be inherited by the programs that check answers.
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
    host, _, port = args.pool.rpartition(":")
    hello = Hello(args.token.read_text(encoding="utf-8").strip(), args.number)
    run_to_its_end(serve(scorer, host, int(port), hello, settings.per_worker))


if __name__ == "__main__":
    main()
