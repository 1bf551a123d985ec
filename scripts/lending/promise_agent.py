"""The agent of prove_promise.py: an OpenAI client whose one tool, bash, has a sandbox of its own.

    python launch.py env=agent env.args.function=scripts/lending/promise_agent.py:play ...

It knows no trainer and calls the server at OPENAI_BASE_URL, as any program does. An episode is a
task of env=terminal's ladder in a sandbox, and a chat of at most `CALLS` calls. Its reward is 1
over the number of calls that the task took, or 0 if it is not solved. Not a command.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from typing import Any

from openai import AsyncOpenAI
from promise_client import client

from rose.agent.envs import _ladder
from rose.parts.sandbox import Sandbox, Spec
from rose.parts.sandbox.envs.terminal import BASH

CALLS = 3
COMMAND_S, OUTPUT_BYTES = 10.0, 200


def play(task: dict[str, Any]) -> float:
    return asyncio.run(_play(task["seed"]))


async def _play(seed: int) -> float:
    async with await Sandbox.start(Spec()) as box, client() as policy:
        return await _solve(box, policy, _ladder.draw(seed))


async def _solve(box: Sandbox, policy: AsyncOpenAI, rung: _ladder.Rung) -> float:
    folder = f"{box.spec.workdir}/task"
    await box.run(_laid_out(folder, rung.files), COMMAND_S, OUTPUT_BYTES)
    messages: list[dict[str, Any]] = [{"role": "system", "content": _ladder.SYSTEM}]
    for number in range(1, CALLS + 1):
        messages.append({"role": "user", "content": rung.instruction})
        answer = await policy.chat.completions.create(
            model="policy", messages=messages, tools=[BASH]
        )
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or ():
            output = await _run(box, call.function.arguments)
            if await _solved(box, rung, output, folder):
                return 1.0 / number
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return 0.0


def _laid_out(folder: str, files: dict[str, str]) -> str:
    """Return the command that writes the files into `folder` and changes to it."""
    folders = sorted({name.rpartition("/")[0] or "." for name in files})
    words = [f"mkdir -p {folder} && cd {folder} && mkdir -p {shlex.join(folders)}"]
    words += [f"printf %s {shlex.quote(text)} > {name}" for name, text in files.items()]
    return "\n".join(words)


async def _run(box: Sandbox, arguments: str) -> str:
    command = json.loads(arguments).get("command")
    if not isinstance(command, str):
        return "bash takes command: text."
    return (await box.run(command, COMMAND_S, OUTPUT_BYTES)).words()


async def _solved(box: Sandbox, rung: _ladder.Rung, output: str, folder: str) -> bool:
    if not rung.target:
        return rung.expected in output
    try:
        data = await box.read_file(f"{folder}/{rung.target}")
    except OSError:
        return False
    return data == rung.expected.encode()
