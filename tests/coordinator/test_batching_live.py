"""Every batching policy drives the live coordinator: whole groups, each prompt once, no older than
the policy says, the same decisions on replay; stopped and resumed, no prompt is lost."""

from pathlib import Path

import pytest

from rose.coordinator import journal
from rose.coordinator.control import train_task
from rose.coordinator.coordinator import Stopped
from rose.observe.metrics import read_metrics, rows_of
from rose.policies import build
from rose.scheduler import events as ev
from rose.scheduler.groups import group_index
from rose.trainer import checkpoint
from tests.coordinator import peers

CONF = Path(__file__).resolve().parents[2] / "conf" / "scheduler" / "batching"
POLICIES = sorted(path.stem for path in CONF.glob("*.yaml"))
DROPS = ("dapo", "trajectory_async")  # prompts for good, as their papers do
GROUPS, SIZE, STEPS = 4, 2, 6
SHORT = (
    f"trainer.steps={STEPS} trainer.batch_size={GROUPS * SIZE} rollout.group_size={SIZE}",
    "eval.episodes=3 eval.every=2 serving.borrow=false observe.tensorboard=false",
    "observe.save_trajectories=false trainer.checkpoint_every=1 algorithm=decoupled_ppo",
)


@pytest.fixture
def config(make_config):
    return lambda policy, *more: make_config(f"scheduler/batching={policy}", *SHORT, *more)


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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains_whole_groups_each_prompt_once_and_none_too_old(policy, seed, config, tmp_path):
    made = config(policy)
    coordinator, peer = peers.run(made, tmp_path, seed=seed)
    check_batches(peer, made)
    indices = [group_index(g) for groups in trained(peer).values() for g in groups]
    assert len(indices) == STEPS * GROUPS == len(set(indices))
    bound = build(made.scheduler, 60.0).staleness
    rows = rows_of(read_metrics(tmp_path), "step")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 <= row["staleness_max"] <= row["group_staleness_max"] <= bound for row in rows)
    assert (peer.turns_in_training > 0) == (bound > 0), (
        "rollouts go on exactly where they may be stale"
    )
    [path] = (tmp_path / "journal").iterdir()
    assert journal.replay(path, build(made.scheduler, made.rollout.turn_timeout_s)) > 100


@pytest.mark.parametrize("policy", POLICIES)
def test_what_no_step_consumed_stays_and_nothing_else(policy, config, tmp_path):
    coordinator, _ = peers.run(config(policy, "algorithm.dynamic_sampling=true"), tmp_path)
    state = coordinator.scheduler.snapshot()["batching"]
    kept = {index for index, _ in state.get("again", [])}
    assert {group_index(g) for g in coordinator.rollouts.finished} <= kept, (
        "a group that no step will take is kept"
    )
    assert coordinator.rollouts.groups.running == 0 and len(coordinator.hub.ledger) == 0
    assert coordinator.scheduler.cluster.turns == {} and coordinator.hub._tokens == {}
    assert all(w.open_turns == 0 for w in coordinator.hub.workers.values())


def stopped_and_resumed(made, folder, stop_when):
    """(peers of the first attempt, of the second, the second's coordinator)"""
    first = []

    def stop(coordinator):
        first[:] = [coordinator.mailbox]
        return stop_when(coordinator)

    with pytest.raises(Stopped):
        peers.run(made, folder, stop_when=stop)
    found = checkpoint.latest(folder)
    coordinator, second = peers.run(made, folder, attempt=2, seed=5, resume_from=found)
    return first[0], second, coordinator, checkpoint.step_of(found)


@pytest.mark.parametrize("policy", POLICIES)
def test_stopped_anywhere_and_resumed_no_prompt_is_lost_or_trained_twice(policy, config, tmp_path):
    made = config(policy)
    places = [
        lambda c: (
            c.progress.step == 3 and c.rollouts.groups.running > 2
        ),  # The run is in a rollout.
        lambda c: c.progress.step == 3 and not c.progress.at_boundary,  # while it trains
        lambda c: c.progress.step == 3 and c.checkpoints._committing,
    ]  # while it saves
    for number, place in enumerate(places):
        first, second, coordinator, step = stopped_and_resumed(made, tmp_path / str(number), place)
        assert step >= 2
        kept = {s: groups for s, groups in trained(first).items() if s <= step} | trained(second)
        assert sorted(kept) == list(range(1, STEPS + 1))
        indices = [group_index(g) for groups in kept.values() for g in groups]
        assert len(set(indices)) == len(indices) == STEPS * GROUPS
        state = coordinator.scheduler.snapshot()["batching"]
        left = {index for index, _ in state.get("again", [])}
        bound = build(made.scheduler, 60.0).staleness
        rows = rows_of(read_metrics(tmp_path / str(number)), "step")
        assert all(row["staleness_max"] <= bound for row in rows)
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
    row = rows_of(read_metrics(tmp_path / "broken"), "step")[3]
    assert row["resumed_tokens"] >= sum(map(len, had.values())) // 4
    assert step == 3
    assert trained(whole) == {s: g for s, g in trained(first).items() if s <= 3} | trained(second)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_is_of_the_same_member_in_every_policy_and_after_a_stop(policy, config, tmp_path):
    made = config(policy, "env=games")
    first, second, coordinator, _ = stopped_and_resumed(
        made, tmp_path, lambda c: c.progress.step == 3 and c.rollouts.groups.running > 2
    )
    seen = first.domain_of_group | second.domain_of_group
    assert set(seen.values()) == {"frozen_lake", "calculator"}
    for group, domain in seen.items():
        if not group.startswith("e"):
            assert domain == train_task(made.seed, group_index(group), made.env.weights).domain
    assert all(t.domain == seen[t.group] for rows in second.trained.values() for t in rows)
    [_, path] = sorted((tmp_path / "journal").iterdir())
    entries = journal.read(path)
    next(entries)
    requested = {
        e.event.group: e.event.domain for e in entries if isinstance(e.event, ev.TurnRequested)
    }
    for row in rows_of(read_metrics(tmp_path), "step"):
        counts = [row[f"trajectories/{name}"] for name in ("frozen_lake", "calculator")]
        assert sum(counts) == GROUPS * SIZE
        success = sum(
            n * row.get(f"success/{name}", 0)
            for n, name in zip(counts, ("frozen_lake", "calculator"), strict=False)
        )
        assert success == pytest.approx(row["success"] * GROUPS * SIZE), (
            "the plain total is over all members"
        )
    for row in rows_of(read_metrics(tmp_path), "eval"):
        assert row["eval_n"] == 3 == row["eval_n/frozen_lake"] + row.get("eval_n/calculator", 0)
    assert requested.items() <= second.domain_of_group.items() and requested, (
        "the scheduler hears of the domain"
    )
