"""Replicas on engines' devices take a part of every batch: each row is trained once, whoever dies,
and engines are asleep as long as a replica has their device."""

import asyncio
import shutil
from pathlib import Path

import pytest

from rose import protocol as p
from rose.coordinator.coordinator import Stopped
from rose.coordinator.waiting import RunFailed
from rose.launch import resume
from rose.launch.layout import layout
from rose.observe.metrics import read_metrics, rows_of
from rose.parts.replicas import division
from rose.trainer import checkpoint
from rose.transfer.mirror import choose_path
from tests.coordinator import peers

STEPS = 4


@pytest.fixture
def config(make_config):
    return lambda *overrides: make_config(
        f"trainer.steps={STEPS}",
        "eval.episodes=2 trainer.batch_size=16 rollout.group_size=2 rollout.workers=2",
        "trainer.elastic_replicas=2 serving.borrow=false observe.tensorboard=false",
        "observe.save_trajectories=false trainer.checkpoint_every=2",
        *overrides,
    )


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path):
    """Of a run that nobody has dismissed."""
    yield
    shutil.rmtree(choose_path(tmp_path), ignore_errors=True)


def ranks_of(made):
    return [rank.rank for rank in layout(made) if rank.role is p.Role.ROLLOUT]


def trained(peer):
    return {step: sorted(t.id for t in rows) for step, rows in peer.trained.items()}


@pytest.mark.parametrize("devices", ["cpu", "gpus"])
def test_replicas_compute_a_part_and_the_same_groups_are_trained(devices, config, tmp_path):
    gpus = () if devices == "cpu" else ("cluster=gpus", "cluster.gpus=3", "trainer.zero_stage=0")
    coordinator, peer = peers.run(config(*gpus), tmp_path / "shared")
    _, alone = peers.run(config("trainer.elastic_replicas=0", *gpus), tmp_path / "alone")
    assert trained(peer) == trained(alone) and len(peer.trained) == STEPS
    rows = rows_of(read_metrics(tmp_path / "shared"), "step")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["replicas"] == 2 and row["replicas_lost"] == 0 for row in rows)
    assert all(row["device_seconds_replica"] == pytest.approx(0.2) for row in rows)  # as they say
    assert all(0.3 < row["replica_token_share"] < 1 for row in rows)
    assert peer.rounds == STEPS and peer.awake == set(ranks_of(config(*gpus)))
    assert not (tmp_path / "shared" / division.FOLDER).exists()
    assert not choose_path(tmp_path / "shared").exists()
    assert peer.turns_asleep == 0


def test_the_trainer_takes_the_rows_of_a_replica_that_dies_at_work(config, tmp_path):
    made = config()
    first, second = ranks_of(made)

    def watch(coordinator):
        coordinator.mailbox.lost = {(first, 2), (first, 3), (second, 3)}

    _, peer = peers.run(made, tmp_path, watch=watch)
    _, alone = peers.run(config("trainer.elastic_replicas=0"), tmp_path / "alone")
    assert trained(peer) == trained(alone) and len(peer.trained) == STEPS
    rows = rows_of(read_metrics(tmp_path), "step")
    assert [row["replicas_lost"] for row in rows] == [0, 1, 2, 0]
    assert [row["replica_token_share"] > 0 for row in rows] == [True, True, False, True]
    faults = [row["detail"] for row in read_metrics(tmp_path) if row["kind"] == "fault"]
    assert len(faults) == 3 and all("killed by SIGKILL" in fault for fault in faults)


