"""Servers of other packages, their environments, and the fixtures of tests/agent."""

import asyncio
import json
import socket
import subprocess
from contextlib import contextmanager

import pytest

from rose.agent import envs
from tests import processes
from tests.agent.conftest import chats, save_tokenizer, tokenizer  # noqa: F401
from tests.made import environment as env_of
from tests.ports import free_port

DEADLINE_S = 120.0

REWARDS = """
import asyncio, os, time
def length(text, row): print("to the log"); return len(text) + row["answer"]
async def slow_judge(messages): await asyncio.sleep(0.01); return messages[-1]["content"] == "yes"
def raises(text): raise OSError("the judge is away")
def hangs(text): time.sleep(3600)
def ends(text): os._exit(7)
def waits(text):
    while not os.path.exists(text): time.sleep(0.01)
    return 1
def nothing(): return None
def roles(messages): return float("".join({"assistant": "1", "tool": "2"}.get(m["role"], "") for m in messages))
def wants(sentence): return 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with prompts and reward functions."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {n} / 2?", "answer": n / 2} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


@contextmanager
def served(*program, **options):
    """The port of a server that runs as `program PORT`."""
    port = free_port()
    process = subprocess.Popen([*map(str, program), str(port)], **options)

    def answers():
        assert process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        processes.until(answers, "the server")
        yield port
    finally:
        process.kill()
        process.wait()


def prompts_env(reward="math", **args):
    return env_of("prompts", **{"data": "sums.jsonl", "reward": reward} | args)


def play(env, seed, *actions):
    """Return the results of `reset` and these actions, then close the environment."""

    async def go():
        made = envs.build(env)
        try:
            return [await made.reset(seed), *[await made.step(action) for action in actions]]
        finally:
            await made.close()

    return asyncio.run(asyncio.wait_for(go(), DEADLINE_S))


def question(start):
    return start.messages[-1]["content"]
