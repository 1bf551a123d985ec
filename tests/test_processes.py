"""Threads for work on the side follow the cores that a process may use, not those that the machine
has; what is imported at once is no work for the garbage collector."""

import asyncio
import gc
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

import pytest

from rose import processes
from rose.comm import address
from rose.transfer import broadcast


def test_threads_follow_the_binding_and_end_at_eight(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "CGROUP", tmp_path)  # no quotas
    for bound, wanted in ({3}, 1), (set(range(4)), 4), (set(range(220)), 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=bound: cores)
        assert processes.usable_threads() == wanted


@pytest.mark.parametrize(
    "own, files, wanted",
    [
        ("0::/a/b", {}, 64),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 64),
        ("0::/a/b", {"a/b/cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "150000 50000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),  # a container's own root
        ("2:cpu,cpuacct:/d", {"cpu/d/cpu.cfs_quota_us": "-1"}, 64),
        ("2:cpu,cpuacct:/d/e", {"cpu/cpu.cfs_quota_us": "200000"}, 2),  # mounted as another path
        ("3:cpuset:/d\n1:cpu:/d\n0::/", {"cpu/d/cpu.cfs_quota_us": "500000"}, 5),
    ],
)
def test_cores_are_no_more_than_the_groups_quotas(monkeypatch, tmp_path, own, files, wanted):
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        file.with_name("cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(processes, "CGROUP", tmp_path / "fs")
    monkeypatch.setattr(processes, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert processes.cores() == wanted


def test_a_container_that_hides_the_boot_is_known_by_its_name(monkeypatch, tmp_path):
    assert "-" in processes.boot()
    monkeypatch.setattr(processes, "BOOT_ID", tmp_path / "hidden")
    assert processes.boot() == platform.node()
    assert address._space().startswith(f"{platform.node()}/")
    assert broadcast._node(tmp_path / "store").startswith(f"{platform.node()} ")


def test_an_import_leaves_out_what_nobody_uses_and_the_collector_goes_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    kept = [[] for _ in range(100)]
    with pytest.raises(ImportError), processes.importing("this", "json"):
        assert not gc.isenabled() and importlib.util.find_spec("json"), "json was there already"
        import this  # noqa: F401
    assert gc.isenabled() and importlib.util.find_spec("this")
    assert not {id(one) for one in kept} & {id(one) for one in gc.get_objects()}


def test_programs_find_this_python_where_path_has_none(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    found = shutil.which("python", path=processes.search_path())
    assert found == shutil.which("python", path=os.path.dirname(sys.executable))
    assert processes.bare_environment()["PATH"].split(os.pathsep)[0] == "/nowhere", "its own first"


def test_a_task_that_exits_ends_no_other():
    """An environment may have started the task."""
    said = []

    async def exits():
        await asyncio.sleep(0)
        raise SystemExit(3)

    async def awaits():
        try:
            await asyncio.gather(exits(), asyncio.sleep(3600))
        except SystemExit as exit:
            said.append(f"exit {exit.code}")

    async def goes_on(all_over):
        await all_over.wait()
        said.append("others went on")

    async def scene():
        all_over = asyncio.Event()
        other = asyncio.create_task(goes_on(all_over))
        await asyncio.create_task(awaits())
        all_over.set()
        await other
        return "ended"

    assert processes.run_to_its_end(scene()) == "ended"
    assert said == ["exit 3", "others went on"]
    with pytest.raises(SystemExit):
        processes.run_to_its_end(exits())


HANGS = """
import asyncio, threading
from rose import processes

async def main():
    assert await processes.in_daemon(lambda: 5) == 5
    try:
        await processes.in_daemon(lambda: 1 / 0)
    except ZeroDivisionError:
        print("raised")
    async with asyncio.timeout(0.1):
        await processes.in_daemon(threading.Event().wait)

asyncio.run(main())
"""


def test_a_call_that_never_returns_keeps_no_process_from_ending():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "raised\n" and "TimeoutError" in done.stderr and done.returncode == 1