def test_a_late_gradient_of_one_that_hangs_is_not_applied(config, tmp_path, monkeypatch):
    monkeypatch.setattr(division, "PATIENCE", 1e-4)
    made, said = config(), []

    class Slow(peers.Peers):
        """That of the second comes when the step is over, all others before the trainer's own
        part."""

        def computed(self, rank, rows):
            if self.orders_of[rank].step == 2 and rank == ranks_of(made)[1] and self.step < 2:
                self.say(rank, lambda: self.computed(rank, rows))
                return None
            said.append(self.orders_of[rank].step)
            return super().computed(rank, rows)

        def ahead_of_shared(self, rank, step):
            if said.count(step) < (2 if step == 1 else 1):
                self.say(rank, lambda: self.ahead_of_shared(rank, step))
                return None
            return super().ahead_of_shared(rank, step)

    monkeypatch.setattr(peers, "Peers", Slow)
    _, peer = peers.run(made, tmp_path)
    assert len(peer.trained) == STEPS and said.count(2) == 2
    rows = rows_of(read_metrics(tmp_path), "step")
    expected = [(2, 0), (2, 1), (1, 0), (1, 0)]
    assert [(row["replicas"], row["replicas_lost"]) for row in rows] == expected
    assert peer.stopped == [(ranks_of(made)[1], 2)]
    [fault] = [row["detail"] for row in read_metrics(tmp_path) if row["kind"] == "fault"]
    assert "rollout-1: no gradient of step 2 in" in fault and "times as long as" in fault
    assert "the trainer computes its rows" in fault and "lower trainer.elastic_replicas=2" in fault


def test_an_engine_that_stays_awake_costs_its_replica_only(config, tmp_path, monkeypatch):
    monkeypatch.setattr(division, "PATIENCE", 1e-4)
    made = config()
    first, second = ranks_of(made)

    class Hangs(peers.Peers):
        """The engine of the second is awake until the trainer has done step 2."""

        def _Sleep(self, rank, m):
            def hangs():
                if self.step < 2:
                    self.say(rank, hangs)
                    return None
                return p.DeviceChanged(rank, m.turn, False, 0.1, 3.0, 20.0, 24.0)

            if rank == second and self.step == 1:
                self.say(rank, hangs)
            else:
                super()._Sleep(rank, m)

        def ahead_of_shared(self, rank, step):
            if len(self.gradients) < (2 if step == 1 else 1):
                self.say(rank, lambda: self.ahead_of_shared(rank, step))
                return None
            return super().ahead_of_shared(rank, step)

    monkeypatch.setattr(peers, "Peers", Hangs)
    _, peer = peers.run(made, tmp_path)
    _, alone = peers.run(config("trainer.elastic_replicas=0"), tmp_path / "alone")
    assert trained(peer) == trained(alone) and len(peer.trained) == STEPS
    assert peer.stopped == [(second, 0)] and peer.awake == {first, second}
    [fault] = [row["detail"] for row in read_metrics(tmp_path) if row["kind"] == "fault"]
    assert "rollout-1: its engine has not fallen asleep in" in fault


def test_a_late_word_of_an_earlier_step_is_no_gradient(config, tmp_path, monkeypatch):
    class Late(peers.Peers):
        """What each replica said of step 2 comes again, behind its order of step 3."""

        files = {}
        taken = {}

        def _ComputeGradient(self, rank, m):
            super()._ComputeGradient(rank, m)
            self.files[rank, m.step] = m.file
            if m.step == 3:
                name = f"rollout-{self.role[rank].index}"
                found = p.GradientSum(self.files[rank, 2], {"loss": 0.5}, 1.0)
                self.say(rank, p.GradientComputed(name, 2, found, 0.1))

        def step_of_shared(self, rank, m):
            super().step_of_shared(rank, m)
            if m.sums:
                self.taken[m.step] = sorted(each.file for each in m.sums)

    monkeypatch.setattr(peers, "Peers", Late)
    _, peer = peers.run(config(), tmp_path)
    assert len(set(peer.files.values())) == 2 * STEPS
    for step in range(1, STEPS + 1):
        given = sorted(file for (_, of), file in peer.files.items() if of == step)
        assert peer.taken[step] == given


def test_a_step_without_replicas_says_why(config, tmp_path, monkeypatch):
    class None_(peers.Peers):
        def say(self, rank, message, about=None):
            if not isinstance(message, p.ReplicaReady):
                super().say(rank, message, about)

    monkeypatch.setattr(peers, "Peers", None_)
    _, peer = peers.run(config(), tmp_path)
    assert len(peer.trained) == STEPS
    [said] = [
        row["detail"] for row in read_metrics(tmp_path) if row.get("what") == "no replica trains"
    ]
    assert said == "step 1: no replica is up beside an engine that is"


