"""The processes of bench_sync.py: `bench_sync_roles.py ROLE JSON`, commands and answers as lines of
JSON.

    sample      trajectories that the model draws itself
    train       one real trainer rank (ZeRO-3): steps, its shard's patterns after each of the last ones into a folder
    publish     one rank that publishes such shards again, as often as asked, in the encoding asked for
    receive     the weights of an engine without the engine: `Receiver` over tensors
    engine      a vLLM engine that generates all the while

Memory is what the kernel counts: resident, its highest since the command began.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench_sync_parts import RANKS, WARM_UP, Memory, Shards, codec_of, digest, release

# a batch: trajectories, of which so many share a prompt; tokens
ROWS, GROUP, PROMPT, RESPONSE = (8, 4, 16, 32)
STAGE_BYTES = 8 * 2**30
TIMEOUT_S = 300.0


def sample(job: dict, say) -> None:
    """`steps` batches: tokens (B, T) and, of each response token, the log-probability that drew
    it."""
    import torch

    from rose.trainer import model

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count())
    policy = model.load(Path(job["model"]), torch.float32, False).eval()
    high = min(20_000, policy.vocabulary)
    prompts = torch.randint(min(100, high // 2), high, (ROWS // GROUP * job["steps"], PROMPT))
    prompts = prompts.repeat_interleave(GROUP, 0)
    with torch.no_grad():
        tokens = policy.hf.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=RESPONSE,
            min_new_tokens=RESPONSE,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        mask = torch.zeros(len(tokens), tokens.shape[1] - 1)
        mask[:, PROMPT - 1 :] = 1
        logprobs = torch.cat(
            [
                policy(part[:, :-1], part[:, 1:], m)[0] * m
                for part, m in zip(tokens.split(ROWS), mask.split(ROWS), strict=False)
            ]
        )
    np.savez(job["file"], tokens=tokens.numpy().astype(np.int32), logprobs=logprobs.float().numpy())
    say({})


def train(job: dict, say) -> None:
    from rose.comm.address import local_place
    from rose.config import read_shape
    from rose.engine import layout
    from rose.observe.recorder import NullRecorder
    from rose.trainer.shards import ShardReader
    from rose.trainer.trainer import DTYPES, Trainer

    rank, folder, store = job["rank"], Path(job["folder"]), Path(job["folder"]) / "store"
    trainer = Trainer(
        _settings(job), rank, RANKS, local_place(job["port"]), job["model"], NullRecorder()
    )
    shape = read_shape(Path(job["model"]))
    trainer.open_store(store, lambda name, extent: layout.cuts(name, extent, shape, [1, 2, 4, 8]))
    if rank == 0:
        (folder / "plan.json").write_bytes((store / "plan.json").read_bytes())
    reader = ShardReader(
        trainer.engine.engine,
        trainer.engine.policy.named_weights(),
        3,
        DTYPES["bfloat16"],
        rank,
        RANKS,
    )
    mine = [block for block in trainer._publisher.plan.blocks if block.owner == rank]
    for step in range(job["steps"]):
        began = time.monotonic()
        metrics = trainer.train(*_batch(job, step, rank))
        said = {
            "step": step,
            "seconds": time.monotonic() - began,
            "grad_norm": metrics["grad_norm"],
        }
        if (kept := step - (job["steps"] - job["kept"] - 1)) >= 0:
            with open(folder / f"step-{kept}.rank-{rank}", "wb") as file:
                for block in mine:
                    file.write(reader.read(block).data)
            memory, began = Memory(), time.monotonic()
            memory.reset()
            published = trainer.publish(kept)
            said |= {
                "publish_s": time.monotonic() - began,
                "nbytes": published.nbytes,
                "rise": memory.peak,
            }
            trainer.tidy()
        say(said)
    trainer.close()


def _settings(job: dict):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from rose import config

    overrides = [
        "model=smollm2",
        "model.dtype=bfloat16",
        "trainer.zero_stage=3",
        "trainer.dtype=float32",
        f"trainer.ranks={RANKS}",
        f"trainer.threads={job['threads']}",
        "trainer.share_prefixes=false",
        f"trainer.optimizer.warmup_steps={WARM_UP}",
        f"trainer.optimizer.lr={job['lr']}",
        f"trainer.batch_size={ROWS}",
        f"rollout.group_size={GROUP}",
        f"transfer.threads={job['threads']}",
    ]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return config.from_dict(OmegaConf.to_container(compose("config", overrides), resolve=True))


def _batch(job: dict, step: int, rank: int):
    """(step, this rank's trajectories); random rewards: what it learns doesn't matter, that it
    pulls both ways does."""
    from rose import protocol as p
    from rose.trainer.batching import Padded, plan_micro_batches

    drawn = np.load(job["samples"])
    tokens, logprobs = (
        drawn[name][ROWS * step : ROWS * (step + 1)] for name in ("tokens", "logprobs")
    )
    mask = np.zeros(tokens.shape, np.uint8)
    mask[:, PROMPT:] = 1
    rewards = np.random.default_rng(step).integers(0, 2, ROWS).astype(float).tolist()
    plan = plan_micro_batches(Padded([tokens.shape[1]] * ROWS), RANKS, 1024, 1)[rank]
    mine = {
        row: p.Trajectory(
            id=f"g{row // GROUP}.{row % GROUP}",
            group=f"g{row // GROUP}",
            phase=p.Phase.TRAIN,
            tokens=p.pack_tokens(tokens[row]),
            mask=mask[row].tobytes(),
            logprobs=p.pack_floats(np.concatenate([[0.0], logprobs[row]]).astype(np.float32)),
            versions=p.pack_tokens(np.where(mask[row], 0, -1)),
            reward=rewards[row],
            success=False,
            turns=1,
            response_tokens=RESPONSE,
        )
        for update in plan
        for micro in update
        for row in micro
    }
    summary = p.BatchSummary(
        rewards, [row // GROUP for row in range(ROWS)], [RESPONSE] * ROWS, [False] * ROWS
    )
    return p.TrainStep(step, summary, plan, False, 1), mine


def publish(job: dict, say) -> None:
    """Commands: {"open": store, "shards", "encoding"}, which publishes step 0 as version 0,
    then {"step"}, whose number is the version's."""
    import torch

    from rose.transfer import codec
    from rose.transfer import publish as product

    codec.compile_all()
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=job["rank"], world_size=RANKS
    )
    publisher, step, memory = None, 0, Memory()
    for command in _commands(say):
        if "open" in command:
            publisher = None
            release()
            product.codec, step = codec_of(command["encoding"]), 0
            shards = Shards(command["shards"])
            publisher = product.Publisher(
                Path(command["open"]),
                shards.plan,
                _Peers(job["rank"]),
                lambda block: shards.read(step, block),
                job["threads"],
                10**9,
                3,
                TIMEOUT_S,
            )
            publisher.publish(0)
            release()
            say({})
            continue
        step = command["step"]
        memory.reset()
        began, computed = time.monotonic(), time.process_time()
        made = publisher.publish(step)
        say(
            {
                "seconds": time.monotonic() - began,
                "cpu_s": time.process_time() - computed,
                "encode_s": made.encode_s,
                "write_s": made.write_s,
                "nbytes": made.nbytes,
                "peak": memory.peak,
            }
        )


