"""A process between the coordinator and one borrowed rank: MPI on one side, a socket on the other.

    mpiexec -n 1 python -m rose.comm.porter SOCKET    started by `rose.comm.guest`, one per admitted rank

MPICH ends a process whose connected peer dies at a bad moment, and serves nobody else while it
accepts. So the coordinator connects to no borrowed rank: this process does, and may block or die of
it, which costs that rank alone. On the socket go frames (`rose.comm.frames`): the first to the
coordinator is the MPI port. An empty one from it announces that the rank connects (accepting takes a whole
core, so not before), the answer that it is here. By mpiexec, because to MPICH all processes without
a launcher are the same one, and the rank has none. Imports little: one runs for each rank.
"""  # noqa: E501

from __future__ import annotations

import select
import socket
import sys

from rose.comm.frames import Frames, frame

ACCEPT_S = 10
_PAUSE_S = 0.004
_FIRST_PAUSE_S = 0.001  # a look costs 50 us of CPU that the engines want


def main() -> None:
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    from mpi4py import MPI

    from rose.comm import mpi_process
    from rose.comm.link import MAX_BYTES, Link

    mpi_process.unname(MPI.COMM_WORLD)
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    port = MPI.Open_port()
    channel.sendall(frame(port.encode()))
    received = Frames(channel, MAX_BYTES)
    while not (data := received.take()):
        if data is None:
            return  # it never connected
    info = MPI.Info.Create()
    info.Set("timeout", str(ACCEPT_S))
    link = Link(MPI.COMM_SELF.Accept(port, info))
    channel.sendall(frame(b""))
    forward(channel, received, link)


def forward(channel: socket.socket, received: Frames, link) -> None:
    """Forward frames both ways until the coordinator closes its end. A frame is forwarded when all
    of it is here."""
    pause = _FIRST_PAUSE_S
    while True:
        readable, _, _ = select.select([channel], [], [], pause)
        if readable:
            if (frames := received.take()) is None:
                return
            for data in frames:
                link.send(data)
        pause = min(pause * 1.5, _PAUSE_S)
        while (message := link.take()) is not None:
            channel.sendall(frame(message))
            pause = _FIRST_PAUSE_S


if __name__ == "__main__":
    import os

    try:
        main()
    except Exception as error:  # the coordinator sees the socket close; why, its log tells
        print(
            f"porter: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            file=sys.stderr,
            flush=True,
        )
    os._exit(0)  # MPI is not finalised: after a peer's death that can abort
