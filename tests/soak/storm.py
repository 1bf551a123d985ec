"""A storm: serving ranks join a real training run and are killed at random moments; what must hold
is checked.

    python tests/soak/storm.py [JOINS=50] [--lenders 3] [--seed 1] [--keep FOLDER]
        [--with stream|hybrid] [HYDRA OVERRIDES ...]

The main job trains on this machine while `--lenders` serving ranks with real engines come over MPI,
each killed with SIGKILL at a random moment (half of them on their way in or within a second of
joining, half in the midst of their turns) and followed by another, until JOINS have joined. Then
the run is stopped as by SIGTERM, and all of this must hold: the run stopped in order, in its first
attempt; every kill of a joined rank was noticed; each step trained its full batch, every trajectory
in one step only and with a version for each token; the journal replays to the same decisions.
Printed: joins, kills, turns that moved, and how long a loss took to be noticed. Exit code 1 if
something does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from rose import config as cfg
from rose import policies
from rose.coordinator import journal, replay
from rose.observe.metrics import read_metrics, rows_of
from rose.protocol import unpack_tokens
from scripts.runs import launch
from tests import processes

SMALL = (
    "trainer.steps=1000000 trainer.batch_size=32 rollout.group_size=4 eval.episodes=0 "
    "observe.terminal=false rollout.kv_cache_gib=0.05 rollout.workers=1 rollout.threads=1 "
    "trainer.threads=1 trainer.checkpoint_every=10 transfer.keep_versions=4"
).split()
# What shortens steps, as far as it goes together.
FASTER = {
    "stream": ("rollout/draft=group", "trainer.stream=true"),
    "hybrid": ("rollout/draft=group", "rollout.hybrid=1", "scheduler/provisioning=all_idle"),
}
START_S = 900.0
JOIN_S = 900.0
STOP_S = 90.0


@dataclass
class Lender:
    """One serving rank: its command, the process that joins, and the name that it was given."""

    process: subprocess.Popen
    log: Path
    kill_after_join_s: float = 0.0
    kill_at: float = 0.0  # monotonic; 0: not yet known

    def plan(self, chance: random.Random) -> None:
        """When this membership will be killed: on its way in, or so long after it has joined."""
        on_its_way = chance.random() < 0.2
        self.kill_at = time.monotonic() + chance.uniform(1.0, 15.0) if on_its_way else 0.0
        self.kill_after_join_s = chance.choice([chance.uniform(0.0, 1.0), chance.uniform(1.0, 7.0)])

    @property
    def worker(self) -> str | None:
        """The name of the present membership once it has joined."""
        last = self.log.read_text(errors="replace").rpartition("admitted as ")[2]
        found = re.search(r"(borrowed-\d+): joined", last)
        return found and found[1]

    def kill(self, whole: bool) -> float:
        """SIGKILL to the membership and its engine, or to all of it; the wall clock then."""
        at = time.time()
        processes.kill_family(self.process.pid, itself=whole)
        if whole:
            self.process.wait()
        return at


def start_run(folder: Path, overrides: list[str]) -> subprocess.Popen:
    command = launch(folder, "run", *SMALL, *overrides)
    with open(folder / "launch.log", "wb") as words:
        return subprocess.Popen(command, stdout=words, stderr=words, start_new_session=True)


def start_lender(run_dir: Path, log: Path, chance: random.Random) -> Lender:
    command = [sys.executable, "-u", "-m", "rose", "serve", f"name={run_dir.name}"]
    command += [f"output_dir={run_dir.parent}", "rollout.threads=1"]
    with open(log, "ab") as words:  # appended to, so that it may be emptied meanwhile
        process = subprocess.Popen(command, stdout=words, stderr=words, cwd=REPOSITORY)
    lender = Lender(process, log)
    lender.plan(chance)
    return lender


def await_step(ended: Callable[[], str], run_dir: Path, step: int, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not any(row["step"] >= step for row in rows_of(read_metrics(run_dir), "step")):
        if ended() or time.monotonic() > end:
            words = f"did not come within {deadline_s:g} s: {ended()}"
            raise SystemExit(f"storm: step {step} of {run_dir} {words}")
        time.sleep(0.5)


def tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:])


@dataclass
class Storm:
    """What befell the ranks."""

    run_dir: Path
    joins: int  # so many must have joined; then it is over
    lenders: int  # at once
    chance: random.Random
    ended: Callable[[], str]  # why the run is not running, "" while it is
    alive: list[Lender] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)
    killed: dict[str, float] = field(default_factory=dict)  # worker -> when (wall clock)
    early: int = 0  # killed on their way in
    last_join: float = field(default_factory=time.monotonic)

    def rage(self) -> list[str]:
        """Until `joins` have joined, then all are killed; what went wrong."""
        number = 0
        try:
            while len(self.joined) < self.joins:
                if self.ended():
                    return [f"the run ended in the storm: {self.ended()}"]
                if time.monotonic() - self.last_join > JOIN_S:
                    said = tail(self.alive[0].log) if self.alive else ""
                    return [f"no rank joined for {JOIN_S:g} s: {said}"]
                while len(self.alive) < self.lenders:
                    log = self.run_dir.parent / f"lender-{number}.log"
                    self.alive.append(start_lender(self.run_dir, log, self.chance))
                    number += 1
                for lender in list(self.alive):
                    self._watch(lender)
                time.sleep(0.05)
        finally:
            for lender in list(self.alive):
                self._kill(lender, whole=True)
        killed = f"{len(self.killed)} killed when joined, {self.early} killed on their way in"
        print(f"{len(self.joined)} joins, {killed}")
        return []

    def _watch(self, lender: Lender) -> None:
        now = time.monotonic()
        if lender.worker and lender.worker not in self.joined:
            self.joined.add(lender.worker)
            self.last_join = now
            lender.kill_at = lender.kill_at or now + lender.kill_after_join_s
            print(f"{len(self.joined):3} joined: {lender.worker}", flush=True)
        if lender.kill_at and now >= lender.kill_at:
            # else its command begins another membership
            self._kill(lender, whole=self.chance.random() < 0.3)

    def _kill(self, lender: Lender, whole: bool) -> None:
        worker, at = lender.worker, lender.kill(whole)
        if whole:
            self.alive.remove(lender)
        else:
            lender.log.write_text("")
            lender.plan(self.chance)
        if worker:
            self.killed[worker] = at
        self.early += not worker


def storm(folder: Path, joins: int, lenders: int, seed: int, overrides: list[str]) -> list[str]:
    """What did not hold of a run of its own; prints the rest."""
    run_dir, run = folder / "run", start_run(folder, overrides)

    def ended() -> str:
        if run.poll() is None:
            return ""
        return f"launch.py ended with {run.returncode}: {tail(folder / 'launch.log')}"

    try:
        await_step(ended, run_dir, 1, START_S)
        one = Storm(run_dir, joins, lenders, random.Random(seed), ended)
        wrong = one.rage()
        if not wrong:
            newest = rows_of(read_metrics(run_dir), "step")[-1]["step"]
            await_step(ended, run_dir, newest + 2, JOIN_S)  # it goes on
            run.send_signal(signal.SIGTERM)
            if run.wait(STOP_S) != 128 + signal.SIGTERM:
                wrong = [ended()]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return wrong + check(run_dir) + losses(run_dir, one.killed)


def check(run_dir: Path) -> list[str]:
    """What does not hold of a run that borrowed ranks came to and went from."""
    wrong, seen, c = [], {}, cfg.load(run_dir / "config.json")
    attempts = sorted((run_dir / "journal").glob("attempt-*.jsonl"))
    if len(attempts) != 1:
        wrong.append(f"{len(attempts)} attempts, where one was to do")
    steps = [row["step"] for row in rows_of(read_metrics(run_dir), "step")]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"steps {steps}")
    for step in steps:
        trajectories = [t for group in replay.load(run_dir, step) for t in group]
        count, batch = len(trajectories), c.trainer.batch_size
        if count != batch:
            wrong.append(f"step {step} has {count} trajectories, not {batch}")
        for t in trajectories:
            if t.id in seen:
                wrong.append(f"{t.id} is in steps {seen[t.id]} and {step}")
            seen[t.id] = step
            made, versions = np.frombuffer(t.mask, np.uint8) == 1, unpack_tokens(t.versions)
            tokens = unpack_tokens(t.tokens)
            if len({len(t.mask), len(versions), len(tokens), len(t.logprobs) // 4}) != 1:
                wrong.append(f"{t.id} has fields of different lengths")
            elif (versions[made] != step - 1).any():
                found = sorted(set(versions[made].tolist()))
                wrong.append(f"{t.id} of step {step} has tokens of versions {found}")
    for path in attempts:
        try:
            events = journal.replay(path, policies.build(c.scheduler, c.rollout.turn_timeout_s))
            print(f"{path.name}: {events:,} events replayed to the same decisions")
        except ValueError as error:
            wrong.append(str(error))
    moved = sum(row["migrations"] for row in rows_of(read_metrics(run_dir), "step"))
    print(f"{len(steps)} steps, {len(seen):,} trajectories, each in one step; {moved} turns moved")
    return wrong


def noticed(run_dir: Path) -> dict[str, float]:
    """Worker that was lost -> when the run said so (wall clock)."""
    rows = [row for row in read_metrics(run_dir) if row.get("what") == "borrowed rank lost"]
    return {row["detail"].split(":")[0]: row["time"] for row in rows}


def losses(run_dir: Path, killed: dict[str, float]) -> list[str]:
    """Kills that nobody noticed; prints how long the others took."""
    seen = noticed(run_dir)
    took = [seen[worker] - at for worker, at in killed.items() if worker in seen]
    if took:
        middle, spread = statistics.median(took), f"{min(took):.2f} to {max(took):.2f} s"
        print(f"kill to notice: median {middle:.2f} s, {spread}")
    end = max((row["time"] for row in read_metrics(run_dir)), default=0.0)
    return [
        f"the kill of {worker} was not noticed"
        for worker, at in killed.items()
        if worker not in seen and at < end - 10
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("joins", type=int, nargs="?", default=50)
    parser.add_argument("--lenders", type=int, default=3, help="at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--with", choices=FASTER, dest="faster", help="what shortens steps")
    parser.add_argument("--keep", type=Path, help="leave everything in this folder")
    args, overrides = parser.parse_known_args()
    overrides = [*FASTER.get(args.faster, ()), *overrides]
    with tempfile.TemporaryDirectory(prefix="rose-storm-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        wrong = storm(folder.resolve(), args.joins, args.lenders, args.seed, overrides)
    for what in wrong:
        print(f"WRONG: {what}")
    print("all of it holds" if not wrong else f"{len(wrong)} things do not hold")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
