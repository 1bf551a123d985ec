"""Trajectories that move between environment hosts have the tokens that they have in a run in which
each stays."""

import pytest

from tests.job.job import Job, trained_on
from tests.job.test_lost_hosts_job import SIZE, STEPS, everything
from tests.job.test_terminal_hosts_job import TERMINAL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RESTLESS = (
    "scheduler.placement.name=tests.job.restless:Restless",
    "+scheduler.placement.args.most=3",
)


def test_agents_in_sandboxes_that_move_have_the_tokens_of_a_run_in_which_none_does(tmp_path):
    stays = Job(tmp_path / "stays", *TERMINAL, *SIZE, "deterministic=true")
    assert stays.wait() == 0, stays.said + stays.logs()
    moves = Job(tmp_path, *TERMINAL, *SIZE, *RESTLESS, "deterministic=true")
    assert moves.wait() == 0, moves.said + moves.logs()
    assert everything(moves) == everything(stays)
    assert len(trained_on(moves.run, STEPS)) == len(set(trained_on(moves.run, STEPS)))
    steps = moves.steps()
    assert sum(step["trajectories_moved"] for step in steps) > 0
    assert sum(step["resumed_snapshots"] for step in steps) > 0
    assert sum(step["trajectories_moved"] for step in stays.steps()) == 0
    assert steps[-1]["failed_trajectories"] == 0 and moves.faults() == []
    assert moves.orphans() == []
