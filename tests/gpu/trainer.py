"""The check of the trainer for gpu_check.py: memory and speed of ZeRO-3 on all visible GPUs, and
versions that are its weights.

Each rank is a process. Imports torch and DeepSpeed only within the checks.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scripts.harness import configured
from scripts.run_weights import threads
from tests.gpu.frame import GIB, Report, check, settle
from tests.gpu.model import folder, of_model, shape_of
from tests.made import trajectory
from tests.ports import free_port

JOIN_S = 30.0
# Least share of the dense peak. Recomputed operations don't count.
MFU_ROWS, MFU_TREES = (0.08, 0.04)
# Largest relative difference in gradient norm and entropy between trees and rows, in bfloat16.
LIKE = 0.05
ESTIMATE = (0.4, 1.1)  # allowed range of the peak, as multiples of rose.launch.memory's estimate


class Training(msgspec.Struct):
    dtype: str
    groups: int
    members: int  # rows of a group
    shared: int  # tokens with which all rows of a group begin
    own: int  # tokens after them in each row, by the policy
    micro_batch_tokens: int
    checkpointing: bool
    timed: int  # timed steps of each kind, after one that is not timed


GPU = Training("bfloat16", 8, 8, 1024, 1024, 16384, True, 2)
CPU = Training("bfloat16", 2, 3, 24, 24, 256, True, 1)


def settings(report: Report, world: int, longest: int, batch: int, *overrides: str):
    """Return the configuration of `world` trainer ranks, by conf/trainer/zero3_gpu."""
    gpus = ["cluster=gpus", f"cluster.gpus={world + 1}"] if report.gpus else []
    if report.setup.memory_gib:
        gpus.append(f"cluster.gpu_memory_gib={report.setup.memory_gib:g}")
    words = f"trainer=zero3_gpu trainer.ranks={world} trainer.dtype={report.sizes.dtype} "
    words += f"trainer.batch_size={batch} rollout.group_size={batch} trainer.threads={threads()} "
    words += "trainer.step_timeout_s=120 algorithm.importance_cap=null"
    return configured(*gpus, *words.split(), *of_model(report, longest), *overrides)


def spawn(report: Report, work, world: int, *arguments: Any) -> list[dict]:
    """Run `work(report, rank, world, port, *arguments)` on each rank, in a process each, and return
    the results. Raises `RuntimeError` if a rank dies."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    own = queue, work, report.setup, report.sizes
    places = [(*own, rank, world, port, arguments) for rank in range(world)]
    ranks = [context.Process(target=_rank, args=place) for place in places]
    for process in ranks:
        process.start()
    found: dict[int, dict] = {}
    while len(found) < world:
        while queue.empty():
            codes = {rank: p.exitcode for rank, p in enumerate(ranks) if rank not in found}
            dead = [f"{rank} ended with {code}" for rank, code in codes.items() if code is not None]
            if dead and queue.empty():
                for process in ranks:
                    process.kill()
                raise RuntimeError(f"trainer rank {dead[0]}; its words are in the log")
            time.sleep(0.05)
        rank, kind, told = queue.get()
        if kind == "say":
            report.say(told)
        else:
            found[rank] = told
    for process in ranks:
        process.join(JOIN_S)
    return [found[rank] for rank in range(world)]


def _rank(queue, work, setup, sizes, rank: int, world: int, port: int, arguments: tuple) -> None:
    from rose.processes import die_with_parent

    die_with_parent()
    report = Report(setup, sizes, lambda _: None)

    def say(words: str) -> None:
        if rank == 0:
            queue.put((rank, "say", words))

    report.say = say
    queue.put((rank, "done", work(report, rank, world, port, *arguments)))


# --------------------------------------------------------------------------- trainer


