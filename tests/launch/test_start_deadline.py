"""Ranks have cluster.start_timeout_s to appear and to join the MPI world, whose own start waits for
ever."""

import os
import socket
import subprocess
import sys

import pytest

from rose.launch import logs, rank_status, supervise
from rose.launch.layout import layout

PASSED, FAR = 0.0, float("inf")


@pytest.fixture
def job(make_config, tmp_path):
    """A starter that lives, whose ranks have all appeared."""
    c = make_config("cluster.interface=ib7")
    logs.new_attempt(tmp_path)
    starter = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    made = supervise.Job(starter, layout(c), tmp_path, 1, c.cluster)
    for rank in made.ranks:
        who = {"rank": rank.rank, "role": rank.role, "index": rank.index, "state": "running"}
        where = {"pid": os.getpid(), "guard_pid": os.getppid(), "host": socket.gethostname()}
        rank_status.write(tmp_path, 1, rank_status.RankStatus(**who, **where))
    yield made
    starter.kill()
    starter.communicate()


def test_ranks_that_hang_in_mpis_start_are_named_with_their_hosts_and_the_key(job):
    for rank in job.ranks[:-1]:
        rank_status.mark_joined(job.run_dir, 1, rank.rank)
    assert job._failure({"appear": FAR}) == ""
    said = job._failure({"appear": PASSED})
    last = job.ranks[-1]
    assert said.startswith(
        f"{last.role.value} rank {last.rank} on {socket.gethostname()} did not join the MPI world "
        f"within cluster.start_timeout_s={job.cluster.start_timeout_s:g}"
    )
    assert "cluster.interface='ib7'" in said


def test_a_world_that_all_have_joined_has_no_such_deadline_any_more(job):
    for rank in job.ranks:
        rank_status.mark_joined(job.run_dir, 1, rank.rank)
    deadlines = {"appear": PASSED}
    assert job._failure(deadlines) == "" and not deadlines
