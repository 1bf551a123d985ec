"""Compare the trainer's step with a plain transformers loop over the same rows, alternating.

    python scripts/bench_trainer.py [model=smollm2] [groups=4] [members=8] [prompt=192] [own=64]
        [micro_batch_tokens=4096] [plain_tokens=4096] [threads=2] [rounds=5] [lora=16]

A batch has `groups` prompts of `prompt` tokens, each with `members` answers of `own`/2 to `own`
tokens, of random ids. Kinds of steps alternate, in two processes: `plain` (padded rows, the
decoder, logits of the answers' tokens only, AdamW; micro-batches of `plain_tokens`), `rows` and
`trees` (`Trainer.train`, as in a run's trainer rank, without and with prefix trees). `lora=16` adds
`rows lora` and `trees lora`, in another process: adapters of that rank beside every projection of
the frozen model. With `members=2 prompt=1` trees share nothing: they are rows without padding.

Prints the first step; medians and extremes of the other steps; and the speed beside `plain` of the
same round, in wall time and in processor time, which other load lengthens less.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose import protocol as p
from rose.config import Config, read_shape
from rose.coordinator.replay import summarise
from rose.models import resolve
from rose.trainer import batching
from scripts.csv_tables import middle, show
from scripts.harness import Child, answers, configured, keyed
from tests.made import trajectory
from tests.ports import free_port


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return serve(sys.argv[2], json.loads(sys.argv[3]))
    options = keyed(
        sys.argv[1:],
        __doc__,
        **{"model": "smollm2", "groups": 4, "members": 8, "prompt": 192, "own": 64},
        **{"micro_batch_tokens": 4096, "plain_tokens": 4096, "threads": 2, "rounds": 5, "lora": 0},
    )
    # The process that has a kind of step. LoRA has one of its own.
    who = {"plain": "plain", "rows": "trainer", "trees": "trainer"}
    if options["lora"]:
        who |= {"rows lora": "lora", "trees lora": "lora"}
    config = configuration(options)
    resolve(config.model)  # created before two processes need it
    threads = {"OMP_NUM_THREADS": str(options["threads"])}
    ours = threads | config.cluster.mpi.env | config.cluster.env
    environment = {name: threads if name == "plain" else ours for name in who.values()}
    found: list[dict[str, dict]] = []
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder, ExitStack() as stack:
        children = {}
        for name, env in environment.items():
            command = [sys.executable, __file__, "--child", name, json.dumps(options)]
            children[name] = Child(name, command, Path(folder) / f"{name}.log", env)
            stack.callback(children[name].end)
        for child in children.values():
            child.answer()
        for _ in range(options["rounds"] + 1):
            found.append({kind: children[name].ask({"kind": kind}) for kind, name in who.items()})
            print(json.dumps(found[-1]), flush=True)
    first, *later = found
    rows = []
    for kind in who:
        speeds = [one["plain"]["s"] / one[kind]["s"] for one in later]
        row = {"step": kind, "first s": first[kind]["s"]}
        row |= {"passes s": middle([one[kind]["s"] for one in later])}
        row |= {"optimizer s": median(one[kind]["optimizer"] for one in later)}
        row |= {"speed of plain": middle(speeds)}
        rows.append(row | {"cpu": median(o["plain"]["cpu"] / o[kind]["cpu"] for o in later)})
    show(rows, f"medians of {len(later)} rounds")
    return 0


def configuration(options: dict[str, Any], *overrides: str) -> Config:
    rows = options["groups"] * options["members"]
    return configured(
        *(["+experiment=smollm"] if options["model"] == "smollm2" else []),
        f"model.max_context={max(512, options['prompt'] + options['own'])}",
        f"rollout.group_size={options['members']}",
        f"trainer.batch_size={rows}",
        f"trainer.micro_batch_tokens={options['micro_batch_tokens']}",
        f"trainer.threads={options['threads']}",
        *overrides,
    )


def batch(options: dict[str, Any], vocabulary: int) -> list[list[p.Trajectory]]:
    """Return groups of trajectories of random tokens, the same in every process."""
    random = np.random.default_rng(0)
    groups = []
    for g in range(options["groups"]):
        prompt = random.integers(0, vocabulary, options["prompt"])
        groups.append([])
        for m in range(options["members"]):
            own = int(random.integers(options["own"] // 2, options["own"] + 1))
            mask = np.repeat([0, 1], [len(prompt), own])
            tokens = [*prompt, *random.integers(0, vocabulary, own)]
            told = mask.tolist(), mask * -np.log(vocabulary), mask - 1, float(m % 2)
            groups[g].append(trajectory(f"g{g}.{m}", tokens, *told))
    return groups


# ------------------------------------------------------------------ in the children


def serve(name: str, options: dict[str, Any]) -> int:
    lora = "+trainer/lora=linear", f"trainer.lora.rank={options['lora']}"
    say, config = answers(), configuration(options, *(lora if name == "lora" else ()))
    groups = batch(options, read_shape(resolve(config.model)).vocab)
    made = (Plain if name == "plain" else Ours)(config, groups, options)
    say({})
    for line in sys.stdin:
        before = time.process_time()
        seconds, optimizer = made.step(json.loads(line)["kind"].partition(" ")[0])
        say({"s": seconds, "optimizer": optimizer, "cpu": time.process_time() - before})
    return 0


class Plain:
    """A trainer's step with transformers alone, without logits that the loss doesn't need."""

    def __init__(self, config: Config, groups: list[list[p.Trajectory]], options: dict) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(
            str(resolve(config.model)), dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        rows = [t for group in groups for t in group]
        tokens = [p.unpack_tokens(t.tokens) for t in rows]
        packing = batching.Padded([len(row) for row in tokens])
        plan = batching.plan_micro_batches(packing, 1, options["plain_tokens"], 1)[0][0]
        self.batches = [_padded([(tokens[row], rows[row].mask) for row in m]) for m in plan]

    def step(self, kind: str) -> tuple[float, float]:
        import torch

        began = time.perf_counter()
        for tokens, made in self.batches:
            hidden = self.model.model(tokens[:, :-1], use_cache=False).last_hidden_state[made]
            logprobs = self.model.lm_head(hidden).log_softmax(-1)
            logprobs.gather(1, tokens[:, 1:][made][:, None]).mean().backward()
        passed = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return passed - began, time.perf_counter() - passed


def _padded(rows: list[tuple[np.ndarray, bytes]]) -> tuple:
    """Return the padded tokens, (B, T) int64, and the policy's after the first, (B, T - 1) bool."""
    import torch

    masks = [torch.tensor(list(mask), dtype=torch.bool) for _, mask in rows]
    whole = [torch.from_numpy(tokens.astype(np.int64)) for tokens, _ in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(whole, batch_first=True), pad(masks, batch_first=True)[:, 1:]


class Ours:
    """The trainer rank of a world of one."""

    def __init__(self, config: Config, groups: list[list[p.Trajectory]], options: dict) -> None:
        from rose.comm.address import local_place
        from rose.observe.recorder import NullRecorder
        from rose.trainer.trainer import Trainer

        self.trainer = Trainer(
            config, 0, 1, local_place(free_port()), resolve(config.model), NullRecorder()
        )
        rows = [t for group in groups for t in group]
        tokens = [p.unpack_tokens(t.tokens) for t in rows]
        self.summary, self.rows, self.number = summarise(groups, config), dict(enumerate(rows)), 0
        limit, padded = config.trainer.micro_batch_tokens, batching.Padded(list(map(len, tokens)))
        packings = {"rows": padded, "trees": batching.Shared(tokens)}
        plan = batching.plan_micro_batches
        self.plans = {kind: plan(each, 1, limit, 1)[0] for kind, each in packings.items()}
        _, trees = batching.plan_batch(tokens, 1, limit, 1, self.trainer.costs)
        print(f"the coordinator's plan would take {'trees' if trees else 'rows'}", file=sys.stderr)

    def step(self, kind: str) -> tuple[float, float]:
        self.number += 1
        order = p.TrainStep(self.number, self.summary, self.plans[kind], kind == "trees", 1)
        began = time.perf_counter()
        metrics = self.trainer.train(order, self.rows)
        took = time.perf_counter() - began
        optimizer = metrics["seconds_optimizer"]
        return took - optimizer, optimizer


if __name__ == "__main__":
    sys.exit(main())