def test_gradients_are_in_memory_if_it_has_room(config, tmp_path, monkeypatch):
    for nbytes, parent in ((4, choose_path(tmp_path).parent), (2**60, tmp_path)):
        files = []

        class Needs(peers.Peers):
            def say(self, rank, message, about=None, need=nbytes):
                if isinstance(message, p.ReplicaReady):
                    message = p.ReplicaReady(message.worker, message.pid, need)
                super().say(rank, message, about)

            def _ComputeGradient(self, rank, m, seen=files):
                super()._ComputeGradient(rank, m)
                Path(m.file).write_bytes(b"a gradient")
                seen.append(Path(m.file))

        with monkeypatch.context() as patched:
            patched.setattr(peers, "Peers", Needs)
            (tmp_path / str(nbytes)).mkdir()
            (tmp_path / str(nbytes) / division.FOLDER).mkdir()  # a killed attempt's
            peers.run(config(), tmp_path / str(nbytes))
        assert len(files) == 2 * STEPS
        assert all(parent in file.parents for file in files)
        assert not any(file.parent.exists() for file in files)


def test_a_run_stopped_while_replicas_compute_repeats_the_step(config, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "step_end_s", lambda *args: 0.0)

    def stop(coordinator):
        return coordinator.progress.step == 2 and bool(coordinator.device._rows)

    with pytest.raises(Stopped):
        peers.run(config(), tmp_path, stop_when=stop)
    found = checkpoint.latest(tmp_path)
    assert checkpoint.step_of(found) == 2
    _, peer = peers.run(config(), tmp_path, attempt=2, seed=5, resume_from=found)
    assert sorted(peer.trained) == [3, 4]


def test_gradients_are_there_until_nobody_can_read_them_any_more(config, tmp_path, monkeypatch):
    class Reads(peers.Peers):
        """The trainer has gradients to add, and the run is stopped."""

        files, reads = [], False

        def _ComputeGradient(self, rank, m):
            super()._ComputeGradient(rank, m)
            Path(m.file).write_bytes(b"a gradient")
            self.files.append(Path(m.file))

        def step_of_shared(self, rank, m):
            super().step_of_shared(rank, m)
            self.reads |= bool(m.sums)

        def part_of_shared(self, rank, rows):
            if not self.reads:  # and does not come to an end
                super().part_of_shared(rank, rows)

    made = []

    def reads(coordinator):
        made[:] = [coordinator]
        return coordinator.mailbox.reads

    monkeypatch.setattr(peers, "Peers", Reads)
    monkeypatch.setattr(resume, "step_end_s", lambda *args: 0.0)
    with pytest.raises(Stopped):
        peers.run(config(), tmp_path, stop_when=reads)
    [coordinator] = made
    assert len(Reads.files) == 2 and all(file.exists() for file in Reads.files)
    coordinator.mailbox.size = 1  # the others are gone
    asyncio.run(coordinator.dismiss("asked to end by a signal"))
    assert not any(file.parent.exists() for file in Reads.files)


def test_an_engine_that_does_not_wake_is_named(config, tmp_path, monkeypatch):
    """The second of two, whose neighbour has no part: its replica never came up."""
    made = config()
    first, second = ranks_of(made)

    class Hangs(peers.Peers):
        def say(self, rank, message, about=None):
            if not (rank == first and isinstance(message, p.ReplicaReady)):
                super().say(rank, message, about)

        def _Wake(self, rank, m):
            assert rank == second

    monkeypatch.setattr(peers, "Peers", Hangs)
    monkeypatch.setattr(division.Replicas, "_deadline_s", lambda *_: 0.01)
    with pytest.raises(RunFailed, match="rollout ranks to take .* no `DeviceChanged` of 1$"):
        peers.run(made, tmp_path)
