"""Agents in sandboxes whose environment hosts, or whose whole job, are killed: their episodes go on
from checkpoints of their sandboxes, with the tokens that they have in a run in which nobody
dies."""

from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from tests.job.job import Job, trained_on
from tests.job.test_lost_hosts_job import SIZE, STEPS, everything, kill_hosts, rolls

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = 3
TERMINAL = (
    "+experiment=terminal",
    "env.max_turns=8",
    "env.max_new_tokens=24",
    "sandbox.checkpoints=classified",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run in which nobody dies."""
    job = Job(tmp_path_factory.mktemp("whole"), *TERMINAL, *SIZE, "deterministic=true")
    assert job.wait() == 0, job.said + job.logs()
    assert sum(step["checkpoint_files"] for step in job.steps()) > 0
    return job


def same(job: Job, whole: Job) -> None:
    """Nothing is lost, made anew or left behind."""
    assert everything(job) == everything(whole)
    assert len(trained_on(job.run, STEPS)) == len(set(trained_on(job.run, STEPS)))
    assert sum(step["resumed_snapshots"] for step in job.steps()) > 0
    assert list((job.run / "sandboxes" / "turns").glob("*/*")) == []
    assert list((job.run / "snapshots").glob("*")) == []
    assert job.orphans() == []


def test_episodes_go_on_from_checkpoints_of_their_sandboxes(tmp_path, whole):
    killed = Job(tmp_path, *TERMINAL, *SIZE, "deterministic=true")
    assert kill_hosts(killed, KILLS) == KILLS
    assert killed.wait() == 0, killed.said + killed.logs()
    same(killed, whole)
    steps = killed.steps()
    assert sum(step["trajectories_restarted"] for step in steps) >= KILLS
    assert sum(step["resumed_turns"] for step in steps) > 0


def test_a_job_that_is_started_again_goes_on_with_the_episodes_that_ran(tmp_path, whole):
    """But for one whose states are damaged: it begins anew, with its answers."""
    first = Job(tmp_path, *TERMINAL, *SIZE, "deterministic=true")

    def manifests(name: str = "*") -> list[Path]:
        return list((first.run / "sandboxes" / "turns").glob(f"{name}/*"))

    def stored() -> set[str] | None:
        """Episodes under way that can be resumed from disk, if there are some."""
        ran = {path.parent.name for path in (first.run / "snapshots").glob("*/a*")}
        both = ran & {unquote(path.parent.name) for path in manifests()}
        return both if rolls(first) and len(both) > 3 else None

    found = first.until(stored, "stored states of some episodes")
    first.kill_everything()
    for path in manifests(quote(min(found)).replace(".", "%2E")):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    again = Job(tmp_path, *TERMINAL, *SIZE, "deterministic=true")
    assert again.wait() == 0, again.said + again.logs()
    same(again, whole)
    logs = (again.run / "logs" / "latest").glob("environment-*.log")
    assert any("the manifest is damaged" in path.read_text() for path in logs)
    assert again.faults() == []
