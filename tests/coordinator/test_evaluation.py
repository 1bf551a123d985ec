"""Held-out evaluations of whole runs: which tasks they have, what waits for them, what they end."""

import pytest

from rose.coordinator.exports import Exports
from rose.launch import resume
from rose.observe import held_out
from rose.observe.metrics import read_metrics
from rose.protocol import Phase, seed_of
from rose.trainer import checkpoint
from tests.coordinator import peers

STEPS = 6


@pytest.fixture
def config(make_config):
    run = f"{peers.SHORT} trainer.steps={STEPS} eval.episodes=3 eval.every=2"
    return lambda *overrides: make_config(run, "trainer.checkpoint_every=100", *overrides)


SETS = ("+env@eval.sets.sums=calculator", "+eval.sets.sums.episodes=2 +eval.sets.sums.samples=4")
SETS += ("+env@eval.sets.lake=frozen_lake", "+eval.sets.lake.episodes=1")


def evaluations(folder):
    return peers.rows(folder, "eval")


def steps_of(folder):
    return [checkpoint.step_of(each) for each in checkpoint.complete(folder)]


def of_kind(folder, what):
    """The details of faults of this kind."""
    return [row["detail"] for row in read_metrics(folder) if row.get("what") == what]


def test_sets_have_tasks_of_their_own_and_all_samples_of_a_task_are_one_group(config, tmp_path):
    _, peer = peers.run(config("eval.samples=2", *SETS), tmp_path)
    first, last = evaluations(tmp_path)[0], evaluations(tmp_path)[-1]
    assert (first["eval_n"], first["eval_tasks"], last["step"]) == (6, 3, STEPS)
    assert (first["eval_n/sums"], first["eval_tasks/sums"], first["eval_n/lake"]) == (8, 2, 2)
    solved = [seed_of(f"e0-{task}.{i}", "reward") % 2 for task in range(3) for i in range(2)]
    assert first["eval_reward"] == pytest.approx(sum(solved) / 6)
    pairs = [any(solved[2 * task : 2 * task + 2]) for task in range(3)]
    assert first["eval_pass_at_2"] == pytest.approx(sum(pairs) / 3)
    expected = {"eval_pass_at_2/sums", "eval_pass_at_4/sums"}
    assert {k for k in first if k.startswith("eval_pass_at_") and k.endswith("/sums")} == expected
    domains = {g: d for g, d in peer.domain_of_group.items() if g.startswith("e0")}
    assert sorted(domains.values()) == ["frozen_lake"] * 3 + ["lake"] + ["sums"] * 2
    assert all(peer.seed_of_group[group] % 2 for group in domains), "held-out seeds are odd"
    again = {g.replace(f"e{STEPS}-", "e0-"): s for g, s in peer.seed_of_group.items()}
    expected = {group: peer.seed_of_group[group] for group in domains}
    assert {group: again[group] for group in domains} == expected
    peers.run(config("eval.episodes=0", *SETS), tmp_path / "without own tasks")
    assert evaluations(tmp_path / "without own tasks")[0]["eval_n"] == 2 * 4 + 1


@pytest.mark.parametrize("batching", ["synchronous", "bounded_staleness", "tail_batching"])
@pytest.mark.parametrize("seed", range(3))
def test_beside_training_every_step_is_trained_as_without(config, batching, seed, tmp_path):
    wanted = config("eval.beside=true", "eval.every=1", f"scheduler/batching={batching}")
    phases = {}

    def watch(coordinator):
        for group in coordinator.rollouts.groups.running_in(Phase.EVAL):
            step = int(group.removeprefix("e").partition("-")[0])
            phases.setdefault(step, set()).add(coordinator.records.live.status.phase)

    _, peer = peers.run(wanted, tmp_path, seed=seed, watch=watch)
    assert len(peer.trained) == STEPS and phases[1] & {"rollout", "train", "sync"}
    assert phases[0] == phases[STEPS] == {"evaluating"}
    rows = evaluations(tmp_path)
    assert rows[-1]["step"] == STEPS and rows[-1]["eval_versions_later"] == 0
    assert len(rows) + len(of_kind(tmp_path, "evaluation left out")) == STEPS + 1
    assert all(row["eval_versions_later"] <= STEPS - row["step"] for row in rows)


