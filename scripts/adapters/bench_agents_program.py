"""The agent of scripts/adapters/bench_agents.py, which imports as little as a user's agent would."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.agent.envs.base import Action, ToolCall
from rose.agent.envs.frozen_lake import FrozenLake


async def converse(seed: int, turns: int, ask: Callable[[dict], Awaitable[dict]]) -> None:
    """Play FrozenLake over chat completions. `ask` posts a body and returns the answer's body."""
    lake = FrozenLake()
    start = await lake.reset(seed)
    messages = list(start.messages)
    for _ in range(turns):
        answer = await ask({"model": "m", "messages": messages, "tools": start.tools})
        if "choices" not in answer:  # the context is full
            break
        message = answer["choices"][0]["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            messages.append({"role": "user", "content": "Call move."})
        for call in calls:
            function = call["function"]
            made = ToolCall(function["name"], json.loads(function["arguments"]))
            step = await lake.step(Action("", made))
            if step.done:
                return
            answer = {"tool_call_id": call["id"], "content": step.observation}
            messages.append({"role": "tool"} | answer)


def solve(task: dict) -> float:
    """Run `converse` the way that env.args.function calls an agent."""

    async def ask(body: dict) -> dict:
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(body).encode(),
            {"x-api-key": os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as got:
            return json.load(got)

    asyncio.run(converse(task["seed"], int(os.environ["BENCH_TURNS"]), ask))
    return 0.0
