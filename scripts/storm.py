"""A storm: serving ranks join a real training run and are killed at random moments; what must hold is checked.

    python scripts/storm.py [JOINS=50] [--lenders 3] [--seed 1] [--keep FOLDER] [HYDRA OVERRIDES ...]

The main job trains on this machine while `--lenders` serving ranks with real engines come over MPI, each killed with
SIGKILL at a random moment (half of them on their way in or within a second of joining, half in the midst of their
turns) and followed by another, until JOINS have joined. Then the run is stopped as by Ctrl-C, and all of this must hold:
the run stopped in order, in its first attempt; every kill of a joined rank was noticed; each step trained its full
batch, every trajectory in one step only and with a version for each token; the journal replays to the same decisions.
Printed: joins, kills, turns that moved, and how long a loss took to be noticed. Exit code 1 if something does not hold.
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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rose import config as cfg  # noqa: E402
from rose import scheduler  # noqa: E402
from rose.observe.metrics import read_metrics, rows_of  # noqa: E402
from rose.protocol import unpack_tokens  # noqa: E402
from rose.roles import journal  # noqa: E402
from rose.rollout import replay  # noqa: E402

SMALL = ("trainer.steps=1000000", "trainer.batch_size=32", "rollout.group_size=4", "eval.episodes=0",
         "observe.terminal=false", "rollout.kv_cache_gib=0.05", "rollout.workers=1", "rollout.threads=1",
         "trainer.threads=1", "trainer.checkpoint_every=10", "transfer.keep_versions=4")
START_S = 240.0
JOIN_S = 240.0
STOP_S = 90.0


@dataclass
class Lender:
    """One serving rank: its command, the process that joins, and the name that it was given."""

    process: subprocess.Popen
    log: Path
    kill_after_join_s: float | None  # None: on its way in, at a random moment
    started: float = field(default_factory=time.monotonic)
    kill_at: float = 0.0  # monotonic

    @property
    def worker(self) -> str | None:
        found = re.search(r"(borrowed-\d+): joined", self.log.read_text(errors="replace"))
        return found and found[1]

    def kill(self) -> float:
        """SIGKILL to all of it; the wall clock then."""
        everybody = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        at = time.time()
        for process in everybody:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        return at


def start_run(folder: Path, overrides: list[str]) -> subprocess.Popen:
    command = [sys.executable, str(REPOSITORY / "launch.py"), f"output_dir={folder}", "name=run", *SMALL, *overrides]
    with open(folder / "launch.log", "wb") as words:
        return subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, start_new_session=True)


def start_lender(folder: Path, number: int, kill_after_join_s: float | None) -> Lender:
    log = folder / f"lender-{number}.log"
    with open(log, "wb") as words:
        process = subprocess.Popen([sys.executable, "-u", "-m", "rose.serving", "name=run", f"output_dir={folder}",
                                    "rollout.threads=1"], stdout=words, stderr=subprocess.STDOUT, cwd=REPOSITORY)
    return Lender(process, log, kill_after_join_s)


def await_step(run: subprocess.Popen, run_dir: Path, step: int, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not any(row["step"] >= step for row in rows_of(read_metrics(run_dir), "step")):
        if run.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"storm: step {step} of {run_dir} did not come: {tail(run_dir.parent / 'launch.log')}")
        time.sleep(0.5)


def tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:])


def storm(folder: Path, joins: int, lenders: int, seed: int, overrides: list[str]) -> list[str]:
    """What did not hold; prints the rest."""
    chance, run_dir = random.Random(seed), folder / "run"
    run = start_run(folder, overrides)
    alive: list[Lender] = []
    killed: dict[str, float] = {}  # worker -> when (wall clock)
    joined, early, number = set(), 0, 0
    try:
        await_step(run, run_dir, 1, START_S)
        last_join = time.monotonic()
        while len(joined) < joins:
            if run.poll() is not None:
                return [f"the run ended in the storm: {tail(folder / 'launch.log')}"]
            while len(alive) < lenders:
                moment = None if chance.random() < 0.2 else chance.choice([chance.random(), 1 + 6 * chance.random()])
                alive.append(start_lender(folder, number, moment))
                alive[-1].kill_at = time.monotonic() + chance.uniform(1.0, 20.0) if moment is None else 0.0
                number += 1
            for lender in list(alive):
                now = time.monotonic()
                if lender.worker and lender.worker not in joined:
                    joined.add(lender.worker)
                    last_join = now
                    lender.kill_at = lender.kill_at or now + lender.kill_after_join_s
                    print(f"{len(joined):3} joined: {lender.worker}", flush=True)
                if lender.kill_at and now >= lender.kill_at:
                    worker, at = lender.worker, lender.kill()
                    alive.remove(lender)
                    if worker:
                        killed[worker] = at
                    early += not worker
            if time.monotonic() - last_join > JOIN_S:
                return [f"no rank joined for {JOIN_S:g} s: {tail(alive[0].log) if alive else ''}"]
            time.sleep(0.05)
        newest = rows_of(read_metrics(run_dir), "step")[-1]["step"]
        await_step(run, run_dir, newest + 2, JOIN_S)  # it goes on
        run.send_signal(signal.SIGTERM)
        code = run.wait(STOP_S)
    finally:
        for lender in alive:
            lender.kill()
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    wrong = [] if code == 128 + signal.SIGTERM else [f"launch.py ended with code {code}: {tail(folder / 'launch.log')}"]
    print(f"{len(joined)} joins, {len(killed)} killed when joined, {early} killed on their way in")
    return wrong + check(run_dir) + losses(run_dir, killed)


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
        if len(trajectories) != c.trainer.batch_size:
            wrong.append(f"step {step} has {len(trajectories)} trajectories, not {c.trainer.batch_size}")
        for t in trajectories:
            if t.id in seen:
                wrong.append(f"{t.id} is in steps {seen[t.id]} and {step}")
            seen[t.id] = step
            made, versions = np.frombuffer(t.mask, np.uint8) == 1, unpack_tokens(t.versions)
            if len({len(t.mask), len(versions), len(unpack_tokens(t.tokens)), len(t.logprobs) // 4}) != 1:
                wrong.append(f"{t.id} has fields of different lengths")
            elif (versions[made] != step - 1).any():
                wrong.append(f"{t.id} of step {step} has tokens of versions {sorted(set(versions[made].tolist()))}")
    for path in attempts:
        try:
            print(f"{path.name}: {journal.replay(path, scheduler.build(c.scheduler, c.rollout.turn_timeout_s)):,} events "
                  "replayed to the same decisions")
        except ValueError as error:
            wrong.append(str(error))
    moved = sum(row["migrations"] for row in rows_of(read_metrics(run_dir), "step"))
    print(f"{len(steps)} steps, {len(seen):,} trajectories, each in one step; {moved} turns moved")
    return wrong


def losses(run_dir: Path, killed: dict[str, float]) -> list[str]:
    """Kills that nobody noticed; prints how long the others took."""
    rows = [row for row in read_metrics(run_dir) if row.get("what") == "borrowed rank lost"]
    noticed = {row["detail"].split(":")[0]: row["time"] for row in rows}
    took = [noticed[worker] - at for worker, at in killed.items() if worker in noticed]
    if took:
        print(f"kill to notice: median {statistics.median(took):.2f} s, {min(took):.2f} to {max(took):.2f} s")
    end = max((row["time"] for row in read_metrics(run_dir)), default=0.0)
    return [f"the kill of {worker} was not noticed" for worker, at in killed.items()
            if worker not in noticed and at < end - 10]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("joins", type=int, nargs="?", default=50)
    parser.add_argument("--lenders", type=int, default=3, help="at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave everything in this folder")
    args, overrides = parser.parse_known_args()
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
