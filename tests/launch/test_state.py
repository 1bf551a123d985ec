"""What is read from Slurm's words about a job."""

import subprocess

import pytest

from rose.launch import state


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


def test_a_slurm_that_does_not_answer_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    def silent(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    state.remember(tmp_path, "7")
    monkeypatch.setattr(state.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(state.subprocess, "run", silent)
    monkeypatch.setattr("sys.argv", ["state", str(tmp_path)])
    assert state.main() == 1
    assert capsys.readouterr().err == f"{tmp_path}: sacct did not answer within 30 s\n"
