"""What is read from Slurm's words about a job, and what is told of a run."""

import re
import subprocess

import pytest

from rose.launch import state
from rose.observe.status import LiveStatus
from rose.trainer import checkpoint


def rows(*states):
    return [
        state.JobState(f"7+{n}", word, "0:0", "None", "n1", "0:01") for n, word in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "hopeless"),
    [
        (["PENDING", "FAILED"], "component 7+1 has ended"),
        (["PENDING", "PENDING"], ""),
        (["RUNNING", "RUNNING"], ""),
        (["PENDING", "RUNNING"], ""),
        (["COMPLETED", "COMPLETED"], ""),
        ([], ""),
    ],
)
def test_a_job_that_waits_for_an_ended_component_waits_for_ever(monkeypatch, states, hopeless):
    monkeypatch.setattr(state, "components", lambda job: rows(*states))
    said = state.cannot_start("7")
    assert bool(said) == bool(hopeless) and hopeless in said


@pytest.mark.parametrize(
    ("reason", "hopeless"),
    [
        ("QOSMaxWallDurationPerJobLimit", True),
        ("AssocMaxCpuPerJobLimit", True),
        ("QOSMinGRESPerJob", True),
        ("PartitionTimeLimit", True),
        ("InvalidAccount", True),
        ("Priority", False),
        ("QOSMaxJobsPerUserLimit", False),  # Until another job of the user's has ended.
        ("AssocGrpGRES", False),
        ("BeginTime", False),
    ],
)
def test_a_job_that_asks_for_more_than_a_limit_waits_for_ever(monkeypatch, reason, hopeless):
    row = state.JobState("7", "PENDING", "0:0", reason, "", "0:00")
    monkeypatch.setattr(state, "components", lambda job: [row])
    assert (reason in state.cannot_start("7")) == hopeless
    monkeypatch.setattr(state, "components", lambda job: [row._replace(state="RUNNING")])
    assert state.cannot_start("7") == ""


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


def test_a_slurm_that_does_not_answer_in_time_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    def silent(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    state.remember(tmp_path, "7")
    monkeypatch.setattr(state.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(state.subprocess, "run", silent)
    assert told(tmp_path, monkeypatch, capsys) == (1, "sacct did not answer within 30 s")


def told(run_dir, monkeypatch, capsys):
    """(exit code, what it complains about on its one line) of `python -m rose.launch.state`."""
    monkeypatch.setattr("sys.argv", ["state", str(run_dir)])
    code = state.main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{run_dir}: ")
    return code, line.removeprefix(f"{run_dir}: ")


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Makes programs that stand in for Slurm's: what each does is a line of shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))  # without this machine's own

    def make(**lines):
        for name, line in lines.items():
            program = folder / name
            program.write_text(line if line.startswith("#!") else f"#!/bin/sh\n{line}\n")
            program.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("squeue", "said"),
    [
        (
            "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
            "squeue failed: slurm_load_jobs error: Unable to contact slurm controller",
        ),
        ("exit 3", "squeue failed: exit code 3, no output"),
        ("echo hello", "squeue printed 'hello', which is no state of a job"),
        (r"printf '\377\376 garbage\n'", "squeue printed '\ufffd\ufffd garbage', which is no"),
        ("#!/no/such/shell", "squeue can't be run: No such file or directory"),
    ],
)
def test_a_slurm_that_fails_ends_no_run(commands, tmp_path, monkeypatch, capsys, squeue, said):
    commands(squeue=squeue, sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1")
    state.remember(tmp_path, "7")
    code, line = told(tmp_path, monkeypatch, capsys)
    assert code == 1 and line.startswith(said)
    with pytest.raises(RuntimeError, match="squeue"):
        state.is_active("7")


def test_a_job_that_slurm_has_forgotten_is_over(commands, tmp_path, monkeypatch, capsys):
    commands(
        squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1",
    )
    state.remember(tmp_path, "7")
    assert not state.is_active("7")
    monkeypatch.setattr("sys.argv", ["state", str(tmp_path)])
    assert state.main() == 0
    assert "job 7: Slurm knows nothing of it any more" in capsys.readouterr().out


def test_names_of_nodes_are_printed_as_they_are(commands, tmp_path, monkeypatch, capsys):
    commands(squeue="echo '7|RUNNING||None|gpu[a-b]|0:01'", sacct="exit 1")
    state.remember(tmp_path, "7")
    monkeypatch.setattr("sys.argv", ["state", str(tmp_path)])
    assert state.main() == 0 and "gpu[a-b]" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_told_in_a_line(commands, tmp_path, monkeypatch, capsys):
    commands()
    no_run = "no run there that has begun, or was submitted to Slurm"
    (tmp_path / "file").write_text("")
    for place in ("nowhere", "bin", "file"):
        assert told(tmp_path / place, monkeypatch, capsys) == (2, no_run)
    run = tmp_path / "run"
    state.remember(run, "7; rm")
    assert told(run, monkeypatch, capsys)[1].endswith("'7; rm' is no id of a Slurm job")
    (run / "status" / "job").write_bytes(b"\xff\xfe")
    assert "which names the run's Slurm job" in told(run, monkeypatch, capsys)[1]
    (run / "status" / "job").unlink()
    (run / "status" / "job").mkdir()
    assert "Is a directory" in told(run, monkeypatch, capsys)[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"phase": "rollout", "step": 4}, r"step 4 of 9, rollout \(\d+ s ago\); saved after step"),
        ({"phase": "starting", "waiting_for": "engines"}, r"step 0 of 9, starting, waiting for"),
        ({"phase": "done", "step": 7}, "finished after step 7 of 9; saved after step 3"),
    ],
)
def test_how_far_a_run_has_come_is_told_in_a_line(tmp_path, monkeypatch, capsys, fields, words):
    run = tmp_path / "mine"
    live = LiveStatus(run)
    monkeypatch.setattr("sys.argv", ["state", str(run)])
    assert state.main() == 0 and "nothing is saved yet" in capsys.readouterr().out
    checkpoint.commit(checkpoint.begin(run, 3), {"step": 3}, 1, ())
    live.update(steps=9, **fields)
    live.close()
    assert state.main() == 0
    assert re.match(f"mine: {words}", capsys.readouterr().out.splitlines()[0])
    (run / "live.json").write_text("{")
    assert told(run, monkeypatch, capsys)[1].startswith("its status can't be read: ")


