"""Tests of a module that use `loop` share one event loop and one keeper of sandboxes."""

import asyncio
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rose.parts.sandbox import Sandbox, Spec, criu, probe
from tests.agent.conftest import chats, save_tokenizer, tokenizer  # noqa: F401
from tests.processes import ran

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
sys.path.insert(0, str(HERE))
from boxes import SMALL


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner
        runner.run(_close())


async def _close():
    probe.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if "loop" not in pyfuncitem.fixturenames or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    pyfuncitem._request.getfixturevalue("loop").run(asyncio.wait_for(test, 300.0))
    return True


@pytest.fixture
def small_disk(tmp_path):
    """1 MiB, of a real file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def box(loop):
    made = loop.run(Sandbox.start(Spec(limits=SMALL), "namespaces"))
    yield made
    loop.run(made.close())


@pytest.fixture
def readable():
    """A copy of rose.parts.sandbox and of the programs that play that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="rose-sandbox-test-", dir="/var/tmp"))
    shutil.copytree(REPOSITORY / "rose/parts/sandbox", folder / "rose/parts/sandbox")
    for name in ("__init__.py", "processes.py"):
        shutil.copy(REPOSITORY / "rose" / name, folder / "rose")
    for name in ("boxes.py", "scenarios.py", "effects.py", "captures.py"):
        shutil.copy(HERE / name, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["this", "other"])
def play(readable, request):
    """play(program, argument, ...) -> what it prints as this user, or as one without rights."""
    options, rights = {}, "root" if os.geteuid() == 0 and request.param == "this" else "rootless"
    if request.param == "other" and os.geteuid() == 0:
        options = {"user": 65534, "group": 65534, "extra_groups": []}

    def run(program: str, *argv: str, **variables: str) -> str:
        subprocess.run(["chmod", "-R", "a+rwX", readable], check=True)
        env = {"PYTHONPATH": str(readable), "PATH": os.environ["PATH"]} | variables
        command = [python_of(options), program, *argv]
        done = ran(command, cwd=readable, env=env, timeout=900, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith(f"\n{rights}\n")
        return done.stdout

    return run


def python_of(options: dict) -> str:
    """A Python that this user may run: the environment's may lie in another's home."""
    recent = "import sys; print(sys.version_info >= (3, 11))"
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            done = ran([path, "-S", "-c", recent], **options)
        except OSError:
            continue
        if done.stdout == "True\n":
            return path
    raise AssertionError("no Python 3.11 that a user without rights may run")


@pytest.fixture
def criu_at(monkeypatch):
    """criu_at(path): CRIU is looked for there, and what was found before counts no more."""

    def look(path):
        monkeypatch.setenv(criu.VARIABLE, str(path))
        criu._find.cache_clear()

    yield look
    criu._find.cache_clear()


@pytest.fixture
def no_criu(criu_at):
    criu_at("/nonexistent")
