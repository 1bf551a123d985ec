"""The rollout engine's threads stand back, are lifted by another process, and stand back again."""

import os
import subprocess
import sys

from rose.parts.lending.vllm import priority

PROGRAM = """
import os, sys, threading
sys.path.insert(0, os.getcwd())
from rose.parts.lending.vllm.priority import Priority
kept = threading.Thread(target=threading.Event().wait, daemon=True); kept.start()
made = Priority(except_for=kept.native_id)
for line in sys.stdin:
    made.lower()
    later = threading.Thread(target=threading.Event().wait, daemon=True); later.start()
    states = [os.sched_getscheduler(t.native_id) for t in (threading.main_thread(), kept, later)]
    nices = [os.getpriority(os.PRIO_PROCESS, t.native_id) for t in (threading.main_thread(), kept, later)]
    print(*states, *nices, flush=True)
"""


def test_all_threads_but_one_get_a_lower_priority_and_the_common_one_again():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    here = os.getpriority(os.PRIO_PROCESS, 0)

    def step():
        process.stdin.write("\n")
        process.stdin.flush()
        found = list(map(int, process.stdout.readline().split()))
        return found[:3], found[3:]

    before = os.sched_getscheduler(0)
    may_raise_again = priority.may_raise_again()
    assert os.sched_getscheduler(0) == before, "trying leaves this thread as it is"
    priority.restore_priority(2**22 - 3)  # nobody's
    try:
        states, nices = step()
        if may_raise_again:
            assert states == [os.SCHED_IDLE, os.SCHED_OTHER, os.SCHED_IDLE]
            priority.restore_priority(process.pid)
            assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
            assert step()[0][0] == os.SCHED_IDLE
        else:
            assert nices == [priority.NICE, here, priority.NICE]
    finally:
        process.kill()
        process.wait(60)
