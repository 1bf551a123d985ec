"""A rank program for the supervisor's tests: real MPI, a real guard, and a body that does what TOY
says.

TOY="<role>-<index>:<deed>" with deed kill | exit | raise | hang (goes on after a SIGTERM, of which
the file `told` in the run's folder tells where it takes files); every other rank works until the
coordinator ends, which it does after TOY_SECONDS, or at once, and cleanly, on SIGTERM. The deed
waits until all ranks have said that they are up, and for the file TOY_WAITS, if one is named.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rose import files
from rose.comm import mpi_process
from rose.launch import guard, rank_status, resume
from rose.protocol import Role
from rose.transfer import mirror


def body(me, run_dir, attempt):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    who, _, deed = os.environ.get("TOY", "").partition(":")
    deed = deed if who == f"{me.role.value}-{me.index}" else ""
    stopped = answer_sigterm(me, run_dir, deed)  # before the test can know that it is up
    world.Barrier()
    rank_status.mark_joined(run_dir, attempt, me.rank)
    if "TOY" in os.environ:  # as ranks that are ended before all have joined have it
        names = "\n".join(mpi_process.shared("self"))
        (run_dir / f"shared-{me.rank}").write_text(names)
    else:
        mpi_process.unlink_shared(world)
    print(f"toy {me.role.value} {me.index} of {world.size} is up", flush=True)
    world.Barrier()
    if me.role is Role.ROLLOUT:  # as an engine does: a process of its own
        engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        files.write_whole(run_dir / f"engine-{me.rank}.pid", str(engine.pid).encode())
    if deed == "kill":
        mirror.choose_path(run_dir).mkdir()  # the machine's memory
    if deed:
        misbehave(deed)
    if me.role is Role.COORDINATOR:
        coordinate(world, run_dir, stopped)
    else:
        while not world.iprobe(source=0):
            time.sleep(0.02)


def answer_sigterm(me, run_dir, deed):
    """A list that has something once the signal has come; only ranks that hang and the coordinator
    do not end by it."""
    stopped = []

    def told(*_):
        with contextlib.suppress(OSError):
            (run_dir / "told").touch()

    if deed == "hang":
        signal.signal(signal.SIGTERM, told)
    elif me.role is Role.COORDINATOR:
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    return stopped


def misbehave(deed):
    if deed == "hang":
        time.sleep(300)
    while not Path(os.environ.get("TOY_WAITS", "/")).exists():
        time.sleep(0.02)
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "exit":
        os._exit(7)
    raise ValueError("the toy broke")


def coordinate(world, run_dir, stopped):
    deadline = time.monotonic() + float(os.environ.get("TOY_SECONDS", "1"))
    while not stopped and time.monotonic() < deadline:
        time.sleep(0.02)
    (run_dir / "clean").touch()
    if not stopped:
        resume.mark_finished(run_dir, steps=1)
    for rank in range(1, world.size):
        world.send(None, dest=rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path)
    parser.add_argument("--attempt", type=int)
    args = parser.parse_args()
    guard.run(args.run, args.attempt, lambda me: body(me, args.run, args.attempt))
