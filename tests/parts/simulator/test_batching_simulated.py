"""Every batching and order policy in whole simulated runs."""

from pathlib import Path

import pytest
import yaml

from rose.parts.simulator.driver import simulate
from rose.scheduler import events as ev
from tests.parts.simulator.clusters import Agents, Memory, cluster, pool
from tests.scheduler.said import built

CONF = Path(__file__).resolve().parents[3] / "conf" / "scheduler"
NAMES = {
    kind: sorted(path.stem for path in (CONF / kind).glob("*.yaml"))
    for kind in ("batching", "order")
}


def policy(kind, name):
    option = yaml.safe_load((CONF / kind / f"{name}.yaml").read_text())
    return option["name"], option["args"]


def run(batching="synchronous", order="fifo", seed=1, **changes):
    chosen = {"order": policy("order", order), "batching": policy("batching", batching)}
    scheduler, memory = built(600.0, **chosen), Memory()
    result = simulate(cluster(pool(count=1), steps=8, **changes), scheduler, seed, memory)
    return result, memory, scheduler.staleness


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way_s", [0.0, 2.0])
@pytest.mark.parametrize("batching", NAMES["batching"])
def test_each_step_trains_on_a_whole_batch_and_no_prompt_twice(batching, way_s, dynamic):
    ways = {"dispatch_s": way_s, "answer_s": way_s}
    env = Agents(crash=1, equal=[1, 4])
    result, memory, bound = run(batching, dynamic=dynamic, env=env, **ways)
    assert [step.trajectories for step in result.steps] == [12] * 8
    assert max(age for step in result.steps for age in step.staleness) <= bound
    groups = [each for _, action in memory.actions(ev.StartTraining) for each in action.groups]
    trained = [group.partition("r")[0] for group in groups]
    assert len(trained) == len(set(trained)) == 24
    if dynamic:
        assert not {"g1", "g4"} & set(trained)


@pytest.mark.parametrize("order", NAMES["order"])
def test_whatever_goes_first_all_turns_end(order):
    result, memory, _ = run(order=order, env=Agents(crash=1))
    ended = {event.turn for event in memory.events(ev.TurnEnded)}
    assert result.counts.turns == len(ended) == (96 + 24) * 4
    assert [step.trajectories for step in result.steps] == [12] * 8


def test_spare_responses_are_cancelled_when_their_group_is_complete():
    result, memory, _ = run("tail_batching")
    ended = {event.trajectory for event in memory.events(ev.TrajectoryEnded)}
    # of a group of four, 1.25 times as many
    assert {name for name in ended if name.startswith("g0.")} == {f"g0.{i}" for i in range(5)}
    assert result.counts.dropped_tokens > 0


def test_rollouts_go_on_while_the_trainer_trains_where_the_policy_is_asynchronous():
    names = ("synchronous", "one_step_off", "bounded_staleness")
    one_by_one, one_off, bounded = (run(name)[0].steps[-1].ended for name in names)
    assert bounded <= one_off < one_by_one
