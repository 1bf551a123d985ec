"""A killed environment host leaves nothing of its agents' programs."""

import subprocess
import sys
import time

import psutil

HOST = """
import asyncio, sys
from pathlib import Path
from rose.agent.gateway.program import HOST, Program, environment
from rose.agent.gateway.watchdog import Watchdog

async def run():
    Watchdog(HOST)
    program = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
    await Program.start("t", program, environment({}, ()), Path(sys.argv[2]) / "log")
    await asyncio.sleep(600)

asyncio.run(run())
"""
PROGRAM = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
if (child := os.fork()) == 0:
    os.setsid()
    time.sleep(600)
open(sys.argv[1] + "/new", "w").write(" ".join(map(str, [*pids, child])))
os.rename(sys.argv[1] + "/new", sys.argv[1] + "/pids")
time.sleep(600)
"""


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition, what):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def test_a_killed_hosts_programs_and_all_that_they_started_end(tmp_path):
    host = subprocess.Popen([sys.executable, "-c", HOST, PROGRAM, str(tmp_path)])
    try:
        wait_until((tmp_path / "pids").exists, "the program started nothing")
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 3 and all(map(alive, pids))
    finally:
        host.kill()
        host.wait()
    try:
        wait_until(lambda: not any(map(alive, pids)), pids)
    finally:
        for pid in filter(alive, pids):
            psutil.Process(pid).kill()
