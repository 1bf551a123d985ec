"""Agents in sandboxes whose environment hosts, or whose whole job, are killed, or that move between
hosts: their episodes go on from checkpoints of their sandboxes, with the tokens that they have in a
run in which nobody dies or moves."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import pytest

from rose.coordinator import journal
from rose.parts.report.trajectories import read_failed
from rose.scheduler import events as ev
from tests import processes
from tests.job.hosts import HOSTS, everything, hosts, kill_hosts, rolls
from tests.job.job import Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = 2
STEPS = 3
TERMINAL = ("+experiment=terminal", "deterministic=true", f"trainer.steps={STEPS}")
TERMINAL += ("eval.episodes=4", *HOSTS, "env.max_turns=8", "env.max_new_tokens=24")
TERMINAL += ("sandbox.checkpoints=classified",)

PLACEMENT = "scheduler.placement.name=tests.job.restless:%s +scheduler.placement.args.most=%d"
RESTLESS = (PLACEMENT % ("Restless", 3)).split()
REBALANCE = (PLACEMENT % ("Relieve", 4)).split()
BUSY = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # it takes no time from anybody
print("busy", flush=True)
while True:
    pass
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run in which nobody dies."""
    job = Job(tmp_path_factory.mktemp("whole"), *TERMINAL)
    assert job.wait() == 0, job.said + job.logs()
    assert sum(step["checkpoint_files"] for step in job.steps()) > 0
    assert sum(step["trajectories_moved"] for step in job.steps()) == 0
    return job


def inside(folder: Path) -> list[Path]:
    """What its folders hold; they come and go."""
    found = []
    for each in folder.iterdir() if folder.exists() else ():
        with suppress(FileNotFoundError):
            found += each.iterdir()
    return found


def same(job: Job, whole: Job) -> None:
    """Nothing is lost, made anew or left behind."""
    assert [shown.record["cause"] for shown in read_failed(job.run)[0]] == []
    assert everything(job) == everything(whole)
    assert len(trained_on(job.run, STEPS)) == len(set(trained_on(job.run, STEPS)))
    assert sum(step["resumed_snapshots"] for step in job.steps()) > 0
    assert list((job.run / "sandboxes" / "turns").glob("*/*")) == []
    assert list((job.run / "snapshots").glob("*")) == []
    assert job.steps()[-1]["failed_trajectories"] == 0
    assert job.orphans() == []


def test_episodes_of_killed_hosts_and_of_a_killed_job_go_on_from_checkpoints(tmp_path, whole):
    """But for one whose states are damaged: it begins anew, with its answers."""
    run = (*TERMINAL, f"sandbox.local={tmp_path}/node")
    first = Job(tmp_path, *run)
    assert kill_hosts(first, KILLS) == KILLS
    turns = first.run / "sandboxes" / "turns"

    def stored() -> set[str]:
        """Episodes under way that can be resumed from disk."""
        snapshots = inside(first.run / "snapshots")
        ran = {path.parent.name for path in snapshots if path.suffix != ".part"}
        both = ran & {unquote(path.parent.name) for path in inside(turns)}
        return {name for name in both if name.startswith("g")}

    def caught() -> bool:
        """Whether there are some while their hosts stand still, else these go on."""
        if not rolls(first):
            return False
        up = hosts(first)
        for host in up:
            processes.signal(host, signal.SIGSTOP)
        if len(stored()) > 3:
            return True
        for host in up:
            processes.signal(host, signal.SIGCONT)
        return False

    first.until(caught, "stored states of some episodes")
    first.kill_everything()
    found = stored()
    shutil.rmtree(tmp_path / "node")
    for path in (turns / min(found).replace(".", "%2E")).iterdir():
        if data := bytearray(path.read_bytes()):  # else it was just being written
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    again = Job(tmp_path, *run)
    assert again.wait() == 0, again.said + again.logs()
    same(again, whole)
    logs = (again.run / "logs" / "latest").glob("environment-*.log")
    assert any("the manifest is damaged" in path.read_text() for path in logs)
    assert [fault["what"] for fault in again.faults()] == ["environment host died"] * KILLS


def test_agents_in_sandboxes_that_move_have_the_tokens_of_a_run_in_which_none_does(tmp_path, whole):
    moves = Job(tmp_path, *TERMINAL, *RESTLESS)
    assert moves.wait() == 0, moves.said + moves.logs()
    same(moves, whole)
    assert sum(step["trajectories_moved"] for step in moves.steps()) > 0
    assert moves.faults() == []


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
def test_a_host_with_fewer_cores_is_relieved_of_its_sandboxes(tmp_path, whole, busy):
    moves = Job(tmp_path, *TERMINAL, *REBALANCE)
    moves.until(lambda: len(hosts(moves)) == 2, "both environment hosts")
    small = hosts(moves)[0]
    for process in (small, *processes.children(small.pid, recursive=True)):
        with suppress(*processes.VANISHED):
            process.cpu_affinity(process.cpu_affinity()[:1])
    assert moves.wait() == 0, moves.said + moves.logs()
    same(moves, whole)
    assert sum(step["trajectories_moved"] for step in moves.steps()) > 0
    assert moves.faults() == []
    (path,) = (moves.run / "journal").iterdir()
    _, *told = journal.read(path)
    moved = [a for entry in told for a in entry.actions if isinstance(a, ev.MoveTrajectory)]
    # others may go back when the machine's load falls between what the two hosts tell of it
    assert "environment-1" in {action.host for action in moved}
