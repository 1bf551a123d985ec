"""The checks of scripts/gpu_check.py, in the order in which it runs them."""

import asyncio
import inspect

import pytest

from tests.gpu import (
    coserving,
    delta,
    digests,
    drafts,
    engine,
    experts,
    fused,
    jobs,
    lora,
    machine,
    model,
    operations,
    rate,
    speed,
    stops,
    trainer,
)
from tests.gpu.frame import Check, Report

ALL = (
    *machine.FIRST,
    model.MODEL,
    *trainer.CHECKS,
    *experts.CHECKS,
    *fused.CHECKS,
    *speed.CHECKS,
    *operations.CHECKS,
    *digests.CHECKS,
    *delta.CHECKS,
    *engine.CHECKS,
    *rate.CHECKS,
    *lora.CHECKS,
    *drafts.CHECKS,
    *stops.CHECKS,
    *coserving.CHECKS,
    *jobs.CHECKS,
    *machine.LAST,
)
CHECKS = {check.name: check for check in ALL}


@pytest.mark.parametrize("check", ALL, ids=[check.name for check in ALL])
def test_gpu(check: Check, report: Report) -> None:
    done = check.work(report)
    if inspect.isawaitable(done):
        asyncio.run(done)
