"""The coordinator's saving: a checkpoint is committed when every trainer rank has written its part,
also when a stop comes in between."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.coordinator import checkpoints
from rose.coordinator.coordinator import Coordinator
from rose.coordinator.waiting import RunFailed
from rose.launch import resume
from rose.observe.metrics import read_metrics
from rose.observe.recorder import NullRecorder
from rose.observe.terminal import describe
from rose.parts.report.report import build_report
from rose.trainer import checkpoint

TRAINER_RANKS = (2, 3)
POLL_S = 0.02


@pytest.fixture
def coordinator(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "POLL_S", POLL_S)
    config = make_config("trainer.ranks=2", "cluster.stop_timeout_s=4")
    sent = []
    mailbox = SimpleNamespace(rank=0, size=6, send=lambda *message: sent.append(message))
    made = Coordinator(config, tmp_path, 1, mailbox, NullRecorder(), None)
    made.sent, made.progress.step = sent, 7
    for index, rank in enumerate(TRAINER_RANKS):
        made.members.handle(rank, p.Hello(rank, p.Role.TRAINER, index, 4242, "host"))
        made.training.handle(p.TrainerReady(index, 7, 7, "store", ""))
    yield made
    made.records.close()


def written(coordinator, *indices):
    """Write these trainer ranks' files into the folders they were sent, then their marks."""
    for index in indices:
        rank = TRAINER_RANKS[index]
        folder = next(Path(m.folder) for to, m in coordinator.sent if to == rank)
        (folder / f"part-{index}").write_text("state")
        checkpoint.mark(folder, index, "")


async def save(coordinator, deadline_s=60.0):
    now = coordinator.progress
    await coordinator.checkpoints.finish(now.step, now.boundary, deadline_s)


async def test_a_stop_while_ranks_write_waits_for_the_rest_of_that_checkpoint(
    coordinator, tmp_path
):
    await save(coordinator)
    last = asyncio.create_task(coordinator.ending.save_last(60.0))
    written(coordinator, 0)
    await asyncio.sleep(2 * POLL_S)
    assert not last.done() and checkpoint.latest(tmp_path) is None
    written(coordinator, 1)
    await last
    told = [type(m) for _, m in coordinator.sent]
    assert told == [p.SaveCheckpoint] * 2, "a rank was told to save twice"
    final = checkpoint.latest(tmp_path)
    assert checkpoint.step_of(final) == 7
    names = {"part-0", "part-1", checkpoint.COORDINATOR_STATE, "saved-00000", "saved-00001"}
    assert {f.name for f in final.iterdir()} == names
    assert resume.last_save_s(tmp_path) > 0


async def test_what_hosts_and_engines_say_of_themselves_is_a_row_for_the_report(
    coordinator, tmp_path
):
    hosts = [p.HostReady(1), *[p.HostReady(1, "sandboxes: <none>")] * 2]
    engine = p.WorkerReady("rollout-0", 1, 7, 4, 64, -1, description=["by V2; graphs", "a warning"])
    said = iter([(1, message) for message in (*hosts, engine)])

    async def receive():
        return next(said)

    coordinator.mailbox.receive = receive
    with pytest.raises(RuntimeError, match="StopIteration"):
        await coordinator._receive()
    assert 1 in coordinator.rollouts.up
    (row, again, engine) = read_metrics(tmp_path)
    assert (row["kind"], row["step"]) == ("host", 7) and row["what"] == again["what"]
    shown = "<td>environment host, rank 1</td><td class=text>sandboxes: &lt;none&gt;</td>"
    report = build_report(tmp_path).read_text()
    assert report.count(shown) == 1
    assert "<td>rollout-0</td><td class=text>by V2; graphs<br>a warning</td>" in report
    assert describe(engine, 1) == "step 7: rollout-0: by V2; graphs"


async def test_the_steps_go_on_while_it_is_written_and_the_next_one_waits_for_it(
    coordinator, tmp_path
):
    """Each checkpoint holds the state of its own step."""
    coordinator.progress.boundary = {"step": 7}
    await save(coordinator)  # returns though no rank has written anything
    assert checkpoint.latest(tmp_path) is None
    coordinator.progress.step, coordinator.progress.boundary = 8, {"step": 8}
    second = asyncio.create_task(save(coordinator))
    await asyncio.sleep(2 * POLL_S)
    assert not second.done() and len(coordinator.sent) == 2, "two checkpoints at a time"
    written(coordinator, 0, 1)
    await second
    assert checkpoint.read_state(checkpoint.latest(tmp_path)) == {"step": 7}
    del coordinator.sent[:2]
    written(coordinator, 0, 1)
    await coordinator.checkpoints.committed()
    assert checkpoint.read_state(checkpoint.latest(tmp_path)) == {"step": 8}
    assert [checkpoint.step_of(folder) for folder in checkpoint.complete(tmp_path)] == [7, 8]


def full(coordinator, folder):
    """Commit as many checkpoints as are kept; return their number."""
    keep = coordinator.config.trainer.checkpoint_keep
    for step in range(1, keep + 1):
        checkpoint.commit(checkpoint.begin(folder, step), {"step": step}, keep)
    return keep


