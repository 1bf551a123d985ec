"""A job whose checkpoints take longer than the warning that it asked Slurm for warns itself in
time."""

import signal
import threading
import time

import pytest
from rich.console import Console

from rose import config as configuration
from rose.config import ConfigError
from rose.config.checks import time_limit
from rose.launch import resume, sbatch, slurm
from rose.launch.layout import layout
from tests.refusals import refused, table


@pytest.fixture
def warned():
    """warned(seconds) -> whether USR2 has come by then. Python's handler runs in the main thread
    when that takes its next step, and the system may have given the signal to another: a single
    long wait would not see it."""
    came = threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda *_: came.set())

    def within(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not came.is_set() and time.monotonic() < end:
            time.sleep(0.01)
        return came.is_set()

    yield within
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def settings(make_config):
    return make_config("cluster=slurm", "cluster.slurm.warning_s=120").cluster.slurm


@pytest.mark.parametrize(
    "took_s, left_s, comes", [(100.0, 150.0, True), (100.0, 5000.0, False), (35.0, 90.0, False)]
)
def test_the_warning_comes_in_time(warned, settings, tmp_path, monkeypatch, took_s, left_s, comes):
    monkeypatch.setattr(slurm, "POLL_S", 0.01)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left_s)))
    resume.note_save(tmp_path, took_s)
    with slurm._warned_in_time(tmp_path, settings):
        assert warned(120.0 if comes else 0.3) is comes


@pytest.fixture
def squeue(stand_in, monkeypatch):
    """squeue(words, code): one that says so, in a job of a Slurm that sets no
    SLURM_JOB_END_TIME."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = "[ $SLURM_TIME_FORMAT = standard ] && printf"
    return lambda words, code=0: stand_in(squeue=f"{said} '{words}'\nexit {code}")


def at(seconds):
    """As squeue tells a time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


EARLIEST = [("{far}\\n{near}\\n", 0, True)]
EARLIEST += [("N/A\\n", 0, False), ("", 0, False), ("", 1, False)]


@pytest.mark.parametrize("words, code, comes", EARLIEST)
def test_before_23_02_squeue_alone_tells_the_earliest_components_end(
    warned, settings, squeue, tmp_path, monkeypatch, words, code, comes
):
    monkeypatch.setattr(slurm, "POLL_S", 0.2)
    squeue(words.format(far=at(time.time() + 9000), near=at(time.time() + 150)), code)
    resume.note_save(tmp_path, 100.0)
    with slurm._warned_in_time(tmp_path, settings):
        assert warned(120.0 if comes else 0.5) is comes


def test_a_job_that_is_submitted_again_asks_for_the_longer_warning(make_config, tmp_path):
    c = make_config("cluster=slurm", "cluster.slurm.warning_s=120")
    for took_s, warning_s in ((0.0, 120), (300.2, 901)):
        resume.note_save(tmp_path, took_s)
        text = sbatch.script(c, layout(c), tmp_path, resume.warning_s(tmp_path, c.cluster.slurm))
        assert f"B:USR2@{warning_s}" in text


LIMITS = [
    (["trainer.time='10'"], {}, 300),
    (["trainer.time='10'", "trainer.sbatch=[--time=0:20:0]", "rollout.time='30'"], {}, 600),
    (["trainer.time='3'"], {}, 120),  # cluster.slurm.warning_s
    ([], {"SBATCH_TIMELIMIT": "8"}, 240),
    ([], {"SLURM_JOB_START_TIME": "5000", "SLURM_JOB_END_TIME": "5500"}, 250),
    ([], {"SBATCH_TIMELIMIT": "UNLIMITED"}, 3000),
]


@pytest.mark.parametrize("limits, variables, seconds", LIMITS)
def test_a_slow_save_never_makes_the_warning_fill_the_job(
    make_config, tmp_path, monkeypatch, limits, variables, seconds
):
    for name in ("SBATCH_TIMELIMIT", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = [f"cluster.slurm.{limit}" for limit in ("warning_s=120", *limits)]
    resume.note_save(tmp_path, 1000.0)
    assert resume.warning_s(tmp_path, make_config("cluster=slurm", *given).cluster.slurm) == seconds


TIMES = {"2": 120, 2: 120, "2:30": 180, "1:02:03": 3780, "1-0": 86400, "2-01:30": 178200}
TIMES |= {"1-00:00:10": 86460, "UNLIMITED": None, "soon": None}


@pytest.mark.parametrize(("limit", "seconds"), TIMES.items())
def test_times_are_read_as_slurm_reads_them(limit, seconds):
    assert time_limit.seconds(limit) == seconds


FILLED = """
cluster.slurm.trainer.time=2 -> cluster.slurm.trainer.time=2 | cluster.slurm.warning_s=
cluster.slurm.trainer.time='1:59' -> cluster.slurm.trainer.time='1:59' | cluster.slurm.warning_s=
cluster.slurm.rollout.time='00:01:00' -> cluster.slurm.rollout.time='00:01:00' | warning_s=
cluster.slurm.trainer.sbatch=[--time=1] -> cluster.slurm.trainer.sbatch.0=--time='1' | warning_s=
cluster.slurm.trainer.time='1:00:00' cluster.slurm.warning_s=3600
    -> cluster.slurm.trainer.time='1:00:00' | cluster.slurm.warning_s=
"""


@pytest.mark.parametrize("overrides, words", table(FILLED))
def test_a_limit_that_the_warning_and_a_start_fill_is_refused(make_config, overrides, words):
    with refused(words):
        make_config("cluster=slurm", overrides)


def test_a_limit_with_time_for_a_step_and_saving_is_taken(make_config, tmp_path, monkeypatch):
    c = make_config("cluster=slurm cluster.slurm.trainer.time='10'")
    resume.note_save(tmp_path, 250.0)
    assert time_limit.too_short(c, resume.warning_s(tmp_path, c.cluster.slurm)) == ""
    monkeypatch.setenv("SBATCH_TIMELIMIT", "00:01:30")
    c = make_config("cluster=slurm", f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match="SBATCH_TIMELIMIT='00:01:30': Slurm warns"):
        slurm.submit(c, layout(c), Console(quiet=True))
    assert not c.run_dir.exists()


@pytest.mark.parametrize("limits", ["time='2:30'", "time='2:00' sbatch=[--time=1-0]", "time='1-0'"])
def test_only_the_limit_that_slurm_will_use_counts(make_config, limits):
    """sbatch rounds up to minutes, takes the last option, and the variable only without one."""
    c = make_config("cluster=slurm", *(f"cluster.slurm.trainer.{each}" for each in limits.split()))
    assert time_limit.too_short(c, c.cluster.slurm.warning_s, "1") == ""


@pytest.mark.parametrize("folder", ["/tmp/o%j", "/runs/%A/x", "/a%t", "link"])
def test_a_folder_in_whose_name_numbers_would_be_put_is_refused(make_config, tmp_path, folder):
    (tmp_path / "r%j").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "r%j")
    folder = str(tmp_path / folder)  # which an absolute one replaces
    with pytest.raises(ConfigError, match="output_dir=.*without %j"):
        make_config("cluster=slurm", f"output_dir='{folder}'")


def test_values_that_a_running_job_does_not_take_are_named(make_config, tmp_path):
    c, stored = make_config("cluster=slurm"), tmp_path / "config.json"
    assert resume.not_applied(stored, c) == []
    configuration.save(c, stored)
    assert resume.not_applied(stored, c) == []
    [words] = resume.not_applied(stored, make_config("cluster=slurm", "trainer.steps=777"))
    assert words == f"trainer.steps: {c.trainer.steps}, not 777"
