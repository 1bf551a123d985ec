"""Sums for the policy, with a tool that adds if `tools` asks for it: an environment of verifiers."""

import asyncio
import time

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace) -> float:
        said = trace.nodes[-1].message.content or ""
        if task.answer == "3":
            raise RuntimeError("nobody can judge 3")
        if task.answer == "5":
            await asyncio.sleep(3600)
        if task.answer == "7":
            time.sleep(3600)
        if task.answer == "9":
            raise SystemExit(4)
        return float(task.answer in said)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return 1.0

    @vf.metric
    async def calls(self, trace) -> float:
        return float(sum(node.message.role == "tool" for node in trace.nodes))


class SumsConfig(vf.TasksetConfig):
    first: int = 10
    rows: int = 20
    split: str = "train"
    tools: bool = False
    needs: str = ""


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        if self.config.needs:
            raise ConnectionError(f"couldn't reach {self.config.needs}")
        ask = "What is 1 + {}?" if self.config.split == "train" else "And 1 + {}?"
        for k in range(self.config.first, self.config.first + self.config.rows):
            named = {"system_prompt": "Add.", "name": f"sum{k}"}
            data = SumData(prompt=ask.format(k), answer=str(k + 1), **named)
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] if config.tools else []


__all__ = ["Sums"]

if __name__ == "__main__":  # the library starts the tools' server so
    Adder.run()
