"""A rank without a process has failed once its guard, which reports how it ended, is gone too."""

import functools
import os
import socket
import subprocess
import sys

import pytest

from rose.launch import rank_status, supervise
from rose.launch.layout import layout


@pytest.fixture
def gone():
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def job(tmp_path, make_config):
    """A job whose starter runs."""
    starter = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    config = make_config()
    yield supervise.Job(starter, layout(config), tmp_path, 1, config.cluster)
    starter.kill()
    starter.communicate()


def report(job, state="running", pid=None, guard_pid=None):
    """Write the status file of rank 0; by default its process and its guard live."""
    coordinator = rank_status.RankStatus(
        rank=0,
        role=job.ranks[0].role,
        index=0,
        pid=pid or os.getpid(),
        guard_pid=guard_pid or os.getpid(),
        host=socket.gethostname(),
        state=state,
        exit_code=None if state == "running" else 0,
    )
    rank_status.write(job.run_dir, job.attempt, coordinator)


def test_a_rank_whose_guard_is_slow_to_report_its_end_has_not_failed(job, gone):
    report(job, pid=gone)
    for _ in range(3):  # polls
        assert job._failure({}) == ""


def test_a_rank_without_a_process_and_without_a_guard_has_vanished(job, gone):
    report(job, pid=gone, guard_pid=gone)
    assert "vanished (its process is gone)" in job._failure({})
    assert job.lost


def test_a_report_that_comes_while_the_launcher_looks_counts(job, gone, monkeypatch):
    """The guard wrote its last report between the launcher's reading and its look at processes."""
    report(job, pid=gone, guard_pid=gone)
    read, reads = functools.partial(rank_status.read_all, job.run_dir, job.attempt), []

    def statuses():
        reads.append(read())
        report(job, "done", gone, gone)
        return reads[-1]

    monkeypatch.setattr(job, "statuses", statuses)
    assert job._failure({}) == ""
    assert reads[0][0].state == "running" and len(reads) > 1
