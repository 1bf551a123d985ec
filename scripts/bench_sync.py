"""Publish to flipped, from two ZeRO-3 trainer ranks to engines behind a relay on a slow link, by
each encoding.

    python scripts/bench_sync.py                                   # 1 Gbit/s and 200 Mbit/s; a quarter of an hour
    python scripts/bench_sync.py --rates 200 --lrs 1e-6 --receivers 1 --engines 1
    python scripts/bench_sync.py --model FOLDER --rates 0          # another model, no limit

Two real trainer ranks make `--steps` GRPO steps on SmolLM2-135M at each learning rate (float32
masters, versions in bfloat16) and save their shards after each of the last; every encoding then
publishes these very steps through `Publisher`, a relay beside the store, the link, a second relay,
and `Receiver` (or, with --engines, vLLM engines that generate all the while). The link is two
network namespaces and tc's tbf, with root; else a token bucket of the bench's own: what it was is
said. Seconds: from the order to publish until the last receiver has flipped; bytes of the link: the
kernel's, headers and requests' answers included. Every receiver's weights are compared with the
trainer's after every sync. No full edge is within what is measured. Dense is synced at the first
learning rate only: its bytes are the same at all. Left out: the full versions and the collecting that
follow a sync, latency (--rates is all that tc does here).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench_sync_link import Namespaces, Proxy
from bench_sync_parts import RANKS, WARM_UP, Shards, digest
from bench_sync_tables import NAMES, Sync, middle, tables, targets, trained

from rose.files import write_whole
from rose.processes import die_with_parent

DEADLINE_S = 900.0
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Failed(SystemExit):
    """What went wrong, said once."""


class Role:
    """A process of bench_sync_roles.py (or another command, for its output). Ended with the
    bench."""

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str] = {}):
        self.name, self._log, self._rest = name, log, b""
        with log.open("wb") as errors:
            parent = os.getpid()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=REPOSITORY,
                env=os.environ | VARIABLES | env | {"PYTHONPATH": str(REPOSITORY)},
                preexec_fn=lambda: die_with_parent(parent),
            )

    def tell(self, command: dict) -> None:
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("is gone") from None

    def line(self, deadline_s: float = DEADLINE_S) -> str:
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise self._failed(f"said nothing for {deadline_s:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise self._failed(f"ended with {self._process.wait()}")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def answer(self, deadline_s: float = DEADLINE_S) -> dict:
        return json.loads(self.line(deadline_s))

    def ask(self, command: dict) -> dict:
        self.tell(command)
        return self.answer()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _failed(self, what: str) -> Failed:
        said = self._log.read_text(errors="replace").strip()[-3000:]
        return Failed(f"bench_sync: {self.name} {what}: {said}")


class Bench:
    """What all runs share; a context manager that ends every process and removes every folder of
    its own."""

    def __init__(self, args: argparse.Namespace):
        self.args, self._stack = args, ExitStack()
        self.work = args.work.resolve()
        self.model = args.model.resolve() if args.model else _smollm2()

    def __enter__(self) -> Bench:
        self.work.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.work))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.stores, self.token_file = self.folder / "stores", self.folder / "token"
        self.stores.mkdir()
        write_whole(self.token_file, secrets.token_hex(32).encode(), private=True)
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def role(self, stack: ExitStack, name: str, role: str, job: dict, side: list[str] = []) -> Role:
        script = str(Path(__file__).with_name("bench_sync_roles.py"))
        return self.process(stack, name, [*side, sys.executable, script, role, json.dumps(job)])

    def process(self, stack: ExitStack, name: str, command: list[str]) -> Role:
        made = Role(name, command, self.folder / f"{name}.log")
        stack.callback(made.end)
        return made

    # ----------------------------------------------------------------- what is published

    def steps(self, lr: float) -> Path:
        """The folder of shards after the last steps at this learning rate, made if it is not
        there."""
        args = self.args
        wanted = {
            "model": str(self.model),
            "lr": lr,
            "steps": WARM_UP + args.steps,
            "kept": args.steps,
        }
        name = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:8]
        folder = self.work / f"steps-{lr:g}-{name}"
        if not (folder / "done.json").exists():
            with ExitStack() as stack:
                making = Path(tempfile.mkdtemp(prefix="making-", dir=self.folder))
                said = self._train(stack, wanted, making)
                shutil.rmtree(making / "store")
                (making / "done.json").write_text(json.dumps(said))
                shutil.rmtree(folder, ignore_errors=True)
                making.rename(folder)
        return folder

    def _train(self, stack: ExitStack, wanted: dict, folder: Path) -> list[list[dict]]:
        print(
            f"learning rate {wanted['lr']:g}: {wanted['steps']} steps by {RANKS} trainer ranks",
            flush=True,
        )
        samples = self.folder / "samples.npz"
        if not samples.exists():  # the same for all learning rates
            self.role(stack, "sampler", "sample", wanted | {"file": str(samples)}).answer()
        job = wanted | {
            "folder": str(folder),
            "samples": str(samples),
            "threads": 1,
            "port": _port(),
        }
        ranks = [
            self.role(stack, f"trainer-{rank}", "train", job | {"rank": rank})
            for rank in range(RANKS)
        ]
        said = []
        for _ in range(wanted["steps"]):
            said.append([rank.answer() for rank in ranks])
            mine = said[-1][0]
            words = (
                f"  step {mine['step']}: {mine['seconds']:.1f} s, gradient norm "
                f"{mine['grad_norm']:.3f}"
            )
            if "nbytes" in mine:
                words += f", {mine['nbytes'] / 1e6:.2f} MB published in {mine['publish_s']:.2f} s"
            print(words, flush=True)
        return said

    # ----------------------------------------------------------------- one link

    def link(self, rate: float) -> list[Sync]:
        """Every measurement over a link of `rate` Mbit/s."""
        with ExitStack() as stack:
            link = stack.enter_context(_link_kind(self.args.link)(rate * 1e6))
            print(
                f"\nlink: {link.name}; {os.getloadavg()[0]:.1f} programs ran on the "
                f"{os.cpu_count()} cores "
                "in the minute before",
                flush=True,
            )
            serving = self._relays(stack, link)
            job = {"token_file": str(self.token_file), "threads": self.args.threads}
            publishing = job | {"port": _port(), "threads": max(1, self.args.threads // RANKS)}
            publishers = [
                self.role(
                    stack,
                    f"publisher-{rank}",
                    "publish",
                    publishing | {"rank": rank},
                    link.sides[0],
                )
                for rank in range(RANKS)
            ]
            for publisher in publishers:
                publisher.answer()
            rows = []
            with ExitStack() as plain:
                receivers = [
                    self.role(plain, f"receiver-{n}", "receive", job, link.sides[1])
                    for n in range(max(self.args.receivers))
                ]
                for receiver in receivers:
                    receiver.answer()
                for lr in self.args.lrs:
                    for encoding in NAMES:
                        # the same bytes at any rate of learning
                        if encoding == "dense" and lr != self.args.lrs[0]:
                            rows += [
                                replace(row, lr=lr)
                                for row in rows
                                if (row.encoding, row.lr) == (encoding, self.args.lrs[0])
                            ]
                            continue
                        for count in self.args.receivers:
                            rows += self._run(
                                link,
                                serving,
                                publishers,
                                receivers[:count],
                                lr,
                                encoding,
                                rate,
                                False,
                            )
            for count in range(1, self.args.engines + 1):
                rows += self._engines(
                    link, serving, publishers, count, job | {"model": str(self.model)}, rate
                )
            return rows

    def _engines(
        self, link, serving: str, publishers: list[Role], count: int, job: dict, rate: float
    ) -> list[Sync]:
        with ExitStack() as stack:
            engines = [
                self.role(stack, f"engine-{n}", "engine", job, link.sides[1]) for n in range(count)
            ]
            for engine in engines:
                engine.answer()
            return [
                row
                for lr in self.args.lrs
                for row in self._run(link, serving, publishers, engines, lr, "ours", rate, True)
            ]

    def _relays(self, stack: ExitStack, link) -> str:
        """URL of the relay on the serving side."""
        token = ["--token-file", str(self.token_file)]
        relay = [sys.executable, "-m", "rose.relay"]
        first = self.process(
            stack,
            "relay-training",
            [
                *link.sides[0],
                *relay,
                str(self.stores),
                "--listen",
                link.listen,
                "--cache-gib",
                "0",
                "--cache",
                str(self.folder / f"cache-a-{link.listen}"),
                *token,
            ],
        )
        port = int(re.search(r"http://[\w.]+:(\d+) ", first.line(60))[1])
        second = self.process(
            stack,
            "relay-serving",
            [
                *link.sides[1],
                *relay,
                link.upstream(port),
                "--listen",
                "127.0.0.1:0",
                "--cache",
                str(self.folder / "cache-b"),
                *token,
            ],
        )
        stack.callback(shutil.rmtree, self.folder / "cache-b", ignore_errors=True)
        return re.search(r"(http://[\w.]+:\d+) ", second.line(60))[1]

    def _run(
        self,
        link,
        serving: str,
        publishers: list[Role],
        readers: list[Role],
        lr: float,
        encoding: str,
        rate: float,
        engines: bool,
    ) -> list[Sync]:
        """All kept steps, one sync each."""
        shards = self.steps(lr)
        store = Path(tempfile.mkdtemp(prefix=f"{encoding}-", dir=self.stores))
        # whose weights are the model's
        opening = {"shards": str(shards), "encoding": encoding}
        _all(publishers, opening | {"open": str(store)})
        _all(readers, opening | {"open": f"{serving}/{store.name}"})
        rows = []
        for step in range(1, self.args.steps + 1):
            link_before, pulled_before = link.bytes(), self._pulled(link, serving)
            began = time.monotonic()
            published = _all(publishers, {"step": step})
            loaded = _all(readers, {"version": step})
            wanted = self._digest(shards, step)
            for reader, said in zip(readers, loaded, strict=False):
                if said.get("digest", wanted) != wanted or not said.get("same", True):
                    raise Failed(
                        f"bench_sync: {encoding}, {reader.name}: version {step} is not the "
                        "trainer's"
                    )
                if len(said["route"]) != 1:
                    raise Failed(
                        f"bench_sync: {encoding}, {reader.name}: version {step} came by "
                        f"{said['route']}"
                    )
            slowest = max(loaded, key=lambda said: said["flipped"])
            rows.append(
                Sync(
                    rate,
                    lr,
                    encoding,
                    len(readers),
                    engines,
                    step,
                    published[0]["nbytes"],
                    link.bytes() - link_before,
                    self._pulled(link, serving) - pulled_before,
                    slowest["flipped"] - began,
                    max(said["seconds"] for said in published),
                    slowest["stage_s"],
                    slowest["pause_s"],
                    sum(said["cpu_s"] for said in published),
                    slowest["cpu_s"],
                    slowest["changed"],
                    max(said["peak"] for said in published),
                    max(said["peak"] for said in loaded),
                )
            )
        shutil.rmtree(store)
        found = middle(rows)
        print(
            f"  lr {lr:g} {NAMES[encoding]:18} {len(readers)} {'engine' if engines else 'receiver'}"
            f"{'s' if len(readers) > 1 else ' '} {found['seconds']:7.2f} s: publish "
            f"{found['publish_s']:.2f}, stage "
            f"{found['stage_s']:.2f}, pause {1e3 * found['pause_s']:.1f} ms; "
            f"{found['payload'] / 1e6:.2f} MB, "
            f"over the link {found['link'] / 1e6:.2f}",
            flush=True,
        )
        return rows

    def _pulled(self, link, url: str) -> int:
        """Bytes of files that the serving side's relay asked for."""
        ask = (
            "import sys, urllib.request as u\n"
            "r = u.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + "
            "open(sys.argv[2]).read()})\n"
            "print(u.urlopen(r, timeout=10).read().decode())"
        )
        command = [
            *link.sides[1],
            sys.executable,
            "-c",
            ask,
            f"{url}/metrics",
            str(self.token_file),
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return int(re.search(r"^rose_relay_upstream_bytes_total (\d+)$", said, re.M)[1])

    def _digest(self, shards: Path, step: int) -> str:
        """Of the trainer's weights, computed once."""
        file = shards / f"step-{step}.digest"
        if not file.exists():
            file.write_text(digest(Shards(shards).tensors(step)))
        return file.read_text()


def _all(roles: list[Role], command: dict) -> list[dict]:
    for role in roles:
        role.tell(command)
    return [role.answer() for role in roles]


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _smollm2() -> Path:
    import msgspec
    import yaml

    from rose import config, models

    return models.resolve(
        msgspec.convert(
            yaml.safe_load((REPOSITORY / "conf/model/smollm2.yaml").read_text()), config.Model
        )
    )


def _link_kind(asked: str) -> Callable:
    if asked == "proxy":
        return Proxy
    obstacle = Namespaces.obstacle()
    if not obstacle:
        return Namespaces
    if asked == "namespaces":
        raise Failed(f"bench_sync: --link namespaces: {obstacle}")
    print(f"no network namespaces ({obstacle}): the bench limits the rate itself")
    return Proxy


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates",
        type=_numbers,
        default=[1000.0, 200.0],
        help="Mbit/s, comma-separated; 0: no limit",
    )
    parser.add_argument(
        "--receivers", type=_numbers, default=[1, 2, 4], help="how many at once, comma-separated"
    )
    parser.add_argument("--lrs", type=_numbers, default=[1e-6, 1e-5])
    parser.add_argument(
        "--engines", type=int, default=0, help="vLLM engines too, 1 to so many at once; ours only"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help=f"syncs per figure; {WARM_UP} more steps warm up"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of a receiver; publishers share as many",
    )
    parser.add_argument("--link", choices=["auto", "namespaces", "proxy"], default="auto")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default SmolLM2-135M")
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / "outputs/bench_sync", help="steps are kept there"
    )
    parser.add_argument("--json", type=Path, help="write every sync there")
    args = parser.parse_args(argv)
    args.receivers = sorted(int(count) for count in args.receivers)
    if args.steps < 1 or min(args.receivers) < 1 or min(args.rates) < 0:
        parser.error("--steps and --receivers must be at least 1, --rates at least 0")
    # as an exception: everything is cleaned up
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Bench(args) as bench:
        folders = {lr: bench.steps(lr) for lr in args.lrs}
        rows = [row for rate in args.rates for row in bench.link(rate)]
        weights = sum(Shards(folders[args.lrs[0]]).nbytes)
    print(*tables(rows, weights), sep="\n")
    for lr, folder in folders.items():
        said = json.loads((folder / "done.json").read_text())
        print(f"\nthe real trainer ranks at lr {lr:g}:", *trained(said), sep="\n")
    print("\ntargets:", *targets(rows), sep="\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
