"""A rank's part of a checkpoint is what it was when it was saved, whatever training does
meanwhile."""

import errno
import os
import threading
import zipfile
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from rose import files, memory
from rose.observe.recorder import NullRecorder
from rose.trainer import checkpoint, checkpoint_writer, saved_states
from rose.trainer.checkpoint_writer import CheckpointWriter, host_copy, tensor_bytes
from rose.trainer.deepspeed_engine import DeepSpeedEngine
from rose.trainer.trainer import Trainer
from rose.transfer.errors import Corrupted


@pytest.fixture
def state():
    flat = torch.arange(12, dtype=torch.float32)
    more = {"parameter": torch.nn.Parameter(torch.ones(2)), "scaler": LossScaler(4.0)}
    nested = {"step": 3, "shape": torch.Size([2, 3])}
    return OrderedDict(view=flat[4:8], whole=[flat], nested=nested, **more)


@pytest.fixture
def held(monkeypatch):
    """torch.save waits until it is set."""
    go, save = threading.Event(), torch.save
    monkeypatch.setattr(checkpoint_writer.torch, "save", lambda *args: (go.wait(60), save(*args)))
    return go


def test_a_copy_shares_nothing_and_keeps_types(state):
    copied = host_copy(state)
    assert type(copied) is OrderedDict and type(copied["parameter"]) is torch.nn.Parameter
    assert copied["view"].untyped_storage().nbytes() == 16, "a view brought its whole buffer along"
    state["view"].zero_()
    state["scaler"].cur_scale = 8.0
    assert copied["view"].tolist() == [4, 5, 6, 7] and copied["whole"][0][4] == 4
    assert copied["scaler"].cur_scale == 4.0
    assert copied["nested"] == {"step": 3, "shape": torch.Size([2, 3])}
    assert tensor_bytes(state) == 16 + 48 + 8


def test_weights_that_change_while_they_are_written_are_the_old_ones(tmp_path, held, state):
    writer = CheckpointWriter(5)
    writer.create(None)
    writer.save(state, str(tmp_path / "states.pt"))
    writer.finish(tmp_path)
    state["whole"][0].fill_(-1)
    assert checkpoint.saved(tmp_path) == 0 and not writer.wait(0.05)
    held.set()
    assert writer.wait(60) and checkpoint.saved(tmp_path) == 1
    assert writer.load(str(tmp_path / "states.pt"))["view"].tolist() == [4, 5, 6, 7]


def bare_engine(**settings):
    """Return an engine without DeepSpeed."""
    engine = object.__new__(DeepSpeedEngine)
    engine.settings, engine.writer = SimpleNamespace(**settings), CheckpointWriter(0)
    engine.rank, engine.world, engine.base = 0, 1, ""
    return engine


class Runs:
    """Unpickled as what `call` of these `args` returns."""

    def __init__(self, call, *args):
        self.how = (call, args)

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("damage", [(b"zero", b"\xff\xfe\xfd\xfc"), (b"K\x03t", b"))t")])
def test_a_damaged_file_of_a_checkpoint_is_named_whatever_its_values(tmp_path, damage):
    """A text isn't UTF-8, or a size isn't a number."""
    path, old = tmp_path / "states.pt", tmp_path / "old.pt"
    torch.save({"zero": torch.ones(3)}, old)
    with zipfile.ZipFile(old) as read, zipfile.ZipFile(path, "w") as made:
        for name in read.namelist():
            data = read.read(name)
            made.writestr(name, data.replace(*damage) if name.endswith("data.pkl") else data)
    with pytest.raises(Corrupted, match="states.pt: unreadable: "):
        saved_states.loaded(path)


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "random-0.pt"])
@pytest.mark.parametrize("call", [os.system, exec, getattr])
def test_a_prepared_checkpoint_runs_nothing_and_is_refused(tmp_path, monkeypatch, name, call):
    """DeepSpeed reads its files by its checkpoint engine, the rank its random states itself."""
    ran = tmp_path / "ran"
    args = {os.system: (f"touch {ran}",), exec: (f"open({str(ran)!r}, 'w')",)}
    runs = Runs(call, *args.get(call, (ZeroStageEnum, "mro")))
    for each in ("model.pt", "optimizer.pt", "random-0.pt"):
        torch.save({"a": runs if each == name else 1}, tmp_path / each)
    monkeypatch.setattr(
        checkpoint, "read_trainer", lambda *_: {"ranks": 1, "zero_stage": 1, "updates": 1}
    )
    engine = bare_engine(zero_stage=1, lora=None)

    def load_checkpoint(folder, **_):
        return folder, [
            engine.writer.load(f"{folder}/{each}.pt") for each in ("model", "optimizer")
        ]

    engine.engine = SimpleNamespace(load_checkpoint=load_checkpoint)
    with pytest.raises(Corrupted, match=f"{name}: (refused: it names|unreadable)"):
        engine.load(tmp_path)
    assert not ran.exists()


