"""What glibc's heap costs an engine on a CPU: page faults and processor time of steps, with ROSE's
plugin, without it, and with glibc's own variables instead.

    python scripts/bench_heap.py                     # four minutes
    python scripts/bench_heap.py rounds=20 seed=3 varied=1

Four vLLM servers of one model on one core, of which all but one are stopped while that one computes:
`glibc` loads no plugin and gives large buffers back to the system after a step; `variables` keeps
them by MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_; `huge` has its heap in
huge pages, too; `kept` has rose.engine.plugin. In turn each gets rounds of prompts that fill whole
steps, or, with `varied=1`, of other lengths in each round. Processor time is of the engine process,
and says what a step costs whatever else the machine does; the first round, in which every heap
grows, is told apart.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench_coserving_bench import (
    DRAIN_S,
    MAX_BATCHED,
    MAX_CONTEXT,
    MAX_PROMPT,
    MAX_SEQUENCES,
    model,
)
from bench_coserving_client import replay
from bench_coserving_engines import Failed, Guard, Server, confine, plugin_folder

from rose.engine import heap
from rose.sim import traces

PROMPTS, OUTPUT = 9, 8  # a round: three and a half steps of MAX_BATCHED tokens, then decodes
VARIED, WITHIN_S = 24, 1.5  # prompts of a varied round, and seconds within which they come
KV_BYTES = 64 << 20
NO_PLUGIN = {"VLLM_PLUGINS": "none"}
KEEP = {  # what `rose.engine.heap.keep` sets
    "MALLOC_MMAP_THRESHOLD_": str(heap.MAPPED),
    "MALLOC_TRIM_THRESHOLD_": str(heap.KEPT),
    "MALLOC_TOP_PAD_": str(heap.AHEAD),
}
HEAPS = {
    "glibc": NO_PLUGIN,
    "variables": NO_PLUGIN | KEEP,
    "huge": NO_PLUGIN | KEEP | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "kept": {},
}


def spent(server: Server) -> tuple[float, float, int]:
    """Of its engine so far: processor time in its own code and in the system's, seconds; page
    faults."""
    engine = psutil.Process(server.engine())
    times = engine.cpu_times()
    fields = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
    return times.user, times.system, int(fields[7])


def prompts(seed: int, varied: bool) -> traces.Trace:
    """Of a round; `replay` makes tokens of the same seed, so that no cache has them."""
    if not varied:
        lengths, outputs = (
            np.full(PROMPTS, MAX_PROMPT, np.int32),
            np.full(PROMPTS, OUTPUT, np.int32),
        )
        return traces.Trace(np.zeros(PROMPTS), lengths, outputs)
    draw = np.random.default_rng(seed)
    lengths, outputs = (
        draw.integers(10, MAX_PROMPT + 1, VARIED),
        draw.integers(1, 4 * OUTPUT, VARIED),
    )
    return traces.Trace(
        np.sort(draw.uniform(0, WITHIN_S, VARIED)),
        lengths.astype(np.int32),
        outputs.astype(np.int32),
    )


def one_round(server: Server, seed: int, varied: bool) -> tuple[float, ...]:
    """What a round took, as `spent`."""
    trace = prompts(seed, varied)
    server.wake()
    before = spent(server)
    answers = asyncio.run(replay(server.url, server.served, trace, seed, DRAIN_S))
    after = spent(server)
    server.park()
    if not all(answer.done for answer in answers):
        raise server.failed(
            f"did not end {sum(not answer.done for answer in answers)} of {len(answers)} requests"
        )
    return tuple(b - a for a, b in zip(before, after, strict=False))


def main() -> int:
    given = {"rounds": 8, "seed": 0, "varied": 0}
    for word in sys.argv[1:]:
        key, _, text = word.partition("=")
        if key not in given or not text.isdecimal() or key == "rounds" and int(text) < 2:
            raise Failed(
                f"bench_heap: {word!r}: options are rounds=N, 2 or more, seed=N and varied=1"
            )
        given[key] = int(text)
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        raise Failed(f"bench_heap: two cores are needed, and this process may use {sorted(cores)}")
    device, guard, servers = {max(cores)}, Guard(), {}
    with tempfile.TemporaryDirectory(prefix="bench-heap-") as name:
        folder = Path(name)
        args = {
            "dtype": "float32",
            "max_model_len": MAX_CONTEXT,
            "max_num_seqs": MAX_SEQUENCES,
            "max_num_batched_tokens": MAX_BATCHED,
            "kv_cache_memory_bytes": KV_BYTES,
        }
        try:
            for kind, variables in HEAPS.items():
                env = {
                    "VLLM_RPC_BASE_PATH": name,
                    "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{plugin_folder(folder)}",
                }
                servers[kind] = Server(
                    guard, kind, model("512x2", 0), args, folder, None, env | variables
                )
            for server in servers.values():
                server.ready()
            confine(list(servers.values()), device, cores - device)
            for server in servers.values():
                server.park()
            took = {kind: [] for kind in servers}
            for number in range(given["rounds"]):
                for kind, server in servers.items():
                    took[kind].append(
                        one_round(server, given["seed"] * 1000 + number, bool(given["varied"]))
                    )
        finally:
            for server in servers.values():
                server.end()
            guard.close()
    what = (
        f"{VARIED} prompts of 10 to {MAX_PROMPT} tokens within {WITHIN_S:g} s"
        if given["varied"]
        else f"{PROMPTS} prompts of {MAX_PROMPT} tokens at once"
    )
    print(
        f"a round: {what}, steps of {MAX_BATCHED}; means of {given['rounds'] - 1} rounds (the "
        "first)"
    )
    for kind, rounds in took.items():
        user, system, faults = (mean(column) for column in zip(*rounds[1:], strict=False))
        print(
            f"{kind:9} {user + system:6.3f} s of processor time ({sum(rounds[0][:2]):.3f}), "
            f"{system:.3f} s of it the "
            f"system's; {faults:8,.0f} page faults ({rounds[0][2]:,})"
        )
    totals = {kind: mean(sum(one[:2]) for one in rounds[1:]) for kind, rounds in took.items()}
    for kind in sorted(totals.keys() - {"kept"}):
        print(f"{kind} / kept: {totals[kind] / totals['kept']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
