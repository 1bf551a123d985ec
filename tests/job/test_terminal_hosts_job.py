"""Agents in sandboxes whose environment hosts are killed: their episodes go on from checkpoints of
their sandboxes, with the tokens that they have in a run in which nobody dies."""

import pytest

from tests.job.job import Job, trained_on
from tests.job.test_lost_hosts_job import SIZE, STEPS, everything, kill_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = 3
TERMINAL = (
    "+experiment=terminal",
    "env.max_turns=8",
    "env.max_new_tokens=24",
    "sandbox.checkpoints=classified",
)


def test_episodes_go_on_from_checkpoints_of_their_sandboxes(tmp_path):
    whole = Job(tmp_path / "whole", *TERMINAL, *SIZE, "deterministic=true")
    assert whole.wait() == 0, whole.said + whole.logs()
    killed = Job(tmp_path, *TERMINAL, *SIZE, "deterministic=true")
    assert kill_hosts(killed, KILLS) == KILLS
    assert killed.wait() == 0, killed.said + killed.logs()
    assert everything(killed) == everything(whole)
    assert len(trained_on(killed.run, STEPS)) == len(set(trained_on(killed.run, STEPS)))
    steps = killed.steps()
    assert sum(step["trajectories_restarted"] for step in steps) >= KILLS
    assert sum(step["resumed_turns"] for step in steps) > 0
    assert sum(step["checkpoint_files"] for step in whole.steps()) > 0
    assert sum(step["resumed_snapshots"] for step in steps) > 0
    left = [path for path in (killed.run / "sandboxes" / "turns").glob("*/*") if path.is_file()]
    assert left == [] and killed.orphans() == []
