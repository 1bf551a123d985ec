"""A storm over environment hosts: agents in sandboxes train while hosts are killed at random.

    python tests/soak/storm_hosts.py [MINUTES=10] [--every 15] [--seed 1] [HYDRA OVERRIDES ...]

A training run on env=terminal with checkpoints of its sandboxes, whose host's process is killed by
SIGKILL or SIGSEGV every `--every` seconds on average, until MINUTES have passed; then it is stopped
as by SIGTERM. A second run, in which nobody dies, makes the same steps. All of this must hold: each
kill was noticed, no trajectory failed, and every step trained the same trajectories with the same
tokens and rewards in both, so that the learning curve is the same. Printed: kills, trajectories
that started again, by how, and the time of a step in both. Exit code 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.job.hosts import everything, hosts
from tests.job.job import Job

RUN = ("+experiment=terminal", "env.max_turns=8", "env.max_new_tokens=24")
RUN += ("sandbox.checkpoints=classified", "rollout.environment_hosts=2")
RUN += ("rollout.host_restarts=1000000", "eval.episodes=0", "deterministic=true")
NOTICE_S, STOP_S = 60.0, 300.0
COUNTED = ("trajectories_restarted", "resumed_snapshots", "resumed_turns", "failed_trajectories")


def storm(job: Job, seconds: float, every_s: float, chosen: random.Random) -> int:
    """How many hosts died."""
    job.until(lambda: job.phase()[0] == "rollout", "the first rollout")
    end, died = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        until = time.monotonic() + chosen.expovariate(1 / every_s)
        job.until(lambda until=until: time.monotonic() > min(until, end), "the next kill")
        if not (found := hosts(job)):
            continue  # it restarts
        chosen.choice(found).send_signal(chosen.choice((signal.SIGKILL, signal.SIGSEGV)))
        died += 1
        job.until(lambda n=died: len(job.faults()) >= n, "the fault", NOTICE_S)
    return died


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("minutes", type=float, nargs="?", default=10.0, metavar="MINUTES")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rose-storm-") as folder:
        job = Job(Path(folder) / "storm", *RUN, "trainer.steps=1000000", *overrides)
        other = None
        try:
            died = storm(job, args.minutes * 60, args.every, random.Random(args.seed))
            job.signal(signal.SIGTERM)
            job.wait(STOP_S)
            rows = job.steps()
            other = Job(Path(folder) / "calm", *RUN, f"trainer.steps={len(rows)}", *overrides)
            code = other.wait(args.minutes * 60 + STOP_S)
            calm = other.steps()
            sums = {key: sum(row[key] for row in rows) for key in COUNTED}
            checks = {
                "each kill was noticed": len(job.faults()) == died > 0,
                "no trajectory failed": sums["failed_trajectories"] == 0,
                "the calm run made the same steps": code == 0 and len(calm) == len(rows) > 0,
                "the same was trained in both": everything(job) == everything(other),
            }
        finally:
            for each in filter(None, (job, other)):
                if each.process.poll() is None:
                    each.kill_everything()
        print(f"{len(rows)} steps, {died} hosts killed", sums)
        for name, of in (("storm", rows), ("calm", calm)):
            reward = statistics.fmean(row["reward_mean"] for row in of)
            seconds = statistics.median(row["time_step"] for row in of)
            print(f"{name}: {seconds:.1f} s a step, mean reward {reward:.3f}")
        for what, holds in checks.items():
            print("holds" if holds else "FAILS", what)
        sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
