"""Whole simulated runs, on a fixed cluster and with borrowed workers."""

import dataclasses
import math

import numpy as np
import pytest

from rose.parts.simulator import probes, spec
from rose.scheduler import events as ev
from tests.parts.simulator import clusters
from tests.parts.simulator.clusters import Agents, cluster, counted_once, pool, run

AT_ONCE = {"patience_s": 0.0, "idle_s": 1e9, "cool_down_s": 0.0, "back_off_s": 1.0}


@pytest.fixture(scope="module")
def plain():
    """A run of two steps on a fixed cluster, and its journal."""
    return run(cluster())


def check_tokens(result, memory):
    """Check that each of 24 trajectories of 4 turns ended once, and that no token is missing."""
    counted_once(memory, 24)
    assert result.counts.turns == 24 * 4
    found = sum(step.tokens for step in result.steps)
    assert found == sum(e.tokens for e in memory.events(ev.TurnEnded))


def test_each_step_trains_on_its_groups_and_every_trajectory_ends_once(plain):
    result, memory = plain
    check_tokens(result, memory)
    assert [step.trajectories for step in result.steps] == [12, 12]
    assert sum(worker.decoded for worker in result.workers) == result.tokens


def test_a_step_is_rollout_training_and_sync_in_this_order(plain):
    result, _ = plain
    for step in result.steps:
        train_s = 3.0 + step.trained_tokens * 1e9 / (2 * probes.GPU.flops * 0.5)
        assert training_s(step) == pytest.approx(train_s)
        assert step.published_at - step.trained_at == pytest.approx(1.0)
        # two workers, one link without relay: both at the end of 2 x 0.5 s, then 0.1 s of latency
        # and 0.2 s to apply
        assert step.ended - step.published_at == pytest.approx(1.3)
    assert result.steps[1].began == result.steps[0].ended
    assert all(step.staleness == (0, 0, 0) for step in result.steps)


def test_no_turn_runs_on_old_weights(plain):
    holds, newest = {}, 0
    for event, actions in plain[1].entries:
        if isinstance(event, ev.VersionPublished):
            newest = event.version
        if isinstance(event, (ev.WorkerLoaded, ev.WorkerJoined)):
            holds[event.worker] = event.version
        assert all(holds[a.worker] == newest for a in actions if isinstance(a, ev.AssignTurn))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(plain):
    again, other = (run(cluster(), seed=seed) for seed in (1, 2))
    assert plain[1].entries == again[1].entries and plain[0].steps == again[0].steps
    assert other[0].steps != plain[0].steps


def test_rival_schedulers_meet_the_same_episodes():
    asked = []
    for routing in ("least_loaded", "round_robin"):
        env = Agents()
        result, _ = run(cluster(env=env), routing)
        asked.append((env.asked, [step.tokens for step in result.steps]))
    assert asked[0] == asked[1]


def test_groups_whose_rewards_are_equal_are_replaced():
    result, memory = run(cluster(env=Agents(equal=[1]), dynamic=True, steps=1))
    finished = memory.events(ev.GroupFinished)
    assert [event.group for event in finished if not event.accepted] == ["g1"]
    assert result.steps[0].trajectories == 12 and result.counts.dropped_groups == 1
    assert result.counts.dropped_tokens > 0


def test_each_turn_takes_the_ways_to_its_engine_and_back():
    def ends(there, back):
        _, memory = run(cluster(groups=1, size=1, dispatch_s=there, answer_s=back))
        return [event.at for event in memory.events(ev.TurnEnded)]

    times = [ends(*ways) for ways in ((0.0, 0.0), (0.25, 0.0), (0.0, 0.5), (0.25, 0.5))]
    for turn in range(4):  # of the first step; nothing else is under way
        bare, there, back, both = (found[turn] for found in times)
        expected = pytest.approx((0.25 * (turn + 1), 0.5 * (turn + 1), 0.75 * (turn + 1)))
        assert (there - bare, back - bare, both - bare) == expected


def test_an_answer_that_comes_after_its_turn_was_taken_back_is_not_heard():
    """As in a live run: the next attempt begins with the tokens that the coordinator had heard
    of."""
    result, memory = run(cluster(answer_s=3.0), timeout=3.8)
    assert result.counts.aborted > 0
    check_tokens(result, memory)
    # what nobody heard of is made again
    assert sum(worker.decoded for worker in result.workers) > result.tokens


SPOT = spec.Available(np.array([0.0, 7.0, 20.0]), np.array([2, 0, 1], np.int32))


