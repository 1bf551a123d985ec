"""The coordinator's saving: a checkpoint is committed when every trainer rank has written its part, also when a
stop comes in between."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.observe.recorder import NullRecorder
from rose.roles.coordinator import Coordinator
from rose.trainer import checkpoint

TRAINER_RANKS = (2, 3)


@pytest.fixture
def coordinator(make_config, tmp_path):
    config = make_config("trainer.ranks=2", "cluster.stop_timeout_s=4")
    sent = []
    mailbox = SimpleNamespace(rank=0, size=6, send=lambda rank, message: sent.append((rank, message)))
    made = Coordinator(config, tmp_path, 1, mailbox, NullRecorder(), None)
    made.sent, made.step = sent, 7
    for index, rank in enumerate(TRAINER_RANKS):
        made._on_Hello(rank, p.Hello(rank, p.Role.TRAINER, index, 4242, "host"))
        made._on_TrainerReady(rank, p.TrainerReady(index, 7, 7, "store", ""))
    yield made
    made.journal.close()


async def cancelled_while_it_saves(coordinator):
    saving = asyncio.create_task(coordinator._checkpoint(60.0))
    while not coordinator.sent:
        await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving


def written(coordinator, index):
    """What a trainer rank does: its file into the folder that it was told, then the message."""
    rank = TRAINER_RANKS[index]
    folder = next(Path(m.folder) for to, m in coordinator.sent if to == rank)
    (folder / f"part-{index}").write_text("state")
    coordinator._on_CheckpointSaved(rank, p.CheckpointSaved(7, index))
    coordinator._changed.set()


def test_a_stop_while_ranks_write_waits_for_the_rest_of_that_checkpoint(coordinator, tmp_path):
    async def scene():
        await cancelled_while_it_saves(coordinator)
        last = asyncio.create_task(coordinator._save_if_idle())
        await asyncio.sleep(0.01)
        written(coordinator, 0)  # of the request before the stop
        await asyncio.sleep(0.01)
        assert not last.done() and checkpoint.latest(tmp_path) is None
        written(coordinator, 1)
        await last

    asyncio.run(scene())
    assert [type(m) for _, m in coordinator.sent] == [p.SaveCheckpoint] * 2, "a rank was told to save twice"
    final = checkpoint.latest(tmp_path)
    assert checkpoint.step_of(final) == 7
    assert {f.name for f in final.iterdir()} == {"part-0", "part-1", checkpoint.COORDINATOR_STATE}


def test_the_next_checkpoint_is_begun_anew(coordinator, tmp_path):
    async def one(step):
        coordinator.step = step
        coordinator.sent.clear()
        saving = asyncio.create_task(coordinator._checkpoint(5.0))
        await asyncio.sleep(0.01)
        for index in range(2):
            written(coordinator, index)
        await saving

    async def scene():
        await one(7)
        await one(8)

    asyncio.run(scene())
    assert [checkpoint.step_of(folder) for folder in checkpoint.complete(tmp_path)] == [7, 8]
