"""A rank that hangs, is stopped, or has lost its GPU is named, and the run may be requeued."""

import os
import signal
import time

import pytest

from rose.launch import guard, supervise
from rose.launch.rank_status import RankStatus
from rose.protocol import Role


def trainer(rank, begun, since=0.0, **more):
    who = {"rank": rank, "role": Role.TRAINER, "index": rank - 2, "pid": 7, "guard_pid": 6}
    who |= {"host": "n1"}
    return RankStatus(**who, state="running", begun=begun, beat_s=10.0, since=since, **more)


BEATS = [
    ({2: [8, 8, 8], 3: [8, 8, 8], 4: [5]}, 3, {4: 5}),  # fell silent
    ({2: [8] * 8, 3: [8] * 8, 4: []}, 8, {4: None}),  # was silent from the step's beginning
    ({2: [8] * 7, 3: [8] * 7, 4: []}, 7, {}),  # or is busy between two steps
    ({2: [8] * 8, 3: [5] * 8, 4: [8] * 8}, 8, {3: 5}),  # lives and does not come
    ({2: [8] * 7, 3: [5] * 7, 4: [8] * 7}, 7, {}),  # or computes for long
    ({2: [8] * 8, 3: [5, 6] * 4, 4: [8] * 8}, 8, {}),  # slow: it is still coming
    ({2: [8] * 8, 3: [8] * 8, 4: [8] * 8}, 8, {}),  # all in the same collective
    ({2: [8], 3: [7], 4: [8]}, 8, {}),  # no beat for long: the reader was away, or the disk
    ({2: [None] * 8, 3: [None] * 8, 4: [None] * 8}, 8, {}),
]


@pytest.mark.parametrize("told, beats, named", BEATS)
def test_the_trainer_rank_that_others_wait_for_is_named(tmp_path, make_config, told, beats, named):
    job = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
    last = {rank: trainer(rank, None) for rank in told}
    for beat in range(beats):
        for rank, counts in told.items():
            if beat < len(counts):
                last[rank] = trainer(rank, counts[beat], since=beat + 1.0)
        for look in range(5):  # several between two beats
            found = job._hanging(last, 100.0 + 10.1 * beat + 2.0 * look)
            assert not found or beat == beats - 1
            if found:
                break
    lines = [line for line in found.splitlines() if line.startswith("rank")]
    expected = [f"rank {rank} (trainer {rank - 2}, pid 7 on n1) hangs" for rank in named]
    assert [line.partition(": ")[0] for line in lines] == expected
    assert all(f"last reported {n or 0} " in found for n in named.values())
    assert job.lost is bool(named) and found.count(".log") == len(named)


def test_who_looks_after_long_names_nobody(tmp_path, make_config):
    """The reader was suspended, and the ranks' files come back one after the other."""
    job = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
    ranks = {2: trainer(2, 8, since=1.0), 3: trainer(3, 7, since=1.0)}
    assert not job._hanging(ranks, 100.0)
    ranks[2] = trainer(2, 8, since=2.0)
    assert not job._hanging(ranks, 1300.0)


def test_a_gpu_that_fails_is_lost_and_one_too_small_is_not(tmp_path, make_config):
    errors = {"AcceleratorError: CUDA error: uncorrectable ECC error encountered": True}
    errors |= {"OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": False}
    for error, lost in errors.items():
        job = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
        assert error in job._first([trainer(2, None, exit_code=1, error=error)])
        assert job.lost is lost


@pytest.mark.parametrize("stops", [True, False])
def test_the_guard_ends_a_rank_that_stays_stopped_and_leaves_one_that_works_alone(
    monkeypatch, stops
):
    monkeypatch.setattr(guard, "POLL_S", 0.01)
    monkeypatch.setattr(guard, "STOPPED_POLLS", 5)
    rank = os.fork()
    if not rank:
        os.kill(os.getpid(), signal.SIGSTOP) if stops else time.sleep(0.3)
        os._exit(3)
    before = signal.getsignal(signal.SIGALRM)
    try:
        code, why = guard._wait(rank)
    finally:
        signal.signal(signal.SIGALRM, before)
    if not stops:
        assert (code, why) == (3, "")
        return
    assert code == -signal.SIGKILL and "had been stopped (SIGSTOP) for 0.05 s" in why
    assert "killed by SIGKILL: its" in trainer(2, None, exit_code=code, error=why).how_it_ended()


def test_the_watchdog_has_half_of_a_steps_time_and_what_the_user_gives_stays(tmp_path):
    ours = guard.watchdog(3600.0, tmp_path, {"TORCH_FR_BUFFER_SIZE": "9"})
    assert ours["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1800" and "TORCH_FR_BUFFER_SIZE" not in ours
    assert ours["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl-"
