"""The plan says what a run takes of its file system. That a saved checkpoint is so large is shown by
tests/job/test_disk.py."""

import pytest

from rose.launch import model, on_disk
from tests.made import model_folder

SEVEN_B = "+experiment=qwen7b cluster=slurm"
# Bytes of a checkpoint of p parameters, of which an adapter has a.
CHECKPOINTS = [
    ("trainer.zero_stage=2", 9, "16*p"),  # float32 weights beside the optimizers
    (SEVEN_B, 21, "12*p"),  # stage 3: the master weights are all
    ("trainer.zero_stage=0 +trainer/lora=linear", 9, "16*a"),
]


@pytest.mark.parametrize("overrides, files, size", CHECKPOINTS)
def test_checkpoints_have_the_optimizers_states_and_what_is_trained(
    make_config, tmp_path, overrides, files, size
):
    c = make_config(overrides, "trainer.checkpoint_keep=2")
    shape = c.model.shape or model.read_shape(model_folder(tmp_path))
    sizes = {"p": shape.parameters, "a": c.trainer.lora and c.trainer.lora.parameters(shape)}
    found = on_disk.of(c, shape)
    assert (found.checkpoints, found.files, found.checkpoint) == (3, files, eval(size, sizes))


def test_trajectories_take_space_where_they_are_saved(make_config):
    shape = make_config(SEVEN_B).model.shape
    c = make_config("trainer.batch_size=64", "model.max_context=512")
    assert on_disk.of(c, shape).step == 13 * 64 * 512
    assert on_disk.of(make_config("observe.save_trajectories=false"), shape).step == 0
