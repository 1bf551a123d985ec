"""Variables and files that agents' programs inherit, and the end of all that they start with their reaper or host."""

import subprocess
import sys

import pytest

from rose.parts.adapters.gateway import call, program
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
RELAY = """
import os, sys, time
end = time.monotonic() + 60
for _ in range(4): os.fork()
open(sys.argv[1], 'w')
while time.monotonic() < end: os.fork() and os._exit(0)
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


def test_below_a_reaper_pipes_end_programs_as_in_a_shell():
    """Python ignores SIGPIPE, which a program would inherit."""
    script = "yes | head -n 1; echo ${PIPESTATUS[@]}"
    ran = subprocess.run([*program.REAPER, "bash", "-c", script], capture_output=True, timeout=60)
    assert ran.stdout.split() == [b"y", b"141", b"0"] and ran.returncode == 0


@pytest.mark.parametrize("code, shown", [("exit 3", 3), ("kill -9 $$", 137), ("kill -40 $$", 168)])
def test_a_reaper_ends_with_its_programs_code(code, shown):
    assert subprocess.run([*program.REAPER, "bash", "-c", code], timeout=60).returncode == shown


def test_processes_that_fork_and_end_all_the_time_are_caught(tmp_path):
    """Each comes to the reaper when its parent has ended, which is soon."""
    mark = tmp_path / "runs"
    limited = ["sh", "-c", '"$@"; sleep 60', "sh", sys.executable, "-c", RELAY, mark]
    with subprocess.Popen([*program.REAPER, *limited]) as reaper:
        processes.until(mark.exists, "a relay")
        reaper.terminate()
        assert reaper.wait(30) == 143
    assert not processes.bearing(str(mark))


def test_a_proxy_that_an_agent_gets_is_not_for_the_gateway(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    own = {program.GATEWAY: "http://127.0.0.1:8000"}
    assert "no_proxy" not in program.environment(own, ())
    for given, hosts in (("", "127.0.0.1"), ("site.org", "site.org,127.0.0.1")):
        monkeypatch.setenv("NO_PROXY", given)
        found = program.environment(own, ("HTTPS_PROXY", "NO_PROXY"))
        assert found["no_proxy"] == found["NO_PROXY"] == hosts


def test_an_import_that_exits_does_not_end_the_server_of_functions(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text("import exits_here\n")
    (tmp_path / "exits_here.py").write_text("raise SystemExit(0)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    call.preload(f"{tmp_path}/agent.py:solve")
