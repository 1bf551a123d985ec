"""A tiny random model, random trajectories, and a run of the real Trainer (rank.py) in processes of
its own."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import time
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import numpy as np
from msgspec.structs import replace

from rose import protocol as p
from rose.trainer import segments
from rose.trainer.batching import Padded, Shared, plan_micro_batches
from tests.made import trajectory
from tests.ports import free_port

VOCABULARY = 97
DEADLINE_S = 600
LENGTHS = [40, 12, 33, 7, 25, 25, 18, 9]
SILENT = 3  # the row of this batch in which the policy made no token
SETTINGS = (
    "algorithm.args.scale_by_std=false algorithm.importance_cap=1.1 trainer.optimizer.eps=1e-3 "
    "trainer.optimizer.lr=0.01 trainer.optimizer.schedule=constant "
    "trainer.optimizer.warmup_steps=2 trainer.optimizer.weight_decay=0.1 trainer.threads=1 "
    "deterministic=true rollout.workers=1 trainer.optimizer.grad_clip=0.05 "
    "trainer.step_timeout_s=200"
).split()

BFLOAT16 = ["trainer.dtype=bfloat16", "model.dtype=bfloat16", "deterministic=false"]


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
SIZES |= {"max_position_embeddings": 256, "initializer_range": 0.2}


def random_model(family: str, **sizes):
    """Return a model of transformers, the same one for the same sizes."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def save_model(folder: Path, tied: bool = True, kv_heads: int = 2) -> Path:
    sizes = SIZES | {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    random_model("Qwen3", **sizes).save_pretrained(folder)
    return folder


def make_batch(seed: int, lengths: list[int] = LENGTHS):
    """(trajectories by row, summary): two groups of four that begin alike, of one to three turns;
    behaviour near uniform, so off-policy as can be."""
    random = np.random.default_rng(seed)
    rows = {}
    begin = random.integers(0, VOCABULARY, 6)
    for row, length in enumerate(lengths):
        mask = (random.random(length) < 0.6 if row != SILENT else np.zeros(length)).astype(np.uint8)
        mask[0] = 0
        turns = 1 + row % 3
        made = [len(part) for part in np.array_split(np.flatnonzero(mask), turns)]
        rows[row] = trajectory(
            f"g{row // 4}.{row % 4}",
            [*begin[: 6 - row // 4], *random.integers(0, VOCABULARY, length)][:length],
            mask.tolist(),
            mask * random.uniform(-5, -4, length),
            np.where(mask, 0, -1),
            float(random.integers(0, 2)),
            turns=turns,
            turn_tokens=list(enumerate(made)),
            turn_rewards=[float((row + seed + turn) % 4) / 2 for turn in range(turns)],
        )
    rewards = [float(row % 3) for row in rows]
    summary = p.BatchSummary(
        rewards,
        [row // 4 for row in rows],
        [t.response_tokens for t in rows.values()],
        [False] * len(rows),
        [t.turn_rewards for t in rows.values()],
    )
    return rows, summary


def with_experts(rows, layers: int = 2, top_k: int = 2, experts: int = 8):
    """As an engine with quite other routers would have recorded them, for all tokens but the
    last."""
    random = np.random.default_rng(0)
    found = {}
    for row, t in rows.items():
        chosen = random.random((len(t.mask) - 1, layers, experts)).argsort(-1)[..., :top_k]
        found[row] = replace(t, experts=chosen.astype(np.uint8).tobytes())
    return found


def plan(seed: int, rows, ranks: int, limit: int, updates: int, part: bool = False):
    """(plan of a batch's micro-batches, whether they are prefix trees: every other seed's are)."""
    trees = seed % 2 == 0
    tokens = [p.unpack_tokens(t.tokens) for t in rows.values()]
    packing = Shared(tokens) if trees else Padded([len(row) for row in tokens])
    return plan_micro_batches(packing, ranks, limit, updates, part), trees


FORKS = {0: 1, 2: 1, 6: 4, 7: 5}  # row of `make_forked` -> whose first turn it has, too
LATE_FORKS = {6: 4, 7: 5}  # the same of the second group alone
SHARES = [1 / 3, 1 / 3, 1 / 3, 1.0, 0.5, 0.5, 0.5, 0.5]  # of each row in its tree


def make_forked(seed: int, forks: dict[int, int] = FORKS):
    """`make_batch`, whose trajectories fork off each other behind the first turn."""
    rows, summary = make_batch(seed)
    for row, other in forks.items():
        t, of = rows[row], rows[other]
        made = of.turn_tokens[0][1]
        end = int(np.flatnonzero(np.frombuffer(of.mask, np.uint8))[made - 1]) + 1
        rows[row] = replace(
            t,
            tokens=of.tokens[: 4 * end] + t.tokens,
            mask=of.mask[:end] + t.mask,
            logprobs=of.logprobs[: 4 * end] + t.logprobs,
            versions=of.versions[: 4 * end] + t.versions,
            turns=t.turns + 1,
            response_tokens=made + t.response_tokens,
            turn_tokens=[(0, made), *((turn + 1, n) for turn, n in t.turn_tokens)],
            turn_rewards=[],
            inherited=[(of.id, 1)],
        )
    return rows, replace(
        summary,
        response_tokens=[t.response_tokens for t in rows.values()],
        turn_rewards=[],
        segments=segments.find(list(rows.values())),
    )


def stream_rounds(seed: int, kind: str, rounds: list[list[int]], ranks: int, limit: int):
    """For each round, (each rank's `TrainStep`, the rows of all). `kind`: "pairs" is a batch of
    four groups of two, the first cut off, the others "forked" or "late": `LATE_FORKS`."""
    if kind == "pairs":
        rows, whole = make_batch(seed)
        pairs, cut = [row // 2 for row in rows], [row < 2 for row in rows]
        whole = replace(whole, groups=pairs, truncated=cut)
    else:
        rows, whole = make_forked(seed, FORKS if kind == "forked" else LATE_FORKS)
    found = []
    for number, new in enumerate(rounds):
        end = new[-1] + 1
        fields = ("rewards", "groups", "response_tokens", "truncated", "turn_rewards")
        forks = segments.find(list(rows.values())[:end]) if kind != "pairs" else []
        summary = p.BatchSummary(*(getattr(whole, field)[:end] for field in fields), forks)
        known = segments.samples([rows[row] for row in range(end)], summary.segments)
        samples = {row: sample for row, (sample, _) in enumerate(known) if row in new}
        everyone, trees = plan(seed, samples, ranks, limit, 1, part=True)
        more, steps = number < len(rounds) - 1, []
        for mine in everyone:
            chosen = [[[new[row] for row in micro] for micro in update] for update in mine]
            steps.append(p.TrainStep(seed, summary, chosen, trees, 1, [], more))
        found.append((steps, samples))
    return found


def in_halves(t):
    """The trajectory as two branches with the same tokens, each of which trains half of them."""
    half = len(t.mask) // 2
    of_tokens = np.full(len(t.mask), -1)
    of_tokens[np.frombuffer(t.mask, np.uint8) == 1] = np.repeat(*np.transpose(t.turn_tokens))

    def branch(kept: slice):
        mask = np.zeros(len(t.mask), np.uint8)
        mask[kept] = np.frombuffer(t.mask, np.uint8)[kept]
        logprobs = np.where(mask, p.unpack_floats(t.logprobs), 0)
        versions = np.where(mask, p.unpack_tokens(t.versions), -1)
        turns = of_tokens[kept][of_tokens[kept] >= 0].tolist()
        counts = [(turn, turns.count(turn)) for turn in sorted(set(turns))]
        floats, ids = p.pack_floats(logprobs), p.pack_tokens(versions)
        return p.Branch(t.tokens, mask.tobytes(), floats, ids, counts)

    first, second = branch(slice(0, half)), branch(slice(half, None))
    kept = {k: getattr(first, k) for k in ("mask", "logprobs", "versions", "turn_tokens")}
    return replace(t, branches=[second], **kept)


def world_of(job: dict, folder: Path, ranks: int, run=None) -> tuple[list, list[Path]]:
    """(`ranks` processes to be started, the files of their words)."""
    job = job | {"ranks": ranks, "port": free_port(), "folder": str(folder)}
    if "tree" not in job:
        job["tree"] = tree(job)  # no rank needs Hydra and pytest
    words = [folder / f"{job['name']}-{rank}.log" for rank in range(ranks)]
    ordered = [(run, job, rank, file) for rank, file in enumerate(words)]
    return [server().Process(target=run_rank, args=args) for args in ordered], words


def run_world(job: dict, folder: Path, ranks: int, run=None) -> list[dict]:
    """Runs `job` on `ranks` processes, each as `run(job, rank)`; what each reports. Fails with their
    words if one fails or hangs."""
    processes, words = world_of(job, folder, ranks, run)
    deadline_s = job.get("deadline_s", DEADLINE_S)
    end = time.monotonic() + deadline_s
    with ended(processes):
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    failed = [
        f"rank {rank}: exit code {code} (None: not within {deadline_s} s)\n{text.read_text()[-4000:]}"
        for rank, (code, text) in enumerate(zip(codes, words, strict=True))
        if code != 0
    ]
    assert not failed, "\n".join(failed)
    return [json.loads(text.with_suffix(".json").read_text()) for text in words]


@contextmanager
def ended(processes):
    """Starts the processes, and ends those that are left."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None:  # the world has been started
                process.kill()
                process.join()


@functools.cache
def server():
    """Processes are forked from one that has imported DeepSpeed, which takes each rank ten seconds
    otherwise."""
    context = multiprocessing.get_context("forkserver")
    # Numba's loops, which a trainer loads when it opens its store; `imported` is the last.
    ours = ["rose.trainer.trainer", "rose.transfer.rice", "tests.trainer.imported"]
    context.set_forkserver_preload(["tests.trainer.rank", "deepspeed", "transformers", *ours])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read when torch is loaded
        forkserver.ensure_running()
    return context


def run_rank(run, job: dict, rank: int, words: Path) -> None:
    with open(words, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if run is None:
        from tests.trainer.rank import Rank as run
    run(job, rank)


def report(job: dict, rank: int, found: dict) -> None:
    (Path(job["folder"]) / f"{job['name']}-{rank}.json").write_text(json.dumps(found))


def tree(job: dict) -> dict:
    from tests.conftest import compose_tree

    return compose_tree(*SETTINGS, *job["settings"], f"trainer.ranks={job['ranks']}")


def settings(job: dict):
    from rose import config

    return config.from_dict(job["tree"] if "tree" in job else tree(job))