def score_of(folder):
    return {row["step"]: held_out.score(row) for row in evaluations(folder)}


@pytest.mark.parametrize("seed", range(3))
def test_an_early_stop_waits_for_what_runs_beside(config, seed, tmp_path):
    wanted = config("trainer.steps=40", "eval.every=2", "eval.beside=true", "eval.stop.patience=1")
    coordinator, peer = peers.run(wanted, tmp_path, seed=seed)
    rows, last = evaluations(tmp_path), coordinator.progress.step
    assert coordinator.progress.stopped_early and max(peer.trained) == last < 40
    assert rows[-1]["step"] == last and rows[-1]["eval_versions_later"] == 0
    begun = {int(g[1:].partition("-")[0]) for g in peer.seed_of_group if g.startswith("e")}
    assert begun == {row["step"] for row in rows}, "none is thrown away"


def test_a_run_that_no_longer_gets_better_ends_and_has_its_last_step(config, tmp_path, monkeypatch):
    async def note(self, step, store):
        exported.append(step)

    exported: list[int] = []
    monkeypatch.setattr(Exports, "_export", note)
    given = ("trainer.steps=40", "eval.every=1", "eval.stop.patience=3")
    wanted = config(*given, "trainer.export_every=1000")
    coordinator, peer = peers.run(wanted, tmp_path)
    scores = list(score_of(tmp_path).values())
    last = coordinator.progress.step
    assert 3 <= last < 40 and len(scores) == last + 1 and len(peer.trained) == last
    assert max(scores[-3:]) <= max(scores[:-3])
    assert "eval.stop.patience=3" in coordinator.progress.stopped_early
    for before in range(4, len(scores)):
        assert max(scores[before - 3 : before]) > max(scores[: before - 3]), "no earlier"
    assert steps_of(tmp_path) == exported == [last]
    resume.mark_finished(tmp_path, last, wanted)
    assert resume.is_finished(tmp_path, wanted) and resume.stopped_early(tmp_path) == last
    for other in ("trainer.steps=41", "eval.stop.patience=4", "eval.stop.min_gain=0.1"):
        assert not resume.is_finished(tmp_path, config(*given, other)), other


@pytest.mark.parametrize("beside", ["true", "false"])
def test_the_checkpoint_of_the_best_evaluation_stays_beside_the_newest(config, beside, tmp_path):
    kept = "trainer.steps=12 trainer.checkpoint_keep=1 eval.keep_best=true"
    wanted = config(kept, f"eval.beside={beside}")
    peers.run(wanted, tmp_path, seed=1)
    best = held_out.best(read_metrics(tmp_path))["step"]
    assert set(steps_of(tmp_path)) == {best, 12}
    assert best < 12, "else this says nothing: another seed"


def test_a_run_that_is_stopped_in_an_evaluation_beside_makes_it_again(config, tmp_path):
    wanted = config("eval.beside=true")

    def evaluating(coordinator):
        running = coordinator.rollouts.groups.running_in(Phase.EVAL)
        return coordinator.progress.step == 2 and bool(running)

    saved = peers.stopped(wanted, tmp_path, evaluating)
    assert checkpoint.step_of(saved) == 2
    peers.run(wanted, tmp_path, attempt=2, resume_from=saved)
    assert {0, 2, 6} <= set(score_of(tmp_path))


def test_what_an_evaluation_beside_loses_at_a_restart_is_told(config, tmp_path):
    wanted = config("eval.beside=true")
    left = tmp_path / "snapshots" / "e2-0.0"
    left.mkdir(parents=True)

    def one_step_after(coordinator):
        coordinator.mailbox.running.pop("e2-0.0", None)  # its environment takes long
        running = coordinator.rollouts.groups.running_in(Phase.EVAL)
        return coordinator.progress.step == 3 and "e2-0" in running

    saved = peers.stopped(wanted, tmp_path, one_step_after)
    assert checkpoint.step_of(saved) == 3 and 2 not in score_of(tmp_path)
    assert left.exists()
    peers.run(wanted, tmp_path, attempt=2, resume_from=saved)
    [lost] = of_kind(tmp_path, "evaluation lost")
    assert lost.startswith("step 2:") and not left.exists()
    assert set(score_of(tmp_path)) == {0, 4, 6}