class _Peers:
    def __init__(self, rank: int):
        self.rank, self.world = rank, RANKS

    def barrier(self) -> None:
        import torch

        torch.distributed.barrier()

    def sum(self, value: int) -> int:
        import torch

        total = torch.tensor(value)
        torch.distributed.all_reduce(total)
        return int(total)


def receive(job: dict, say) -> None:
    """Commands: {"open": store, "shards", "encoding"}, then {"version"}; {"metrics": url} asks a
    relay."""
    from rose.transfer import codec
    from rose.transfer import stage as product
    from rose.transfer.live import Live
    from rose.transfer.receive import Receiver, whole

    codec.compile_all()
    receiver = live = tensors = None
    for command in _commands(say):
        if "metrics" in command:
            say(_metrics(command["metrics"], job["token_file"]))
        elif "open" in command:
            if receiver is not None:
                receiver.close()
            receiver = live = tensors = None
            product.codec = codec_of(command["encoding"])
            tensors = Shards(command["shards"]).tensors(0)
            live = Live(tensors)
            receiver = Receiver(command["open"], None, job["token_file"], whole, live)
            release()
            memory = Memory()
            say({})
        else:
            memory.reset()
            began, computed = time.monotonic(), time.process_time()
            staged = receiver.stage(
                command["version"] - 1, command["version"], job["threads"], STAGE_BYTES, TIMEOUT_S
            )
            ready = time.monotonic()
            staged.flip()
            flipped = time.monotonic()
            computed = time.process_time() - computed
            staged.check()
            say(
                {
                    "flipped": flipped,
                    "stage_s": ready - began,
                    "cpu_s": computed,
                    "pause_s": flipped - ready,
                    "nbytes": staged.nbytes,
                    "changed": staged.changed,
                    "route": staged.route,
                    "peak": memory.peak,
                    "digest": digest(tensors),
                }
            )
            del staged


