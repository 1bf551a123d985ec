"""The link of bench_sync.py: two sides of one machine, a rate limit, every byte counted.

`Namespaces`: two network namespaces joined by a veth pair, tc's token bucket (tbf) on both ends,
bytes from the kernel's counters of the serving end, including headers. No latency is added, because
tc's netem is a module that many kernels lack. `Loopback`: neither limited nor counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from scripts.harness import Failed

BURST = 256 * 1024  # bytes of a token bucket; a packet with offload has up to 64 KiB
SUBNET = "10.203.71"
ROOTLESS = "unshare -rnm sh -c 'mount -t tmpfs none /run && python scripts/bench_sync.py ...'"


class Loopback:
    name, sides, listen, host = "loopback", ([], []), "127.0.0.1:0", "127.0.0.1"

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_) -> None:
        pass

    def bytes(self) -> int:
        return 0


class Namespaces:
    """A link of `rate` bits a second. A context manager that removes its namespaces at the end.
    Raises `Failed` where this machine can't create them."""

    listen, host = f"{SUBNET}.1:0", f"{SUBNET}.1"  # addresses of the training side's relay

    def __init__(self, rate: float) -> None:
        self.name = f"network namespaces, tc tbf {rate / 1e6:g} Mbit/s"
        self._rate, tag = rate, os.getpid()
        self._spaces = f"rose-train-{tag}", f"rose-serve-{tag}"
        self._ends = f"rt{tag}", f"rs{tag}"

    def __enter__(self) -> Namespaces:
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            words = getattr(error, "stderr", None) or error
            raise Failed(
                f"--rates {self._rate / 1e6:g}: no network namespaces ({str(words).strip()}); they "
                f"need root and iproute2, or: {ROOTLESS}; --rates 0 is the loopback without a limit"
            ) from None
        return self

    def _make(self) -> None:
        (train, serve), (here, there) = self._spaces, self._ends
        for space in self._spaces:
            _tool(f"ip netns add {space}")
        _tool(f"ip link add {here} netns {train} type veth peer name {there} netns {serve}")
        for number, (space, end) in enumerate(zip(self._spaces, self._ends, strict=True), 1):
            _tool(f"ip -n {space} addr add {SUBNET}.{number}/30 dev {end}")
            for device in (end, "lo"):
                _tool(f"ip -n {space} link set {device} up")
            limit = f"tbf rate {self._rate:.0f}bit burst {BURST} latency 50ms"
            _tool(f"tc -n {space} qdisc add dev {end} root {limit}")

    def __exit__(self, *_) -> None:
        if shutil.which("ip"):
            for space in self._spaces:  # removes the veth pair, too
                subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The commands that run a program on the training and on the serving side."""
        return tuple(["ip", "netns", "exec", space] for space in self._spaces)

    def bytes(self) -> int:
        """Return the bytes that the serving side has received so far."""
        counter = f"/sys/class/net/{self._ends[1]}/statistics/rx_bytes"
        return int(_tool(f"ip netns exec {self._spaces[1]} cat {counter}"))


def _tool(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout
