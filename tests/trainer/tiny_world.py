"""A tiny random model, random trajectories, and a run of the real Trainer in processes of its
own."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import nullcontext
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import numpy as np

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


def save_model(folder: Path, tied: bool = True, kv_heads: int = 2) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "vocab_size": VOCABULARY}
    sizes |= {"max_position_embeddings": 256, "initializer_range": 0.2}
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=tied)).save_pretrained(folder)
    return folder


def make_batch(seed: int, lengths: list[int] = LENGTHS):
    """(trajectories by row, summary): two groups of four that begin alike, of one to three turns;
    behaviour near uniform, so off-policy as can be."""
    from rose import protocol as p
    from tests.made import trajectory

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
    import msgspec

    random = np.random.default_rng(0)
    found = {}
    for row, t in rows.items():
        chosen = random.random((len(t.mask) - 1, layers, experts)).argsort(-1)[..., :top_k]
        found[row] = msgspec.structs.replace(t, experts=chosen.astype(np.uint8).tobytes())
    return found


def plan(seed: int, rows, ranks: int, limit: int, updates: int, part: bool = False):
    """(plan of a batch's micro-batches, whether they are prefix trees: every other seed's are)."""
    from rose.protocol import unpack_tokens
    from rose.trainer.batching import Padded, Shared, plan_micro_batches

    trees = seed % 2 == 0
    tokens = [unpack_tokens(t.tokens) for t in rows.values()]
    packing = Shared(tokens) if trees else Padded([len(row) for row in tokens])
    return plan_micro_batches(packing, ranks, limit, updates, part), trees


FORKS = {0: 1, 2: 1, 6: 4, 7: 5}  # row of `make_forked` -> whose first turn it has, too
LATE_FORKS = {6: 4, 7: 5}  # the same of the second group alone
SHARES = [1 / 3, 1 / 3, 1 / 3, 1.0, 0.5, 0.5, 0.5, 0.5]  # of each row in its tree


def make_forked(seed: int, forks: dict[int, int] = FORKS):
    """`make_batch`, whose trajectories fork off each other behind the first turn."""
    import msgspec

    from rose.trainer import segments

    rows, summary = make_batch(seed)
    for row, other in forks.items():
        t, of = rows[row], rows[other]
        made = of.turn_tokens[0][1]
        end = int(np.flatnonzero(np.frombuffer(of.mask, np.uint8))[made - 1]) + 1
        rows[row] = msgspec.structs.replace(
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
    return rows, msgspec.structs.replace(
        summary,
        response_tokens=[t.response_tokens for t in rows.values()],
        turn_rewards=[],
        segments=segments.find(list(rows.values())),
    )


def stream_rounds(seed: int, kind: str, rounds: list[list[int]], ranks: int, limit: int):
    """For each round, (each rank's `TrainStep`, the rows of all). `kind`: "pairs" is a batch of
    four groups of two, the first cut off, the others "forked" or "late": `LATE_FORKS`."""
    import msgspec

    from rose import protocol as p
    from rose.trainer import segments

    if kind == "pairs":
        rows, whole = make_batch(seed)
        pairs, cut = [row // 2 for row in rows], [row < 2 for row in rows]
        whole = msgspec.structs.replace(whole, groups=pairs, truncated=cut)
    else:
        rows, whole = make_forked(seed, FORKS if kind == "forked" else LATE_FORKS)
    found = []
    for number, new in enumerate(rounds):
        end = new[-1] + 1
        summary = p.BatchSummary(
            *(
                getattr(whole, field)[:end]
                for field in ("rewards", "groups", "response_tokens", "truncated", "turn_rewards")
            ),
            segments.find(list(rows.values())[:end]) if kind != "pairs" else [],
        )
        known = segments.samples([rows[row] for row in range(end)], summary.segments)
        samples = {row: sample for row, (sample, _) in enumerate(known) if row in new}
        everyone, trees = plan(seed, samples, ranks, limit, 1, part=True)
        mine = [
            [[[new[row] for row in micro] for micro in update] for update in each]
            for each in everyone
        ]
        more = number < len(rounds) - 1
        steps = [p.TrainStep(seed, summary, each, trees, 1, [], more) for each in mine]
        found.append((steps, samples))
    return found


def weights(trainer) -> dict:
    from deepspeed.utils import safe_get_full_fp32_param

    zero = trainer.engine.settings.zero_stage
    return {
        name: (safe_get_full_fp32_param(p) if zero else p).detach().clone().float().numpy()
        for name, p in trainer.engine.policy.named_weights()
    }


def states(trainer) -> dict:
    """Float32 weights and Adam's two moments, whole, under ZeRO."""
    from deepspeed.utils import safe_get_full_optimizer_state

    zero = trainer.engine.engine.optimizer
    if trainer.engine.settings.zero_stage < 3:
        zero._lazy_init_hp_params_optimizer_state()
    return weights(trainer) | {
        f"{name} {moment}": safe_get_full_optimizer_state(p, moment).numpy()
        for name, p in trainer.engine.policy.named_weights()
        for moment in ("exp_avg", "exp_avg_sq")
    }


def watch_gradients(trainer, found: list) -> None:
    """Each update's whole gradient, as it is applied but for clipping: parameter -> array."""
    from deepspeed.utils import safe_get_full_grad

    update, zero = trainer.engine._update, trainer.engine.settings.zero_stage

    def watched(stepped):
        scale = trainer.engine.engine.optimizer.loss_scale if zero else 1.0
        gradient = {
            name: ((safe_get_full_grad(p) if zero else p.grad) / scale).float().numpy()
            for name, p in trainer.engine.policy.named_weights()
        }
        found.append(gradient)
        return update(stepped)

    trainer.engine._update = watched


def in_halves(t):
    """The trajectory as two branches with the same tokens, each of which trains half of them."""
    import msgspec

    from rose import protocol as p

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
    return msgspec.structs.replace(t, branches=[second], **kept)


def world_of(job: dict, folder: Path, ranks: int) -> tuple[list, list[Path]]:
    """(`ranks` processes to be started, the files of their words)."""
    job = job | {"ranks": ranks, "port": free_port(), "folder": str(folder)}
    job |= {"tree": tree(job)}  # so that no rank needs Hydra and pytest
    words = [folder / f"{job['name']}-{rank}.log" for rank in range(ranks)]
    return [
        server().Process(target=run_rank, args=(job, rank, file)) for rank, file in enumerate(words)
    ], words


def run_world(job: dict, folder: Path, ranks: int) -> list[dict]:
    """Runs `job` on `ranks` processes; what each reports. Fails with their words if one fails or
    hangs."""
    processes, words = world_of(job, folder, ranks)
    deadline_s = job.get("deadline_s", DEADLINE_S)
    end = time.monotonic() + deadline_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:  # it has been started
                process.kill()
                process.join()
    failed = [
        f"rank {rank}: exit code {code} (None: not within {deadline_s} s)\n{text.read_text()[-4000:]}"
        for rank, (code, text) in enumerate(zip(codes, words, strict=True))
        if code != 0
    ]
    assert not failed, "\n".join(failed)
    return [
        json.loads((folder / f"{job['name']}-{rank}.json").read_text()) for rank in range(ranks)
    ]


@functools.cache
def server():
    """Processes are forked from one that has imported DeepSpeed, which takes each rank ten seconds
    otherwise."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tests.trainer.tiny_world",
            "deepspeed",
            "transformers",
            "rose.trainer.trainer",
            "rose.transfer.rice",  # numba's loops, which a trainer loads when it opens its store
            "tests.trainer.imported",  # the last
        ]
    )
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read when torch is loaded
        forkserver.ensure_running()
    return context


def run_rank(job: dict, rank: int, words: Path) -> None:
    with open(words, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(job, rank)


def limits_s() -> list[float]:
    """Seconds that a collective of each process group may take."""
    import torch

    groups = torch.distributed.distributed_c10d._world.pg_map
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    ]


def watch_merging(found: list[int]) -> None:
    """Bytes of values that transformers makes of a folder's tensors as it reads a model under
    ZeRO-3."""
    from transformers.integrations import deepspeed

    convert = deepspeed._apply_weight_conversions_to_state_dict

    def watched(model, stored, how):
        given = set(map(id, stored.values()))
        made = convert(model, dict(stored), how)
        found.extend(t.nbytes for t in made.values() if id(t) not in given and not t.is_meta)
        return made

    deepspeed._apply_weight_conversions_to_state_dict = watched


def tree(job: dict) -> dict:
    from tests.conftest import compose_tree

    return compose_tree(*SETTINGS, *job["settings"], f"trainer.ranks={job['ranks']}")


def settings(job: dict):
    from rose import config

    return config.from_dict(job["tree"] if "tree" in job else tree(job))


def watch_second_copies(trainer, found: list[int]) -> None:
    """Bytes of this rank's second copy of the weights (trainer.hpz) before each update."""
    update = trainer.engine._update

    def watched(stepped):
        parts = (
            getattr(p, "ds_secondary_tensor", None) for p in trainer.engine.policy.parameters()
        )
        found.append(sum(part.nbytes for part in parts if part is not None))
        return update(stepped)

    trainer.engine._update = watched


# of DeepSpeed's, in elements: else ZeRO-3 gathers all of the tiny model and keeps it
LARGE = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 20_000}
LARGE |= {"stage3_prefetch_bucket_size": 10_000}


