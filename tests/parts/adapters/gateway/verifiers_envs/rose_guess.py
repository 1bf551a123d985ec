"""A number is guessed over several turns, the environment being the user: one of verifiers."""

import itertools
import random
import re

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    seed: int


GuessTask = vf.Task[GuessData, vf.State, vf.TaskConfig]


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for seed in itertools.count():
            yield GuessTask(GuessData(prompt="Guess from 1 to 3.", seed=seed), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    turns: int = 3


class Guess(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        number, reward = random.Random(task.data.seed).randint(1, 3), 0.0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(self.config.turns - 1):
                if segment.terminated or re.findall(r"[1-3]", segment.last_reply) == [str(number)]:
                    break
                segment = await talk.turn("No. Again.")
            reward = float(re.findall(r"[1-3]", segment.last_reply) == [str(number)])
        talk.trace.record_reward("guessed", reward, 1.0)


__all__ = ["GuessTaskset", "Guess"]
