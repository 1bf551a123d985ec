"""Measure publish to flip by each encoding, from a publisher to receivers behind a slow link.

    python scripts/bench_sync.py outputs/smollm                    # 1 Gbit/s and 200 Mbit/s
    python scripts/bench_sync.py RUN RUN --rates 200 --receivers 1 --steps 2

The last `--steps` versions of each run's store are published again, by every encoding, through
`Publisher`, a relay beside the store, the link, a second relay, and `Receiver` in a process for
each receiver. `--rates`: Mbit/s; 0 is the loopback, neither limited nor counted. Seconds: from the
begin of publishing until the last receiver has flipped. Bytes of the link include headers and
requests' answers. After every sync, each receiver's weights are compared with the run's. Dense is
synced for the first run only: its bytes are the same for all. Left out: full versions and
collecting, latency, several publishers, an engine around the receiver.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.files import write_whole
from rose.transfer import codec
from scripts.csv_tables import show, write_csv
from scripts.harness import Child, Failed, answers, cfg, flagged
from scripts.run_weights import CodecOf, Whole, last_versions, threads

ENCODINGS = ("dense", "xor", "ours")
# A median is over the syncs that have these in common.
ALIKE = ("run", "encoding", "receivers")
STAGE_BYTES, TIMEOUT_S = 8 * 2**30, 300.0
BURST = 256 * 1024  # bytes of a token bucket; a packet with offload has up to 64 KiB
SUBNET = "10.203.71"
ROOTLESS = "unshare -rnm sh -c 'mount -t tmpfs none /run && python scripts/bench_sync.py ...'"
VARIABLES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def load(file: Path | str) -> dict:
    """Load a version's tensors into memory of their own, not mapped from the file."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def digest(tensors: dict) -> str:
    """Return xxh3-128 over all tensors in the order of their names."""
    import torch
    import xxhash

    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().view(torch.uint8).numpy().data.cast("B"))
    return state.hexdigest()


def encoding(name: str) -> Any:
    return codec if name == "ours" else CodecOf(name)


def receive(token_file: str) -> int:
    """Receive the weights of an engine, without the engine, as ordered: {"open": store, "file",
    "encoding"}, then {"version"}."""
    from rose.transfer import stage as product
    from rose.transfer.live import Live
    from rose.transfer.receive import Receiver, whole

    say = answers()
    codec.compile_all()
    say({"ready": True})
    receiver: Any = None
    tensors: dict = {}
    for order in map(json.loads, sys.stdin):
        if "open" in order:
            if receiver is not None:
                receiver.close()
            product.codec, tensors = encoding(order["encoding"]), load(order["file"])
            receiver = Receiver(order["open"], None, token_file, whole, Live(tensors))
            say({})
            continue
        version, computed = order["version"], time.process_time()
        staged = receiver.stage(version - 1, version, threads(), STAGE_BYTES, TIMEOUT_S)
        staged.flip()
        told = {"flipped": time.monotonic(), "cpu_s": time.process_time() - computed}
        staged.check()
        say(told | {"route": staged.route, "digest": digest(tensors)})
        del staged
    return 0


class Steps(NamedTuple):
    """Consecutive versions of a run, a file each."""

    name: str
    files: list[Path]
    digests: list[str]
    shape: cfg.ModelShape


def steps_of(run: Path, count: int, folder: Path) -> Steps:
    from safetensors.torch import save_file

    from rose.transfer.receive import materialise

    files, digests = [], []
    store, versions = last_versions(run, count + 1)
    for version in versions:
        tensors = materialise(store, version)
        files.append(folder / f"{run.name}-{version}.safetensors")
        save_file(tensors, files[-1])
        digests.append(digest(tensors))
    return Steps(run.name, files, digests, cfg.load(run / "config.json").model.shape)