def keep_gathered(below: int, more: dict[str, int]) -> None:
    """Parameters of fewer elements are those that ZeRO-3 keeps from one pass to the next; `more` of
    its settings."""
    from rose.trainer import deepspeed_engine

    make = deepspeed_engine.zero_config

    def made(*args):
        config = make(*args)
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": below} | more
        return config

    deepspeed_engine.zero_config = made


def compilations() -> int:
    """Functions that torch has compiled in this process, each form once."""
    import torch._dynamo

    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def forms(trainer) -> list[int]:
    """How many forms of a layer's code, and of the head's, torch has compiled in this process."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    policy = trainer.engine.policy
    functions = (type(policy.hf.base_model.layers[0]).forward, type(policy.head)._chunk)
    return [len(_debug_get_cache_entry_list(function.__code__)) for function in functions]


def checkpoint_layers(trainer, whether: bool) -> None:
    """From now on the policy's layers keep their inputs alone for the backward pass, or all."""
    hf = trainer.engine.policy.hf
    if whether:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        hf.disable_input_require_grads()  # made by that, too, behind rose/trainer/kernels.py's
    else:
        hf.gradient_checkpointing_disable()


def stop_in_backward(trainer) -> None:
    """This process stops before its next backward pass, which the others go through."""
    backward = trainer.engine.backward

    def stopped(loss):
        os.kill(os.getpid(), signal.SIGSTOP)
        backward(loss)

    trainer.engine.backward = stopped


