"""A stop while a step is trained: its end is waited for, and saved, where it comes soon enough."""

from pathlib import Path

import pytest

from rose.coordinator.stopping import RECENT_STEPS, StepEnd
from rose.coordinator.waiting import Changes
from rose.launch import resume
from rose.trainer import checkpoint
from tests.coordinator import peers

TRAINED = 3  # steps before the one in which the stop comes
RUN = "trainer.batch_size=8 rollout.group_size=4 trainer.checkpoint_every=100 eval.episodes=0"


@pytest.fixture
def config(make_config):
    return make_config(RUN, "trainer.steps=6")


def training(coordinator):
    return coordinator.progress.step == TRAINED and not coordinator.progress.at_boundary


def test_the_step_that_is_trained_ends_and_is_saved(config, tmp_path, capsys):
    saved = peers.stopped(config, tmp_path, training)
    assert checkpoint.step_of(saved) == TRAINED + 1
    assert "asked to end: step 4 is waited for" in capsys.readouterr().out
    _, peer = peers.run(config, tmp_path, attempt=2, resume_from=saved)
    assert list(peer.trained) == [5, 6]


def silent(monkeypatch, kind, of):
    """No peer answers messages of this kind about the step in which the stop comes."""
    answer = getattr(peers.Peers, kind)

    def until_then(mailbox, rank, message):
        if of(message) <= TRAINED:
            answer(mailbox, rank, message)

    monkeypatch.setattr(peers.Peers, kind, until_then)


@pytest.fixture
def endless(monkeypatch):
    """The step in which the stop comes never ends."""
    silent(monkeypatch, "_TrainPart", lambda message: message.step)


LONG = (StepEnd, "left_s", lambda end: 1e4), "step 4 is trained for some 10000 s more"
SLOW = (resume, "step_end_s", lambda *args: 0.2), "step 4 is waited for, 0 s at most"


@pytest.mark.parametrize("change, said", [LONG, SLOW])
def test_a_step_that_would_outlast_the_stop_or_does_is_left(
    change, said, config, tmp_path, capsys, monkeypatch, endless
):
    monkeypatch.setattr(*change)
    assert peers.stopped(config, tmp_path, training) is None
    assert said in capsys.readouterr().out


def test_the_longest_of_the_last_steps_tells_how_long_one_takes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rose.coordinator.stopping.time.monotonic", lambda: now[0])
    pace = StepEnd(Changes(lambda what: None))
    pace.training_began()
    assert pace.left_s() == 0, "nobody knows"
    for seconds in (50.0, 8.0, 9.0, 7.0):
        pace.training_began()
        now[0] += seconds
        pace.training_ended()
    pace.training_began()
    now[0] += 2.0
    assert RECENT_STEPS == 3 and pace.left_s() == pytest.approx(7.0)
    now[0] += 20.0
    assert pace.left_s() == 0
    pace.training_began()
    now[0] += 1.0
    pace.training_ended()
    assert pace.left_s() == 0, "it is trained, and engines get its weights"


LOCAL = ("cluster.stop_timeout_s=30",)
SLURM = ("cluster=dev", "cluster.stop_timeout_s=300")


@pytest.mark.parametrize(
    ("overrides", "save_s", "step_end_s"),
    [
        (LOCAL, 0.0, 15.0),
        (LOCAL, 4.0, 12.0),
        (LOCAL, 100.0, 500 * 2 / 3 - 200),
        (SLURM, 0.0, 60.0),  # Slurm warns 120 s before
        ((*SLURM, "cluster.slurm.warning_s=30"), 2.0, 10.0),  # killed after 15 s
        (SLURM, None, 15.0),  # cancelled
    ],
)
def test_step_save_and_ranks_share_time(make_config, tmp_path, overrides, save_s, step_end_s):
    cluster = make_config(*overrides).cluster
    if save_s:
        resume.note_save(tmp_path, save_s)
    limit_s = resume.stop_s(tmp_path, cluster)
    warned = save_s is not None
    waited_s = resume.step_end_s(tmp_path, cluster, warned)
    save_s = save_s or 0.0
    assert resume.end_s(tmp_path, cluster, warned) - waited_s >= 2 * save_s
    assert waited_s == pytest.approx(step_end_s)
    assert resume.save_s(tmp_path, cluster, 0.0) == limit_s / 2
    left_s = resume.save_s(tmp_path, cluster, waited_s)
    assert left_s >= 2 * save_s and waited_s + left_s <= limit_s * 2 / 3 + 1e-9


def test_nothing_is_waited_for_between_steps(config, tmp_path, monkeypatch):
    async def none(*args):
        raise AssertionError("waited")

    def between(coordinator):
        return coordinator.progress.step == 2 and coordinator.progress.at_boundary

    monkeypatch.setattr(StepEnd, "wait", none)
    assert checkpoint.step_of(peers.stopped(config, tmp_path, between)) == 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("batching", ["bounded_staleness", "one_step_off"])
def test_no_step_begins_after_the_one_that_is_waited_for(make_config, tmp_path, batching, seed):
    """Though its batch is there: it would go on so until the time to stop is over, in the midst of
    a step."""
    stale = f"scheduler/batching={batching}", "algorithm.importance_cap=2.0"
    saved = peers.stopped(make_config(RUN, "trainer.steps=30", *stale), tmp_path, training, seed)
    assert checkpoint.step_of(saved) == TRAINED + 1


@pytest.mark.parametrize("when", ["trained", "synced"])
def test_engines_that_no_longer_answer_keep_no_step_unsaved(config, tmp_path, monkeypatch, when):
    """Slurm's SIGTERM ends them too."""

    def comes(coordinator):
        synced = coordinator.hub.weights.version > TRAINED
        return training(coordinator) and (synced or when == "trained")

    silent(monkeypatch, "_LoadVersion", lambda message: message.version)
    assert checkpoint.step_of(peers.stopped(config, tmp_path, comes)) == TRAINED + 1


def test_a_warned_job_has_ended_in_time_to_be_requeued(make_config, tmp_path):
    """A trainer rank in the midst of a long step doesn't leave by itself."""
    slurm = make_config("cluster=slurm", "cluster.slurm.warning_s=120").cluster
    assert resume.stop_s(tmp_path, slurm) == 300
    assert resume.end_s(tmp_path, slurm, warned=True) == 100
    assert resume.end_s(tmp_path, slurm, warned=False) == 300
    resume.note_save(tmp_path, 100.0)
    assert resume.stop_s(tmp_path, slurm) == pytest.approx(500)
    assert resume.warning_s(tmp_path, slurm.slurm) == 300
    assert resume.end_s(tmp_path, slurm, warned=True) == 280
    local = make_config("cluster.stop_timeout_s=30").cluster
    assert resume.end_s(tmp_path, local, warned=True) == resume.stop_s(tmp_path, local)
    (tmp_path / "status" / "save.json").write_text("torn")
    assert resume.stop_s(tmp_path, slurm) == 300


def test_the_job_of_one_node_is_warned_as_early_as_it_may_take_to_stop(make_config):
    text = (Path(__file__).parents[2] / "slurm" / "one_node.sbatch").read_text()
    warned_s = int(text.partition("#SBATCH --signal=B:USR2@")[2].split()[0])
    assert warned_s >= make_config("cluster=gpus").cluster.stop_timeout_s
