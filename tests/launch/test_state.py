"""What is read from Slurm's words about a job, and what is told of a run."""

import re
import subprocess
from pathlib import Path

import pytest

from rose.launch import state
from rose.observe.status import LiveStatus
from rose.trainer import checkpoint
from tests.launch.conftest import no_permission


def rows(*states, reason="None"):
    made = enumerate(states)
    return [state.JobState(f"7+{n}", word, "0:0", reason, "n1", "0:01") for n, word in made]


FINE = ("PENDING PENDING", "RUNNING RUNNING", "PENDING RUNNING", "COMPLETED COMPLETED", "")
FINE += ("PENDING STOPPED", "PENDING SPECIAL_EXIT", "PENDING RESV_DEL_HOLD", "PENDING REQUEUE_FED")
# Reasons of a job that asks for more than a limit, and of one that waits for others' ends.
TOO_MUCH = "QOSMaxWallDurationPerJobLimit AssocMaxCpuPerJobLimit QOSMinGRESPerJob "
TOO_MUCH += "PartitionTimeLimit InvalidAccount"
OF_OTHERS = "Priority QOSMaxJobsPerUserLimit AssocGrpGRES BeginTime"


WHY = [("PENDING FAILED", "None", "component 7+1 has ended"), ("RUNNING", "InvalidAccount", "")]
WHY += [(states, "None", "") for states in FINE]
WHY += [("PENDING", reason, reason) for reason in TOO_MUCH.split()]
WHY += [("PENDING", reason, "") for reason in OF_OTHERS.split()]


@pytest.mark.parametrize("states, reason, why", WHY)
def test_a_job_that_waits_for_ever_is_known(monkeypatch, states, reason, why):
    monkeypatch.setattr(state, "components", lambda job: rows(*states.split(), reason=reason))
    said = state.cannot_start("7")
    assert bool(said) == bool(why) and why in said


def test_the_controller_is_believed_before_the_accounting(monkeypatch):
    answers = {
        "sacct": "7+0|PREEMPTED|0:0|None|n1|0:09\n7+1|CANCELLED by 0|0:0|None|n2|0:09\n",
        "squeue": "7+0|PENDING||BeginTime||0:00\n",
    }
    monkeypatch.setattr(state, "_ask", lambda command: answers[command[0]])
    assert [row.state for row in state.components("7")] == ["PENDING", "CANCELLED"]
    answers["sacct"] = ""  # it hears of a job a moment later
    assert state.is_active("7")
    answers |= {"sacct": None, "squeue": None}
    assert state.components("7") == []


@pytest.fixture
def asked(monkeypatch, capsys):
    """asked(run, ...) -> (exit code, output, complaint) of `python -m rose.launch.state`."""

    def ask(*runs):
        monkeypatch.setattr("sys.argv", ["state", *map(str, runs)])
        code = state.main()
        said = capsys.readouterr()
        return code, said.out, said.err.removeprefix(f"{runs[0]}: ").removesuffix("\n")

    return ask


