"""The plan says what a run takes of its file system. That a saved checkpoint is so large is shown by
tests/job/test_disk.py."""

from rose.config import ModelShape
from rose.launch import model, on_disk

SHAPE = ModelShape(
    layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512,
    tied_embeddings=True,
)  # fmt: skip
SEVEN_B = ("+experiment=qwen7b", "cluster=slurm")


def test_a_checkpoint_without_sharded_weights_has_them_beside_the_optimizers(make_config):
    c = make_config("trainer.zero_stage=2", "trainer.checkpoint_keep=2")
    found = on_disk.of(c, SHAPE)
    assert found.checkpoint == 16 * SHAPE.parameters, "fp32"
    assert (found.checkpoints, found.files, found.version) == (3, 9, 4 * SHAPE.parameters)


def test_of_stage_3_the_master_weights_are_all(make_config):
    c = make_config(*SEVEN_B)
    found = on_disk.of(c, model.shape(c))
    assert found.checkpoint == 12 * model.shape(c).parameters
    assert found.files == 5 + 4 * c.trainer.ranks
    assert "3 checkpoints of 85.1 GiB and 21 files each" in str(found)


def test_an_adapter_is_all_that_is_saved_of_its_run(make_config):
    c = make_config("+trainer/lora=linear", "trainer.zero_stage=0")
    assert on_disk.of(c, SHAPE).checkpoint == 16 * c.trainer.lora.parameters(SHAPE)


def test_trajectories_that_are_not_saved_take_nothing(make_config):
    c = make_config("observe.save_trajectories=false")
    assert on_disk.of(c, SHAPE).step == 0
    c = make_config("trainer.batch_size=64", "model.max_context=512")
    assert on_disk.of(c, SHAPE).step == 13 * 64 * 512
