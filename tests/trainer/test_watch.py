"""A trainer rank for which others wait is named: real gloo ranks, and the launcher's own look at
what they say."""

import os
import signal
import time

import psutil
import pytest

from rose.launch import beats, supervise
from tests.trainer import tiny_world

pytestmark = pytest.mark.slow
BEAT_S = 0.5


def test_a_rank_that_stops_while_gradients_are_summed_is_named(tmp_path, make_config):
    tiny_world.save_model(tmp_path / "model")
    step = ["train", 1, 4000, 1, 1]
    actions = [["watch", BEAT_S], step, ["stop", 1], step]
    job = {"name": "run", "settings": ["trainer.zero_stage=2"], "actions": actions}
    processes, words = tiny_world.world_of(job, tmp_path, 3)
    launcher = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
    end = time.monotonic() + tiny_world.DEADLINE_S

    def wait():
        assert time.monotonic() < end, [path.read_text()[-3000:] for path in words]
        time.sleep(0.02)

    def told(known):
        """Statuses once the ranks that live have told something since the `known`."""
        while True:
            states = launcher.statuses()
            of = [(states[r], known.get(r)) for r in (0, 2)] if len(states) == 3 else []
            if of and all(s.begun is not None and (not k or s.since > k.since) for s, k in of):
                return states
            wait()

    with tiny_world.ended(processes):
        stops = psutil.Process(processes[1].pid)  # ours, so at worst a zombie
        while stops.status() != psutil.STATUS_STOPPED:
            wait()
        first, second = {}, told({})
        while [s.begun for s in first.values()] != [s.begun for s in second.values()]:
            first, second = second, told(second)
        assert launcher._hanging(first, 0.0) == "" and not launcher.lost
        beat = 0  # by whose count the launcher looks: the machine may be slow
        while not (found := launcher._hanging(second, beat * BEAT_S)):
            assert (beat := beat + 1) < beats.LATE_BEATS + 2
            second = told(second)
        assert beat > beats.STILL_BEATS
        assert found.startswith(f"rank 1 (trainer 1, pid {processes[1].pid} on here) hangs: others")
        assert f"after {max(second[r].begun for r in (0, 2))} coll" in found
        assert "trainer-1.log" in found
        assert launcher.lost and found.count("rank ") == 1
        os.kill(processes[1].pid, signal.SIGKILL)  # as the launcher does
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        assert [process.exitcode for process in processes] == [1, -signal.SIGKILL, 1]
