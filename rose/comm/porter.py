"""Forward messages between the coordinator (a socket) and one borrowed rank (MPI).

    mpiexec -n 1 python -m rose.comm.porter SOCKET    started by `rose.comm.guest`, one per admitted rank

MPICH may end a process when its connected peer dies, and blocks it while it accepts a connection.
So the coordinator does not connect to a borrowed rank itself. This process connects, and if it
blocks or dies, only that rank is lost. The socket carries frames (`rose.comm.frames`):
1. The porter sends the MPI port.
2. The coordinator sends an empty frame when the rank is about to connect. The porter accepts from
   then on and not earlier, because accepting occupies a whole core.
3. The porter sends an empty frame when the rank is connected.
4. Each further frame is a message.

mpiexec starts the porter because to MPICH all processes without a launcher are the same process,
and the rank has no launcher. The module imports little because each borrowed rank has a porter.
"""  # noqa: E501

from __future__ import annotations

import select
import socket
import sys

from rose.comm.frames import Frames, frame

# Seconds for the rank to connect, once it has announced its connection.
ACCEPT_S = 10
_PAUSE_S = 0.004  # the longest pause between two polls of MPI
# The pause after a message. A poll takes 50 us of CPU, which the engines need.
_FIRST_PAUSE_S = 0.001


def main() -> None:
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    from mpi4py import MPI

    from rose.comm import mpi_process
    from rose.comm.link import MAX_BYTES, Link

    mpi_process.unlink_shared(MPI.COMM_WORLD)
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    port = MPI.Open_port()
    channel.sendall(frame(port.encode()))
    received = Frames(channel, MAX_BYTES)
    while not (data := received.take()):
        if data is None:
            return  # a socket that the coordinator closed, because the rank never connected
    info = MPI.Info.Create()
    info.Set("timeout", str(ACCEPT_S))
    link = Link(MPI.COMM_SELF.Accept(port, info))
    channel.sendall(frame(b""))
    forward(channel, received, link)


def forward(channel: socket.socket, received: Frames, link) -> None:
    """Forward whole frames both ways until the coordinator closes its end of the socket."""
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
    except Exception as error:  # printed to the coordinator's log
        print(
            f"porter: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            file=sys.stderr,
            flush=True,
        )
    os._exit(0)  # no MPI_Finalize, which can abort after a peer's death
