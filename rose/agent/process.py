"""The process in which an environment host's trajectories run, started by its rank (rank.py):

    python -m rose.agent.process --run RUN --attempt N --rank RANK --channel FD

Environments are foreign code: they may crash, leak memory or be killed by the kernel. So they run
in this process, without MPI. The rank, which the job can't lose, forwards its messages. The channel
is a stream socket for frames (`rose.comm.frames`). A frame from the process holds the receiving
rank's number (uint32, little-endian) and then a message. A frame to the process is only a message.
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

RANK_BYTES = 4  # bytes of the receiving rank's number in a frame
READ_BYTES = 2**20  # most bytes of the channel's read buffer
FRAME_BYTES = MAX_MESSAGE_BYTES + 64  # most bytes of a frame: message, header and rank


class Channel:
    """Sends and receives messages as `Mailbox` does, through the rank."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, rank: int, message: p.Message) -> None:
        """Queue `message` for `rank` and return at once. Raises `WireError` if it is too large."""
        self._writer.write(frames.frame(rank.to_bytes(RANK_BYTES, "little") + encode(message)))

    async def receive(self) -> p.Message:
        return decode(await frames.read(self._reader, FRAME_BYTES))

    async def drain(self) -> None:
        """Send the queued messages, then close the channel."""
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
    """Run the host and return the exit code. An error is sent to this rank, which then fails."""
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
    faulthandler.enable()  # logs all stacks when native code crashes, and on the rank's SIGABRT
    # Survive the SIGTERM that Slurm sends to a whole job. Children would inherit SIG_IGN instead.
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