def watched(trainer, folder: Path, rank: int, beat_s: float):
    """What a rank of a run says of its progress, in `folder`."""
    from rose.launch import rank_status
    from rose.protocol import Role
    from rose.trainer.watch import Watch

    who = {"rank": rank, "role": Role.TRAINER, "index": rank, "host": "here"}
    who |= {"pid": os.getpid(), "guard_pid": os.getppid()}
    rank_status.write(folder, 1, rank_status.RankStatus(**who, state="running"))
    report = functools.partial(rank_status.mark_begun, folder, 1, rank, beat_s=beat_s)
    return Watch(beat_s, trainer.progress, report)


def publish_beside(trainer, store: Path, cuts):
    """A publisher of the same weights that keeps a copy of the last version."""
    publisher = trainer._publisher
    with mock.patch.object(type(trainer.config), "compares_updates", False):
        trainer.open_store(store, cuts)
    trainer._publisher, publisher = publisher, trainer._publisher
    assert publisher._updates is None
    return publisher


def save(trainer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    assert trainer.engine.writer.wait(120), "the checkpoint is still being written"
    trainer._peers.barrier()  # the others' files are needed to load it


def main(job: dict, rank: int) -> None:
    """Each action of the job in turn: ["train", seed, limit, updates, reward_scale, version to
    publish or nothing], ["split", seed, limit]: the same with each trajectory in two branches,
    ["forked", seed, limit]: the same with those of `make_forked`, what they share trained once,
    ["publish", version], ["publish", version, "away"]: old versions are tidied while the device is
    given back, ["save", folder], ["load", folder], ["states", file], ["turn"]: the device
    is given back and taken again, ["watch", beat_s]: as in a run, ["stop", rank]: that one stops in
    the next step. ["checkpointing", whether layers are computed again in the backward pass].
    ["rounds", algorithm, args, arguments of `stream_rounds` before `ranks`, limit,
    gradient]: a step in rounds, its gradient in a file, a checkpoint between rounds."""
    import deepspeed
    import msgspec

    from rose import protocol as p
    from rose.comm.address import local_place
    from rose.config import read_shape
    from rose.engine import layout
    from rose.observe.recorder import NullRecorder
    from rose.trainer import segments
    from rose.trainer.algorithms import build
    from rose.trainer.step import TrainingDiverged
    from rose.trainer.trainer import Trainer

    folder = Path(job["folder"])
    merged: list[int] = []
    watch_merging(merged)
    if "compiled_in" in job:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = job["compiled_in"]
    if "keeps_below" in job:
        keep_gathered(job["keeps_below"], LARGE if job.get("as_large") else {})
    place, model = local_place(job["port"]), folder / "model"
    trainer = Trainer(settings(job), rank, job["ranks"], place, model, NullRecorder())
    shape = read_shape(folder / "model")
    degrees = job.get("degrees", [1, 2])

    def cuts(name: str, extent: tuple[int, ...]):
        return layout.cuts(name, extent, shape, degrees)

    trainer.open_store(folder / job["name"], cuts)
    beside = publish_beside(trainer, folder / "copied", cuts) if job.get("beside") else None
    report: dict = {
        "compares": trainer._updates is not None,
        "parameters": trainer.engine.parameters,
        "models": len(trainer.engine.models()),
        "metrics": [],
        "errors": [],
        "limits_s": limits_s(),
        "merged": sum(merged),
    }
    watch_second_copies(trainer, report.setdefault("second", []))
    gradients: list[dict] = []
    if job.get("gradients"):
        watch_gradients(trainer, gradients)
    compiled = report.setdefault("compiled", [compilations()])
    parts = trainer.config.trainer.sequence_parallel
    replicas, replica = job["ranks"] // parts, rank // parts
    watch = nullcontext
    for number, (action, *args) in enumerate(job["actions"]):
        if action == "train":
            seed, limit, updates, reward_scale, *publish_as = args
            rows, summary = make_batch(seed, job.get("lengths", LENGTHS))
            rows = with_experts(rows) if job.get("experts") else rows
            scaled = [r * float(reward_scale) for r in summary.rewards]
            summary = msgspec.structs.replace(summary, rewards=scaled)
            everyone, trees = plan(seed, rows, replicas, limit, updates)
            mine = {
                row: rows[row] for update in everyone[replica] for micro in update for row in micro
            }
            step = p.TrainStep(number, summary, everyone[replica], trees, 1)
            try:
                with watch():
                    report["metrics"].append(trainer.train(step, mine, *publish_as))
            except TrainingDiverged as error:
                report["errors"].append(str(error))
            compiled.append(compilations())
        elif action in ("split", "forked"):
            seed, limit = args
            whole, summary = make_batch(seed) if action == "split" else make_forked(seed)
            halves = [in_halves(t) if action == "split" else t for t in whole.values()]
            split = segments.samples(halves, summary.segments)
            rows = {row: sample for row, (sample, _) in enumerate(split)}
            everyone, trees = plan(seed, rows, replicas, limit, 1)
            owners = [owner for _, owner in split]
            step = p.TrainStep(number, summary, everyone[replica], trees, 1, owners)
            report["metrics"].append(trainer.train(step, rows))
        elif action == "rounds":
            name, arguments, seed, kind, rounds, limit, kept = args
            trainer.algorithm = build(name, arguments)
            gradients: list = []
            watch_gradients(trainer, gradients)
            *first, last = stream_rounds(seed, kind, rounds, replicas, limit)
            for steps, rows in first:
                trainer.train_ahead(steps[replica], rows)
                if kept.startswith("saves"):
                    save(trainer, folder / "between")
            report["metrics"].append(trainer.train(last[0][replica], last[1]))
            del trainer.engine._update
            gradients[0] |= {f"{n} after": w for n, w in weights(trainer).items()}
            np.savez(folder / f"{kept}-{rank}.npz", **gradients[0])
        elif action == "publish":
            version, *away = args
            trainer.publish(version)
            if away:
                trainer.share_device(folder)
                trainer.give_device_back()
            trainer.tidy()
            if away:
                trainer.take_device()
            if beside is not None:
                beside.publish(version)
                beside.tidy()
        elif action == "watch":
            watch = watched(trainer, folder, rank, args[0]).step
        elif action == "stop":
            if rank == args[0]:
                stop_in_backward(trainer)
        elif action == "turn":
            trainer.share_device(folder)
            trainer.give_device_back()
            report.setdefault("gone", []).append(trainer._offload.nbytes)
            trainer.take_device()
        elif action == "save":
            save(trainer, folder / (args[0] if args else "checkpoint"))
        elif action == "states":
            np.savez(folder / f"{args[0]}-{rank}.npz", **states(trainer))
        elif action == "checkpointing":
            checkpoint_layers(trainer, args[0])
        elif action == "load":
            trainer.load(folder / (args[0] if args else "checkpoint"))
    if gradients:
        every = [(f"{n} {name}", g) for n, one in enumerate(gradients) for name, g in one.items()]
        np.savez(folder / f"{job['name']}-gradients-{rank}.npz", **dict(every))
    report["forms"] = forms(trainer)
    report["compiler"] = "torch._inductor.compile_fx" in sys.modules
    report["operators"] = deepspeed.ops.__compatible_ops__
    (folder / f"{job['name']}-{rank}.json").write_text(json.dumps(report))
    trainer.close()
