"""Where ranks on several hosts meet for torch.distributed: an address that each of them reached.

A host's own name is no address of it: Debian, Ubuntu and DGX OS map it to 127.0.1.1, some sites to
a network that compute nodes don't share, some not at all. So the first rank listens on each address
that its interfaces have, every other rank connects to all of them, and the first one that all have
reached is taken. The socket that was listening there is handed on, still open: nobody else gets its
port. Left out: the choice of NCCL's InfiniBand devices (NCCL_IB_HCA), which is NCCL's own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

MEET_S = 60.0  # for all ranks to have met; torch's own default is half an hour
REACH_S = 5.0  # for one connection: a firewall that drops packets answers never
LOOPBACK = "127.0.0.1"
# bridges that many hosts have with one address
ALIKE = ("docker", "virbr", "br-", "veth", "cni", "podman")
INTERFACES, INFINIBAND = Path("/sys/class/net"), 32  # its hardware type there (ARPHRD_INFINIBAND)
TOKEN_BYTES = 16
# Where gloo and NCCL look for their interface. To NCCL a bare name is a prefix: eth1 is eth10, too.
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}

Gather = Callable[[str], list[str]]  # collective: every rank's text, by rank


class RendezvousError(RuntimeError):
    """The ranks found no address that all of them can reach; it names all hosts and addresses."""


class Host(msgspec.Struct, frozen=True):
    """A rank's host. `space` differs between hosts and network namespaces."""

    name: str
    space: str
    addresses: list[tuple[str, str]]  # (interface, IP address), loopback left out

    def listing(self) -> str:
        return ", ".join(f"{address} ({name})" for name, address in self.addresses) or "no address"


@dataclass
class Place:
    """Where the ranks meet. `listener`: rank 0's open socket, null on the others. `interface`: by
    which this rank reaches the others, null when it can't be found."""

    address: str
    port: int
    listener: socket.socket | None
    interface: str | None
    hosts: list[Host]

    def claim(self) -> int | None:
        """The listener's file descriptor, the caller's from now on; null on other ranks."""
        return self.listener.detach() if self.listener is not None else None

    def use_interface(self) -> None:
        """From now on gloo and NCCL connect by this interface, also in groups that DeepSpeed makes
        later. A variable that is set already stays: the user's, or a larger world's."""
        for name, form in INTERFACE_VARIABLES.items() if self.interface else ():
            os.environ.setdefault(name, form.format(self.interface))

    @property
    def neighbours(self) -> int:
        """Ranks on this host, this one among them."""
        return max(1, sum(host.space == _space() for host in self.hosts))

    def parted(self, size: int) -> bool:
        """Whether a group of `size` ranks, the first such, the next ones and so on, is on several
        hosts."""
        spaces = [host.space for host in self.hosts]
        return any(len(set(spaces[at : at + size])) > 1 for at in range(0, len(spaces), size))

    def listing(self) -> str:
        """A line of each rank's host and addresses."""
        lines = (
            f"  rank {r} on {host.name}: {host.listing()}" for r, host in enumerate(self.hosts)
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def local_place(port: int) -> Place:
    """A place on this host for ranks that know `port` beforehand; rank 0 opens it."""
    return Place(LOOPBACK, port, None, None, [])


def check_interface(interface: str | None) -> None:
    """Raises `RendezvousError` when `interface` (cluster.interface) has no address here."""
    if interface is not None:
        _addresses(interface)


def meet(gather: Gather, rank: int, interface: str | None = None) -> Place:
    """Agree on a place. Collective over the ranks of `gather`; `interface` (cluster.interface): the
    only one to use. Raises `RendezvousError` on every rank when all can't reach one address within
    `MEET_S` seconds and what `gather` takes."""
    here = Host(socket.gethostname(), _space(), _addresses(interface))
    answers = gather(msgspec.json.encode(here).decode())
    hosts = [msgspec.json.decode(text, type=Host) for text in answers]
    alone = len({host.space for host in hosts}) == 1
    if rank == 0:
        with _Listeners([LOOPBACK] if alone else _by_vote(hosts)) as listeners:
            gather(json.dumps([listeners.token, listeners.places]))
            reached = gather(json.dumps(list(range(len(listeners.places)))))
            chosen = _first_common(reached)
            if chosen is None:
                raise RendezvousError(_unreachable(hosts, listeners.places, reached, interface))
            address, port = listeners.places[chosen]
            return Place(address, port, listeners.take(chosen), _interface_of(address), hosts)
    token, places = json.loads(gather("")[0])
    mine = _reach(places, bytes.fromhex(token))
    reached = gather(json.dumps(sorted(mine)))
    chosen = _first_common(reached)
    if chosen is None:
        raise RendezvousError(_unreachable(hosts, places, reached, interface))
    address, port = places[chosen]
    return Place(address, port, None, _interface_of(mine[chosen]), hosts)


class _Listeners:
    """Rank 0's sockets, one per address that can be bound; each connection gets the token."""

    def __init__(self, addresses: list[str]) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._sockets: list[socket.socket] = []
        for address in addresses:
            try:
                self._sockets.append(_listen(address))
            except OSError:
                continue  # an address that has just gone, or of a family that is switched off
        self.places = [list(one.getsockname()[:2]) for one in self._sockets]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._answer, args=(one,), daemon=True) for one in self._sockets
        ]

    def __enter__(self) -> _Listeners:
        for thread in self._threads:
            thread.start()
        return self

    def take(self, index: int) -> socket.socket:
        """The socket of that place: still listening, with nobody waiting in its queue."""
        self._end()
        return self._sockets.pop(index)

    def __exit__(self, *_) -> None:
        self._end()
        for one in self._sockets:
            one.close()

    def _end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _answer(self, listening: socket.socket) -> None:
        listening.settimeout(0.05)
        while not self._stop.is_set():
            try:
                with closing(listening.accept()[0]) as visitor:
                    visitor.sendall(bytes.fromhex(self.token))
            except OSError:  # nobody came, or somebody left
                continue
        listening.settimeout(None)