def test_other_files_in_a_runs_folder_do_not_matter(commands, tmp_path, monkeypatch, capsys):
    commands(squeue="echo '7|RUNNING||None|n1|0:01'", sacct="exit 1")
    state.remember(tmp_path, "7")
    (tmp_path / "status" / "attempt-old").mkdir()
    (tmp_path / "status" / "attempt-002").mkdir()
    monkeypatch.setattr("sys.argv", ["state", str(tmp_path)])
    assert state.main() == 0 and "attempt 2: 0 ranks" in capsys.readouterr().out
    (tmp_path / "status" / "attempt-002" / "rank-0.json").write_text("{")
    code, line = told(tmp_path, monkeypatch, capsys)
    assert code == 1 and "attempt-002" in line


def test_what_lies_there_is_told_though_slurm_is_silent(commands, tmp_path, monkeypatch, capsys):
    commands(squeue="echo 'Unable to contact slurm controller' >&2; exit 1", sacct="exit 1")
    run = tmp_path / "mine"
    state.remember(run, "7")
    live = LiveStatus(run)
    live.update(steps=9, step=4, phase="rollout")
    live.close()
    monkeypatch.setattr("sys.argv", ["state", str(run)])
    assert state.main() == 1
    said = capsys.readouterr()
    assert "mine: step 4 of 9, rollout" in said.out
    assert said.err == f"{run}: squeue failed: Unable to contact slurm controller\n"


def test_several_runs_and_a_failed_ones_log_are_told(commands, tmp_path, monkeypatch, capsys):
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
    monkeypatch.setattr("sys.argv", ["state", *map(str, runs.values()), str(tmp_path / "none")])
    assert state.main() == 2
    said = capsys.readouterr()
    assert said.out.count("failed: bad ") == 1 and "\x1b" not in said.out
    assert f"last lines of {runs['7']}/logs/slurm-7.out:\n  line 26" in said.out
    assert (
        f"slurm-8.out is missing or empty: the node could not write it; does it see {tmp_path}"
        in (said.out)
    )
    assert "9" in said.out and "no run there that has begun" in said.err
