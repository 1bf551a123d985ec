"""The launcher's part of a run with toy ranks, in a process of its own: python drive.py RUN_DIR;
prints the outcome."""

import sys
from pathlib import Path

from rose import config as configuration
from rose import processes
from rose.launch import local, logs, supervise
from rose.launch.layout import layout

if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    config = configuration.load(run_dir / "config.json")
    attempt = logs.new_attempt(run_dir)
    processes.adopt_orphans()
    command = [sys.executable, str(Path(__file__).with_name("toy_rank.py"))]
    ranks = layout(config)
    with local.locked(run_dir):
        process = local.start(config, ranks, run_dir, attempt, command)
        outcome = supervise.Job(process, ranks, run_dir, attempt, config.cluster).wait()
    print(outcome.failure + ("\na rank was lost" if outcome.lost_rank else ""))
    sys.exit(outcome.code)
