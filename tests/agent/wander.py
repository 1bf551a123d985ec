"""An environment that no seed determines: each step leads to a place drawn from the system's
randomness, so that only a saved state leads back to it."""

import json
import os
from pathlib import Path

import msgspec

from rose import protocol as p
from rose.agent.envs.base import Start, Step

DOMAIN = "tests.agent.wander:Wander"
START = p.StartTrajectory("g1.2", "g1", p.Phase.TRAIN, DOMAIN, 7, None)
WORDS = list(range(40, 46))  # the tokens of each turn


def wandering(config, length, **changed):
    """`config` with an environment of this length, and other `changed` keys of it."""
    env = msgspec.structs.replace(config.env, name=DOMAIN, args={"length": length}, **changed)
    return msgspec.structs.replace(config, env=env)


class Wander:
    """Done after `length` steps, of which each tells where it began and ended. `log` gets a line
    for each reset and resume. `size`: characters of a state beyond that."""

    requires_tool = False

    def __init__(self, length: int = 4, log: str = "", size: int = 0):
        self.length, self.log, self.size = length, log, size
        self.steps, self.place = 0, ""

    async def reset(self, seed):
        self.steps, self.place = 0, os.urandom(4).hex()
        self._say("reset")
        return Start([{"role": "user", "content": f"You are at {self.place}."}])

    async def step(self, action):
        self.steps, before = self.steps + 1, self.place
        self.place = os.urandom(4).hex()
        done = self.steps == self.length
        return Step(f"{before} to {self.place}", reward=float(len(action.text) % 2), done=done)

    async def checkpoint(self):
        return json.dumps([self.steps, self.place, "x" * self.size]).encode()

    async def resume(self, saved):
        self.steps, self.place, _ = json.loads(saved)
        self._say("resume")

    async def close(self):
        pass

    def _say(self, what):
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{what}\n")
