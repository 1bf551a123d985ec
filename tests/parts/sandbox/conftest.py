"""The tests of a module that use `loop` share one event loop, and so one keeper. The fixtures of
tests/agent are here, too: the tests of env=terminal use its loop and templates."""

import asyncio
import inspect
import subprocess

import pytest

from rose.parts.sandbox import probe
from tests.agent.conftest import chats, save_tokenizer, tokenizer  # noqa: F401


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
