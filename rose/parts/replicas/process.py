"""The process of an elastic replica, started by a rollout rank (rollout_worker.py):

    python -m rose.parts.replicas.process --config FILE --model FOLDER --worker NAME --channel FD

It may be killed at any instruction. Then its result is lost and its rows are computed elsewhere.
The channel is a stream socket with messages in frames (`rose.comm.frames`). The process receives
`LoadVersion`, `ComputeGradient`, `TrainStep` and `TrainPart`, and sends `ReplicaReady` and
`GradientComputed`. Before it exits with an error it sends `RankFailed` with rank -1.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from rose import config as cfg
from rose import protocol as p
from rose.comm import frames
from rose.comm.wire import MAX_MESSAGE_BYTES, decode, encode
from rose.observe.recorder import NullRecorder
from rose.processes import importing
from rose.transfer.errors import TransferError

FRAME_BYTES = MAX_MESSAGE_BYTES + 64  # a message with its header


def serve(config: cfg.Config, model: Path, name: str, channel: socket.socket) -> None:
    """Compute what the rollout rank orders, until that rank closes the channel."""
    with importing():
        from rose.parts.replicas.replica import Replica
    replica = Replica(config, model, NullRecorder())

    def send(message: p.Message) -> None:
        channel.sendall(frames.frame(encode(message)))

    send(p.ReplicaReady(name, os.getpid(), replica.engine.nbytes))
    received = frames.Frames(channel, FRAME_BYTES)
    order: p.ComputeGradient | None = None
    step: p.TrainStep | None = None
    rows: dict[int, p.Trajectory] = {}
    parts, began = 0, 0.0
    while (whole := received.take()) is not None:
        for message in map(decode, whole):
            match message:
                case p.LoadVersion(version, store):
                    with suppress(TransferError):  # raised again when a step needs the version
                        replica.receive(version, store)
                case p.ComputeGradient():
                    order, step, rows, parts, began = message, None, {}, 0, time.time()
                case p.TrainStep():
                    step = message
                case p.TrainPart():
                    rows.update(zip(message.indices, message.trajectories, strict=True))
                    parts += 1
                case _:
                    raise ValueError(f"a replica has no use for {type(message).__name__}")
            if order is not None and step is not None and parts == step.parts:
                found = replica.compute(order, step, rows)
                send(p.GradientComputed(name, order.step, found, time.time() - began))
                order = None


def main() -> int:
    parser = argparse.ArgumentParser(description="a replica's process; see rose/parts/replicas")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--channel", type=int, required=True)
    args = parser.parse_args()
    faulthandler.enable()
    # Slurm sends SIGTERM to all of a job's processes, but the rollout rank ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = socket.socket(fileno=args.channel)
    try:
        serve(cfg.load(args.config), args.model, args.worker, channel)
    except Exception as error:
        traceback.print_exc()
        failed = p.RankFailed(-1, f"{type(error).__name__}: {error}")
        channel.sendall(frames.frame(encode(failed)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
