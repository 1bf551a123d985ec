"""Every batching policy drives the live coordinator: whole groups, each prompt once, no older than
the policy says, the same decisions on replay; stopped and resumed, no prompt is lost."""

from pathlib import Path

import pytest

from rose.coordinator.control import train_task
from rose.policies import build
from rose.scheduler import events as ev
from rose.scheduler.groups import group_index
from rose.trainer import checkpoint
from tests.coordinator import peers

CONF = Path(__file__).resolve().parents[2] / "conf" / "scheduler" / "batching"
POLICIES = sorted(path.stem for path in CONF.glob("*.yaml"))
DROPS = ("dapo", "trajectory_async")  # prompts for good, as their papers do
GROUPS, SIZE, STEPS = 4, 2, 6
RUN = f"{peers.SHORT} trainer.steps={STEPS} trainer.checkpoint_every=1 eval.episodes=3 eval.every=2"


@pytest.fixture
def config(make_config):
    plain = (RUN, "algorithm=decoupled_ppo")
    return lambda policy, *more: make_config(f"scheduler/batching={policy}", *plain, *more)


def trained(peer):
    """step -> groups, in order."""
    return {step: list(dict.fromkeys(t.group for t in rows)) for step, rows in peer.trained.items()}


def check_batches(peer, config):
    for rows in peer.trained.values():
        groups = [t.group for t in rows]
        assert len(rows) == GROUPS * SIZE and len({t.id for t in rows}) == len(rows)
        assert all(groups.count(g) == SIZE for g in groups)
    for group, seed in peer.seed_of_group.items():
        if not group.startswith("e"):
            assert seed == train_task(config.seed, group_index(group), config.env.weights).seed


def check_left(coordinator):
    """Groups that no step consumed stay, and nothing else does."""
    state = coordinator.scheduler.snapshot()["batching"]
    left = {group_index(group) for group in coordinator.rollouts.finished}
    assert left <= {index for index, _ in state.get("again", [])}, "one stays that no step takes"
    assert coordinator.rollouts.groups.running == 0 and len(coordinator.hub.ledger) == 0
    assert coordinator.scheduler.cluster.turns == {} and coordinator.hub._tokens == {}
    assert all(w.open_turns == 0 for w in coordinator.hub.workers.values())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains_whole_groups_each_prompt_once_and_none_too_old(policy, seed, config, tmp_path):
    made = config(policy, f"algorithm.dynamic_sampling={'true' if seed else 'false'}")
    coordinator, peer = peers.run(made, tmp_path, seed=seed)
    check_batches(peer, made)
    check_left(coordinator)
    indices = [group_index(g) for groups in trained(peer).values() for g in groups]
    assert len(indices) == STEPS * GROUPS == len(set(indices))
    bound = build(made.scheduler, 60.0).staleness
    rows = peers.rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 <= row["staleness_max"] <= row["group_staleness_max"] <= bound for row in rows)
    goes_on = peer.turns_in_training > 0
    assert goes_on == (bound > 0), "rollouts go on exactly where they may be stale"
    peers.check_replay(made, tmp_path)


def stopped_and_resumed(made, folder, stop_when):
    """(peers of the first attempt, of the second, the second's coordinator, its first step)"""
    first = []

    def stop(coordinator):
        first[:] = [coordinator.mailbox]
        return stop_when(coordinator)

    found = peers.stopped(made, folder, stop)
    coordinator, second = peers.run(made, folder, attempt=2, seed=5, resume_from=found)
    return first[0], second, coordinator, checkpoint.step_of(found)


@pytest.mark.parametrize("policy", POLICIES)
def test_stopped_anywhere_and_resumed_no_prompt_is_lost_or_trained_twice(policy, config, tmp_path):
    made = config(policy)
    places = {
        "rollout": lambda c: c.rollouts.groups.running > 2,
        "training": lambda c: not c.progress.at_boundary,
        "saving": lambda c: c.checkpoints._committing,
    }
    for name, place in places.items():
        first, second, coordinator, step = stopped_and_resumed(
            made, tmp_path / name, lambda c: c.progress.step == 3 and place(c)
        )
        assert step >= 2
        kept = {s: groups for s, groups in trained(first).items() if s <= step} | trained(second)
        assert sorted(kept) == list(range(1, STEPS + 1))
        indices = [group_index(g) for groups in kept.values() for g in groups]
        assert len(set(indices)) == len(indices) == STEPS * GROUPS
        bound = build(made.scheduler, 60.0).staleness
        assert all(row["staleness_max"] <= bound for row in peers.rows(tmp_path / name))
        state = coordinator.scheduler.snapshot()["batching"]
        left = {index for index, _ in state.get("again", [])}
        if policy not in DROPS:
            assert set(range(state["next"])) == set(indices) | left, "a prompt was skipped"


def test_a_synchronous_run_resumes_with_the_very_next_batch_and_the_turns_it_had(config, tmp_path):
    made = config("synchronous")
    _, whole = peers.run(made, tmp_path / "whole")
    first, second, _, step = stopped_and_resumed(
        made,
        tmp_path / "broken",
        # of the fourth step: progress is the third's until that has begun
        lambda c: c.progress.step == 3 and c.rollouts.batch is None and c.rollouts.progress[0] > 2,
    )
    had = {t.id: first.received[t.id] for t in second.trained[4] if t.id in first.received}
    assert len(had) > 2
    assert all(t.tokens[4:].startswith(had.get(t.id, b"")) for t in second.trained[4])
    row = peers.rows(tmp_path / "broken")[3]
    assert row["resumed_tokens"] >= sum(map(len, had.values())) // 4
    assert step == 3
    assert trained(whole) == {s: g for s, g in trained(first).items() if s <= 3} | trained(second)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_is_of_the_same_member_in_every_policy_and_after_a_stop(policy, config, tmp_path):
    made, members = config(policy, "env=games"), ("frozen_lake", "calculator")
    first, second, _, _ = stopped_and_resumed(
        made, tmp_path, lambda c: c.progress.step == 3 and c.rollouts.groups.running > 2
    )
    seen = first.domain_of_group | second.domain_of_group
    assert set(seen.values()) == set(members)
    for group, domain in seen.items():
        if not group.startswith("e"):
            assert domain == train_task(made.seed, group_index(group), made.env.weights).domain
    assert all(t.domain == seen[t.group] for rows in second.trained.values() for t in rows)
    for row in peers.rows(tmp_path):
        counts = {name: row[f"trajectories/{name}"] for name in members}
        assert sum(counts.values()) == GROUPS * SIZE
        success = sum(n * row.get(f"success/{name}", 0) for name, n in counts.items())
        assert success == pytest.approx(row["success"] * GROUPS * SIZE), "it is over all members"
    for row in peers.rows(tmp_path, "eval"):
        assert row["eval_n"] == 3 == row["eval_n/frozen_lake"] + row.get("eval_n/calculator", 0)
    events = [entry.event for entry in peers.entries(tmp_path, attempt=2)]
    asked = {e.group: e.domain for e in events if isinstance(e, ev.TurnRequested)}
    assert asked and asked.items() <= second.domain_of_group.items(), "the scheduler hears of it"
