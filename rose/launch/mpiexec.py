"""Start ranks on this machine, as MPICH's mpiexec does, without listening on any port.

    python -I rose/launch/mpiexec.py [-keep] -n 2 [-env NAME VALUE]... COMMAND... [: -n 1 ...]

MPICH's own launcher, hydra, listens on all interfaces without a secret for as long as its ranks
run, and a dozen bytes from anybody end them. This launcher speaks version 1 of MPICH's process
management interface with each rank, over a socket pair that the rank inherits (PMI_FD). The
interface gives the number of ranks, a table for their addresses, and a barrier. The launcher ends
after its last rank, with MPI_Abort's exit code or else the first that isn't 0. If a rank fails, the
others are killed, unless `-keep` is given. If a rank calls MPI_Abort, they are always killed. If
the launcher is killed, all ranks end too. It can't start ranks on other machines, as srun does, and
refuses `MPI_Comm_spawn`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

PR_SET_PDEATHSIG = 1
LIMITS = {"kvsname_max": 256, "keylen_max": 64, "vallen_max": 1024}  # characters; hydra's limits
# Beginnings of the variables by which launchers describe their world to MPI.
LAUNCHERS = ("PMI", "HYDI", "HYDRA", "MPI_LOCAL", "OMPI_", "PALS_")
OPTION = {"-n": 1, "-env": 2}  # option -> number of its arguments


@dataclass
class Rank:
    number: int
    process: subprocess.Popen
    wire: socket.socket  # the launcher's end of the rank's socket pair
    unread: bytes = b""  # beginning of a line whose end has not arrived
    spawning: bool = False  # True until the last line of a spawn request, which is refused


@dataclass
class World:
    """The ranks, and the table of their addresses."""

    size: int
    # MPICH distinguishes worlds by this name, and names their shared memory after it.
    name: str = field(default_factory=lambda: f"kvs_{secrets.token_hex(8)}")
    ranks: list[Rank] = field(default_factory=list)
    table: dict[str, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # ranks that are in the barrier
    code: int = 0  # the first exit code that isn't 0

    def __post_init__(self) -> None:
        # All ranks are on one node: one block of nodes from node 0 on, 1 node of `size` ranks.
        self.table["PMI_process_mapping"] = f"(vector,(0,1,{self.size}))"

    def answer(self, rank: Rank, line: str) -> str | None:
        """Return the answer to one line of a rank, as words NAME=VALUE; None if no answer is due
        yet."""
        asked = dict(word.partition("=")[::2] for word in line.split())
        if rank.spawning:
            if line.strip() != "endcmd":
                return None
            rank.spawning = False
            return "cmd=spawn_result rc=-1 msg=not_supported"
        match asked.get("cmd", asked.get("mcmd")):
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                return _message("maxes", rc=0, **LIMITS)
            case "get_appnum":
                return "cmd=appnum rc=0 appnum=0"
            case "get_my_kvsname":
                return _message("my_kvsname", rc=0, kvsname=self.name)
            case "get_universe_size":
                return _message("universe_size", rc=0, size=self.size)
            case "put":
                self.table[asked["key"]] = asked["value"]
                return "cmd=put_result rc=0 msg=success"
            case "get":
                value = self.table.get(asked["key"])
                if value is None:
                    return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
                return _message("get_result", rc=0, msg="success", value=value)
            case "barrier_in":
                return self._enter_barrier(rank)
            case "finalize":
                return "cmd=finalize_ack rc=0"
            case "abort":
                _say(f"rank {rank.number} called MPI_Abort: {line.strip()}")
                self.code = int(asked.get("exitcode", 1)) % 256 or 1
                # The caller of MPI_Abort is killed as well: it waits for that.
                self.end()
                return None
            case "spawn":
                rank.spawning = True
                return None
            case other:
                _say(f"rank {rank.number} asked for {other!r}, which is not supported")
                return f"cmd={other}_result rc=-1 msg=not_supported"

    def end(self) -> None:
        """Kill all ranks."""
        for rank in self.ranks:
            rank.process.kill()

    def _enter_barrier(self, rank: Rank) -> None:
        self.waiting.add(rank.number)
        if len(self.waiting) == self.size:
            self.waiting.clear()
            for each in self.ranks:
                _send(each, "cmd=barrier_out rc=0")


def blocks(arguments: list[str]) -> list[tuple[int, dict[str, str], list[str]]]:
    """Return (count, variables, command) of each block between colons. Raises ValueError."""
    found = []
    rest = arguments
    while rest:
        count, variables = 1, {}
        while rest and rest[0] in OPTION:
            name, values = rest[0], rest[1 : 1 + OPTION[rest[0]]]
            if len(values) < OPTION[name]:
                raise ValueError(f"{name}: too few words follow")
            if name == "-n":
                count = int(values[0])
            else:
                variables[values[0]] = values[1]
            rest = rest[1 + len(values) :]
        end = rest.index(":") if ":" in rest else len(rest)
        command, rest = rest[:end], rest[end + 1 :]
        if not command or count < 1:
            raise ValueError(f"-n {count}: a number above 0 and a command are needed")
        found.append((count, variables, command))
    if not found:
        raise ValueError("no command")
    return found


def start(world: World, number: int, variables: dict[str, str], command: list[str]) -> Rank:
    """Start a rank, which inherits one end of a socket pair."""
    ours, theirs = socket.socketpair()
    own = {
        "PMI_FD": str(theirs.fileno()),
        "PMI_RANK": str(number),
        "PMI_SIZE": str(world.size),
        "MPI_LOCALRANKID": str(number),
        "MPI_LOCALNRANKS": str(world.size),
    }
    with theirs:
        process = subprocess.Popen(
            command,
            env=_without_launchers() | variables | own,
            pass_fds=[theirs.fileno()],
            preexec_fn=_ends_with(os.getpid()),
        )
    return Rank(number, process, ours)


def _without_launchers() -> dict[str, str]:
    """Return this process's variables without those of other launchers, such as Slurm's srun, which
    would describe another world to MPI."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def _ends_with(parent: int) -> Callable[[], None]:
    """Return a `preexec_fn` by which a process is killed when `parent` ends."""
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # a launcher that was killed before prctl took effect
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def serve(world: World, keep: bool) -> None:
    """Answer the ranks until the last has ended. Unless `keep`, kill all when one fails."""
    children = _child_ends()
    running = list(world.ranks)
    with selectors.DefaultSelector() as selector:
        selector.register(children, selectors.EVENT_READ)
        for rank in running:
            selector.register(rank.wire, selectors.EVENT_READ, rank)
        while running:
            for key, _ in selector.select():
                if key.fileobj is children:
                    children.recv(65536)
                elif not _read(world, key.data):
                    selector.unregister(key.fileobj)
            for rank in [each for each in running if each.process.poll() is not None]:
                running.remove(rank)
                _read(world, rank)  # the last message, perhaps the reason of an abort
                if ended := rank.process.returncode:
                    _say(f"rank {rank.number} ended with {_code_or_signal(ended)}")
                    world.code = world.code or (ended if ended > 0 else 128 - ended)
                    if not keep:
                        world.end()


