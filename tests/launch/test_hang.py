"""A rank that hangs, is stopped, or has lost its GPU is named, and the run may be requeued."""

import os
import signal
import time

import pytest

from rose.launch import guard, supervise
from rose.launch.rank_status import RankStatus
from rose.protocol import Role


def trainer(rank, stuck_at, **more):
    who = {"rank": rank, "role": Role.TRAINER, "index": rank - 2, "pid": 7, "host": "n1"}
    return RankStatus(**who, state="running", stuck_at=stuck_at, **more)


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ((118, 118, None), ["rank 4 (trainer 2, pid 7 on n1) shows no sign of life"]),
        ((118, 101, 118), ["rank 3 (trainer 1, pid 7 on n1) hangs after 101"]),
        ((118, 118, 118), []),
        ((None, None, None), []),
    ],
)
def test_the_trainer_rank_that_is_behind_is_named(tmp_path, make_config, counts, named):
    job = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
    states = {rank: trainer(rank, at) for rank, at in enumerate(counts, 2)}
    assert job._hanging(states, 100.0) == ""
    found = job._hanging(states, 100.0 + supervise.REPORT_S)
    assert [line for line in found.splitlines() if line.startswith("rank")] == [
        f"{name}, while others wait for it after 118 collectives and micro-batches "
        "(for half of trainer.step_timeout_s)"
        for name in named
    ]
    assert job.lost is bool(named) and (not named or "trainer-" in found)


def test_a_rank_that_goes_on_is_forgiven(tmp_path, make_config):
    job = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
    assert job._hanging({2: trainer(2, 5), 3: trainer(3, 4)}, 1.0) == ""
    assert job._hanging({2: trainer(2, None), 3: trainer(3, None)}, 2.0) == ""
    waits_anew = {2: trainer(2, 9), 3: trainer(3, 8)}
    assert job._hanging(waits_anew, 1.0 + supervise.REPORT_S) == "" and not job.lost


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", True),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_a_gpu_that_fails_is_a_lost_rank_and_one_that_is_too_small_is_not(
    tmp_path, make_config, error, lost
):
    job = supervise.Job(None, (), tmp_path, 1, make_config().cluster)
    assert error in job._first([trainer(2, None, exit_code=1, error=error)])
    assert job.lost is lost


def test_the_guard_ends_a_rank_that_stays_stopped(monkeypatch):
    monkeypatch.setattr(guard, "LOOK_S", 0.01)
    monkeypatch.setattr(guard, "STOPPED_LOOKS", 5)
    rank = os.fork()
    if not rank:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    before = signal.getsignal(signal.SIGALRM)
    try:
        code, why = guard._wait(rank)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert code == -signal.SIGKILL and "had been stopped (SIGSTOP) for 0.05 s" in why
    assert (
        "killed by SIGKILL: its process"
        in trainer(2, None, exit_code=code, error=why).how_it_ended()
    )


def test_a_rank_that_works_is_left_alone(monkeypatch):
    monkeypatch.setattr(guard, "LOOK_S", 0.01)
    monkeypatch.setattr(guard, "STOPPED_LOOKS", 5)
    rank = os.fork()
    if not rank:
        time.sleep(0.3)
        os._exit(3)
    before = signal.getsignal(signal.SIGALRM)
    try:
        assert guard._wait(rank) == (3, "")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_watchdog_has_half_of_a_steps_time_and_what_the_user_gives_stays(tmp_path):
    set_by_us = guard.watchdog(3600.0, tmp_path, {"TORCH_FR_BUFFER_SIZE": "9"})
    assert set_by_us == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl-",
    }
