"""A run folder as a run writes it, through the real writers, with made-up but plausible numbers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from rose.observe.metrics import MetricsWriter
from rose.observe.recorder import Recorder

T0 = 1_790_000_000.0


def write_run(
    run_dir: Path, steps: int = 12, engines: int = 2, turns: int = 40, tensorboard: bool = False
) -> Path:
    """`turns` on each engine in each step, 8 at a time; evaluations before and after; one engine
    fault."""
    draw = random.Random(3)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(
        json.dumps(
            {
                "name": run_dir.name,
                "model": {"name": "tiny"},
                "env": {"name": "frozen_lake"},
                "algorithm": {"name": "grpo"},
                "note": "</script><img src=x onerror=alert(1)>",
            }
        )
    )
    metrics = MetricsWriter(run_dir, tensorboard)
    metrics.write(
        0,
        {
            "kind": "eval",
            "eval_n": 128,
            "eval_successes": 31,
            "eval_success": 31 / 128,
            "eval_reward": 0.242,
            "time": T0,
        },
    )
    ranks = {
        name: Recorder(run_dir, rank, role, name)
        for rank, (role, name) in enumerate(
            [
                ("coordinator", "coordinator"),
                ("environment", "environment-0"),
                ("trainer", "trainer-0"),
                *(("rollout", f"rollout-{i}") for i in range(engines)),
            ]
        )
    }
    clock = T0
    for step in range(1, steps + 1):
        clock = _step(ranks, metrics, step, steps, engines, turns, clock, draw)
    if steps > 2:
        metrics.write(
            2,
            {
                "kind": "fault",
                "what": "engine restart",
                "time": T0 + 9,
                "detail": "rollout-1 <b>lost</b> its engine: exit code -9; 5 turns rerouted",
            },
        )
        metrics.write(
            steps,
            {
                "kind": "eval",
                "eval_n": 128,
                "eval_successes": 97,
                "eval_success": 97 / 128,
                "eval_reward": 0.758,
                "time": clock,
            },
        )
    metrics.close()
    for recorder in ranks.values():
        recorder.close()
    return run_dir


def _step(ranks, metrics, step, steps, engines, turns, start, draw) -> float:
    ends, number = [], 0
    for engine in range(engines):
        lanes = [start + 0.01 * i for i in range(8)]
        for _ in range(turns):
            lane = min(range(8), key=lanes.__getitem__)
            tokens = int(min(160, 12 + draw.expovariate(1 / 28)))
            begin, lanes[lane] = lanes[lane], lanes[lane] + 0.03 + tokens * 0.006
            name = f"g{step}.{number % 16}"
            ranks[f"rollout-{engine}"].span(
                "turn",
                begin,
                lanes[lane],
                turn=f"{name}.t{number // 16}",
                trajectory=name,
                tokens=tokens,
                version=step - 1,
                attempt=1,
                finish="stop",
            )
            lanes[lane] += 0.02 * draw.random()
            number += 1
        ends.append(max(lanes))
    rolled, host = max(ends), ranks["environment-0"]
    for i in range(16):
        host.span("trajectory", start + 0.001 * i, rolled - 0.01 * i, trajectory=f"g{step}.{i}")
        host.span("env_step", start + 0.2, start + 0.25, trajectory=f"g{step}.{i}")
    trained = rolled + 1.4 + 0.2 * draw.random()
    trainer, boss = ranks["trainer-0"], ranks["coordinator"]
    trainer.span("train_step", rolled, trained, step=step)
    trainer.span("forward_backward", rolled, trained - 0.4, step=step)
    trainer.span("optimizer", trained - 0.4, trained - 0.1, step=step)
    end = trained + 0.35
    trainer.span("publish", trained, trained + 0.15, step=step)
    for engine in range(engines):
        ranks[f"rollout-{engine}"].span("load_version", trained + 0.15, end, version=step)
    for name, a, b in (
        ("step", start, end),
        ("rollout", start, rolled),
        ("train", rolled, trained),
        ("sync", trained, end),
    ):
        boss.span(name, a, b, step=step)
    success = 0.25 + 0.5 / (1 + math.exp(-8 * (step / steps - 0.5))) + 0.06 * draw.gauss(0, 1)
    success = min(1.0, max(0.0, success))
    metrics.write(
        step,
        {
            "time": end,
            "success": success,
            "reward_mean": success - 0.05,
            "response_tokens_mean": 40 - 12 * step / steps,
            "response_tokens_max": 160,
            "time_rollout": rolled - start,
            "time_train": trained - rolled,
            "time_sync": end - trained,
            "time_idle": 0.1,
            "time_step": end - start + 0.2,
            "tokens_per_s": 300.0 * engines + 20 * draw.random(),
            "loss": 0.01 * draw.gauss(0, 1),
            "clip_fraction": 0.02 * draw.random(),
            "importance_capped": 0.001 * draw.random(),
            "staleness_mean": 0.5,
            "staleness_max": 1,
            "lr": 1e-4 * (1 - step / (steps + 1)),
            "grad_norm": 0.5 + 0.2 * draw.random(),
            "entropy": 1.2 - 0.6 * step / steps,
            "mismatch_kl": 10 ** draw.uniform(-5, -3.2),
            "mismatch_max_ratio": 1 + 0.2 * draw.random(),
            "version": step,
            "engine_restarts": int(step == 2),
            "invalid_calls": 3,
            "truncated": 1,
            "migrations": 2,
            "returned_turns": 1,
            "reward_values": [[0.0, 9], [0.5, 2], [1.0, step]],
            "turn_values": [[float(n), 1] for n in range(1, 41)],
            "response_hist": [
                [16 * (i + 1), int(100 * math.exp(-i / (3 - step / steps)))] for i in range(10)
            ],
            **{f"tokens_per_s/rollout-{i}": 300 + 25 * draw.random() for i in range(engines)},
        },
    )
    return end + 0.2
