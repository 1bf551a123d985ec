"""Measure the cost to a training run of ranks that join and leave, on a real Slurm.

    slurm/dev_cluster.sh start && export SLURM_CONF=... python scripts/lending/bench_elastic.py [--rounds 3]
    [--steps 6] [--borrowed 0 1 2 4] [--keep FOLDER] [HYDRA OVERRIDES ...]

A training job with one dedicated engine runs throughout. In each round serving jobs join it one
after the other, with `--steps` training steps at each number of borrowed ranks. Then half of the
ranks are asked to leave (SIGUSR2: the rank finishes its turns first), and the other half is killed
(SIGKILL to every process of the rank). Prints medians and ranges over all rounds, which are read
from the run's own journal and metrics: seconds from a rank's request to its hello, during which its
engine starts; from the hello to its first token at the coordinator; from a kill until it is known,
and until another rank has its last turn; tokens lost per kill (generated and never received,
estimated from the rank's rate) and computed again (contexts of its turns, unless they are cached);
and seconds of a drain. The kills need the virtual nodes of slurm/dev_cluster.sh, whose processes
run on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.coordinator import journal
from rose.engine.rank import PROGRESS_S
from rose.observe.metrics import read_metrics
from rose.scheduler import events as ev
from scripts.csv_tables import middle, show
from scripts.harness import Failed, flagged
from scripts.runs import MEASURED
from scripts.slurm_jobs import Serving, Training

RUN = (
    *MEASURED,
    "trainer.steps=1000000",
    "rollout.workers=1",
    "cluster.slurm.rollout.nodes=1",
    "rollout.kv_cache_gib=0.05",
    "trainer.checkpoint_every=1000000",
    "transfer.keep_versions=4",
)
REPORT_S = PROGRESS_S  # seconds between two messages of a rank with turns
RATE_S = 2.0  # seconds before a killed rank's last message over which its token rate is computed


def wait(training: Training, count: int) -> None:
    """Wait for `count` whole steps. The present one may have begun with other ranks."""
    last = training.steps()[-1]["step"] + 1 + count
    training.until(lambda: training.steps()[-1]["step"] >= last, f"{count} steps")


def joined(training: Training, job: Serving) -> str:
    """Wait until the job's rank has joined and return its worker's name. If it was lost and joined
    again, return the name of its latest membership."""
    return training.until(job.members, f"job {job.id}")[-1][1]


def kill(job: Serving) -> float:
    """Kill all processes of the job's rank and return the wall-clock time."""
    lender, at = job.member.parent(), time.time()
    job.kill()
    lender.kill()
    return at


def drain(training: Training, job: Serving, worker: str) -> float:
    # The signal goes to the job's command, which then doesn't join again.
    job.member.parent().send_signal(signal.SIGUSR2)
    at = time.time()
    training.until(lambda: f"{worker}: left" in job.words, f"{worker} to leave")
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
                for turn in event.ended:
                    size.pop(turn, None), holder.pop(turn, None)
                held = [turn for turn, name in holder.items() if name == worker]
                for turn in held:
                    del holder[turn]
                if worker in killed:
                    orphans |= dict.fromkeys(held, worker)
                    sizes, said = [size[turn] for turn in held], words.get(worker, [])
                    story.losses[worker] = _loss(event.at, killed[worker], sizes, said)
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


def bench(folder: Path, rounds: int, steps: int, counts: list[int], overrides: list[str]) -> None:
    training = Training(folder, "bench", [*RUN, *overrides])
    serving: list[Serving] = []
    killed, drained = {}, {}
    try:
        training.until(training.steps, "the first step")
        for at in range(rounds):
            for count in counts:
                while len(serving) < count:
                    serving.append(Serving(folder, "bench", ""))
                    print(f"round {at + 1}: {joined(training, serving[-1])} joined", flush=True)
                wait(training, steps)
            for i, job in enumerate(serving):
                worker = joined(training, job)
                if i % 2:
                    drained[worker] = drain(training, job, worker)
                else:
                    killed[worker] = kill(job)
                training.until(lambda worker=worker: gone(training, worker), f"{worker} to be gone")
            serving.clear()
        wait(training, 1)  # the step with which the journal is flushed
    finally:
        for job in (*serving, training):
            job.end()
    summarise(training, killed, drained)


def gone(training: Training, worker: str) -> float | None:
    """Return when the coordinator noted that the worker was gone, wall clock, or None."""
    for row in read_metrics(training.run):
        ended = row.get("what") in ("left", "borrowed rank lost")
        if ended and row["detail"].startswith(f"{worker}:"):
            return row["time"]
    return None


def summarise(training: Training, killed: dict[str, float], drained: dict[str, float]) -> None:
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
    losses = list(story.losses.values())
    found: dict[str, list[float]] = {
        "ask to joined, s": list(waited.values()),
        "joined to first token, s": [
            at - story.joined[w] for w, at in story.first_token.items() if w in waited
        ],
        "kill to notice, s": [it.notice for it in losses if it.notice is not None],
        "kill to reroute, s": [r for it in losses if (r := it.reroute) is not None],
        "turns moved per kill": [one.turns for one in losses],
        "tokens lost per kill": [one.lost for one in losses],
        "tokens computed again per kill": [one.again for one in losses],
        "drain, s": [gone(training, worker) - at for worker, at in drained.items()],
    }
    rows = [
        {"": name, "median (range)": middle(values), "of": len(values)}
        for name, values in found.items()
        if values
    ]
    show(rows, f"{len(waited)} joins, {len(killed)} kills, {len(drained)} drained")


def main() -> int:
    args = flagged(__doc__, None, "OVERRIDE", rounds=3, steps=6, borrowed=[0, 1, 2, 4], keep=Path)
    if shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ:
        raise Failed("SLURM_CONF is not set, or there is no sbatch: slurm/dev_cluster.sh start")
    counts = sorted(args.borrowed)
    with tempfile.TemporaryDirectory(prefix="rose-elastic-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench(folder, args.rounds, args.steps, counts, args.words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
