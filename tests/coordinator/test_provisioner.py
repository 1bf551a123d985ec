"""Commands and jobs of a run that asks for capacity, without a Slurm."""

import asyncio
from types import SimpleNamespace

import pytest

from rose.coordinator import provisioner
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
