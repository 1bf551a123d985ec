"""Small clusters to simulate, and a journal in memory."""

import dataclasses
from statistics import NormalDist

import numpy as np

from rose.parts.simulator import probes, spec
from rose.parts.simulator.driver import simulate
from rose.scheduler import events as ev
from tests.scheduler.said import built

ENGINE = spec.Engine(spec.StepTime(0.01, 2e-5, 1e-9, 1e-4, 1e-7), 8, 2048, 60_000, True)
LINK = spec.Link(0.1, 1e9, 5e8, False, 0.2, 1e9)
TRAINER = spec.Trainer(2, probes.GPU, 0.5, 1e9, 3.0, 1.0)


class Agents:
    """Four turns; a member of each group dies the first time if `crash` is 1, every time if it is
    2; rewards differ but in the groups `equal`."""

    max_new_tokens = 400

    def __init__(self, crash=0, equal=()):
        self.crash, self.equal, self.asked = crash, set(equal), []

    def group(self, index, size, version, draw):
        self.asked.append((index, size, version))

        def episode(member):
            output = tuple(int(x) for x in draw.integers(5, 400, 4))
            crashed = member == 0 and self.crash + (size > 1) > 1
            think = tuple(draw.exponential(1.0, 4).tolist()), (False, True, False, False)
            reward = 0.0 if index in self.equal else float(member % 2)
            sizes = 200, output, (30,) * 4
            return spec.Episode(*sizes, *think, reward, 0.5, crashed, "test")

        return [episode(member) for member in range(size)]


def pool(name="dedicated", kind="dedicated", count=2, **changes):
    found = spec.Pool(name, kind, probes.GPU, 1, ENGINE, LINK, spec.Allocation(0.0, 4.0), count)
    return dataclasses.replace(found, **changes)


def cluster(*pools, steps=2, groups=3, size=4, env=None, dynamic=False, **changes):
    batch, env, pools = spec.Batch(groups, size, dynamic), env or Agents(), pools or (pool(),)
    times = 0.5, 1.0, 0.001, 0.001
    found = spec.Spec("test", steps, batch, env, TRAINER, pools, *times)
    return dataclasses.replace(found, **changes)


def scheduler(
    routing="least_loaded",
    provisioning="fixed",
    args=None,
    routing_args=None,
    timeout=600.0,
    **more,
):
    chosen = {"provisioning": (provisioning, args or {}), "routing": (routing, routing_args or {})}
    return built(timeout, batching_args={"max_admitted": 2.0}, **chosen | more)


class Memory:
    """A journal in memory."""

    def __init__(self):
        self.entries = []

    def write(self, event, actions):
        self.entries.append((event, actions))

    def events(self, kind):
        return [event for event, _ in self.entries if isinstance(event, kind)]

    def actions(self, kind):
        found = [(event.at, action) for event, actions in self.entries for action in actions]
        return [(at, action) for at, action in found if isinstance(action, kind)]


def run(what, *args, seed=1, **kwargs):
    memory = Memory()
    return simulate(what, scheduler(*args, **kwargs), seed, memory), memory


def steady_load(busy=0.5, kv=0.3, period=100.0):
    return made_load(np.zeros(1), busy * np.ones(1), kv * np.ones(1), 100, period)


def made_load(at, busy, kv, requests, period):
    """`requests` in each piece, of which the latencies are lognormal about 0.1 s and 0.02 s."""
    normal = np.array([NormalDist().inv_cdf((k + 0.5) / requests) for k in range(requests)])
    spread = {sigma: np.exp(sigma * normal - sigma**2 / 2) for sigma in (0.5, 0.3)}
    ttft, tpot = np.tile(0.1 * spread[0.5], len(at)), np.tile(0.02 * spread[0.3], len(at))
    return spec.Load(at, busy, kv, np.arange(len(at)).repeat(requests), ttft, tpot, period)


class Devices:
    def __init__(self, load, ahead=0.0):
        self.loads, self.ahead = load, ahead

    def load(self, device):
        return self.loads, self.ahead * device


def serving(load, executor="gate", **changes):
    found = spec.Serving(Devices(load), executor, 0.5, 0.15, 0.0, 1.0, 0.05, 0.9, 0.05)
    return dataclasses.replace(found, **changes)


def borrowed(load=None, executor="gate", count=2):
    """A pool beside online engines of this load, half of whose compute is idle by default."""
    beside = serving(load or steady_load(), executor)
    return pool("borrowed", "cooperative", count, serving=beside)


def counted_once(memory, count):
    """Check that so many trajectories ended, each once."""
    ended = [event.trajectory for event in memory.events(ev.TrajectoryEnded)]
    assert len(ended) == len(set(ended)) == count
