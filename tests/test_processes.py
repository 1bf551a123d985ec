"""Threads for work on the side follow the cores that a process may use, not those that the machine
has."""

import os

from rose import processes


def test_threads_follow_the_binding_and_end_at_eight(monkeypatch):
    for bound, wanted in ({3}, 1), (set(range(4)), 4), (set(range(220)), 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=bound: cores)
        assert processes.usable_threads() == wanted