@check(
    "DeepSpeed ZeRO-3 on all GPUs: rows and prefix trees, memory, speed, a version read back",
    "out of memory: --set trainer.micro_batch_tokens=8192; a hang of several ranks: "
    "NCCL_DEBUG=INFO, and rose doctor cluster=gpus",
    {"cuda": GPU, "cpu": CPU},
)
def trainer(report: Report) -> None:
    world = max(1, report.setup.gpus)
    found = spawn(report, _train, world)
    first, shape = found[0], shape_of(report)
    report.figure("ranks", world)
    flops = report.setup.rates[0]
    for kind, floor in (("rows", MFU_ROWS), ("trees", MFU_TREES)):
        seconds = min(
            max(rank[kind]["seconds"][i] for rank in found) for i in range(report.sizes.timed)
        )
        tokens = sum(rank[kind]["tokens"] for rank in found)
        report.figure(f"{kind}: computed tokens", tokens / seconds, "token/s")
        useful = _flops(shape, [rank[kind] for rank in found]) / seconds / world / 1e12
        limit, words = flops and flops / 1e12, "dense bfloat16, recomputation not counted"
        remedy = "is the CPU busy? trainer.micro_batch_tokens larger?"
        name = f"{kind}: useful operations"
        report.share(name, useful, "TFLOP/s a GPU", limit, floor, words, remedy)
        # A norm of NaN fails, too.
        report.figure(f"{kind}: gradient norm", first[kind]["grad_norm"], least=1e-9)
    remedy = "the tree's attention isn't the rows': trainer.share_prefixes=false until it is mended"
    for name in ("grad_norm", "entropy"):
        rows, trees = first["rows"][name], first["trees"][name]
        apart = abs(trees - rows) / max(abs(rows), 1e-12)
        report.figure(f"trees and rows, {name} differs by", apart, most=LIKE, remedy=remedy)
    given = first["given"]
    report.figure("device given back for an engine's turn", given["give_s"], "s")
    report.figure("device taken again", given["take_s"], "s")
    if report.gpus:
        held, kept = given["held_gib"], given["kept_gib"]
        bound = {"most": 0.1 * held, "source": f"of {held:.1f}"}
        remedy = "what keeps it has no room for the engine: rose/trainer/offload.py"
        report.figure("memory kept meanwhile", kept, "GiB", **bound, remedy=remedy)
    apart = abs(given["grad_norm"] / first["trees"]["grad_norm"] - 1)
    remedy = "states were lost on their way to host memory and back: colocate=false"
    report.figure("after that, gradient norm differs by", apart, most=LIKE, remedy=remedy)
    report.figure("tensors published and read back", first["published"], least=1)
    remedy = "a version that is not the trainer's weights: report it with the log"
    report.figure("of them, not the trainer's", first["wrong"], most=0, remedy=remedy)
    if report.gpus:
        peak, estimate = max(rank["peak_gib"] for rank in found), first["estimate_gib"]
        bound = {"least": ESTIMATE[0] * estimate, "most": ESTIMATE[1] * estimate}
        bound |= {"source": f"rose.launch.memory says {estimate:.1f}"}
        remedy = "dry runs rely on this estimate: say what was measured here in an issue"
        report.figure("memory at the peak", peak, "GiB", **bound, remedy=remedy)


def _flops(shape, ranks: list[dict]) -> float:
    """Return the operations of forward and backward passes: 6 per weight and token, 12 per attended
    pair and channel, and the head only for generated tokens."""
    layer = shape.parameters - shape.vocab * shape.hidden * (1 if shape.tied_embeddings else 2)
    head = shape.vocab * shape.hidden
    width = shape.heads * shape.head_dim
    return sum(
        6.0 * (layer * r["tokens"] + head * r["made"]) + 12.0 * shape.layers * width * r["pairs"]
        for r in ranks
    )


def _train(report: Report, rank: int, world: int, port: int) -> dict:
    """Train steps on padded rows and on prefix trees of the same batch, then publish a version."""
    import torch

    from rose.launch import memory

    sizes, batch = report.sizes, Batch(report, rank, world)
    config = batch.config(f"trainer.gradient_checkpointing={str(sizes.checkpointing).lower()}")
    began = time.monotonic()
    made = started(report, config, rank, world, port)
    report.say(f"rank 0 of {world} has its share after {time.monotonic() - began:.1f} s")
    made.publish(0)
    out: dict[str, Any] = {}
    for kind in ("rows", "trees"):
        packing, plan = batch.packed(kind == "trees")
        steps = [batch.train(made, plan, kind == "trees") for _ in range(sizes.timed + 1)]
        out[kind] = {name: steps[0][0][name] for name in ("grad_norm", "entropy")}
        out[kind] |= {"seconds": [took for _, took in steps[1:]], **_work(plan[0], packing, sizes)}
    out["given"] = _in_turn(report, made, lambda: batch.train(made, plan, True)[0])
    out["estimate_gib"] = memory.trainer(config, shape_of(report)).total
    peak = torch.cuda.max_memory_allocated() / GIB if report.gpus else 0.0
    out["peak_gib"] = memory.RUNTIME_GIB + peak
    made.publish(1)
    out["published"], out["wrong"] = _read_back(made, report.folder / "trained", rank)
    made.close()
    return out


def _in_turn(report: Report, made, train) -> dict[str, float]:
    """Release the device's memory as for an engine and reclaim it, then train another step."""
    import torch

    made.share_device(report.folder)
    out, began = {}, time.monotonic()
    out["held_gib"] = torch.cuda.memory_allocated() / GIB if report.gpus else 0.0
    made.give_device_back()
    out["kept_gib"] = torch.cuda.memory_allocated() / GIB if report.gpus else 0.0
    given = time.monotonic()
    made.take_device()
    out |= {"give_s": given - began, "take_s": time.monotonic() - given}
    return out | {"grad_norm": train()["grad_norm"]}