def beside_spot(**changes):
    """A run whose two spot workers are lost at 7 s; one is there again from 20 s on."""
    pools = pool(count=1), pool("spot", "spot", 2, available=SPOT)
    result, memory = run(cluster(*pools, groups=6, **changes))
    assert result.counts.lost_workers == 2 and result.counts.migrations > 0
    assert sum(step.trajectories for step in result.steps) == 48
    return result, memory


def test_answers_on_their_way_from_a_worker_that_is_lost_are_lost():
    result, memory = beside_spot(answer_s=2.0)
    counted_once(memory, 48)
    lost_at = next(e.at for e in memory.events(ev.WorkerLost))
    taken = {a.turn: (at, a.worker) for at, a in memory.actions(ev.AssignTurn)}
    later = [taken[e.turn] for e in memory.events(ev.TurnEnded) if e.at > lost_at]
    assert not [worker for at, worker in later if at < lost_at and worker.startswith("spot")]


def test_a_crashed_environment_is_replaced_within_its_group():
    result, memory = run(cluster(env=Agents(crash=1), steps=1))
    assert result.counts.crashed == 3 and result.steps[0].trajectories == 12
    assert result.counts.crashed_tokens > 0
    assert {"g0.0", "g0.0r1"} <= {event.trajectory for event in memory.events(ev.TrajectoryEnded)}


def test_the_scheduler_hears_of_long_turns_while_they_run():
    result, memory = run(cluster(progress_s=0.5))
    assert len(memory.events(ev.TurnProgressed)) > 100
    quiet, silent = run(cluster(progress_s=math.inf))
    assert not silent.events(ev.TurnProgressed)
    assert quiet.steps == result.steps  # nothing depends on it here


@pytest.mark.parametrize(
    "what, words",
    [
        (cluster(pool(count=0), tick_s=math.inf), "12 of them wait for 0 workers"),
        (cluster(pool(count=0), tick_s=60.0), "all turns have waited for 86400 s; the .*, 12 of"),
        (cluster(horizon_s=5.0), "horizon_s=5"),
        (cluster(env=Agents(crash=2), groups=1, size=1, max_failures_in_row=2), "failed in a row"),
    ],
)
def test_a_run_that_cannot_end_is_an_error_that_says_why(what, words):
    with pytest.raises(RuntimeError, match=words):
        run(what)


def test_a_cooperative_worker_computes_in_the_idle_share_only():
    pools = pool(count=1), clusters.borrowed(None, "none", 1), clusters.borrowed(count=1)
    alone, bare, beside = (run(cluster(each, steps=1))[0].steps[0].rollout_s for each in pools)
    assert bare == pytest.approx(alone)
    assert alone < beside <= 2 * alone


def test_the_gate_keeps_the_targets_that_memory_sharing_alone_misses():
    load = clusters.steady_load()
    slower = dataclasses.replace(load, ttft_s=load.ttft_s * 3)
    for executor, beside, kept in (("gate", None, True), ("memory_only", slower, False)):
        lent = clusters.borrowed(dataclasses.replace(load, beside=beside), executor)
        [use] = run(cluster(pool(), lent))[0].serving
        assert (use.beside.ttft_attained > 0.99) == kept and use.alone.ttft_attained > 0.99


def test_called_back_memory_sends_turns_elsewhere_and_stays_called_back_until_the_next_step():
    kv = np.array([0.1, 0.99, 0.1])
    burst = clusters.made_load(np.array([0.0, 6.0, 8.0]), np.full(3, 0.2), kv, 50, 1000.0)
    result, memory = run(cluster(pool(count=1), clusters.borrowed(burst, count=1), groups=4))
    words = [(e.at, e.kv_tokens, e.revoked) for e in memory.events(ev.WorkerCapacity)]
    assert result.counts.returned > 0 and result.counts.migrations >= result.counts.returned
    assert (6.0, 0, True) in words
    second = result.steps[1].began
    assert not [word for word in words if 6.0 < word[0] < second]
    assert [word for word in words if word[0] == second and word[1] > 0 and not word[2]]
    assert sum(step.trajectories for step in result.steps) == 32


def test_a_worker_that_joins_takes_the_weights_first():
    what = cluster(pool(count=1), pool("lend", "cooperative", 3, on_request=True), groups=8)
    result, memory = run(what, provisioning="on_demand", args={"min": 2, "max": 2} | AT_ONCE)
    joined = [event for event in memory.events(ev.WorkerJoined) if event.kind == "cooperative"]
    assert len(joined) == 2 and len(result.allocations) == 2
    for granted in result.allocations:
        assert granted.seconds > 4.0  # its start, and a whole version
        turns = memory.actions(ev.AssignTurn)
        firsts = [at for at, action in turns if action.worker == granted.worker]
        assert min(firsts) >= granted.ready_at


