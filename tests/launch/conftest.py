"""Programs that stand in for Slurm's, and a job whose ranks report what a test says."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from rose.launch import logs, rank_status, supervise
from rose.launch.layout import layout


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(NAME="shell lines") puts programs first on PATH. In their lines $N is how often they
    have been called. stand_in.called(NAME) -> their arguments, a line a call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    class StandIn:
        def __call__(self, **lines):
            for name, line in lines.items():
                program, calls = folder / name, folder / f"{name}.calls"
                count = f'N=0; while read -r each; do N=$((N + 1)); done < "{calls}"'
                text = f'#!/bin/sh\necho "$@" >> "{calls}"\n{count}\n{line}\n'
                program.write_text(line if line.startswith("#!") else text)
                program.chmod(0o755)

        def called(self, name):
            path = folder / f"{name}.calls"
            return path.read_text().splitlines() if path.exists() else []

    return StandIn()


def no_permission(path, *_, **more):
    """Stands in for a function of `Path` on a folder that may not be searched, which root may."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def report(job, rank, **changed):
    """Write a rank's status file; by default its process and its guard live."""
    here = {"pid": os.getpid(), "guard_pid": os.getpid(), "host": socket.gethostname()}
    who = {"rank": rank.rank, "role": rank.role, "index": rank.index, "state": "running"}
    status = rank_status.RankStatus(**who | here | changed)
    rank_status.write(job.run_dir, job.attempt, status)


@pytest.fixture
def reported(make_config, tmp_path):
    """A job whose starter lives, and whose ranks have all appeared."""
    c = make_config("cluster.interface=ib7")
    logs.new_attempt(tmp_path)
    starter = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    job = supervise.Job(starter, layout(c), tmp_path, 1, c.cluster)
    for rank in job.ranks:
        report(job, rank)
    yield job
    starter.kill()
    starter.communicate()
