"""Find an address at which ranks on several hosts can meet for torch.distributed.

A host's name is no reliable address. Debian, Ubuntu and DGX OS map it to 127.0.1.1. Some sites map
it to a network that compute nodes don't share, or don't map it at all. So rank 0 listens on every
address of its interfaces, and every other rank connects to all of them. The ranks choose the
first address that all of them reached. Rank 0 passes on the listening socket without closing it, so
that no other process can take its port. NCCL chooses its InfiniBand devices itself (NCCL_IB_HCA).
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

from rose import processes

# Seconds in which all ranks must meet. With torch's default, an error takes half an hour.
MEET_S = 60.0
# Seconds for one connection attempt. A firewall that drops packets never answers.
REACH_S = 5.0
LOOPBACK = "127.0.0.1"
# Name prefixes of bridges, which have the same address on many hosts.
BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "podman")
INTERFACES = Path("/sys/class/net")
INFINIBAND = 32  # InfiniBand's hardware type in `INTERFACES` (ARPHRD_INFINIBAND)
TOKEN_BYTES = 16
# The variables that name the interface for gloo and NCCL. To NCCL a bare name is a prefix (eth1
# matches eth10), and a name after "=" is exact.
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}

# A collective call that returns the texts of all ranks, ordered by rank.
Gather = Callable[[str], list[str]]


class RendezvousError(RuntimeError):
    """No address can be reached by all ranks; the message names all hosts and addresses."""


class Host(msgspec.Struct, frozen=True):
    """A rank's host. Ranks have the same `space` if they share a host and a network namespace."""

    name: str
    space: str
    addresses: list[tuple[str, str]]  # (interface, IP address), without loopback

    def listing(self) -> str:
        return ", ".join(f"{address} ({name})" for name, address in self.addresses) or "no address"


