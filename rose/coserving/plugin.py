"""vLLM's entry point into ROSE (group `vllm.general_plugins`): loaded in every process of an engine.

It gives our schedulers what vLLM doesn't: the engine core around them, to reach its workers and to wake its loop. A
scheduler of another class is left alone.
"""

from __future__ import annotations

import multiprocessing
import os

from rose.coserving import names


def register() -> None:
    """May be called any number of times in a process. Does nothing in engines that share no device."""
    if names.FOLDER not in os.environ:
        return
    from vllm.v1.engine.core import EngineCoreProc

    from rose.coserving import metrics
    from rose.processes import die_with_parent

    metrics.register_if_serving()
    parent = multiprocessing.parent_process()
    if parent is not None:  # vLLM's engine would wait for ever for an API server that was killed
        die_with_parent(parent.pid)
    original = EngineCoreProc.run_busy_loop
    if getattr(original, "attaches", False):
        return

    def run_busy_loop(self):
        if hasattr(self.scheduler, "attach"):
            self.scheduler.attach(self)
        return original(self)

    run_busy_loop.attaches = True
    EngineCoreProc.run_busy_loop = run_busy_loop
