"""Replicas where rollouts go on during training: as many engines as are planned hand their turns on
and sleep, the others roll out; nothing is lost or trained twice, and the journal replays."""

import pytest

from rose import protocol as p
from rose.coordinator import coordinator as coordinators
from rose.coordinator import journal
from rose.coordinator.coordinator import Stopped
from rose.launch.layout import layout
from rose.observe.metrics import read_metrics, rows_of
from rose.policies import build
from rose.scheduler import events as ev
from rose.trainer import checkpoint
from tests.coordinator import peers
from tests.coordinator.test_batching_live import SHORT, STEPS, check_batches

NEVER = 1000  # steps until a plan


@pytest.fixture
def config(make_config):
    def make(*overrides, batching="bounded_staleness", replicas=2, workers=3, period=NEVER):
        args = "scheduler.provisioning.args"
        return make_config(
            *(f"scheduler/batching={batching}", *SHORT, "scheduler/provisioning=libra"),
            f"{args}.replicas={replicas} {args}.period_steps={period} {args}.cost_s=0 {args}.gain=0",
            f"trainer.elastic_replicas={max(replicas, 1)} rollout.workers={workers}",
            *overrides,
        )

    return make


@pytest.fixture
def ticks_often(monkeypatch):
    """What engines do is looked at by the tick; these runs last less than one."""
    monkeypatch.setattr(coordinators, "TICK_S", 1e-3)


def ranks_of(made):
    return [rank.rank for rank in layout(made) if rank.role is p.Role.ROLLOUT]


def steps_of(folder):
    return rows_of(read_metrics(folder), "step")


def replays(made, folder):
    path = sorted((folder / "journal").iterdir())[-1]
    return journal.replay(path, build(made.scheduler, made.rollout.turn_timeout_s)) > 100


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("devices", ["cpu", "gpus"])
@pytest.mark.parametrize(
    "batching", ["bounded_staleness", "one_step_off", "trajectory_async", "carry_over"]
)
def test_planned_engines_train_while_the_others_roll_out(batching, devices, seed, config, tmp_path):
    gpus = () if devices == "cpu" else ("cluster=gpus", "cluster.gpus=4", "trainer.zero_stage=0")
    made = config(*gpus, batching=batching)
    _, peer = peers.run(made, tmp_path, seed=seed)
    check_batches(peer, made)
    assert sorted(peer.trained) == list(range(1, STEPS + 1))
    rows = steps_of(tmp_path)
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["replicas_planned"] == 2 for row in rows)
    assert sum(row["replicas"] for row in rows) >= 2 * STEPS - 2, "both, once they are up"
    assert all(row["replicas_lost"] == 0 for row in rows)
    assert any(row["replica_token_share"] > 0.3 for row in rows)
    assert peer.turns_in_training > 0 and peer.turns_asleep == 0
    assert peer.awake == set(ranks_of(made)[:2]), "they roll out again"
    entries = list(journal.read(tmp_path / "journal" / "attempt-001.jsonl"))[1:]
    told = [e.event.tokens for e in entries if isinstance(e.event, ev.VersionPublished)]
    of_steps = [sum(len(t.mask) for t in peer.trained[step]) for step in range(1, STEPS + 1)]
    assert told == [0, *of_steps], "what training is judged by"
    assert replays(made, tmp_path)


def test_the_turns_of_engines_that_rest_go_on_with_their_tokens(config, tmp_path):
    """In the midst of turns, as each begins the next step's groups at once."""
    made = config("scheduler.batching.args.running=2", "scheduler.batching.args.eta=4")
    moved = []

    class Hands(peers.Peers):
        def _AbortTurn(self, rank, m):
            if rank in self.replicas and self.training is False:
                moved.append(m.turn)
            super()._AbortTurn(rank, m)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peers, "Peers", Hands)
        _, peer = peers.run(made, tmp_path)
    check_batches(peer, made)
    assert moved, "no engine had a turn as it was put to rest"
    assert sum(row["migrations"] for row in steps_of(tmp_path)) > 0
    for rows in peer.trained.values():
        for trajectory in rows:  # what the environment got is what is trained, and no more
            assert trajectory.tokens == p.pack_tokens([1]) + peer.received[trajectory.id]


