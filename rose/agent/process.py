"""The process in which an environment host's trajectories run, started by its rank (rank.py):

    python -m rose.agent.process --run RUN --attempt N --rank RANK --channel FD

Environments are others' code: it may crash, leak memory or be ended by the kernel. So it runs
here, without MPI; the rank, which the job can't lose, passes its messages on. On the channel, a
stream socket, go frames (`rose.comm.frames`): to the rank the number of the rank that a message is
for, uint32 little-endian, then the message; from the rank the message alone.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import signal
import socket
import sys
import traceback
from pathlib import Path

from rose import config as cfg
from rose import inputs
from rose import protocol as p
from rose.comm import frames
from rose.comm.wire import MAX_MESSAGE_BYTES, decode, encode
from rose.launch.layout import Rank, layout
from rose.observe.recorder import NullRecorder, Recorder
from rose.processes import importing, run_to_its_end

RANK_BYTES = 4
READ_BYTES = 2**20  # at once from the channel
FRAME_BYTES = MAX_MESSAGE_BYTES + 64  # a message with its header and its rank


class Channel:
    """Sends and receives as a `Mailbox` does, by way of the rank."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, rank: int, message: p.Message) -> None:
        """Queue `message` for `rank`; returns at once. Raises `WireError` when it is too large."""
        self._writer.write(frames.frame(rank.to_bytes(RANK_BYTES, "little") + encode(message)))

    async def receive(self) -> p.Message:
        return decode(await frames.read(self._reader, FRAME_BYTES))

    async def drain(self) -> None:
        await self._writer.drain()
        self._writer.close()
        await self._writer.wait_closed()


async def run(
    me: Rank,
    config: cfg.Config,
    run_dir: Path,
    attempt: int,
    channel: socket.socket,
    recorder: NullRecorder,
) -> int:
    """The exit code. An error is told to the rank, which fails with it."""
    with importing():
        from rose.agent import host
    link = Channel(*await asyncio.open_connection(sock=channel, limit=READ_BYTES))
    try:
        folder = run_dir / "snapshots"
        await host.run(me.rank, config, link.send, link.receive, recorder, folder, attempt)
    except Exception as error:
        traceback.print_exc()
        link.send(me.rank, p.RankFailed(me.rank, f"{type(error).__name__}: {error}"))
        return 1
    finally:
        recorder.close()
        await link.drain()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="an environment host's process; see its rank")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True)
    args = parser.parse_args()
    faulthandler.enable()  # where native code crashed, the log tells
    # Slurm sends it to all of a job's processes; what this one starts gets it as usual
    signal.signal(signal.SIGTERM, lambda *_: None)
    inputs.expect(args.run)
    config = cfg.load(args.run / "config.json")
    me = layout(config)[args.rank]
    role = me.role.value
    recorder = (
        Recorder(args.run, me.rank, role, f"{role}-{me.index}", args.attempt)
        if config.observe.trace
        else NullRecorder()
    )
    channel = socket.socket(fileno=args.channel)
    return run_to_its_end(run(me, config, args.run, args.attempt, channel, recorder))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
