"""A killed environment host leaves nothing of its agents' programs."""

import subprocess
import sys

from tests import processes

HOST = """
import asyncio, sys
from pathlib import Path
from rose.parts.adapters.gateway.program import HOST, Program, environment
from rose.parts.adapters.gateway.watchdog import Watchdog

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


def test_a_killed_hosts_programs_and_all_that_they_started_end(tmp_path):
    host = subprocess.Popen([sys.executable, "-c", HOST, PROGRAM, str(tmp_path)])
    try:
        processes.until((tmp_path / "pids").exists, "the program's processes")
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 3 and all(map(processes.alive, pids))
    finally:
        host.kill()
        host.wait()
    try:
        assert not processes.left(lambda: filter(processes.alive, pids))
    finally:
        for pid in pids:
            processes.kill(pid)
