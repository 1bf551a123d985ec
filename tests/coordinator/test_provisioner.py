"""Commands and jobs of a run that asks for capacity, without a Slurm."""

import asyncio
from types import SimpleNamespace

import pytest

from rose.coordinator import provisioner
from rose.launch import lent
from rose.scheduler import events as ev
from tests import processes


@pytest.mark.parametrize("how", ["is slow", "is cancelled"])
async def test_a_command_is_killed_with_what_it_has_started(tmp_path, monkeypatch, how):
    """An sbatch that outlived the command would submit a job that the provisioner doesn't know."""
    monkeypatch.setattr(provisioner, "COMMAND_S", 2.0 if how == "is slow" else 600.0)
    note = tmp_path / "pid"
    lines = f"sleep 600 & echo $! > {note}.part; mv {note}.part {note}; wait"
    calls = asyncio.create_task(provisioner._command("sh", "-c", lines))
    while not note.exists():
        await asyncio.sleep(0.01)
    if how == "is cancelled":
        calls.cancel()
    await asyncio.wait([calls], timeout=60.0)
    assert calls.cancelled() or calls.result() == (124, "", "sh did not answer within 2 s")
    await asyncio.to_thread(
        processes.until, lambda: not processes.alive(int(note.read_text())), "its end"
    )


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "STOPPED"])
async def test_a_job_that_is_suspended_has_not_waited_in_the_queue(make_config, tmp_path, state):
    c, fed = make_config("cluster=slurm", "cluster.slurm.pending_s=1"), []
    made = provisioner.Provisioner(c, tmp_path, fed.append, lambda *_: None, lambda *_: None)
    await made._judge("lend-1", SimpleNamespace(id="8", since=0.0, ran=False), {state})
    assert [type(event) for event in fed] == [ev.CapacityGranted]


def made(make_config, folder, monkeypatch, answers):
    """A provisioner whose commands get `answers(command)`, and the events that it feeds."""

    async def command(*words):
        return answers(words)

    monkeypatch.setattr(provisioner, "_command", command)
    fed = []
    c = make_config("cluster=slurm")
    return provisioner.Provisioner(c, folder, fed.append, lambda *_: None, lambda *_: None), fed


async def test_the_scheduler_hears_nothing_of_a_request_that_it_has_released(
    make_config, tmp_path, monkeypatch
):
    """The scheduler has forgotten the request, and would count it as capacity for ever."""
    answers = {"scancel": (0, "", "")}
    mine, fed = made(
        make_config, tmp_path, monkeypatch, lambda words: answers.get(words[0], (0, "job 7", ""))
    )
    mine._tasks = provisioner.Tasks()
    mine._submitting.add("lent-1")
    mine.do(ev.ReleaseCapacity("lent-1"))  # It waits behind other actions as sbatch answers.
    await mine._submit("lent-1")
    assert fed == [] and lent.noted(tmp_path) == {}
    await mine._submit("lent-2")
    mine.do(ev.ReleaseCapacity("lent-2"))
    await mine._judge("lent-2", mine._jobs["lent-2"], {"RUNNING"})
    assert [type(event) for event in fed] == [ev.CapacityQueued]


async def test_a_job_that_slurm_has_not_cancelled_stays_in_the_list_for_the_runs_end(
    make_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(provisioner.commands, "PATIENCE_S", 0.0)
    monkeypatch.setattr(provisioner.commands, "PAUSE_S", 0.0)
    listed = []

    def answers(words):
        listed.append(lent.noted(tmp_path))
        return (
            (1, "", "unable to contact the controller") if words[0] == "scancel" else (0, "7", "")
        )

    mine, _ = made(make_config, tmp_path, monkeypatch, answers)
    await mine._submit("lent-1")
    await mine._cancel("lent-1", "not needed any more")
    assert listed[-1] == lent.noted(tmp_path) == {"lent-1": "7"}


async def test_an_attempt_that_ends_as_it_adopts_jobs_has_lost_none(
    make_config, tmp_path, monkeypatch
):
    lent.note(tmp_path, {"lent-1": "7", "lent-2": "8", "lent-3": "9"})
    seen = []

    def is_active(job):
        seen.append(lent.noted(tmp_path))
        return job != "8"

    monkeypatch.setattr(provisioner.state, "is_active", is_active)
    mine, fed = made(make_config, tmp_path, monkeypatch, None)
    await mine._adopt()
    assert seen[0] == seen[1] == {"lent-1": "7", "lent-2": "8", "lent-3": "9"}
    assert seen[2] == lent.noted(tmp_path) == {"lent-1": "7", "lent-3": "9"}
    assert [event.request for event in fed if isinstance(event, ev.CapacityEnded)] == ["lent-2"]
