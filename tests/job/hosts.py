"""Environment hosts that are killed while trajectories run on them, and all that a run trains on."""

import signal

import psutil

from rose.coordinator import replay
from tests import processes
from tests.job.job import Job

HOSTS = ("rollout.environment_hosts=2", "rollout.host_restarts=100")


def hosts(job: Job) -> list[psutil.Process]:
    """The processes of all environment hosts that are up and run trajectories, by rank."""
    found = {}
    bearing = processes.bearing("rose.agent.process", str(job.run))
    known = {process.pid for process in bearing}
    for process in bearing:
        words = processes.words(process)
        # a child that it has just forked has its words, too, and maybe a smaller pid
        if "--rank" in words and processes.parent(process) not in known:
            found[int(words[words.index("--rank") + 1])] = process
    return [found[rank] for rank in sorted(found)]


def kill_host(job: Job, which: int = 0, number: int = signal.SIGKILL) -> None:
    """Ends one and waits until the run has noticed."""
    lost = len(job.faults())
    found = job.until(lambda: hosts(job)[which:], f"host {which}")
    processes.signal(found[0], number)
    job.until(lambda: len(job.faults()) > lost, "the fault")


def kill_hosts(job: Job, kills: int) -> int:
    """In rollouts, each when some trajectories of it are in, another one since the last, and others
    run; how many died."""
    at = (0, 0)
    for died in range(kills):
        job.until(lambda last=at: rolls(job) and place(job) > last, "another trajectory's end")
        at = place(job)
        up = job.until(lambda: hosts(job), "a host")
        kill_host(job, died % len(up), (signal.SIGKILL, signal.SIGSEGV)[died % 2])
    return kills


def rolls(job: Job) -> bool:
    live = job.live()
    return live.get("phase") == "rollout" and 0 < live.get("finished", 0) < live.get("total", 0)


def place(job: Job) -> tuple[int, int]:
    live = job.live()
    return live.get("step", 0), live.get("finished", 0)


def everything(job: Job) -> list[tuple]:
    """All that is trained on, of each trajectory of each step."""
    return [
        (t.id, t.tokens, t.mask, t.versions, t.reward, t.turns, t.inherited)
        for row in job.steps()
        for group in replay.load(job.run, row["step"])
        for t in group
    ]