def test_a_replica_that_dies_at_work_is_missed_by_nobody_and_counted_on_again(config, tmp_path):
    made = config()
    first, second = ranks_of(made)[:2]

    def watch(coordinator):
        coordinator.mailbox.lost = {(first, 3), (first, 4), (second, 4)}

    _, peer = peers.run(made, tmp_path, watch=watch)
    check_batches(peer, made)
    rows = steps_of(tmp_path)
    assert sorted(peer.trained) == list(range(1, STEPS + 1))
    assert [row["replicas_lost"] for row in rows[2:4]] == [1, 2]
    assert [row["replica_token_share"] > 0 for row in rows[2:5]] == [True, False, True]
    assert rows[-1]["replicas"] == 2 and replays(made, tmp_path)


def test_an_engine_that_dies_asleep_is_started_again_and_rests_again(config, tmp_path):
    made = config()
    [rank, *_] = ranks_of(made)

    class Dies(peers.Peers):
        died = False

        def _ComputeGradient(self, rank_, m):
            super()._ComputeGradient(rank_, m)
            if rank_ == rank and m.step == 3 and not Dies.died:
                Dies.died = True
                self.dies(rank)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peers, "Peers", Dies)
        coordinator, peer = peers.run(made, tmp_path)
    check_batches(peer, made)
    assert Dies.died and sorted(peer.trained) == list(range(1, STEPS + 1))
    assert coordinator.hub.workers.restarts == 1
    assert steps_of(tmp_path)[-1]["replicas"] == 2 and replays(made, tmp_path)


def test_plans_their_forecasts_and_what_then_happened_are_recorded(config, ticks_often, tmp_path):
    made = config(period=1, replicas=1, workers=2)
    _, peer = peers.run(made, tmp_path)
    check_batches(peer, made)
    rows = read_metrics(tmp_path)
    plans = [row["detail"] for row in rows if row.get("what") == "replicas planned"]
    assert len(plans) >= 1
    assert "train, " in plans[0] and "s a step are expected. Steps took" in plans[0]
    assert all("s were expected: training" in plan for plan in plans[1:])
    steps = rows_of(rows, "step")
    assert any(row.get("seconds_step_planned", 0) > 0 for row in steps)
    assert all(row["replicas"] <= row["replicas_planned"] <= 1 for row in steps)
    assert replays(made, tmp_path)


def test_none_train_before_the_first_plan_unless_it_is_said(config, tmp_path):
    _, peer = peers.run(config(replicas=0), tmp_path)
    assert not peer.gradients and len(peer.trained) == STEPS
    rows = read_metrics(tmp_path)
    assert all(row["replicas_planned"] == 0 for row in rows_of(rows, "step"))
    assert not [row for row in rows if row.get("what") == "no replica trains"]


def test_evaluations_beside_training_go_on_as_engines_rest(config, tmp_path):
    made = config("eval.beside=true")
    _, peer = peers.run(made, tmp_path)
    check_batches(peer, made)
    evals = rows_of(read_metrics(tmp_path), "eval")
    assert len(evals) >= 3 and all(row["eval_n"] == 3 for row in evals)
    assert any(row["replicas"] == 2 for row in steps_of(tmp_path))


def test_a_run_that_is_stopped_as_engines_rest_goes_on_with_its_plan(config, ticks_often, tmp_path):
    """It has planned once, at its second step, and is not to plan again."""
    made = config(period=1, replicas=1, workers=2)

    def stop(coordinator):
        return coordinator.progress.step >= 3 and "rollout-0" in coordinator.hub.workers.idled

    def watch(coordinator):
        planner = coordinator.scheduler._provisioning
        if planner._expected_s:
            planner.period_steps, planner.replicas = NEVER, 1

    with pytest.raises(Stopped):
        peers.run(made, tmp_path, stop_when=stop, watch=watch)
    found = checkpoint.latest(tmp_path)
    step = checkpoint.step_of(found)
    made = config(replicas=0, workers=2)
    _, peer = peers.run(made, tmp_path, attempt=2, seed=5, resume_from=found)
    assert sorted(peer.trained) == list(range(step + 1, STEPS + 1))
    later = [row for row in steps_of(tmp_path) if row["step"] > step]
    assert later and all(row["replicas_planned"] == 1 for row in later[1:]), "as was planned before"
    assert replays(made, tmp_path)