class Link:
    """A link of `rate` bits a second: two network namespaces joined by a veth pair, tc's token
    bucket on both ends, bytes from the kernel's counters. A context manager that removes its
    namespaces at the end. Raises `Failed` where this machine can't create them. Latency is left
    out, because tc's netem is a module that many kernels lack. With a rate of 0 it is the
    loopback."""

    def __init__(self, rate: float) -> None:
        self.name = f"network namespaces, tc tbf {rate / 1e6:g} Mbit/s" if rate else "loopback"
        self.host = f"{SUBNET}.1" if rate else "127.0.0.1"  # address of the training side's relay
        self.rate, tag = rate, os.getpid()
        self._spaces = (f"rose-train-{tag}", f"rose-serve-{tag}") if rate else ()
        self._ends = f"rt{tag}", f"rs{tag}"
        # The commands that run a program on the training and on the serving side.
        self.sides = [["ip", "netns", "exec", space] for space in self._spaces] or [[], []]

    def __enter__(self) -> Link:
        try:
            if self.rate:
                self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            words = getattr(error, "stderr", None) or error
            raise Failed(
                f"--rates {self.rate / 1e6:g}: no network namespaces ({str(words).strip()}); they "
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
            limit = f"tbf rate {self.rate:.0f}bit burst {BURST} latency 50ms"
            _tool(f"tc -n {space} qdisc add dev {end} root {limit}")

    def __exit__(self, *_) -> None:
        if shutil.which("ip"):
            for space in self._spaces:  # removes the veth pair, too
                subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)

    def bytes(self) -> int:
        """Return the bytes that the serving side has received so far, 0 without a counter."""
        if not self.rate:
            return 0
        counter = f"/sys/class/net/{self._ends[1]}/statistics/rx_bytes"
        return int(_tool(f"ip netns exec {self._spaces[1]} cat {counter}"))