def _child_ends() -> socket.socket:
    """Return a socket that is readable now, and again whenever a child has ended."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    writer.send(b"!")
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # no-op: Python writes to the wakeup socket
    return reader


def _read(world: World, rank: Rank) -> bool:
    """Answer what a rank has sent. Return True if it can send more."""
    try:
        got = rank.wire.recv(65536, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:  # a rank that was killed before it read our last answer
        return False
    *lines, rank.unread = (rank.unread + got).split(b"\n")
    for line in lines:
        try:
            reply = world.answer(rank, line.decode())
        except (KeyError, ValueError):
            _say(f"rank {rank.number} sent what is no request: {line[:80]!r}")
            rank.wire.shutdown(socket.SHUT_RDWR)
            return False
        if reply is not None:
            _send(rank, reply)
    return bool(got)


def _send(rank: Rank, message: str) -> None:
    with suppress(OSError):  # a rank that has ended, which `serve` will notice
        rank.wire.sendall(message.encode() + b"\n")


def _message(command: str, **values: object) -> str:
    return " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in values.items())])


def _code_or_signal(code: int) -> str:
    if code > 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def _say(text: str) -> None:
    print(f"mpiexec: {text}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    arguments = sys.argv[1:]
    keep = arguments[:1] == ["-keep"]
    try:
        asked = blocks(arguments[keep:])
    except ValueError as error:
        sys.exit(f"mpiexec: {error}")
    world = World(sum(count for count, _, _ in asked))
    try:
        for count, variables, command in asked:
            for _ in range(count):
                world.ranks.append(start(world, len(world.ranks), variables, command))
    except OSError as error:
        sys.exit(f"mpiexec: {command[0]} can't be started: {error.strerror}")
    serve(world, keep)
    sys.exit(world.code)


if __name__ == "__main__":
    main()