@dataclass
class Place:
    """The address and port at which the ranks meet. `listener`: rank 0's open socket; None on other
    ranks. `interface`: the interface through which this rank reaches them; None if unknown."""

    address: str
    port: int
    listener: socket.socket | None
    interface: str | None
    hosts: list[Host]

    def detach_listener(self) -> int | None:
        """Return the listener's file descriptor, which the caller then owns; None without one."""
        return self.listener.detach() if self.listener is not None else None

    def use_interface(self) -> None:
        """Make gloo and NCCL connect through this interface, also in process groups created later.
        Keep a variable that is already set, by the user or by a larger world of this rank."""
        for name, form in INTERFACE_VARIABLES.items() if self.interface else ():
            os.environ.setdefault(name, form.format(self.interface))

    @property
    def neighbours(self) -> int:
        """Number of ranks on this host, this rank included."""
        return max(1, sum(host.space == _space() for host in self.hosts))

    def spans_hosts(self, size: int) -> bool:
        """True if any group of `size` consecutive ranks has ranks on several hosts. The first group
        starts at rank 0, the second at rank `size`, and so on."""
        spaces = [host.space for host in self.hosts]
        return any(len(set(spaces[at : at + size])) > 1 for at in range(0, len(spaces), size))

    def listing(self) -> str:
        """Return one line per rank with its host and addresses."""
        lines = (
            f"  rank {r} on {host.name}: {host.listing()}" for r, host in enumerate(self.hosts)
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def local_place(port: int) -> Place:
    """Return a place on this host for ranks that know `port` beforehand; nothing listens yet."""
    return Place(LOOPBACK, port, None, None, [])


def check_interface(interface: str | None) -> None:
    """Raise `RendezvousError` if `interface` (cluster.interface) has no address on this host."""
    if interface is not None:
        addresses_of(interface)


def meet(gather: Gather, rank: int, interface: str | None = None) -> Place:
    """Agree on a place, collectively over the ranks of `gather`. With `interface`
    (cluster.interface), only the addresses of this interface are used. Raises `RendezvousError` on
    every rank if no address was reached by all within `REACH_S` seconds."""
    here = Host(socket.gethostname(), _space(), addresses_of(interface))
    answers = gather(msgspec.json.encode(here).decode())
    hosts = [msgspec.json.decode(text, type=Host) for text in answers]
    alone = len({host.space for host in hosts}) == 1
    if rank == 0:
        with _Listeners([LOOPBACK] if alone else _by_vote(hosts)) as listeners:
            gather(json.dumps([listeners.token, listeners.places]))
            reached = gather(json.dumps(list(range(len(listeners.places)))))
            chosen = _first_reached_by_all(reached)
            if chosen is None:
                raise RendezvousError(_unreachable(hosts, listeners.places, reached, interface))
            address, port = listeners.places[chosen]
            return Place(address, port, listeners.take(chosen), _interface_of(address), hosts)
    token, places = json.loads(gather("")[0])
    mine = _reach(places, bytes.fromhex(token))
    reached = gather(json.dumps(sorted(mine)))
    chosen = _first_reached_by_all(reached)
    if chosen is None:
        raise RendezvousError(_unreachable(hosts, places, reached, interface))
    address, port = places[chosen]
    return Place(address, port, None, _interface_of(mine[chosen]), hosts)


class _Listeners:
    """Rank 0's listening sockets, one per address, which send the token to each connection."""

    def __init__(self, addresses: list[str]) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._sockets = listen(addresses)
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
        """Return a place's socket, which still listens and has no waiting connection."""
        self._stop_threads()
        return self._sockets.pop(index)

    def __exit__(self, *_) -> None:
        self._stop_threads()
        for one in self._sockets:
            one.close()

    def _stop_threads(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _answer(self, listening: socket.socket) -> None:
        listening.settimeout(0.05)
        while not self._stop.is_set():
            try:
                with closing(listening.accept()[0]) as visitor:
                    visitor.sendall(bytes.fromhex(self.token))
            except OSError:  # no connection within the timeout, or the peer has disconnected
                continue
        listening.settimeout(None)


def listen(addresses: list[str]) -> list[socket.socket]:
    """Return a listening socket for each address that can be bound. Binding fails if the address
    was just removed, or if the kernel has its family (IPv6) switched off."""
    sockets = []
    for address in addresses:
        try:
            sockets.append(_listen(address))
        except OSError:
            continue
    return sockets


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
    """Connect to all places. Return place -> own address, for the places that sent the token."""
    with ThreadPoolExecutor(max(1, len(places))) as pool:
        found = list(pool.map(lambda place: _try(place, token), places))
    return {index: own for index, own in enumerate(found) if own is not None}


def _try(place: list, token: bytes) -> str | None:
    """Connect to a place and return our address of the connection; None if it doesn't send `token`.
    The token shows that rank 0 of this run has answered. Another service may answer, because the
    address of a bridge may also exist on this host."""
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


def _first_reached_by_all(reached: list[str]) -> int | None:
    common = set.intersection(*(set(json.loads(text)) for text in reached))
    return min(common, default=None)


def _by_vote(hosts: list[Host]) -> list[str]:
    """Return rank 0's addresses, best first. They are sorted by the number of other hosts that
    rank 0's routes reach from them, then by: no bridge, InfiniBand, speed of the interface. The
    speed counts because hosts commonly share a slow management network, too."""
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
            name.startswith(BRIDGES),
            _of_interface(name, "type") != INFINIBAND,
            -_of_interface(name, "speed"),
        )

    return [address for _, address in sorted(hosts[0].addresses, key=order)]


def _of_interface(name: str, what: str) -> int:
    """Return a number that Linux reports of an interface, such as `speed` in Mbit/s; -1 if none."""
    try:
        return int((INTERFACES / name / what).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1


def _source(address: str) -> str | None:
    """Return this host's address from which packets to `address` would leave; send nothing."""
    try:
        with closing(socket.socket(_family(address), socket.SOCK_DGRAM)) as probe:
            probe.connect((address, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def addresses_of(interface: str | None) -> list[tuple[str, str]]:
    """Return this host's (interface, address) pairs: no loopback, IPv6 behind IPv4, bridges last.
    Raises `RendezvousError` if `interface` is not on this host or has no address."""
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
    listed.sort(key=lambda one: (one[0].startswith(BRIDGES), one[1] == socket.AF_INET6))
    if interface is not None and not listed:
        raise RendezvousError(
            f"cluster.interface={interface!r}: it has no IP address on {socket.gethostname()}"
        )
    return [(name, address) for name, _, address in listed]


def _usable(address: str, interface: str | None) -> bool:
    """False for link-local addresses, which need a scope, and for loopback without `interface`."""
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
    """Return this process's boot, network namespace and host name. Ranks with the same result reach
    each other through loopback."""
    return f"{processes.boot()}/{os.stat('/proc/self/ns/net').st_ino}/{socket.gethostname()}"


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
