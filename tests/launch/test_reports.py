"""The supervisor learns from ranks' reports which of them never joined the MPI world within
cluster.start_timeout_s, and which vanished with the guard that reports how they end."""

import functools
import socket
import subprocess
import sys
from unittest.mock import Mock

import msgspec
import pytest

from rose.launch import logs, rank_status, resume, supervise
from tests.launch.conftest import no_permission, report

PASSED, FAR = 0.0, float("inf")


def test_an_attempts_number_is_above_that_of_an_attempt_whose_logs_were_removed(tmp_path):
    rank_status.folder(tmp_path, 3).mkdir(parents=True)
    (tmp_path / "status" / "attempt-009.bak").mkdir()
    assert [logs.new_attempt(tmp_path) for _ in range(2)] == [4, 5]


def test_ranks_that_hang_in_mpis_start_are_named_with_their_hosts_and_the_key(reported):
    *others, last = reported.ranks
    for rank in others:
        rank_status.mark_joined(reported.run_dir, 1, rank.rank)
    assert reported._failure({"appear": FAR}) == ""
    said, who = reported._failure({"appear": PASSED}), f"{last.role.value} rank {last.rank} on"
    assert said.startswith(
        f"{who} {socket.gethostname()} did not join the MPI world within cluster."
    )
    assert "cluster.interface='ib7'" in said
    rank_status.mark_joined(reported.run_dir, 1, last.rank)
    deadlines = {"appear": PASSED}
    assert reported._failure(deadlines) == "" and not deadlines


@pytest.fixture
def gone():
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_rank_has_vanished_once_its_guard_which_reports_its_end_is_gone_too(reported, gone):
    report(reported, reported.ranks[0], pid=gone)
    for _ in range(3):  # polls
        assert reported._failure({}) == ""
    report(reported, reported.ranks[0], pid=gone, guard_pid=gone)
    assert "vanished (its process is gone)" in reported._failure({})
    assert reported.lost


def test_a_report_that_comes_while_the_launcher_looks_counts(reported, gone, monkeypatch):
    """The guard wrote its last report between the launcher's reading and its look at processes."""
    dead = {"pid": gone, "guard_pid": gone}
    report(reported, reported.ranks[0], **dead)
    read, reads = functools.partial(rank_status.read_all, reported.run_dir, reported.attempt), []

    def statuses():
        reads.append(read())
        report(reported, reported.ranks[0], **dead, state="done", exit_code=0)
        return reads[-1]

    monkeypatch.setattr(reported, "statuses", statuses)
    assert reported._failure({}) == ""
    assert reads[0][0].state == "running" and len(reads) > 1


def test_reports_that_cannot_be_read_for_a_moment_end_nothing(reported, monkeypatch):
    """A rank that replaces its file on NFS makes it unreadable for a moment."""
    assert reported._failure({}) == ""
    path = rank_status.folder(reported.run_dir, reported.attempt) / "rank-0.json"
    path.write_text("{")
    assert reported._failure({"appear": PASSED}) == ""
    assert len(reported.statuses()) == len(reported.ranks)
    monkeypatch.setattr(supervise, "UNREAD_S", 0.0)
    assert reported._failure({}).startswith(f"{path.parent}: no rank's status could be read for")
    report(reported, reported.ranks[0])
    assert reported._failure({}) == ""


@pytest.mark.parametrize("reads", ["X", "RXXD", "RXXX", "RRX"])
@pytest.mark.parametrize("starter_gone", [True, False])
def test_a_rank_that_ends_well_while_reports_cannot_be_read_has_not_vanished(
    reported, gone, monkeypatch, reads, starter_gone
):
    """The launcher reads these one after the other: R running, X an error, D done."""
    for rank in reported.ranks:
        report(reported, rank, pid=gone, guard_pid=gone)
    running = reported.statuses()
    ended = {r: msgspec.structs.replace(s, state="done") for r, s in running.items()}
    answers = {"R": running, "D": ended, "X": OSError("stale")}
    answers = [answers[read] for read in reads + 4 * reads[-1]]
    monkeypatch.setattr(rank_status, "read_all", Mock(side_effect=answers))
    monkeypatch.setattr(supervise, "SETTLE_S", 0.0)
    if starter_gone:
        reported.process.communicate(b"\n")
    assert reported._failure({}) == "" and not reported.lost


def test_reports_that_come_after_the_starter_has_ended_count(reported, monkeypatch):
    """The launcher read the reports before the last guard wrote its own."""
    for rank in reported.ranks:
        report(reported, rank)
    read, starter = reported.statuses(), subprocess.Popen(["true"])
    starter.wait()
    monkeypatch.setattr(reported, "process", starter)
    for rank in reported.ranks:
        report(reported, rank, state="done", exit_code=0)
    late, read_all = iter([read]), rank_status.read_all
    now = lambda: next(late, None) or read_all(reported.run_dir, reported.attempt)  # noqa: E731
    monkeypatch.setattr(reported, "statuses", now)
    assert reported._failure({}) == ""
    report(reported, reported.ranks[0], state="running")
    assert "exited with code 0" in reported._failure({})


def test_a_rank_that_dies_after_the_run_has_finished_is_only_told(reported, monkeypatch, capsys):
    def dies(*_):
        resume.mark_finished(reported.run_dir, 40)
        report(reported, reported.ranks[3], state="failed", exit_code=-11)

    resume.mark_finished(reported.run_dir, 30)  # mark of an earlier attempt
    monkeypatch.setattr(reported, "_hanging", lambda *_: dies() or "")
    monkeypatch.setattr(supervise, "end_all", lambda process: None)
    assert reported.wait() == supervise.Outcome()
    assert "the run is finished; afterwards rank 3 (" in capsys.readouterr().err


def test_a_mark_that_is_gone_or_was_not_read_at_the_start_is_no_success(reported, monkeypatch):
    resume.mark_finished(reported.run_dir, 30)  # mark of an earlier attempt
    reported.finished = resume.finished_mark(reported.run_dir)
    with monkeypatch.context() as away:
        away.setattr(reported, "run_dir", reported.run_dir / "moved")
        assert not reported._finished("rank 3 failed")
    with monkeypatch.context() as away:
        away.setattr(resume.Path, "read_bytes", no_permission)
        assert not reported._finished("rank 3 failed")
        reported.finished = resume.finished_mark(reported.run_dir)
    assert not reported._finished("rank 3 failed")


def test_a_rank_that_ends_while_the_launcher_ends_ranks_is_no_error(reported, monkeypatch):
    """The rank still existed when the launcher looked, but no longer when it sends the signal."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for rank in reported.ranks:
        report(reported, rank, pid=process.pid)
    monkeypatch.setattr(supervise, "_remove_shared", lambda pids: process.communicate(b"\n"))
    monkeypatch.setattr(reported, "process", process)
    reported._end_ranks(FAR)
    assert process.returncode == 0