def test_a_cpu_is_given_back_when_the_copies_are_written_and_not_with_them(tmp_path, held):
    """To who looks for a process's tensors the writer's copies look like the trainer's states."""
    trainer = object.__new__(Trainer)
    trainer.device, trainer.recorder = torch.device("cpu"), NullRecorder()
    trainer._publisher, trainer.engine = None, (engine := bare_engine(zero_stage=0))
    wait = engine.writer.wait
    engine.writer.wait = lambda deadline_s: (held.set(), wait(deadline_s))[-1]
    weights = torch.arange(100_000, dtype=torch.float32)
    engine.states = lambda: [weights]
    for name in ("first", "second"):
        engine.writer.save({"weights": weights}, str(tmp_path / f"{name}.pt"))
    engine.writer.finish(tmp_path)
    trainer.share_device(tmp_path)
    trainer.give_device_back()
    held.set()
    assert wait(60) and checkpoint.saved(tmp_path) == 1
    assert weights.untyped_storage().nbytes() == 0
    trainer.take_device()
    for name in ("first", "second"):
        assert torch.equal(engine.writer.load(str(tmp_path / f"{name}.pt"))["weights"], weights)


def test_a_checkpoint_that_is_never_written_keeps_the_device_and_says_so():
    engine = bare_engine()
    engine.writer = SimpleNamespace(wait=lambda deadline_s: False)
    with pytest.raises(TimeoutError, match="trainer rank 0 is writing its part of the last"):
        engine.saved()


def test_without_room_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch, capsys, state):
    monkeypatch.setattr(checkpoint_writer, "available_bytes", lambda: 100)
    writer = CheckpointWriter(0, neighbours=2)
    for name in ("a.pt", "b.pt"):
        writer.save(state, str(tmp_path / name))
    state["whole"][0].fill_(-1)
    assert writer.load(str(tmp_path / "a.pt"))["view"].tolist() == [4, 5, 6, 7]
    assert capsys.readouterr().err.count("while training waits") == 1
    writer.finish(tmp_path)
    assert writer.wait(60) and checkpoint.saved(tmp_path) == 1


def failed(writer, state, folder, name, words) -> str:
    """Saves to a file that can't be written; what is said of it."""
    writer.save(state, str(folder / name))
    writer.finish(folder)
    assert writer.wait(60)
    with pytest.raises(checkpoint.SaveFailed, match=words) as met:
        checkpoint.saved(folder)
    return str(met.value)


def test_a_part_that_cannot_be_written_is_marked_with_the_reason(tmp_path, state, monkeypatch):
    why = "trainer rank 3 could not save: .*no such"
    failed(CheckpointWriter(3), state, tmp_path, "no such folder/states.pt", why)

    def broken(*args):
        raise RuntimeError("unexpected pos 704 vs 598")  # which torch says of a full disk

    monkeypatch.setattr(checkpoint_writer.torch, "save", broken)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))
    monkeypatch.setattr(checkpoint_writer, "refusal", lambda folder: full)
    (folder := tmp_path / "full").mkdir()
    why = f"pos 704 vs 598; .*No space left.*{tmp_path.name}"
    said = failed(CheckpointWriter(3), state, folder, "states.pt", why)
    assert "free some space" in files.advice(None, said)


V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", str(2**63 - 4096), "total_")
V2 = ("", "memory.max", "memory.current", "max", "")


@pytest.mark.parametrize(
    "line, names", [("0::{}\n", V2), ("12:pids:/a\n4:memory:{}\n", V1)], ids=["v2", "v1"]
)
def test_the_limit_of_a_control_group_is_the_steps(tmp_path, monkeypatch, line, names):
    """Slurm limits job and step, never the group in which a task is; what files fill can be given
    back."""
    home, limit, usage, unlimited, prefix = names
    path = "/slurm/job_7/step_0/user/task_3"
    task = tmp_path / home / path.strip("/")
    task.mkdir(parents=True)
    step = task.parents[1]
    for group, most in ((task, unlimited), (step, "9000")):
        (group / limit).write_text(most + "\n")
        (group / usage).write_text("6000\n")
        filled = f"{prefix}active_file 1000\n{prefix}inactive_file 500\nanon 4500\n"
        (group / "memory.stat").write_text(filled)
    (tmp_path / "self").write_text(line.format(path))
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "PROCESS", tmp_path / "self")
    assert checkpoint_writer.available_bytes() == 9000 - 6000 + 1500
    assert memory.host_bytes() == 9000
    (step / limit).write_text(unlimited + "\n")
    assert min(checkpoint_writer.available_bytes(), memory.host_bytes()) > 9000
