"""Measure the cost to a training run of ranks that join and leave, on a real Slurm.

    slurm/dev_cluster.sh start && export SLURM_CONF=... python scripts/bench_elastic.py [--rounds 3]
    [--steps 6] [--borrowed 0 1 2 4] [HYDRA OVERRIDES ...]

A training job with one dedicated engine runs throughout. In each round serving jobs join it one
after the other, and at each number of borrowed ranks `--steps` training steps are timed. Then half
of the ranks are asked to leave (SIGUSR2: the rank finishes its turns first), and the other half is
killed (SIGKILL to every process of the rank). Prints median, smallest and largest over all rounds:

    ask to joined         from a rank's request to its hello; its engine starts meanwhile (vLLM is imported before)
    joined to first token from the hello to the rank's first token at the coordinator; it loads the current weights
    stall per join        the longest time that the coordinator's clock was late (it ticks every 0.5 s) between
                          ask and first token, beside the longest in an equal time without a join: the time
                          that the training loop may wait
    kill to notice, kill to reroute: from a kill until it is known, and until another rank has its last turn
    lost, computed again  per kill: tokens generated and never received (estimated from the rank's rate and
                          the time since its last message, at most 0.1 s), and tokens of its turns'
                          contexts that another rank prefills again (unless it has them cached)
    drain                 from SIGUSR2 to the rank's goodbye
    step time             by the number of borrowed ranks

The script records only the times of kills and signals. All else is read from the run's own journal
and metrics afterwards. The kills need the virtual nodes of slurm/dev_cluster.sh, whose processes
run on this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from csv_tables import REPOSITORY, shown
from rich.console import Console

from rose.coordinator import journal
from rose.coordinator.records import TICK_S
from rose.engine.rank import PROGRESS_S
from rose.launch import state
from rose.observe.metrics import read_metrics, rows_of
from rose.scheduler import events as ev

DEADLINE_S = 300.0
RUN = (
    "cluster=dev",
    "name=bench",
    "trainer.steps=1000000",
    "eval.episodes=0",
    "observe.terminal=false",
    "observe.report=false",
    "rollout.workers=1",
    "cluster.slurm.rollout.nodes=1",
    "rollout.threads=1",
    "trainer.threads=1",
    "rollout.kv_cache_gib=0.05",
    "trainer.checkpoint_every=1000000",
    "transfer.keep_versions=4",
)
REPORT_S = PROGRESS_S  # seconds between two messages of a rank with turns
RATE_S = 2.0  # seconds before a killed rank's last message over which its token rate is computed


class Training:
    """The training job, submitted to Slurm."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder, self.run = folder, folder / "bench"
        done = subprocess.run(
            [
                sys.executable,
                str(REPOSITORY / "launch.py"),
                *RUN,
                f"output_dir={folder}",
                *overrides,
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        if done.returncode:
            raise SystemExit(f"bench_elastic: {done.stdout}{done.stderr}")
        self.id = state.submitted(self.run)

    def until(self, condition: Callable[[], object], what: str):
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            if time.monotonic() > end or not state.is_active(self.id):
                raise SystemExit(
                    f"bench_elastic: {what} did not come within {DEADLINE_S:g} s; see "
                    f"{self.run}/logs"
                )
            time.sleep(0.2)
        return value

    def steps(self) -> list[dict]:
        return rows_of(read_metrics(self.run), "step")

    def next_steps(self, count: int) -> list[float]:
        """Wait for the next `count` whole steps and return their seconds."""
        first = (
            self.steps()[-1]["step"] if self.steps() else 0
        ) + 2  # skips the present step, which may have begun with other ranks
        self.until(
            lambda: self.steps() and self.steps()[-1]["step"] >= first + count - 1, f"{count} steps"
        )
        return [row["time_step"] for row in self.steps() if first <= row["step"] < first + count]


class Serving:
    """A Slurm job that lends one rank."""

    def __init__(self, training: Training, number: int) -> None:
        self.training, self.log = training, training.folder / f"serving-{number}.log"
        done = subprocess.run(
            [
                "sbatch",
                "--parsable",
                "--partition=spare",
                f"--output={self.log}",
                str(REPOSITORY / "slurm" / "serving.sbatch"),
                "name=bench",
                f"output_dir={training.folder}",
                "rollout.threads=1",
            ],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            timeout=60,
        )
        if done.returncode:
            raise SystemExit(f"bench_elastic: {done.stderr}")
        self.id = done.stdout.strip().split(";")[0]

    def joined(self) -> str:
        """Wait until the rank has joined and return its worker's name. If it was lost and joined
        again, return the name of its latest membership."""
        found = self.training.until(
            lambda: (
                self.log.exists()
                and re.findall(
                    r"rose.serving\[(\d+)\].* (borrowed-\d+): joined",
                    self.log.read_text(encoding="utf-8"),
                )
            ),
            f"job {self.id}",
        )[-1]
        self.pid, self.worker = int(found[0]), found[1]
        return self.worker

    def kill(self) -> float:
        """Kill all processes of the rank and return the wall-clock time."""
        member = psutil.Process(self.pid)
        lender = member.parent()
        at = time.time()
        for process in (*member.children(recursive=True), member, lender):
            process.kill()
        return at

    def drain(self) -> float:
        # The signal goes to the job's command, which then doesn't join again.
        psutil.Process(self.pid).parent().send_signal(signal.SIGUSR2)
        at = time.time()
        self.training.until(
            lambda: f"{self.worker}: left" in self.log.read_text(encoding="utf-8"),
            f"{self.worker} to leave",
        )
        return at


@dataclass
class Loss:
    """A killed rank. Times are seconds since the kill, None if the event did not happen."""

    notice: float | None = None
    reroute: float | None = None
    turns: int = 0
    lost: float = 0.0
    again: int = 0


@dataclass
class Story:
    """The history of borrowed workers, read from a journal."""

    joined: dict[str, float] = field(default_factory=dict)  # wall-clock times
    first_token: dict[str, float] = field(default_factory=dict)
    ticks: list[float] = field(default_factory=list)
    losses: dict[str, Loss] = field(default_factory=dict)


def read(entries, killed: dict[str, float]) -> Story:
    """Return the history in a journal's `entries`, which are without the snapshot."""
    story = Story(losses={worker: Loss() for worker in killed})
    size: dict[str, int] = {}  # tokens of each open turn: context and generated
    holder: dict[str, str] = {}
    words: dict[str, list[tuple[float, int]]] = {}  # (time, tokens) of each message of each worker
    orphans: dict[str, str] = {}  # turn -> the killed worker that held it
    for entry in entries:
        event = entry.event
        match event:
            case ev.Tick():
                story.ticks.append(event.at)
            case ev.WorkerJoined(kind="cooperative", worker=worker):
                story.joined.setdefault(worker, event.at)
            case ev.TurnRequested(turn=turn):
                size[turn] = event.context_tokens
            case ev.TurnProgressed(turn=turn) if turn in holder:
                size[turn] += event.tokens
                words.setdefault(holder[turn], []).append((event.at, event.tokens))
                story.first_token.setdefault(holder[turn], event.at)
            case ev.TurnEnded(turn=turn):
                size.pop(turn, None), holder.pop(turn, None), orphans.pop(turn, None)
            case ev.WorkerLost(worker=worker):
                held = [
                    turn
                    for turn, name in holder.items()
                    if name == worker and turn not in event.ended
                ]
                for turn in event.ended:
                    size.pop(turn, None), holder.pop(turn, None)
                for turn in held:
                    del holder[turn]
                if worker in killed:
                    orphans |= dict.fromkeys(held, worker)
                    story.losses[worker] = _loss(
                        event.at, killed[worker], [size[t] for t in held], words.get(worker, [])
                    )
        for action in entry.actions:
            if isinstance(action, ev.AssignTurn):
                holder[action.turn] = action.worker
                if (worker := orphans.pop(action.turn, None)) is not None:
                    story.losses[worker].reroute = event.at - killed[worker]
    return story


def _loss(noticed: float, killed: float, held: list[int], words: list[tuple[float, int]]) -> Loss:
    words = [(at, tokens) for at, tokens in words if at <= killed]
    last = words[-1][0] if words else killed
    rate = sum(tokens for at, tokens in words if at > last - RATE_S) / RATE_S
    return Loss(
        noticed - killed,
        turns=len(held),
        lost=rate * min(killed - last, REPORT_S) if held else 0.0,
        again=sum(held),
    )


def lateness(ticks: Sequence[float], begin: float, end: float) -> float:
    """Return the largest lateness in seconds of a tick between `begin` and `end`."""
    late = [b - a - TICK_S for a, b in zip(ticks, ticks[1:], strict=False) if b > begin and a < end]
    return max(late, default=0.0)


def stalls(story: Story, asked: dict[str, float]) -> tuple[list[float], list[float]]:
    """Return the largest lateness (ms) in each join, and in as long a time before, without
    joins."""
    spans = [
        (asked[worker], story.first_token[worker])
        for worker in asked
        if worker in story.first_token
    ]
    quiet = [(a - (b - a), a) for a, b in spans]
    free = [
        (a, b)
        for a, b in quiet
        if story.ticks and a > story.ticks[0] and not any(a < d and c < b for c, d in spans)
    ]
    return (
        [1000 * lateness(story.ticks, *span) for span in spans],
        [1000 * lateness(story.ticks, *span) for span in free],
    )


def bench(
    folder: Path, rounds: int, steps: int, counts: list[int], overrides: list[str], console: Console
) -> None:
    training, serving, number = Training(folder, overrides), [], 0
    killed, drained = {}, {}
    times: dict[int, list[float]] = {count: [] for count in counts}
    try:
        training.until(training.steps, "the first step")
        for at in range(rounds):
            for count in counts:
                while len(serving) < count:
                    serving.append(Serving(training, number := number + 1))
                    console.print(f"round {at + 1}: {serving[-1].joined()} joined")
                times[count] += training.next_steps(steps)
                median = statistics.median(times[count][-steps:])
                console.print(f"round {at + 1}: {count} borrowed: {median:.2f} s a step")
            for i, job in enumerate(serving):
                worker = job.joined()
                if i % 2:
                    drained[worker] = job.drain()
                else:
                    killed[worker] = job.kill()
                training.until(
                    lambda worker=job.worker: gone(training, worker), f"{job.worker} to be gone"
                )
            serving.clear()
        training.next_steps(1)  # a step, with which the journal is flushed
    finally:
        subprocess.run(
            ["scancel", training.id, *(job.id for job in serving)], timeout=60, check=True
        )
    end = time.monotonic() + DEADLINE_S
    while state.is_active(training.id) and time.monotonic() < end:
        time.sleep(0.5)
    show(training, killed, drained, times, console)


def gone(training: Training, worker: str) -> float | None:
    """Return when the coordinator noted that the worker was gone, wall clock, or None."""
    return next(
        (
            row["time"]
            for row in read_metrics(training.run)
            if row.get("what") in ("left", "borrowed rank lost")
            and row["detail"].startswith(f"{worker}:")
        ),
        None,
    )


def show(
    training: Training,
    killed: dict[str, float],
    drained: dict[str, float],
    times: dict[int, list[float]],
    console: Console,
) -> None:
    [path] = (training.run / "journal").glob("attempt-*.jsonl")
    entries = journal.read(path)
    next(entries)
    story = read(entries, killed)
    waited = {
        worker: float(seconds)
        for row in read_metrics(training.run)
        if row.get("what") == "joined"
        for worker, seconds in re.findall(r"^(\S+):.* ([\d.]+) s after it asked", row["detail"])
    }
    during, without = stalls(
        story, {worker: story.joined[worker] - waited[worker] for worker in waited}
    )
    losses = list(story.losses.values())
    found: dict[str, list[float]] = {
        "ask to joined, s": list(waited.values()),
        "joined to first token, s": [
            at - story.joined[w] for w, at in story.first_token.items() if w in waited
        ],
        "stall per join, ms": during,
        "the same without a join, ms": without,
        "kill to notice, s": [one.notice for one in losses if one.notice is not None],
        "kill to reroute of its last turn, s": [
            one.reroute for one in losses if one.reroute is not None
        ],
        "turns moved per kill": [one.turns for one in losses],
        "tokens lost per kill": [one.lost for one in losses],
        "tokens computed again per kill": [one.again for one in losses],
        "drain, s": [gone(training, worker) - at for worker, at in drained.items()],
    } | {f"step with {count} borrowed, s": seconds for count, seconds in times.items()}
    rows = [
        {
            "": name,
            "median": statistics.median(values),
            "smallest": min(values),
            "largest": max(values),
            "of": len(values),
        }
        for name, values in found.items()
        if values
    ]
    title = f"{len(waited)} joins, {len(killed)} kills, {len(drained)} drained"
    console.print(shown(rows, title))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--borrowed", type=int, nargs="+", default=[0, 1, 2, 4], help="ascending")
    parser.add_argument("--keep", type=Path, help="leave everything in this folder")
    args, overrides = parser.parse_known_args()
    if shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ:
        parser.error("SLURM_CONF is not set, or there is no sbatch: slurm/dev_cluster.sh start")
    if args.borrowed != sorted(args.borrowed):
        parser.error(f"--borrowed {args.borrowed}: must ascend")
    with tempfile.TemporaryDirectory(prefix="rose-elastic-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench(folder, args.rounds, args.steps, args.borrowed, overrides, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