def _listen(address: str) -> socket.socket:
    listening = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        listening.bind((address, 0))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def _reach(places: list[list], token: bytes) -> dict[int, str]:
    """{index of a place that answered with the token: this host's address towards it}."""
    with ThreadPoolExecutor(max(1, len(places))) as pool:
        found = list(pool.map(lambda place: _try(place, token), places))
    return {index: own for index, own in enumerate(found) if own is not None}


def _try(place: list, token: bytes) -> str | None:
    """The token tells this run's rank 0 from a service at the same address of a bridge here."""
    end = time.monotonic() + REACH_S
    try:
        with closing(socket.create_connection(tuple(place), timeout=REACH_S)) as connection:
            token_seen = b""
            while len(token_seen) < TOKEN_BYTES and (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(TOKEN_BYTES - len(token_seen))
                if not part:
                    return None
                token_seen += part
            return connection.getsockname()[0] if token_seen == token else None
    except OSError:
        return None


def _first_common(reached: list[str]) -> int | None:
    common = set.intersection(*(set(json.loads(text)) for text in reached))
    return min(common, default=None)


def _by_vote(hosts: list[Host]) -> list[str]:
    """Rank 0's addresses: first those by which its routes lead to the most other hosts, of these
    InfiniBand's, and then those of the fastest interfaces: hosts commonly share a network for
    management, too."""
    own = [address for _, address in hosts[0].addresses]
    votes = dict.fromkeys(own, 0)
    for host in {host.space: host for host in hosts if host.space != hosts[0].space}.values():
        sources = {_source(address) for _, address in host.addresses}
        for address in sources & votes.keys():
            votes[address] += 1

    def order(place: tuple[str, str]) -> tuple[int, bool, bool, int]:
        name, address = place
        return (
            -votes[address],
            name.startswith(ALIKE),
            _of_interface(name, "type") != INFINIBAND,
            -_of_interface(name, "speed"),
        )

    return [address for _, address in sorted(hosts[0].addresses, key=order)]


def _of_interface(name: str, what: str) -> int:
    """A number that Linux tells of it, as its speed in Mbit/s; -1 where it doesn't."""
    try:
        return int((INTERFACES / name / what).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1


def _source(address: str) -> str | None:
    """The address of this host that packets to `address` would come from; nothing is sent."""
    try:
        with closing(socket.socket(_family(address), socket.SOCK_DGRAM)) as probe:
            probe.connect((address, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def _addresses(interface: str | None) -> list[tuple[str, str]]:
    """(interface, address) of this host without loopback: IPv4 first, bridges that every host has
    last. Raises `RendezvousError` for an interface that is not here or has no address."""
    found, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    if interface is not None and interface not in found:
        raise RendezvousError(
            f"cluster.interface={interface!r}: {socket.gethostname()} has no such interface; it "
            f"has {', '.join(sorted(found))}"
        )
    listed = [
        (name, entry.family, entry.address)
        for name, entries in found.items()
        for entry in entries
        if interface in (None, name)
        and (name not in stats or stats[name].isup)
        and entry.family in (socket.AF_INET, socket.AF_INET6)
        and _usable(entry.address, interface)
    ]
    listed.sort(key=lambda one: (one[0].startswith(ALIKE), one[1] == socket.AF_INET6))
    if interface is not None and not listed:
        raise RendezvousError(
            f"cluster.interface={interface!r}: it has no IP address on {socket.gethostname()}"
        )
    return [(name, address) for name, _, address in listed]


def _usable(address: str, interface: str | None) -> bool:
    """Link-local addresses need a scope; loopback leads nowhere, unless it was asked for."""
    if "%" in address or address.startswith(("169.254.", "fe80:")):
        return False
    return interface is not None or not (address.startswith("127.") or address == "::1")


def _interface_of(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _space() -> str:
    """Boot and network namespace: ranks for which it is the same reach each other by loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{socket.gethostname()}"


def _unreachable(
    hosts: list[Host], places: list[list], reached: list[str], interface: str | None
) -> str:
    tried = ", ".join(f"{address}:{port}" for address, port in places) or "none"
    ranks = []
    for rank, (host, text) in enumerate(zip(hosts, reached, strict=True)):
        found = ", ".join(places[index][0] for index in json.loads(text)) or "none of them"
        ranks.append(f"  rank {rank} on {host.name} with {host.listing()}: reached {found}")
    asked = f"cluster.interface={interface!r}" if interface else "cluster.interface=NAME"
    return (
        f"no address of {hosts[0].name} can be reached by all {len(hosts)} ranks (tried {tried}, "
        f"{REACH_S:g} s each):\n" + "\n".join(ranks) + "\nGive an interface of a network that "
        f"these hosts share ({asked}), and let its firewall pass TCP between them"
    )
