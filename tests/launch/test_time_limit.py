"""A job whose checkpoints take longer than the warning that it asked Slurm for warns itself in time."""

import signal
import threading
import time

import pytest

from rose.launch import resume, sbatch, slurm
from rose.launch.layout import layout


@pytest.fixture
def warned():
    """Set by USR2."""
    came = threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda *_: came.set())
    yield came
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def settings(make_config):
    return make_config("cluster=slurm", "cluster.slurm.warning_s=120").cluster.slurm


@pytest.mark.parametrize("took_s, left_s, comes", [(100.0, 150.0, True), (100.0, 5000.0, False), (35.0, 90.0, False)])
def test_the_warning_comes_when_saving_needs_what_is_left_and_slurm_would_be_late(
        warned, settings, tmp_path, monkeypatch, took_s, left_s, comes):
    monkeypatch.setattr(slurm, "LOOK_S", 0.01)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left_s)))
    resume.note_save(tmp_path, took_s)
    with slurm._warned_in_time(tmp_path, settings):
        assert warned.wait(30.0 if comes else 0.3) is comes


def test_a_job_that_is_submitted_again_asks_for_the_longer_warning(make_config, tmp_path):
    c = make_config("cluster=slurm", "cluster.slurm.warning_s=120")
    text = sbatch.script(c, layout(c), tmp_path, resume.warning_s(tmp_path, c.cluster.slurm))
    assert "B:USR2@120" in text
    resume.note_save(tmp_path, 300.2)
    text = sbatch.script(c, layout(c), tmp_path, resume.warning_s(tmp_path, c.cluster.slurm))
    assert "B:USR2@901" in text