def test_a_full_pool_refuses():
    what = cluster(pool("lend", "cooperative", 0, on_request=True), pool(count=1))
    result, memory = run(what, provisioning="on_demand", args={"min": 1, "max": 1} | AT_ONCE)
    assert result.counts.refused > 1 and memory.events(ev.CapacityRefused)


def test_lost_spot_workers_cost_no_token_that_had_been_made():
    result, memory = beside_spot()
    assert sum(worker.decoded for worker in result.workers) == result.tokens  # none was made twice
    joined = [event.worker for event in memory.events(ev.WorkerJoined) if event.kind == "spot"]
    assert joined[2:] == ["spot-2"]


def training_s(step):
    return step.trained_at - step.training_at


def test_hybrid_workers_roll_out_only_between_training_phases():
    result, _ = run(cluster(pool("hybrid", "hybrid", 2, switch_s=1.5)))
    began, ended = np.concatenate([worker.spans for worker in result.workers]).T
    for step in result.steps:
        assert training_s(step) > 3.0 + 1.5
        assert not ((began < step.trained_at) & (ended > step.training_at + 1e-6)).any()


def test_each_trained_token_attends_to_those_before_it_in_its_trajectory():
    """n tokens make n x n / 2 pairs: a batch's attention is no function of its tokens alone."""

    class Remembered(Agents):
        def group(self, *args):
            made = super().group(*args)
            episodes.extend(made)
            return made

    episodes, seconds = [], {}
    for flops_per_pair in (0.0, 1e8):
        episodes.clear()
        trainer = dataclasses.replace(clusters.TRAINER, flops_per_pair=flops_per_pair)
        [step] = run(cluster(steps=1, env=Remembered(), trainer=trainer))[0].steps
        seconds[flops_per_pair] = training_s(step)
    lengths = [e.prompt_tokens + sum(e.output_tokens + e.observation_tokens) for e in episodes]
    assert sum(lengths) == step.trained_tokens
    rate = trainer.gpus * trainer.gpu.flops * trainer.mfu
    attention_s = sum(n * n / 2 for n in lengths) * 1e8 / rate
    assert seconds[1e8] - seconds[0.0] == pytest.approx(attention_s)
    assert attention_s > 0.01


def test_gpus_that_roll_out_train_no_more_and_libras_split_shortens_the_steps():
    """Rollouts take long here, training on two GPUs hardly any time: one of them is worth more on
    the other side, which it changes to before step 2, in `switch_s`."""
    pools = pool(count=1), pool("elastic", "hybrid", 2, split=True, switch_s=1.0)
    args = {"period_steps": 2, "gain": 0.05, "cost_s": 1.0, "training_workers": 0}
    trainer = dataclasses.replace(clusters.TRAINER, flops_per_token=2e10)
    what = cluster(*pools, steps=8, groups=12, trainer=trainer)
    result, _ = run(what, provisioning="libra", args=args)
    never, _ = run(what, provisioning="libra", args=args | {"gain": 1.0})
    for found, names in ((result, {"dedicated-0", "elastic-0"}), (never, {"dedicated-0"})):
        assert {worker.name for worker in found.workers if worker.decoded} == names
    for number, times, more in ((0, 1, 0.0), (1, 1, 0.0), (2, 2, 1.0), (3, 2, 0.0), (7, 2, 0.0)):
        step, other = result.steps[number], never.steps[number]  # tokens of the same episodes
        assert step.trained_tokens == other.trained_tokens
        expected = times * (training_s(other) - trainer.step_s) + more
        assert training_s(step) - trainer.step_s == pytest.approx(expected)
    assert result.seconds < 0.9 * never.seconds


def test_certain_groups_are_trained_while_others_run():
    slow = dataclasses.replace(clusters.TRAINER, flops_per_token=1e11)
    runs = (run(cluster(groups=6, trainer=slow, stream=stream))[0] for stream in (False, True))
    whole, ahead = (result.steps for result in runs)
    for before, step in zip(whole, ahead, strict=True):
        assert step.tokens == before.tokens and step.rollout_s == pytest.approx(before.rollout_s)
        assert training_s(step) + step.ahead_s == pytest.approx(training_s(before))
        assert before.ahead_s == 0.0 and step.ahead_s > 0.1 * training_s(step)


def test_a_trainer_that_is_slower_than_rollouts_begins_with_the_first_group_and_never_rests():
    slow = dataclasses.replace(clusters.TRAINER, flops_per_token=1e13)
    result, memory = run(cluster(trainer=slow, stream=True, steps=1))
    first = memory.actions(ev.TrainGroup)[0][0]
    [step] = result.steps
    assert step.ahead_s == pytest.approx(step.training_at - first)