def _tool(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


class Bench:
    """The syncs of all runs, which must have one model's shape."""

    def __init__(self, folder: Path, runs: list[Steps], receivers: list[int]) -> None:
        self.folder, self.runs, self.receivers = folder, runs, receivers
        self.stores, self.token_file = folder / "stores", folder / "token"
        self.stores.mkdir()
        write_whole(self.token_file, secrets.token_hex(32).encode(), private=True)

    def child(self, stack: ExitStack, name: str, command: list[str]) -> Child:
        made = Child(name, command, self.folder / f"{name}.log", VARIABLES)
        stack.callback(made.end)
        return made

    def over(self, rate: float) -> list[dict]:
        """Measure everything over a link of `rate` Mbit/s."""
        with ExitStack() as stack:
            link = stack.enter_context(Link(rate * 1e6))
            load = os.getloadavg()[0]
            print(f"link: {link.name}; {load:.1f} programs ran in the minute before", flush=True)
            serving = self._relays(stack, link)
            command = [*link.sides[1], sys.executable, __file__, "--receive", str(self.token_file)]
            count = max(self.receivers)
            receivers = [self.child(stack, f"receiver-{n}", command) for n in range(count)]
            for one in receivers:
                one.answer()
            rows: list[dict] = []
            for run in self.runs:
                for name in ENCODINGS if run is self.runs[0] else ENCODINGS[1:]:
                    with patch("rose.transfer.publish.codec", encoding(name)):
                        for count in self.receivers:
                            rows += self._syncs(link, serving, receivers[:count], run, name)
            return rows

    def _relays(self, stack: ExitStack, link) -> str:
        """Start a relay on each side and return the URL of the serving side's."""
        relay = [sys.executable, "-m", "rose.parts.relay"]
        token = ["--token-file", str(self.token_file), "--cache"]
        cache = Path(tempfile.mkdtemp(dir=self.folder))
        first = [*link.sides[0], *relay, str(self.stores), "--cache-gib", "0", "--listen"]
        command = [*first, f"{link.host}:0", *token, str(cache / "a")]
        port = re.search(r":(\d+) ", self.child(stack, "relay-training", command).line(60))[1]
        upstream = [*link.sides[1], *relay, f"http://{link.host}:{port}"]
        command = [*upstream, "--listen", "127.0.0.1:0", *token, str(cache / "b")]
        second = self.child(stack, "relay-serving", command)
        return re.search(r"(http://[\w.]+:\d+) ", second.line(60))[1]

    def _syncs(
        self, link: Link, serving: str, readers: list[Child], run: Steps, encoding: str
    ) -> list[dict]:
        store = Path(tempfile.mkdtemp(prefix=f"{encoding}-", dir=self.stores))
        made = Whole(store, load(run.files[0]), run.shape, (1, 2, 4, 8))
        made.publish(0)
        opening = {"encoding": encoding, "file": str(run.files[0])}
        ask(readers, opening | {"open": f"{serving}/{store.name}"})
        rows = []
        for version, file in enumerate(run.files[1:], 1):
            made.tensors = load(file)
            before, began, computed = link.bytes(), time.monotonic(), time.process_time()
            nbytes = made.publish(version).nbytes
            computed = time.process_time() - computed
            loaded = ask(readers, {"version": version})
            crossed = link.bytes() - before
            for reader, found in zip(readers, loaded, strict=True):
                if found["digest"] != run.digests[version] or len(found["route"]) != 1:
                    which = f"{encoding}, {reader.name}: version {version}, by {found['route']}"
                    raise Failed(f"bench_sync: {which}, is not the run's")
            slowest = max(loaded, key=lambda found: found["flipped"])
            row = {"rate": link.rate / 1e6, "run": run.name, "encoding": encoding}
            row |= {"receivers": len(readers), "MB": nbytes / 1e6, "link_MB": crossed / 1e6}
            row |= {"seconds": slowest["flipped"] - began, "publish_cpu_s": computed}
            rows.append(row | {"stage_cpu_s": slowest["cpu_s"]})
        shutil.rmtree(store)
        print(f"  {run.name} {encoding}, {len(readers)} receivers: {rows[-1]['seconds']:.2f} s")
        return rows


def ask(children: list[Child], order: dict) -> list[dict]:
    for child in children:
        child.order(order)
    return [child.answer() for child in children]


def medians(rows: list[dict]) -> list[dict]:
    """Return a row per run and encoding. Seconds and bytes of the link are given for each number of
    receivers, the other columns for the fewest."""
    found: dict[tuple[str, str], dict] = {}
    for row in rows:
        name, encoding, count = (row[key] for key in ALIKE)
        same = [each for each in rows if all(each[key] == row[key] for key in ALIKE)]
        middle = {key: median(x[key] for x in same) for key in row if key not in ("rate", *ALIKE)}
        own = {f"s x{count}": middle.pop("seconds"), f"link x{count}": middle.pop("link_MB")}
        first = {"run": name, "encoding": encoding} | middle
        found[name, encoding] = found.get((name, encoding), first) | own
    dense = max(row["MB"] for row in found.values())
    return [row | {"dense / it": dense / row["MB"]} for row in found.values()]


def main(argv: list[str] | None = None) -> int:
    if sys.argv[1:2] == ["--receive"]:
        return receive(sys.argv[2])
    args = flagged(__doc__, argv, "RUN", rates="1000,200", receivers="1,2,4", steps=3, csv=Path)
    # SIGTERM becomes an exception, so that everything is cleaned up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rates = [float(rate) for rate in args.rates.split(",")]
    receivers = sorted(int(count) for count in args.receivers.split(","))
    if not args.words or min(args.steps, receivers[0]) < 1 or min(rates) < 0:
        raise Failed("one RUN is needed; --steps and --receivers from 1 on, --rates from 0 on")
    codec.compile_all()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rose-bench-sync-") as folder:
        runs = [steps_of(Path(run), args.steps, Path(folder)) for run in args.words]
        bench = Bench(Path(folder), runs, receivers)
        for rate in rates:
            found = bench.over(rate)
            show(medians(found), f"{rate:g} Mbit/s, medians" if rate else "no limit, medians")
            rows += found
    if args.csv:
        write_csv(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
