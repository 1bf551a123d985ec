"""A checkpoint is whole or absent, and never more are kept than asked for."""

import errno
import json
import os

import pytest

from rose.trainer import checkpoint


def saved(run_dir, step):
    folder = checkpoint.begin(run_dir, step)
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "model.pt").write_bytes(b"weights")
    state = {"step": step, "scheduler": {"batching": {"next": 8 * step}}}
    return checkpoint.commit(folder, state, keep=2)


def test_a_checkpoint_holds_all_files_and_what_is_still_being_written_is_none(tmp_path):
    assert checkpoint.complete(tmp_path) == [] and checkpoint.latest(tmp_path) is None
    final = saved(tmp_path, 5)
    unfinished = checkpoint.begin(tmp_path, 10)
    (unfinished / checkpoint.COORDINATOR_STATE).write_text("{}")
    assert checkpoint.complete(tmp_path) == [final] and checkpoint.latest(tmp_path) == final
    assert final == tmp_path / "checkpoints" / "step-000005" and checkpoint.step_of(final) == 5
    assert checkpoint.read_state(final) == {"step": 5, "scheduler": {"batching": {"next": 40}}}
    assert (final / "deepspeed" / "model.pt").read_bytes() == b"weights"
    # what an interrupted attempt left of the same step is forgotten
    assert list(checkpoint.begin(tmp_path, 10).iterdir()) == []


def test_a_mark_that_is_being_written_is_none_yet(tmp_path):
    checkpoint.mark(tmp_path, 0, "")
    (tmp_path / "saved-00001.part").write_bytes(b"")
    (tmp_path / "failed-00003.part").write_bytes(b"")
    assert checkpoint.saved(tmp_path) == 1
    (tmp_path / "failed-00003.part").rename(tmp_path / "failed-00003")
    with pytest.raises(checkpoint.SaveFailed, match="trainer rank 3 could not save"):
        checkpoint.saved(tmp_path)


def test_only_the_newest_are_kept_and_those_of_spared_steps(tmp_path):
    for step in (2, 9, 10, 100):
        folder = checkpoint.begin(tmp_path, step)
        checkpoint.commit(folder, {"step": step}, 1, spared={2, 10} if step < 100 else {9, 2})
    assert [checkpoint.step_of(c) for c in checkpoint.complete(tmp_path)] == [2, 100]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_what_cannot_be_removed_is_reported_and_ends_nothing(tmp_path, monkeypatch):
    """NFS keeps a removed file in its folder, under another name, while somebody copies it."""

    def busy(folder):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))

    saved(tmp_path, 5), saved(tmp_path, 6)
    said = []
    with monkeypatch.context() as during:
        during.setattr(checkpoint.shutil, "rmtree", busy)
        for step in (7, 6, 6):
            (checkpoint.begin(tmp_path, step, said.append) / "torn.pt").touch()
            folder = checkpoint.begin(tmp_path, step, said.append)
            assert not list(folder.iterdir())
            checkpoint.commit(folder, {}, 2, (), said.append)
    assert [checkpoint.step_of(c) for c in checkpoint.complete(tmp_path)] == [6, 7]
    names = {path.name for path in (tmp_path / "checkpoints").glob("*.tmp")}
    assert names == {
        f"step-00000{left}.old.tmp" for left in ("5.0", "7.0", "6.0", "6.1", "6.2", "6.3")
    }
    assert all(any(f"{name}: not removed (" in words for words in said) for name in names)
    checkpoint.remove_halves(tmp_path)
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_the_latest_is_the_greatest_step_not_the_last_name_and_may_be_saved_again(tmp_path):
    saved(tmp_path, 999_999)
    (saved(tmp_path, 1_000_000) / "old").touch()  # a longer number, which sorts before it as text
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 1_000_000
    assert not (saved(tmp_path, 1_000_000) / "old").exists()


@pytest.mark.parametrize("text", [None, b'{"step": 5, "sch', b"", b'{"step": "\xff"}', b"[5]"])
def test_a_damaged_state_is_one_error_that_says_what_to_remove(tmp_path, text):
    path = saved(tmp_path, 5) / checkpoint.COORDINATOR_STATE
    path.unlink() if text is None else path.write_bytes(text)
    with pytest.raises(ValueError, match=r"step-000005 is damaged \(coordinator.json") as raised:
        checkpoint.read_state(path.parent)
    assert not isinstance(raised.value, json.JSONDecodeError)


def saved_by(folder, ranks, stage, dtype="float32"):
    state = {"updates": 5, "ranks": ranks, "zero_stage": stage, "dtype": dtype}
    (folder / "deepspeed").mkdir(exist_ok=True)
    (folder / checkpoint.TRAINER_STATE).write_text(json.dumps(state))
    for rank in range(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (folder / "deepspeed" / f"bf16_{name}").touch()
    return state


UPDATES = b'{"ranks": "2", "zero_stage": 2, "dtype": "float32", "updates": 5}'
NONE = b'{"ranks": 2, "zero_stage": 2, "dtype": "float32"}'


@pytest.mark.parametrize(
    "text", [b'{"ranks": "\xff"}', b'{"ranks": 1}', b"[1]", b"null", b"{", UPDATES, NONE]
)
def test_a_damaged_note_of_the_trainer_is_named(tmp_path, make_config, text):
    (tmp_path / checkpoint.TRAINER_STATE).write_bytes(text)
    with pytest.raises(ValueError, match=r"trainer.json is damaged .*; remove that folder to go"):
        checkpoint.read_trainer(tmp_path, make_config().trainer)


@pytest.mark.parametrize(
    ("stage", "dtype", "gone", "words"),
    [
        (0, "float32", "", r"by 2 trainer ranks with ZeRO 0, .* by 1 .*set trainer.zero_stage=0"),
        (2, "bfloat16", "", "saved with trainer.dtype=bfloat16, now float32; set it to bfloat16"),
        (2, "float32", "*_1_*", "zero_pp_rank_1_mp_rank_00_optim_states.pt is absent; bring it"),
        (2, "float32", "trainer.json", "is not a checkpoint of a trainer"),
    ],
)
def test_what_cannot_be_continued_is_one_line(tmp_path, make_config, stage, dtype, gone, words):
    saved_by(tmp_path, 2, stage, dtype)
    for path in tmp_path.rglob(gone) if gone else ():
        path.unlink()
    with pytest.raises(ValueError, match=words) as raised:
        checkpoint.read_trainer(tmp_path, make_config("trainer.zero_stage=2").trainer)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)
