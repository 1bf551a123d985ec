"""Online server and rollout engine on one device under replayed traffic, while one thing after
another goes wrong.

    python tests/soak/soak_coserving.py                     # 20 minutes
    python tests/soak/soak_coserving.py minutes=5 seed=3 trace=AzureLLMInferenceTrace_conv_2023.csv

Engines are killed, stopped and continued, their boards overwritten and cut, lending switched off
and on, and clients hang up in the middle of their answers. After each fault both sides must make
progress again within PROGRESS_S, the rollouts only if the server lends: one that misses its targets
by itself doesn't. At the end: no online request was lost but those that a killed server had or
would have had, nothing has grown, nothing is left behind. All options of bench_coserving.py are
taken as well. Exit code 0 if all held, 1 if not.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from rose import heap
from rose.parts.simulator import traces
from scripts.harness import Failed, family
from scripts.lending.bench_coserving import parse, say
from scripts.lending.bench_coserving_bench import ALONE, DRAIN_S, Bench
from scripts.lending.bench_coserving_client import Request, replay
from scripts.lending.bench_coserving_engines import Process, confine

PROGRESS_S = 60.0  # of both sides after a fault, a restart on half a machine included
PAUSE_S = (6.0, 12.0)  # between two faults
HELD_S = (0.5, 3.0)  # a stopped process
DAMAGE_S, STOP_S = 2.0, 1.5  # for how long a board is damaged; until a switch has worked
HANG_UP = 0.05  # of the clients
STEADY_S = 45.0  # after a start nothing is measured
# a heap grows by AHEAD at once
GROWTH, GROWTH_BYTES, GROWTH_FILES = (1.1, (64 << 20) + heap.ENGINE_TOP_PAD, 8)
END_S = 60.0  # of a run without new faults
SETTLED_S = 10.0  # after the last process: other programs' names come and go
FAILURES = 3  # in a row, then no other fault is tried
SCENARIO = "ours"


@dataclass
class Size:
    rss: dict[int, int]  # by pid, bytes
    files: int  # open

    @property
    def all(self) -> int:
        return sum(self.rss.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{nbytes / 1e6:.0f}" for nbytes in self.rss.values())
        return f"{self.all / 1e6:,.0f} MB ({parts}), {self.files} files"


class Soak:
    def __init__(self, bench: Bench, seed: int, minutes: float) -> None:
        self.bench, self.seconds, self.draw = bench, 60 * minutes, np.random.default_rng(seed)
        self.began = time.monotonic()
        self.problems: list[str] = []
        self.faults: list[str] = []
        # Faults after which the server lent nothing, so that rollouts were not awaited.
        self.refused = 0
        # The server was killed, until it served again; of the traffic's time.
        self.down: list[tuple[float, float]] = []
        self.requests: list[Request] = []
        self.sizes: dict[int, list[Size]] = {}  # by pid
        self.since: dict[int, float] = {}

    # ----------------------------------------------------------------- the two sides

    @property
    def server(self):
        return self.bench.servers[SCENARIO]

    @property
    def side(self):
        return self.bench.rollouts[SCENARIO]

    @property
    def now(self) -> float:
        """Seconds of the traffic."""
        return time.monotonic() - self.began

    def progress(self) -> str:
        """Waits for tokens on both sides. Raises `Failed` when a side makes none within
        `PROGRESS_S`."""
        start = time.monotonic()
        end = start + PROGRESS_S
        body = {"model": self.server.served, "prompt": [1, 2, 3], "max_tokens": 4}
        given, kind = json.dumps(body | {"ignore_eos": True}).encode(), "application/json"
        url = f"{self.server.url}/v1/completions"
        asked = urllib.request.Request(url, given, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(asked, timeout=PROGRESS_S) as answer:
                answer.read()
        except OSError as error:
            raise Failed(f"the server made no token within {PROGRESS_S:g} s: {error}") from None
        served = time.monotonic()
        answered = f"server answered after {served - start:.1f} s"
        made = self.side.ask("count")["made"]
        while (now := self.side.ask("count")["made"]) == made:
            if self._refuses():
                self.refused += 1
                return f"{answered}; it lends nothing until it meets its targets by itself"
            if time.monotonic() > end:
                raise Failed(
                    f"rollouts made no token within {PROGRESS_S:g} s; the boards say "
                    f"{self.bench.operator.boards()}; {self.side.failed('wrote')}"
                )
            time.sleep(0.05)
        took = time.monotonic() - start
        return f"{answered}, rollouts made {now - made} tokens after {took:.1f} s"

    def _refuses(self) -> bool:
        """On a machine with other guests S may miss its targets whatever is lent."""
        online = self.bench.operator.boards().online
        return online is not None and online.lends == 0

    def look(self) -> None:
        """An end that nobody ordered; sizes of what has been up for long enough."""
        for process in (self.server, self.side):
            if process.popen.poll() is not None or len(family(process.popen.pid)) < 2:
                raise Failed(f"{process.name} ended by itself: {process.failed('said')}")
            pid = process.popen.pid
            if time.monotonic() - self.since.setdefault(pid, time.monotonic()) > STEADY_S:
                self.sizes.setdefault(pid, []).append(size(process))

    def restart_server(self) -> None:
        port = self.server.port
        self.server.end()
        self.bench.servers[SCENARIO] = self.bench.server(SCENARIO, port)
        self.server.ready()
        confine([self.server], self.bench.device, self.bench.host)

    def restart_rollouts(self) -> None:
        self.side.end()
        self.bench.rollouts[SCENARIO] = self.bench.side(SCENARIO, SCENARIO)
        self.side.ready()
        confine([self.side], self.bench.device, self.bench.host)
        self.side.ask("start")

    def _steps(self) -> float:
        """Steps that R has ended."""
        return self.bench.operator.boards().rollout.steps

    def _made(self) -> float:
        """Tokens by R's scheduler; what the other side has received of them comes later."""
        return self.bench.operator.boards().rollout.made_tokens

    # ----------------------------------------------------------------- what goes wrong

    def kill_rollouts(self) -> str:
        self.side.kill()
        time.sleep(self.draw.uniform(*HELD_S))
        self.restart_rollouts()
        return "started again"

    def kill_server(self) -> str:
        begin = self.now
        self.server.kill()
        time.sleep(1.0)
        first = self._made()
        time.sleep(self.draw.uniform(*HELD_S))
        after = self._made()
        if after > first:
            self.problems.append(f"{after - first} rollout tokens were made beside a dead server")
        self.restart_server()
        self.down.append((begin, self.now))
        return f"started again, {self.now - begin:.1f} s without it"

    def _hold(self, process: Process) -> str:
        held = self.draw.uniform(*HELD_S)
        process.park()
        time.sleep(held)
        process.wake()
        return f"for {held:.1f} s"

    def stop_rollouts(self) -> str:
        return self._hold(self.side)

    def stop_server(self) -> str:
        return self._hold(self.server)

    def damage_board(self) -> str:
        """Random bytes at random places, all the while."""
        path = self._board()
        size, end = path.stat().st_size, time.monotonic() + DAMAGE_S
        with path.open("r+b", buffering=0) as file:
            while time.monotonic() < end:
                file.seek(int(self.draw.integers(0, size - 8)))
                file.write(self.draw.bytes(8))
                time.sleep(0.002)
        return path.name

    def cut_board(self) -> str:
        """To a part or to nothing; whoever restarts would write it anew, and so does the soak."""
        path = self._board()
        whole, left = path.stat().st_size, int(self.draw.choice([0, 16]))
        os.truncate(path, left)
        time.sleep(DAMAGE_S)
        os.truncate(path, whole)
        return f"{path.name} to {left} bytes"

    def _board(self) -> Path:
        return self.bench.operator.folder / str(self.draw.choice(["online", "rollout", "control"]))

    def switch_off(self) -> str:
        switch = self.bench.operator.switch
        switch.by_hand = "stopped by the soak"
        time.sleep(STOP_S)
        first = self._steps()
        time.sleep(self.draw.uniform(*HELD_S))
        after = self._steps()
        switch.by_hand = ""
        if after > first + 1:  # one that had begun ends when the online engine lets it
            late = f"more than {STOP_S:g} s after lending was switched off"
            self.problems.append(f"{after - first:g} rollout steps ended {late}")
        return "and on"

    # ----------------------------------------------------------------- all of it

    def run(self) -> None:
        trace = self._traffic()
        leaving = np.flatnonzero(self.draw.random(len(trace)) < HANG_UP)
        leave = {int(n): float(self.draw.uniform(0.01, 0.3)) for n in leaving}
        self.server.wake(), self.side.wake()
        self.side.ask("start")
        self.began = time.monotonic() + 1.0
        client = threading.Thread(target=self._send, args=(trace, leave), daemon=True)
        client.start()
        try:
            self._break_things()
        except Failed as failed:
            self.problems.append(str(failed))
        client.join(max(0.0, self.seconds - self.now) + DRAIN_S + 10)
        if client.is_alive():
            self.problems.append("the client did not end")
        self._judge(leave)

    def _break_things(self) -> None:
        kinds: dict[str, Callable[[], str]] = {
            "rollouts killed": self.kill_rollouts,
            "server killed": self.kill_server,
            "rollouts stopped": self.stop_rollouts,
            "server stopped": self.stop_server,
            "board damaged": self.damage_board,
            "board cut": self.cut_board,
            "lending switched off": self.switch_off,
        }
        deck: list[str] = []
        failures = 0
        self.progress()
        while self.now < self.seconds - END_S and failures < FAILURES:
            time.sleep(self.draw.uniform(*PAUSE_S))
            self.look()
            deck = deck or list(self.draw.permutation(list(kinds)))
            kind = deck.pop()
            failures = 0 if self._overcomes(kind, kinds[kind]) else failures + 1
        while self.now < self.seconds:
            time.sleep(1.0)
            self.look()

    def _overcomes(self, kind: str, fault: Callable[[], str]) -> bool:
        say(f"{kind} ...")
        try:
            words = f"{kind} {fault()}"
            self.look()
            self.faults.append(f"{self.now:6.0f} s  {words}; {self.progress()}")
        except Failed as failed:
            self.problems.append(f"{self.now:6.0f} s  {kind}: {failed}")
            say(self.problems[-1])
            return False
        say(self.faults[-1])
        return True

    def _traffic(self) -> traces.Trace:
        """Slices one after another, so that a trace shorter than the soak will do."""
        length = 60.0
        numbers = range(int(np.ceil(self.seconds / length)))
        parts = [self.bench.slice(number, length) for number in numbers]
        at = np.concatenate([part.at + length * number for number, part in enumerate(parts)])
        prompts = np.concatenate([part.prompt_tokens for part in parts])
        outputs = np.concatenate([part.output_tokens for part in parts])
        return traces.Trace(at, prompts, outputs).slice(0, self.seconds)

    def _send(self, trace: traces.Trace, leave: dict[int, float]) -> None:
        url, served = self.server.url, self.server.served
        self.requests = asyncio.run(replay(url, served, trace, 7, DRAIN_S, leave, self.began))

    def _judge(self, leave: dict[int, float]) -> None:
        lost, excused = [], 0
        for number, request in enumerate(self.requests):
            if request.done or number in leave:
                continue
            if any(begin <= request.ended and request.at <= end for begin, end in self.down):
                excused += 1
            else:
                lost.append(
                    f"request {number}, sent at {request.at:.1f} s, ended at {request.ended:.1f} s "
                    f"after {len(request.chunks)} of {request.output_tokens} tokens: {request.why}"
                )
        done = f"{len(self.requests)} online requests: {sum(r.done for r in self.requests)} done"
        otherwise = f"{excused} lost with a killed server, {len(lost)} lost otherwise"
        say(f"{done}, {len(leave)} hung up, {otherwise}")
        self.problems += lost
        for process in (self.server, self.side):
            if process.popen.poll() is None:
                self._has_grown(process)

    def _has_grown(self, process: Process) -> None:
        if process is self.side:
            process.ask("stop")
        found = self.sizes.get(process.popen.pid)
        if not found:
            return
        # A heap grows until it has seen the largest step; what leaks does so in the second half of
        # its time, too.
        before, after = found[len(found) // 2], size(process)
        lent = int(self.bench.options.kv_mib * 2**20)  # may be anybody's by now
        words = f"{found[0]} {STEADY_S:g} s after its start, {before} halfway, {after} at the end"
        grown = after.all > GROWTH * before.all + GROWTH_BYTES + lent
        if grown or after.files > before.files + GROWTH_FILES:
            self.problems.append(f"{process.name} has grown: {words}")
        say(f"{process.name}: {words}")


def size(process: Process) -> Size:
    tree = family(process.popen.pid)
    rss = {one.pid: one.memory_info().rss for one in tree}
    return Size(rss, sum(one.num_fds() for one in tree))


def left_behind(before: set[str]) -> list[str]:
    """Names in /dev/shm that are new and stay so, and mapped by no living process."""
    new = set(os.listdir("/dev/shm")) - before
    time.sleep(SETTLED_S)
    new &= set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        new = {name for name in new if f"/dev/shm/{name}" not in text}
    return sorted(new)


def main() -> int:
    words = [word for word in sys.argv[1:] if word.startswith(("minutes=", "seed="))]
    own = dict(word.split("=", 1) for word in words)
    options = parse([word for word in sys.argv[1:] if word.partition("=")[0] not in own])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    before = set(os.listdir("/dev/shm"))
    with Bench(options) as bench:
        bench.start(ALONE)
        for words in bench.calibrate():
            say(words)
        bench.slo = bench.targets()
        bench.start(SCENARIO)
        soak = Soak(bench, int(own.get("seed", 0)), float(own.get("minutes", 20)))
        soak.run()
    soak.problems += [f"/dev/shm/{name} was left behind" for name in left_behind(before)]
    faults = f"{len(soak.faults)} faults, after {soak.refused} of them nothing was lent"
    for title, lines in ((faults, soak.faults), (f"{len(soak.problems)} problems", soak.problems)):
        print(f"\n{title}", *lines, sep="\n  ")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
