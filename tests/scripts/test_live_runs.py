"""Which steps of a live run count, and how a script that started one ends."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts import live_runs

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_step_counts_when_the_hypervisor_left_the_machine_to_us(tmp_path, monkeypatch):
    monkeypatch.setattr(live_runs, "CORES", 2)
    ran = live_runs.Ran(tmp_path, "run")
    (tmp_path / "run.stolen").write_text("[100.0, 7.0]\n[110.0, 7.0]\n[120.0, 12.0]\n")
    rows = [{"time": begin + 10.0, "time_step": 10.0} for begin in (100.0, 101.0, 103.0, 110.0)]
    monkeypatch.setattr(live_runs.Ran, "steps", lambda self, skip: rows[skip:])
    # 0, 0.5, 1.5 and 5 of 20 s
    assert ran.calm_steps(0) == rows[:2] and ran.calm_steps(1) == rows[1:2]


@pytest.mark.slow
def test_a_second_sigterm_does_not_break_off_the_end_that_the_first_one_began():
    code = (
        "import time; from scripts import live_runs; live_runs.end_in_order()\n"
        "try:\n    print('up', flush=True); time.sleep(600)\n"
        "finally:\n    print('ending', flush=True); input(); print('ended', flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, **pipes)
    for word in ("up", "ending"):
        assert process.stdout.readline().strip() == word
        process.terminate()
    said, _ = process.communicate("\n", timeout=600)
    assert said.strip() == "ended" and process.returncode == 143


THREADS = """
import threading, time
thread = threading.Thread(target=time.sleep, args=(600,))
thread.start()
print(thread.native_id, flush=True)
thread.join()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a cgroup")
def test_a_quota_holds_an_engines_computing_thread_and_no_other(monkeypatch):
    name = f"rose-{os.getpid()}-test"
    quota = live_runs.Quota("test", 0.5, core=min(os.sched_getaffinity(0)))
    engine = subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE)
    try:
        other = int(engine.stdout.readline())
        process = psutil.Process(engine.pid)
        monkeypatch.setattr(live_runs, "engines_of", lambda pid: [process])
        quota.add(os.getpid())
        quota.limit()
        groups = [Path(f"/proc/{id}/cgroup").read_text() for id in (engine.pid, other)]
        # On version 2 the other threads are in the group above, which has no limit.
        assert name in groups[0] and groups[0] != groups[1]
        assert len(os.sched_getaffinity(engine.pid)) == 1
        assert os.sched_getaffinity(other) == os.sched_getaffinity(0)
        os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0))
        monkeypatch.setattr(live_runs, "family", lambda pid: [process])
        quota.favour(os.getpid())
        assert os.sched_getscheduler(other) == os.SCHED_OTHER
        assert os.getpriority(os.PRIO_PROCESS, other) < os.getpriority(os.PRIO_PROCESS, engine.pid)
    finally:
        engine.kill()
        engine.communicate()
        quota.close()
    assert not any((above / name).exists() for above in (live_runs.V1, live_runs.V2))
