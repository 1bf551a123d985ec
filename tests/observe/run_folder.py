"""A run folder as a run writes it, through the real writers, with made-up but plausible numbers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from rose.observe.metrics import MetricsWriter
from rose.observe.recorder import Recorder

T0 = 1_790_000_000.0
NAMES = "tiny", "frozen_lake", "grpo"


def evaluation(wins: int, time: float) -> dict:
    row = {"kind": "eval", "eval_n": 128, "eval_successes": wins, "eval_success": wins / 128}
    return row | {"eval_reward": wins / 128, "time": time}


def write_run(
    run_dir: Path, steps: int = 12, engines: int = 2, turns: int = 40, tensorboard: bool = False
) -> Path:
    """`turns` on each engine in each step, 8 at a time; evaluations before and after; one engine
    fault."""
    draw = random.Random(3)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(
        json.dumps(
            {"name": run_dir.name, "note": "</script><img src=x onerror=alert(1)>"}
            | {k: {"name": v} for k, v in zip(("model", "env", "algorithm"), NAMES, strict=True)}
        )
    )
    metrics = MetricsWriter(run_dir, tensorboard)
    metrics.write(0, evaluation(31, T0))
    names = ["coordinator", "environment-0", "trainer-0", *(f"rollout-{i}" for i in range(engines))]
    ranks = {n: Recorder(run_dir, rank, n.split("-")[0], n) for rank, n in enumerate(names)}
    clock = T0
    for step in range(1, steps + 1):
        clock = _step(ranks, metrics, step, steps, engines, turns, clock, draw)
    if steps > 2:
        detail = "rollout-1 <b>lost</b> its engine: exit code -9; 5 turns rerouted"
        fault = {"kind": "fault", "what": "engine restart", "time": T0 + 9, "detail": detail}
        metrics.write(2, fault)
        metrics.write(steps, evaluation(97, clock))
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
            made = {"tokens": tokens, "version": step - 1, "attempt": 1, "finish": "stop"}
            turn = {"turn": f"{name}.t{number // 16}", "trajectory": name} | made
            ranks[f"rollout-{engine}"].span("turn", begin, lanes[lane], **turn)
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
    phases = {"step": (start, end), "rollout": (start, rolled), "train": (rolled, trained)}
    for name, (begin, until) in (phases | {"sync": (trained, end)}).items():
        boss.span(name, begin, until, step=step)
    success = 0.25 + 0.5 / (1 + math.exp(-8 * (step / steps - 0.5))) + 0.06 * draw.gauss(0, 1)
    success = min(1.0, max(0.0, success))
    row = {"time": end, "success": success, "reward_mean": success - 0.05, "version": step}
    row |= {"response_tokens_mean": 40 - 12 * step / steps, "response_tokens_max": 160}
    row |= {"time_rollout": rolled - start, "time_train": trained - rolled, "time_idle": 0.1}
    row |= {"time_sync": end - trained, "time_step": end - start + 0.2}
    row |= {"tokens_per_s": 300.0 * engines + 20 * draw.random(), "loss": 0.01 * draw.gauss(0, 1)}
    row |= {"clip_fraction": 0.02 * draw.random(), "importance_capped": 0.001 * draw.random()}
    row |= {"staleness_mean": 0.5, "staleness_max": 1, "lr": 1e-4 * (1 - step / (steps + 1))}
    row |= {"grad_norm": 0.5 + 0.2 * draw.random(), "entropy": 1.2 - 0.6 * step / steps}
    row |= {"mismatch_kl": 10 ** draw.uniform(-5, -3.2), "engine_restarts": int(step == 2)}
    row |= {"mismatch_max_ratio": 1 + 0.2 * draw.random(), "invalid_calls": 3, "truncated": 1}
    row |= {"migrations": 2, "returned_turns": 1}
    row |= {"reward_values": [[0.0, 9], [0.5, 2], [1.0, step]]}
    row |= {"turn_values": [[float(n), 1] for n in range(1, 41)]}
    lengths = [int(100 * math.exp(-i / (3 - step / steps))) for i in range(10)]
    row |= {"response_hist": [[16 * (i + 1), count] for i, count in enumerate(lengths)]}
    row |= {f"tokens_per_s/rollout-{i}": 300 + 25 * draw.random() for i in range(engines)}
    metrics.write(step, row)
    return end + 0.2