@pytest.fixture
def commands(tmp_path, monkeypatch, stand_in):
    """commands(NAME="shell lines"), which are all that PATH has."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return stand_in


def test_a_slurm_that_does_not_answer_in_time_is_told_in_a_line(tmp_path, monkeypatch, asked):
    def silent(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    state.remember(tmp_path, "7")
    monkeypatch.setattr(state.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(state.subprocess, "run", silent)
    assert asked(tmp_path)[::2] == (1, "sacct did not answer within 30 s")


AWAY = "echo 'Unable to contact slurm controller' >&2; exit 1"
NO_SACCT = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
FAILING = {
    AWAY: "squeue failed: Unable to contact slurm controller",
    "exit 3": "squeue failed: exit code 3, no output",
    r"printf '\377\376 garbage\n'": "squeue printed '\ufffd\ufffd garbage', which is no state",
    "#!/no/such/shell": "squeue can't be run: No such file or directory",
}


@pytest.mark.parametrize("squeue, said", FAILING.items())
def test_a_slurm_that_fails_ends_no_run_and_what_lies_there_is_told(
    commands, tmp_path, asked, squeue, said
):
    commands(squeue=squeue, sacct=NO_SACCT)
    run = tmp_path / "mine"
    state.remember(run, "7")
    live = LiveStatus(run)
    live.update(steps=9, step=4, phase="rollout")
    live.close()
    code, told, complaint = asked(run)
    assert code == 1 and complaint.startswith(said) and "\n" not in complaint
    assert "mine: step 4 of 9, rollout" in told
    with pytest.raises(RuntimeError, match="squeue"):
        state.is_active("7")


def test_a_job_that_slurm_has_forgotten_is_over(commands, tmp_path, asked):
    state.remember(tmp_path, "7")
    assert "job 7: no squeue on PATH, so its state is unknown" in asked(tmp_path)[1]
    unknown = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    commands(squeue=unknown, sacct=NO_SACCT)
    assert not state.is_active("7")
    code, said, _ = asked(tmp_path)
    assert code == 0 and "job 7: Slurm knows nothing of it any more" in said


def test_a_run_that_may_not_be_read_is_told_in_a_line(tmp_path, asked, monkeypatch):
    with monkeypatch.context() as hidden:
        for name in ("stat", "read_text"):
            hidden.setattr(Path, name, no_permission)
        code, _, complaint = asked(tmp_path)
    assert code == 1 and "Permission denied" in complaint


def test_a_folder_that_is_no_run_is_told_in_a_line(commands, tmp_path, asked):
    (tmp_path / "file").write_text("")
    for place in ("nowhere", "bin", "file"):
        no_run = "no run there that has begun, or was submitted to Slurm"
        assert asked(tmp_path / place)[::2] == (2, no_run)
    run = tmp_path / "run"
    state.remember(run, "7; rm")
    assert asked(run)[2].endswith("'7; rm' is no id of a Slurm job")
    (run / "status" / "job").write_bytes(b"\xff\xfe")
    assert "which names the run's Slurm job" in asked(run)[2]


FAR = {
    r"step 4 of 9, rollout \(\d+ s ago\); saved after step": {"phase": "rollout", "step": 4},
    "step 0 of 9, starting, waiting for": {"phase": "starting", "waiting_for": "engines"},
    "finished after step 7 of 9; saved after step 3": {"phase": "done", "step": 7},
}


@pytest.mark.parametrize("words, fields", FAR.items())
def test_how_far_a_run_has_come_is_told_in_a_line(tmp_path, asked, fields, words):
    run = tmp_path / "mine"
    live = LiveStatus(run)
    code, said, _ = asked(run)
    assert code == 0 and "nothing is saved yet" in said
    checkpoint.commit(checkpoint.begin(run, 3), {"step": 3}, 1, ())
    live.update(steps=9, **fields)
    live.close()
    code, said, _ = asked(run)
    assert code == 0 and re.match(f"mine: {words}", said.splitlines()[0])
    (run / "live.json").write_text("{")
    assert asked(run)[2].startswith("its status can't be read: ")


def test_other_files_in_a_runs_folder_do_not_matter(commands, tmp_path, asked):
    commands(squeue="echo '7|RUNNING||None|gpu[a-b]|0:01'", sacct="exit 1")
    state.remember(tmp_path, "7")
    (tmp_path / "status" / "attempt-old").mkdir()
    (tmp_path / "status" / "attempt-002").mkdir()
    code, said, _ = asked(tmp_path)
    assert code == 0 and "attempt 2: 0 ranks" in said and "gpu[a-b]" in said
    (tmp_path / "status" / "attempt-002" / "rank-0.json").write_text("{")
    code, _, complaint = asked(tmp_path)
    assert code == 1 and "attempt-002" in complaint


def test_several_runs_and_a_failed_ones_log_are_told(commands, tmp_path, asked):
    commands(
        squeue="""case $5 in 7) echo '7|FAILED||NonZeroExitCode|n1|0:01';;
        8) echo '8|FAILED||JobLaunchFailure|n1|0:00';; 9) echo '9|RUNNING||None|n1|0:00';; esac""",
        sacct="exit 1",
    )
    runs = {job: tmp_path / f"run-{job}" for job in "789"}
    for job, run in runs.items():
        state.remember(run, job)
    for job in "79":
        (runs[job] / "logs").mkdir()
        text = "\n".join(f"line {n}" for n in range(40)) + "\nfailed: bad \x1b]0;data\n"
        (runs[job] / "logs" / f"slurm-{job}.out").write_text(text)
    code, said, complaint = asked(*runs.values(), tmp_path / "none")
    assert code == 2 and "no run there that has begun" in complaint
    assert said.count("failed: bad ") == 1 and "\x1b" not in said and "9" in said
    assert f"last lines of {runs['7']}/logs/slurm-7.out:\n  line 26" in said
    missing = "slurm-8.out is missing or empty: the node could not write it; does it see"
    assert f"{missing} {tmp_path}" in said
