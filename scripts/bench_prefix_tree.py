"""What prefix trees save: one batch of saved trajectories, forward and backward, as padded rows and
as trees.

    python scripts/bench_prefix_tree.py RUN [--step 1] [--micro-batch-tokens N] [--rounds 3]

RUN is a run's folder (outputs/smollm). Printed: seconds and computed tokens of both, in turn
`--rounds` times, their ratio, the largest difference of a gradient relative to its tensor's largest
element, and which of the two the coordinator's plan takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from harness import cfg

from rose.coordinator import replay
from rose.models import resolve
from rose.protocol import Trajectory, unpack_tokens
from rose.trainer import batching, model
from rose.trainer.collate import MicroBatch, collate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="default: the run's trainer.micro_batch_tokens"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = cfg.load(args.run / "config.json")
    torch.set_num_threads(config.trainer.threads or torch.get_num_threads())
    policy = model.load(
        resolve(config.model), torch.float32, config.trainer.gradient_checkpointing
    ).train()
    policy.use_stretches()
    trajectories = [t for group in replay.load(args.run, args.step) for t in group]
    rows = [unpack_tokens(t.tokens) for t in trajectories]
    limit = args.micro_batch_tokens or config.trainer.micro_batch_tokens
    plans = {
        "rows": batching.plan_micro_batches(
            batching.Padded([len(row) for row in rows]), 1, limit, 1
        )[0][0],
        "trees": batching.plan_micro_batches(batching.Shared(rows), 1, limit, 1)[0][0],
    }
    batches = {
        name: [make(group, trajectories, policy.vocabulary, name == "trees") for group in plan]
        for name, plan in plans.items()
    }
    seconds: dict[str, list[float]] = {"rows": [], "trees": []}
    gradients = {}
    for _ in range(args.rounds):
        for name in seconds:
            began = time.perf_counter()
            gradients[name] = gradient(policy, batches[name])
            seconds[name].append(time.perf_counter() - began)
    difference = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(gradients["trees"], gradients["rows"], strict=False)
    )
    for name, made in batches.items():
        tokens = sum(
            batch.inputs.numel() if batch.tree is None else len(batch.tree.tokens) for batch in made
        )
        print(
            f"{name:6} {statistics.median(seconds[name]):8.2f} s {tokens:8} tokens in {len(made)} "
            "micro-batches"
        )
    ratios = [tree / row for tree, row in zip(seconds["trees"], seconds["rows"], strict=False)]
    costs = batching.flops(config.model.shape, sparse=True)
    taken = batching.plan_batch(rows, 1, limit, 1, costs)[1]
    print(
        f"trees / rows: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
        "gradients differ by "
        f"{difference:.1e}; the plan takes {'trees' if taken else 'rows'}"
    )
    return 0


def make(
    group: list[int], trajectories: list[Trajectory], vocabulary: int, trees: bool
) -> MicroBatch:
    return collate(group, dict(enumerate(trajectories)), vocabulary, trees)


def gradient(policy: model.Policy, batches: list[MicroBatch]) -> list[torch.Tensor]:
    """Of the sum of the log-probabilities of the policy's own tokens."""
    policy.zero_grad()
    for batch in batches:
        policy(batch.inputs, batch.targets, batch.mask, batch.tree)[0].sum().backward()
    return [parameter.grad.clone() for parameter in policy.parameters()]


if __name__ == "__main__":
    sys.exit(main())
