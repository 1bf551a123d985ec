"""Trajectories that move between environment hosts, whenever they can or to the less loaded one, have
the tokens that they have in a run in which each stays."""

import os
import subprocess
import sys

import pytest

from rose.coordinator import journal
from rose.scheduler import events as ev
from tests.job.job import Job, trained_on
from tests.job.test_lost_hosts_job import SIZE, STEPS, everything, hosts
from tests.job.test_terminal_hosts_job import TERMINAL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RESTLESS = (
    "scheduler.placement.name=tests.job.restless:Restless",
    "+scheduler.placement.args.most=3",
)


BUSY = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # it takes no time from anybody
print("busy", flush=True)
while True:
    pass
"""
REBALANCE = (
    "scheduler/placement=rebalance",
    "scheduler.placement.args.margin=1.0",
    "scheduler.placement.args.move_s=0.0",
    "scheduler.placement.args.patience_s=3.0",
)


@pytest.fixture(scope="module")
def stays(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("stays"), *TERMINAL, *SIZE, "deterministic=true")
    assert job.wait() == 0, job.said + job.logs()
    assert sum(step["trajectories_moved"] for step in job.steps()) == 0
    return job


def same(moves: Job, stays: Job) -> None:
    assert everything(moves) == everything(stays)
    assert len(trained_on(moves.run, STEPS)) == len(set(trained_on(moves.run, STEPS)))
    steps = moves.steps()
    assert sum(step["trajectories_moved"] for step in steps) > 0
    assert sum(step["resumed_snapshots"] for step in steps) > 0
    assert steps[-1]["failed_trajectories"] == 0 and moves.faults() == []
    assert moves.orphans() == []


def test_agents_in_sandboxes_that_move_have_the_tokens_of_a_run_in_which_none_does(tmp_path, stays):
    moves = Job(tmp_path, *TERMINAL, *SIZE, *RESTLESS, "deterministic=true")
    assert moves.wait() == 0, moves.said + moves.logs()
    same(moves, stays)


@pytest.fixture
def busy():
    """Four tasks that could run, whoever else there is."""
    begun = [
        subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for _ in range(4)
    ]
    for process in begun:
        assert process.stdout.readline() == b"busy\n"
    yield
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="hosts need different cores")
def test_a_host_with_fewer_cores_is_relieved_of_its_sandboxes(tmp_path, stays, busy):
    moves = Job(tmp_path, *TERMINAL, *SIZE, *REBALANCE, "deterministic=true")
    small = moves.until(lambda: hosts(moves)[:1], "an environment host")[0]
    for process in (small, *small.children(recursive=True)):
        process.cpu_affinity(process.cpu_affinity()[:1])
    assert moves.wait() == 0, moves.said + moves.logs()
    same(moves, stays)
    (path,) = (moves.run / "journal").iterdir()
    _, *told = journal.read(path)
    moved = [a for entry in told for a in entry.actions if isinstance(a, ev.MoveTrajectory)]
    assert {action.host for action in moved} == {"environment-1"}
