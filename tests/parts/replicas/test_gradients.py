"""The files of replicas' gradients: whole, checked, and read by parts; and a loss that is not finite
ends the step on every rank."""

import errno
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rose import protocol as p
from rose.observe.recorder import NullRecorder
from rose.parts.replicas import gradients
from rose.trainer.algorithms import build
from rose.trainer.step import Step, TrainingDiverged


def test_every_part_of_a_gradient_is_added_where_it_belongs(tmp_path):
    values = {"a.weight": torch.randn(3000, 700), "b.bias": torch.randn(5)}
    gradients.write(tmp_path / "sum", values.items())
    assert [path.name for path in tmp_path.iterdir()] == ["sum"]
    held = {"a.weight": torch.randn(2_000_000), "b.bias": torch.randn(5)}
    before = {name: part.clone() for name, part in held.items()}
    with gradients.Sum(tmp_path / "sum", threads=2) as found:
        found.add("a.weight", held["a.weight"], 100_000)
        found.add("b.bias", held["b.bias"], 0)
        with pytest.raises(OSError, match=r"sum: b\.bias has fewer values"):
            found.add("b.bias", torch.zeros(5), 1)
        with pytest.raises(OSError, match=r"sum: it has no c\.bias"):
            found.add("c.bias", torch.zeros(5), 0)
    part = values["a.weight"].view(-1)[100_000:]
    torch.testing.assert_close(held["a.weight"], before["a.weight"] + part, rtol=0, atol=0)
    assert torch.equal(held["b.bias"], before["b.bias"] + values["b.bias"])


def test_a_damaged_file_is_found_and_named(tmp_path):
    file = tmp_path / "sum"
    values = torch.randn(100_000)
    gradients.write(file, [("a", values)])
    data = file.read_bytes()
    at = data.index(values[50_000:50_008].numpy().tobytes())
    for wrong in (at, len(data) - 40, len(data) - 1):  # in the values, the index, the end
        damaged = bytearray(data)
        damaged[wrong] ^= 1
        file.write_bytes(bytes(damaged))
        with pytest.raises(OSError, match=f"{file}: damaged"), gradients.Sum(file) as found:
            found.add("a", torch.zeros(100_000), 0)
    for size in (10, 1000, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(OSError, match=f"{file}: damaged"):
            gradients.Sum(file)
    with pytest.raises(FileNotFoundError, match=r"none"):
        gradients.Sum(tmp_path / "none")


def test_a_full_disk_is_an_error_that_names_the_file_and_nothing_stays(disk):
    file = disk.path / "sum"
    disk.fill(leave=2**20)
    with pytest.raises(OSError, match=re.escape(str(file))) as refused:
        gradients.write(file, [("a", torch.ones(2**20)), ("b", torch.ones(2**20))])
    assert refused.value.errno == errno.ENOSPC
    assert [path.name for path in disk.path.glob("sum*")] == []
    disk.empty()
    gradients.write(file, [("a", torch.ones(2**20))])
    held = torch.ones(2**20)
    with gradients.Sum(file) as found:
        found.add("a", held, 0)
    assert torch.equal(held, torch.full((2**20,), 2.0))


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_replicas_loss_that_is_not_finite_ends_the_step(loss, make_config):
    config = make_config()
    trains = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        recorder=NullRecorder(),
        algorithm=build(config.algorithm.name, config.algorithm.args),
        engine=None,  # nobody asks it
    )
    step = Step(trains, 3)
    step.others = [p.GradientSum("", {"loss": float(loss)}, 0.0)]
    with pytest.raises(TrainingDiverged, match="step 3: the loss of a replica's rows is not"):
        gradients.add(step)
