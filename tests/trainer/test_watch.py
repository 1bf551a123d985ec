"""A trainer rank for which others wait is named: real gloo ranks, and the launcher's own look at
what they say."""

import os
import signal
import time

import pytest

from rose.launch import rank_status, supervise
from tests.trainer import tiny_world

pytestmark = pytest.mark.slow


def test_a_rank_that_stops_while_gradients_are_summed_is_named_and_its_end_is_theirs(
    tmp_path, make_config
):
    tiny_world.save_model(tmp_path / "model")
    step = ["train", 1, 4000, 1, 1]
    actions = [["watch", 4.0], step, ["stop", 1], step]
    job = {"name": "run", "settings": ["trainer.zero_stage=2"], "actions": actions}
    processes, words = tiny_world.world_of(job, tmp_path, 3)
    launcher = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
    end = time.monotonic() + tiny_world.DEADLINE_S
    try:
        for process in processes:
            process.start()
        while sum(s.stuck_at is not None for s in launcher.statuses().values()) < 2:
            assert time.monotonic() < end, [path.read_text()[-3000:] for path in words]
            time.sleep(0.05)
        states, now = launcher.statuses(), time.monotonic()
        assert launcher._hanging(states, now) == "", "the others may still be about to say so"
        found = launcher._hanging(states, now + supervise.REPORT_S)
        who = f"rank 1 (trainer 1, pid {processes[1].pid} on here) shows no sign of life"
        assert found.startswith(who) and "trainer-1.log" in found and launcher.lost
        assert f"after {states[0].stuck_at} collectives" in found and found.count("rank ") == 1
        os.kill(processes[1].pid, signal.SIGKILL)  # as the launcher does
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        assert [process.exitcode for process in processes] == [1, -signal.SIGKILL, 1]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    assert rank_status.read(tmp_path, 1, 1).stuck_at is None
