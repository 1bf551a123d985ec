"""Properties that every combination of policies has, for any order of events from workers,
environments, trainer and cluster.

The driver checks each action: a turn is on one worker at a time, on the newest version, within the
worker's caps. A group is trained once or dropped once, and no staler than its policy allows.
"""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.config import Policy
from rose.config import Scheduler as SchedulerConfig
from rose.policies import build
from rose.policies.registry import PROTOCOLS, policies
from tests.scheduler.driver import KINDS, WHOLE_KV, Driver

CONF = Path(__file__).parents[2] / "conf" / "scheduler"
TIMEOUT_S = 60.0
STALENESS = {  # a policy's bound in versions, or the argument with it; 0: only the newest version
    "bounded_staleness": "eta",
    "carry_over": "staleness",
    "trajectory_async": "alpha",
    "one_step_off": 1,
    "dapo": 0,
    "synchronous": 0,
    "tail_batching": 0,
}
EVERY = [(kind, name) for kind in PROTOCOLS for name in sorted(policies(kind))]


def policy(kind, name):
    found = (CONF / kind / f"{name}.yaml").read_text().replace("${serving.max_ranks}", "1")
    read = yaml.safe_load(found)
    if (kind, name) == ("provisioning", "libra"):  # Plan after every step, for any gain.
        read["args"] |= {"period_steps": 1, "gain": 0.0, "cost_s": 0.0}
    return Policy(**read)


def scheduler(names, queue_depth):
    chosen = {kind: policy(kind, name) for kind, name in names.items()}
    return build(SchedulerConfig(**chosen, queue_depth=queue_depth), TIMEOUT_S)


WEIGHTS = {"request": 5, "progress": 2, "end": 5, "return": 2, "late message": 1, "join": 1}
WEIGHTS |= {"lose": 1, "capacity": 2, "drain": 1, "host": 2, "load": 4, "train": 2}
WEIGHTS |= dict.fromkeys(["fail", "tick", "stall", "answer", "clock"], 1)
STEPS = st.tuples(
    st.sampled_from([what for what, weight in WEIGHTS.items() for _ in range(weight)]),
    st.sampled_from(list(KINDS)),
    st.integers(0, 7),
    st.integers(0, 50),
)


def play(driver, what, worker, pick, count):
    match what:
        case "request":
            driver.request(pick)
        case "progress" | "end" | "return" | "late message":
            driver.at_turn(pick, what, count)
        case "join":
            driver.join(worker, driver.version - pick % 2)
        case "lose" | "drain":
            driver.at_worker(worker, what)
        case "load":
            driver.at_worker(worker, what, kv=pick)  # 0: loading failed, the old version stays
        case "capacity":
            driver.at_worker(worker, what, kv=pick * WHOLE_KV // 7, sequences=count % 4)
        case "train":
            driver.train()
        case "fail":
            driver.fail(pick)
        case "tick":
            driver.tick(count)
        case "stall" if driver.stalls < 4:  # The fifth stall would stop the run.
            driver.stalls += 1
            driver.tick(TIMEOUT_S + 1)
        case "answer":
            driver.answer(pick, count)
        case "host":
            driver.at_host(pick, count)
        case "clock":
            driver.at -= count


def staleness(names):
    bound = STALENESS[names["batching"]]
    return policy("batching", names["batching"]).args[bound] if isinstance(bound, str) else bound


@pytest.mark.parametrize("kind, name", EVERY)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_trajectory_is_lost_or_counted_twice_and_a_replay_is_the_same(kind, name, data):
    others = {k: data.draw(st.sampled_from(sorted(policies(k))), k) for k in PROTOCOLS if k != kind}
    names = {kind: name} | others
    queue_depth = data.draw(st.sampled_from([0.0, 0.5]), "queue depth")
    lengths = data.draw(st.lists(st.integers(0, 79), min_size=1, max_size=12), "lengths")
    driver = Driver(scheduler(names, queue_depth), queue_depth, staleness(names), lengths)
    driver.held_out = data.draw(st.sampled_from([0, 2, 3]), "evaluations")
    for name in data.draw(st.lists(st.sampled_from(list(KINDS)), unique=True), "workers"):
        driver.join(name, 0)
    for step in data.draw(st.lists(STEPS, max_size=60), "steps"):
        play(driver, *step)
    driver.restore()
    driver.settle()
    driver.finish(steps=3)
    assert set(driver.s.cluster.turns) == set(driver.turns) and not driver.over
    assert driver.s.waiting == sum(turn.worker is None for turn in driver.turns.values())
    driver.replay(scheduler(names, queue_depth))
