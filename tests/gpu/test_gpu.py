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
    head,
    jobs,
    lora,
    machine,
    model,
    speed,
    stops,
    trainer,
)
from tests.gpu.frame import Check, Report

ALL = (machine.machine, machine.micro, model.model, trainer.trainer)
ALL += (experts.experts, fused.compile_zero2, fused.compile_zero3, fused.liger, fused.hpz)
ALL += (speed.speed, head.head, digests.digests, delta.delta)
ALL += (engine.engine, engine.precision, engine.tp2, engine.sleep, lora.lora)
ALL += (drafts.drafts, stops.stops, coserving.pool, coserving.profile, coserving.coserving)
ALL += (*jobs.CHECKS, machine.nccl, machine.left)
CHECKS = {check.name: check for check in ALL}


@pytest.mark.parametrize("check", ALL, ids=[check.name for check in ALL])
def test_gpu(check: Check, report: Report) -> None:
    done = check.work(report)
    if inspect.isawaitable(done):
        asyncio.run(done)
