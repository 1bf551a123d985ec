"""The link of bench_sync.py: two sides of one machine, between them so many bits a second, every
byte counted.

`Namespaces`: two network namespaces joined by a veth pair, tc's token bucket (tbf) on both ends,
bytes from the kernel's counters of the serving end, headers included; needs root, `ip` and `tc`.
`Proxy`: a token bucket of our own in front of the training side's relay, where there is no root; it
counts what TCP carries. No latency is added: tc's netem is a module that many kernels lack.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time

BURST = 256 * 1024  # bytes of a token bucket; a packet offloaded to the device has 64 KiB
QUEUE = "50ms"
PIECE = 64 * 1024
SUBNET = "10.203.71"


class Namespaces:
    """`rate` in bits a second, 0: as fast as the machine. A context manager; what it made is
    removed at its end."""

    def __init__(self, rate: float):
        self.name = (
            f"network namespaces, tc tbf {rate / 1e6:g} Mbit/s"
            if rate
            else "network namespaces, unlimited"
        )
        self._rate, tag = rate, os.getpid()
        self._spaces, self._ends = (
            (f"rose-train-{tag}", f"rose-serve-{tag}"),
            (f"rt{tag}", f"rs{tag}"),
        )

    @staticmethod
    def obstacle() -> str:
        """Why this machine can't; "" if it can."""
        if os.geteuid() != 0:
            return "not root"
        missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
        if missing:
            return f"no {' and no '.join(missing)} (Debian: apt-get install iproute2)"
        try:
            with Namespaces(1e9):
                return ""
        except subprocess.CalledProcessError as error:
            return f"{' '.join(error.cmd)}: {error.stderr.strip()}"

    def __enter__(self) -> Namespaces:
        try:
            for space in self._spaces:
                _tool("ip", "netns", "add", space)
            _tool(
                "ip",
                "link",
                "add",
                self._ends[0],
                "netns",
                self._spaces[0],
                "type",
                "veth",
                "peer",
                "name",
                self._ends[1],
                "netns",
                self._spaces[1],
            )
            for number, (space, end) in enumerate(zip(self._spaces, self._ends, strict=False), 1):
                _tool("ip", "-n", space, "addr", "add", f"{SUBNET}.{number}/30", "dev", end)
                for device in (end, "lo"):
                    _tool("ip", "-n", space, "link", "set", device, "up")
                if self._rate:
                    _tool(
                        "tc",
                        "-n",
                        space,
                        "qdisc",
                        "add",
                        "dev",
                        end,
                        "root",
                        "tbf",
                        "rate",
                        f"{self._rate:.0f}bit",
                        "burst",
                        str(BURST),
                        "latency",
                        QUEUE,
                    )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for space in self._spaces:  # the veth pair goes with its namespaces
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Commands that begin those of the training and of the serving side."""
        return tuple(["ip", "netns", "exec", space] for space in self._spaces)

    listen = f"{SUBNET}.1:0"  # of the training side's relay

    def upstream(self, port: int) -> str:
        return f"http://{SUBNET}.1:{port}"

    def bytes(self) -> int:
        """That came to the serving side so far."""
        counter = f"/sys/class/net/{self._ends[1]}/statistics/rx_bytes"
        return int(_tool(*self.sides[1], "cat", counter))


class Proxy:
    """As `Namespaces`; only what comes down is limited."""

    sides: tuple[list[str], list[str]] = ([], [])
    listen = "127.0.0.1:0"

    def __init__(self, rate: float):
        self.name = (
            f"token bucket of the bench's own, {rate / 1e6:g} Mbit/s"
            if rate
            else "loopback, unlimited"
        )
        self._rate, self._passed, self._lock = rate / 8, 0, threading.Lock()
        self._free = 0.0  # when the link has sent what it was given, monotonic seconds

    def __enter__(self) -> Proxy:
        self._listening = socket.create_server(("127.0.0.1", 0))
        return self

    def __exit__(self, *_) -> None:
        self._listening.close()

    def upstream(self, port: int) -> str:
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def bytes(self) -> int:
        return self._passed

    def _accept(self, port: int) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(("127.0.0.1", port))
            for source, sink, down in ((server, client, True), (client, server, False)):
                threading.Thread(target=self._pump, args=(source, sink, down), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        try:
            while data := source.recv(PIECE):
                if down:
                    self._wait_for(len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other end is gone: so is this one
            for end in (source, sink):
                end.close()

    def _wait_for(self, size: int) -> None:
        with self._lock:
            self._passed += size
            if not self._rate:
                return
            now = time.monotonic()
            self._free = max(self._free, now - BURST / self._rate) + size / self._rate
            wait_s = self._free - now
        if wait_s > 0:
            time.sleep(wait_s)


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