def _work(micro_batches: list[list[int]], packing, sizes: Training) -> dict[str, float]:
    """Return what a rank computes: tokens, those among them by the policy, attended pairs."""
    from rose.trainer.batching import Padded, size_of

    tokens = sum(size_of(m, packing) for m in micro_batches)
    rows = sum(len(m) for m in micro_batches)
    length = sizes.shared + sizes.own
    if isinstance(packing, Padded):
        pairs = rows * length**2 / 2
    # A row's own part attends to itself and the shared part, whose own pairs count once per tree.
    else:
        pairs = (
            rows * (sizes.own**2 / 2 + sizes.own * sizes.shared)
            + (tokens - rows * sizes.own) * sizes.shared / 2
        )
    return {"tokens": tokens, "made": rows * sizes.own, "pairs": pairs}


class Batch:
    """Random rows for a rank of `world`, and the steps that train on all of them."""

    def __init__(self, report: Report, rank: int, world: int) -> None:
        from rose import protocol

        self._report, self._rank, self._world = report, rank, world
        self.rows = random_rows(report.sizes, shape_of(report).vocab)
        rows = self.rows.values()
        self._tokens = [protocol.unpack_tokens(t.tokens) for t in rows]
        told = [t.reward for t in rows], [int(t.group[1:]) for t in rows]
        responses = [t.response_tokens for t in rows]
        self._summary = protocol.BatchSummary(*told, responses, [False] * len(rows))
        self._number = 0

    def config(self, *overrides: str):
        """Return the configuration of a trainer of such batches."""
        sizes = self._report.sizes
        limit = f"trainer.micro_batch_tokens={sizes.micro_batch_tokens}"
        longest = sizes.shared + sizes.own
        return settings(self._report, self._world, longest, len(self.rows), limit, *overrides)

    def packed(self, trees: bool = False) -> tuple[Any, list]:
        """Return the batch as prefix trees or as padded rows, and the rank's micro-batches."""
        from rose.trainer.batching import Padded, Shared, plan_micro_batches

        packing = Shared(self._tokens) if trees else Padded([len(t) for t in self._tokens])
        most = self._report.sizes.micro_batch_tokens
        return packing, plan_micro_batches(packing, self._world, most, 1)[self._rank]

    def train(self, made, plan: list, trees: bool = False) -> tuple[dict[str, float], float]:
        """Train the next step on these micro-batches. Return its metrics and its seconds."""
        from rose import protocol

        self._number += 1
        mine = {row: self.rows[row] for micro in plan[0] for row in micro}
        step = protocol.TrainStep(self._number, self._summary, plan, trees, 1)
        began = time.monotonic()
        metrics = made.train(step, mine)
        settle(made.device)
        took = time.monotonic() - began
        kind = "trees" if trees else "rows"
        self._report.say(f"{kind}: step {self._number} took {took:.3f} s")
        return metrics, took


def random_rows(sizes: Training, vocabulary: int) -> dict[int, Any]:
    """Return rows of random tokens. A group's rows begin alike; every other one has a reward."""
    dice, rows = np.random.default_rng(0), {}
    for group in range(sizes.groups):
        begin = dice.integers(0, vocabulary, sizes.shared)
        for member in range(sizes.members):
            tokens = np.concatenate([begin, dice.integers(0, vocabulary, sizes.own)])
            mask = np.repeat([0, 1], [sizes.shared, sizes.own])
            told = mask.tolist(), -np.log(vocabulary) * mask, mask - 1, float(member % 2)
            rows[len(rows)] = trajectory(f"g{group}.{member}", tokens, *told)
    return rows


def started(report: Report, config, rank: int, world: int, port: int):
    """Return the rank's `Trainer` with an open store."""
    from rose.engine import layout

    made, shape = joined(report, config, rank, world, port), shape_of(report)
    made.open_store(
        report.folder / "trained", lambda name, extent: layout.cuts(name, extent, shape, [1, 2])
    )
    return made


def joined(report: Report, config, rank: int, world: int, port: int):
    """Return the rank's `Trainer`, which can't publish."""
    from rose.comm.address import local_place
    from rose.observe.recorder import NullRecorder
    from rose.trainer.trainer import Trainer

    return Trainer(config, rank, world, local_place(port), folder(report), NullRecorder())


def _read_back(made, store: Path, rank: int) -> tuple[int, int]:
    """Return the number of tensors of the newest version, and how many of them differ from the
    float32 weights that DeepSpeed gathers, rounded. All ranks call it; rank 0 compares."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    from rose.transfer.receive import materialise

    found = materialise(store, 1) if rank == 0 else {}
    wrong = 0
    for name, parameter in made.engine.policy.named_weights():
        full = safe_get_full_fp32_param(parameter)
        if rank == 0:
            ours = found[name]
            wrong += not torch.equal(ours, full.reshape(ours.shape).to(ours.dtype).cpu())
    return len(found), wrong
