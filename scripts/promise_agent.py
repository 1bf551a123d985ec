"""The agent of prove_promise.py: an OpenAI client whose one tool, bash, acts in a sandbox of its own.

    python launch.py env=agent env.args.function=scripts/promise_agent.py:play ...

It knows no trainer: it calls whatever answers at OPENAI_BASE_URL, as any program does. An episode
is a task of env=terminal's ladder, `CALLS` calls at most; its reward is 1 over the number of calls
that it took, 0 if it is not solved. Not a command.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI

from rose.agent.envs import _ladder
from rose.agent.envs.terminal import BASH
from rose.sandbox import Sandbox, Spec

CALLS = 3
COMMAND_S, OUTPUT_BYTES = 10.0, 200

# What the client imports at its first use is imported here, once: episodes are forked from this.
_ = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1/v1").chat.completions


def play(task: dict[str, Any]) -> float:
    return asyncio.run(_play(_ladder.draw(task["seed"])))


async def _play(rung: _ladder.Rung) -> float:
    messages: list[dict[str, Any]] = [{"role": "system", "content": _ladder.SYSTEM}]
    async with await Sandbox.start(Spec()) as box, AsyncOpenAI() as client:
        for name, text in rung.files.items():
            await box.write_file(f"{box.spec.workdir}/{name}", text.encode())
        for number in range(1, CALLS + 1):
            messages.append({"role": "user", "content": rung.instruction})
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[BASH]
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls or ():
                output = await _run(box, call.function.arguments)
                if await _solved(box, rung, output):
                    return 1.0 / number
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return 0.0


async def _run(box: Sandbox, arguments: str) -> str:
    command = json.loads(arguments).get("command")
    if not isinstance(command, str):
        return "bash takes command: text."
    return (await box.run(command, COMMAND_S, OUTPUT_BYTES)).words()


async def _solved(box: Sandbox, rung: _ladder.Rung, output: str) -> bool:
    if not rung.target:
        return rung.expected in output
    try:
        data = await box.read_file(f"{box.spec.workdir}/{rung.target}")
    except OSError:
        return False
    return data == rung.expected.encode()