def _metrics(url: str, token_file: str) -> dict[str, int]:
    import urllib3

    from rose.transfer.source import read_token

    answer = urllib3.request(
        "GET", f"{url}/metrics", headers={"Authorization": f"Bearer {read_token(token_file)}"}
    )
    words = (line.split() for line in answer.data.decode().splitlines() if not line.startswith("#"))
    return {name.removeprefix("rose_relay_"): int(value) for name, value in words}


def engine(job: dict, say) -> None:
    asyncio.run(_engine(job, say))


async def _engine(job: dict, say) -> None:
    """Commands: {"open": store, "shards"}, then {"version"}."""
    import msgspec
    import yaml

    from rose import config
    from rose.config import read_shape
    from rose.engine.vllm_engine import Engine

    def settings(name: str, kind, **changes):
        return msgspec.convert(
            yaml.safe_load((REPOSITORY / "conf" / name).read_text()) | changes, kind
        )

    rollout = settings(
        "rollout/cpu.yaml",
        config.Rollout,
        threads=job["threads"],
        max_sequences=4,
        stream_interval=1,
    )
    model = settings("model/smollm2.yaml", config.Model, dtype="bfloat16", max_context=512)
    transfer = settings(
        "transfer/sparse.yaml",
        config.Transfer,
        threads=job["threads"],
        relay_token_file=job["token_file"],
        load_timeout_s=TIMEOUT_S,
    )
    serving = await Engine.start(job["model"], rollout, model)
    shape = read_shape(Path(job["model"]))
    turns = [asyncio.create_task(_talk(serving, number)) for number in range(4)]
    loop, memory = asyncio.get_running_loop(), Memory(serving.pid)
    store = shards = None
    say({"ready": True})
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            if "open" in command:
                store, shards = command["open"], Shards(command["shards"])
                await serving.load_version(0, store, transfer)
                memory = Memory(serving.pid)
                say({})
                continue
            memory.reset()
            computed = _cpu(serving.pid)
            flipping = asyncio.create_task(_flipped(serving, command["version"]))
            loaded = await serving.load_version(command["version"], store, transfer)
            peak, computed = memory.peak, _cpu(serving.pid) - computed
            wanted = await asyncio.to_thread(_parameters, shards.tensors(command["version"]), shape)
            found = (await serving.checksum())[0]
            if any(turn.done() for turn in turns):
                raise RuntimeError("a turn broke off")
            say(
                {
                    "flipped": await flipping,
                    "stage_s": loaded.stage_s,
                    "pause_s": loaded.pause_s,
                    "flip_s": loaded.flip_s,
                    "nbytes": loaded.nbytes,
                    "changed": loaded.changed,
                    "route": loaded.route,
                    "peak": peak,
                    "cpu_s": computed,
                    "same": wanted == found,
                }
            )
    finally:
        for turn in turns:
            turn.cancel()
        await serving.shutdown()


def _cpu(process: int) -> float:
    """Seconds that it has computed, in all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _flipped(serving, version: int) -> float:
    """When generation had gone on: `load_version` itself returns after the live weights were read
    back."""
    while serving.version != version or not serving.open:
        await asyncio.sleep(0.0005)
    return time.monotonic()


async def _talk(serving, number: int) -> None:
    """One turn after the other, for ever."""
    from rose import protocol

    prompt = protocol.pack_tokens(np.arange(100 + number, 132 + number))
    turn = 0
    while True:
        async for _ in serving.generate(
            f"t{number}.{turn}", prompt, protocol.Sampling(max_new_tokens=200)
        ):
            pass
        turn += 1


def _parameters(tensors: dict, shape) -> dict[str, str]:
    """xxh3-128 of each of vLLM's parameters, as these tensors should fill it."""
    import torch

    from rose.engine.layout import slices
    from rose.transfer.codec import digest as of

    places = [
        (tensor, place)
        for name, tensor in tensors.items()
        if (place := slices(name, tuple(tensor.shape), shape, 0, 1)) is not None
    ]
    extents: dict[str, list[int]] = {}
    for _, place in places:
        ends = [part.stop for part in place.destination]
        extents[place.parameter] = list(map(max, ends, extents.get(place.parameter, ends)))
    made = {name: torch.zeros(extent, dtype=torch.bfloat16) for name, extent in extents.items()}
    for tensor, place in places:
        made[place.parameter][place.destination] = tensor[place.source]
    return {name: of(tensor.view(torch.uint8).numpy()) for name, tensor in made.items()}


def _commands(say):
    say({"ready": True})
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; answers are ours alone

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    roles = {
        "sample": sample,
        "train": train,
        "publish": publish,
        "receive": receive,
        "engine": engine,
    }
    roles[sys.argv[1]](json.loads(sys.argv[2]), say)


if __name__ == "__main__":
    main()
