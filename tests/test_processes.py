"""Threads for work on the side follow the cores that a process may use, not those that the machine
has; what is imported at once is no work for the garbage collector."""

import gc
import importlib.util
import os
import sys

import pytest

from rose import processes


def test_threads_follow_the_binding_and_end_at_eight(monkeypatch):
    for bound, wanted in ({3}, 1), (set(range(4)), 4), (set(range(220)), 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=bound: cores)
        assert processes.usable_threads() == wanted


def test_an_import_leaves_out_what_nobody_uses_and_the_collector_goes_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    kept = [[] for _ in range(100)]
    with pytest.raises(ImportError), processes.importing("this", "json"):
        assert not gc.isenabled() and importlib.util.find_spec("json"), "json was there already"
        import this  # noqa: F401
    assert gc.isenabled() and importlib.util.find_spec("this")
    assert not {id(one) for one in kept} & {id(one) for one in gc.get_objects()}