async def test_an_old_one_that_cannot_be_removed_is_a_fault(coordinator, tmp_path, monkeypatch):
    def busy(folder):
        raise OSError(39, "Directory not empty", str(folder))

    full(coordinator, tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", busy)
    await save(coordinator)
    written(coordinator, 0, 1)
    await coordinator.checkpoints.committed()
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 7
    (row,) = read_metrics(tmp_path)
    assert row["what"] == "checkpoint not removed" and "Directory not empty" in row["detail"]


class Fails:
    """A run whose messages end with a failure; its trainer ranks write what they are told to."""

    def __init__(self, coordinator, monkeypatch, *messages):
        self.coordinator, self.messages = coordinator, list(messages)
        coordinator.mailbox.receive = self.receive
        coordinator.mailbox.poll = lambda: None
        monkeypatch.setattr(coordinator, "_steps", self.steps)
        self.finishes = asyncio.Event()

    async def receive(self):
        if self.messages:
            return 1, self.messages.pop(0)
        await asyncio.Event().wait()

    async def steps(self):
        """The step's end, once the trainers were told nothing else."""
        await self.finishes.wait()
        self.coordinator.progress.step, self.coordinator.progress.at_boundary = 8, True
        self.coordinator._changed.set()
        await asyncio.Event().wait()

    async def writes(self):
        while len(self.coordinator.sent) < len(TRAINER_RANKS):
            await asyncio.sleep(POLL_S)
        written(self.coordinator, 0, 1)

    async def run(self):
        writing = asyncio.create_task(self.writes())
        try:
            async with asyncio.timeout(20):
                await self.coordinator.run()
        finally:
            writing.cancel()


BAD_HOST = p.RankFailed(1, "environment 0: ValueError: gone")


@pytest.mark.parametrize("at_boundary", [True, False])
async def test_steps_that_end_are_saved_before_a_run_fails_and_so_is_the_one_that_is_trained(
    at_boundary, coordinator, tmp_path, monkeypatch
):
    """Though another failure follows."""
    coordinator.progress.at_boundary = at_boundary
    run = Fails(coordinator, monkeypatch, BAD_HOST, BAD_HOST)
    running = asyncio.create_task(run.run())
    if not at_boundary:
        while run.messages:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(2 * POLL_S)
        assert not running.done()
        run.finishes.set()
    with pytest.raises(RunFailed, match="ValueError: gone"):
        await running
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == (7 if at_boundary else 8)


async def test_a_run_whose_trainer_is_gone_fails_at_once(coordinator, tmp_path, monkeypatch):
    lost = p.RankFailed(TRAINER_RANKS[1], "trainer 1: out of memory")
    with pytest.raises(RunFailed, match="out of memory"):
        await Fails(coordinator, monkeypatch, lost).run()
    assert checkpoint.latest(tmp_path) is None and coordinator.sent == []


def cannot_write(coordinator):
    """The second trainer rank meets a full disk; the folder that it was told."""
    folder = Path(coordinator.sent[0][1].folder)
    checkpoint.mark(folder, 1, "OSError: No space left on device")
    return folder


async def test_a_rank_that_cannot_write_ends_the_run_with_what_it_met_and_nothing_is_committed(
    coordinator, tmp_path
):
    await save(coordinator)
    cannot_write(coordinator)
    ended = asyncio.create_task(coordinator.checkpoints.committed())
    await asyncio.sleep(2 * POLL_S)
    assert not ended.done(), "another rank writes"
    written(coordinator, 0)
    words = "trainer rank 1 could not save: OSError: No space left"
    with pytest.raises(checkpoint.SaveFailed, match=words):
        await ended
    assert checkpoint.latest(tmp_path) is None


async def test_where_other_ranks_still_write_no_save_is_tried_again(coordinator, monkeypatch):
    """Ranks that still write would write into the folder of the next try."""
    monkeypatch.setattr(checkpoints, "FAILED_S", 0.0)
    await save(coordinator)
    folder = cannot_write(coordinator)
    for _ in range(2):
        with pytest.raises(RunFailed, match="No space left.*still write after 0 s"):
            await coordinator.checkpoints.order(5)
    assert folder.exists() and len(coordinator.sent) == len(TRAINER_RANKS)


async def test_a_save_that_failed_is_tried_again_before_the_run_ends(
    coordinator, tmp_path, monkeypatch
):
    """The checkpoint that its commit would have removed goes first, and its half."""
    keep = full(coordinator, tmp_path)

    async def steps():
        await save(coordinator)
        first = cannot_write(coordinator)
        (first / "half").touch()
        checkpoint.mark(first, 0, "")
        await coordinator.checkpoints.committed()

    async def writes():
        while len(coordinator.sent) < 4:
            await asyncio.sleep(POLL_S)
        left = [checkpoint.step_of(folder) for folder in checkpoint.complete(tmp_path)]
        assert left == list(range(2, keep + 1))
        del coordinator.sent[:2]
        written(coordinator, 0, 1)

    run = Fails(coordinator, monkeypatch)
    monkeypatch.setattr(coordinator, "_steps", steps)
    monkeypatch.setattr(run, "writes", writes)
    with pytest.raises(checkpoint.SaveFailed, match="No space left"):
        await run.run()
    final = checkpoint.latest(tmp_path)
    assert checkpoint.step_of(final) == 7 and not (final / "half").exists()


async def test_ranks_that_never_write_are_named_by_number_after_the_deadline(coordinator):
    await save(coordinator, 0.1)
    written(coordinator, 1)
    with pytest.raises(RunFailed, match="for trainer ranks to save step 7: 1 of 2 saved"):
        await coordinator.checkpoints.committed()
