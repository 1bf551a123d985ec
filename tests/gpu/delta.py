"""The check of publish, stage and flip on the device for gpu_check.py: weights of a model's shapes,
of which a share changes, as a trainer rank publishes them and an engine takes them.

The trainer is ShardReader, Updates and Publisher over the two partitions of ZeRO-3, without an
optimizer: the first version is published by a copy of the last one, the second by comparing the
partitions. The engine is Receiver over parameters of vLLM's shapes.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from rose.config import ModelShape
from rose.parts.simulator.hardware import SHAPES
from scripts.run_weights import Alone, threads
from tests.gpu.frame import GIB, Report, check, settle

AT_ONCE = 2**26  # values that are changed at once, which bounds the memory on the device
TIMEOUT_S = 200.0
DEVIATION = 0.02  # standard deviation of the weights
STEP = 2.0**-7  # relative change, of one or two steps of bfloat16


MODELS = {  # Qwen3-0.6B and Qwen2.5-7B
    "0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied_embeddings=True),
    "7B": SHAPES["qwen2_5_7b"],
    "tiny": ModelShape(2, 256, 768, 4, 2, 64, 4096, tied_embeddings=False),
}


class Sizes(msgspec.Struct):
    models: list[str]
    changed: float  # share of the values that each version changes


@check(
    "publish, stage and flip of 1 % changed values, compared on the device: exact, seconds",
    "trainer ranks can keep a copy of the last version and compare with it; tell us",
    {"cuda": Sizes(["0.6B", "7B"], 0.01), "cpu": Sizes(["tiny"], 0.01)},
    needs_model=False,
)
def delta(report: Report) -> None:
    """Compare the kernels with the host's loops, then publish and load versions of each model."""
    if report.gpus:
        kernels(report)
    for name in report.sizes.models:
        run(report, name, MODELS[name])


def kernels(report: Report) -> None:
    """Move, compare and compact random patterns on the device and on the host."""
    import torch

    from rose.transfer import codec, delta_triton

    device, wrong = torch.device("cuda"), 0
    for dtype in (torch.int16, torch.int32):
        for index in (torch.int32, torch.int64):
            bounds = torch.iinfo(dtype)
            drawn = torch.randint(bounds.min, bounds.max, (2, 2**20), dtype=dtype)
            live, by = drawn[0].to(device), drawn[1, :300_001].to(device)
            at = torch.randperm(2**20)[: len(by)].to(index)
            delta_triton.move(live, at.to(device), by, 1)
            codec.move(drawn[0].numpy(), at.numpy(), by.cpu().numpy(), 1)
            wrong += int((live.cpu() != drawn[0]).sum())
    report.figure("moved values that differ", wrong, most=0)
    held = torch.randn(2**22 + 77, device=device).bfloat16()
    master = held.float() * (1 + STEP * torch.randn(len(held), device=device))
    patterns = held.view(torch.int16)
    ends = delta_triton.compare(master, patterns).cumsum(0)
    counts = 0, int(ends[-1])
    found = delta_triton.compact(master, patterns, ends, (0, len(ends)), counts)
    new, old = (x.view(torch.int16).cpu().numpy().view("u2") for x in (master.bfloat16(), held))
    twin = codec.differences(new, old)
    equal = all((a.cpu().numpy() == b).all() for a, b in zip(found, twin, strict=True))
    report.figure("compared alike", equal and counts[1] == len(twin[0]), equal=True)


def run(report: Report, name: str, shape: ModelShape) -> None:
    import torch

    from rose.transfer import codec

    codec.compile_all()
    device = torch.device("cuda", 0) if report.gpus else torch.device("cpu")
    folder = report.folder / "delta"
    trained = Trained(shape, device, report.sizes.changed, folder)
    nbytes = trained.held.nbytes
    report.say(f"{name}: {nbytes / 1e9:.1f} GB, {len(trained.blocks)} blocks")
    seconds: dict[str, float] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        settle(device)
        began = time.perf_counter()
        result = work()
        settle(device)
        seconds[what] = time.perf_counter() - began
        return result

    trained.open()
    engine = Engine(trained, shape, device)
    trained.change()
    trained.copy()
    timed("published by comparing with a copy", lambda: trained.publish(1))
    engine.stage(1)
    engine.flip()
    # What is compiled at first use: the kernels that compare.
    trained.change()
    trained.updates.compare(0)
    trained.copy()
    trained.publish(2)
    engine.stage(2)
    engine.flip()
    count = trained.change()
    timed("compared", lambda: trained.updates.compare(0))
    trained.copy()
    published = timed("published", lambda: trained.publish(3))
    engine.staged.release()  # An engine releases version 2 before it stages another one.
    if report.gpus:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if report.gpus else 0
    timed("staged", lambda: engine.stage(3))
    if report.gpus:
        took = (torch.cuda.max_memory_allocated() - before) / GIB
        report.figure(f"{name}: staging took on the device", took, "GiB")
    timed("flipped", engine.staged.flip)
    timed("checked", engine.staged.check)
    for what, took in seconds.items():
        report.figure(f"{name}: {what}", took, "s")
    new = sum(seconds[what] for what in ("compared", "published", "staged", "flipped"))
    report.figure(f"{name}: published to flipped", new, "s")
    report.figure(f"{name}: of weights", nbytes / new / 1e9, "GB/s")
    report.figure(f"{name}: copied to the device in", engine.staged.copy_s, "s")
    report.figure(f"{name}: of the file", published.nbytes / 1e6, "MB")
    report.figure(f"{name}: changed values", engine.staged.changed, equal=count)
    report.figure(f"{name}: values that differ", engine.differing(), most=0)
    engine.staged.release()
    engine.receiver.close()
    shutil.rmtree(folder)


class Trained:
    """The partitions of one trainer rank, and its publisher. `changed` of the values change."""

    def __init__(self, shape: ModelShape, device, changed: float, store) -> None:
        import torch

        from rose.engine import layout
        from rose.trainer.shards import ShardReader
        from rose.transfer.blocks import cut
        from rose.transfer.store import FORMAT, Plan

        self.store, self._changed, self._device = store, changed, device
        self._random = torch.Generator(device).manual_seed(0)
        extents = dict(extents_of(shape))
        values = sum(map(math.prod, extents.values()))
        self.held = torch.empty(values, dtype=torch.bfloat16, device=device)
        for part in self.held.split(AT_ONCE):
            part.normal_(0.0, DEVIATION, generator=self._random)
        self.master = self.held.float()
        parameters = [Parameter(extent) for extent in extents.values()]
        zero = SimpleNamespace(fp16_groups=[parameters])
        zero.fp32_partitioned_groups_flat = [self.master]
        zero.fp16_partitioned_groups_flat = [self.held]
        weights = list(zip(extents, parameters, strict=True))
        engine: Any = SimpleNamespace(optimizer=zero)
        self._shards = ShardReader(engine, weights, 3, torch.bfloat16, 0, 1)
        cuts = {name: layout.cuts(name, extent, shape, {1}) for name, extent in extents.items()}
        tensors = self._shards.tensors
        blocks = cut(tensors, cuts, self._shards.shards, 1)
        self._plan = Plan(FORMAT, "", 1, tensors, blocks)
        self.blocks = self._plan.owned(0)
        self.updates: Any = None
        self._publisher: Any = None

    def open(self) -> None:
        from rose.trainer.updates import Updates
        from rose.transfer.publish import Publisher

        def updates(plan) -> Updates:
            self.updates = Updates(self._shards, plan, self._device, threads(16))
            return self.updates

        args = self._plan, Alone(), self._shards.read, threads(16), 10**9, 9, TIMEOUT_S, updates
        self._publisher = Publisher(self.store, *args)
        self._publisher._full = 0  # no full version is written, which takes longer than all else

    def change(self) -> int:
        """Do what an optimizer does to the float32 values. Return how many bfloat16 ones change."""
        import torch

        there, count = {"generator": self._random, "device": self._device}, 0
        for master, held in zip(self.master.split(AT_ONCE), self.held.split(AT_ONCE), strict=True):
            chosen = torch.rand(master.shape, **there) < self._changed
            step = 1 + STEP * torch.randn(master.shape, **there).sign()
            master.copy_(torch.where(chosen, master * step, master))
            count += int((master.bfloat16().view(torch.int16) != held.view(torch.int16)).sum())
        return count

    def copy(self) -> None:
        """Copy the float32 values into the parameters, as ZeRO does."""
        self.held.copy_(self.master)

    def publish(self, version: int):
        return self._publisher.publish(version)

    def tensor(self, name: str):
        """Return a tensor's values as the parameters have them."""
        number = next(n for n, t in enumerate(self._shards.tensors) if t.name == name)
        tensor, (parameter, _) = self._shards.tensors[number], self._shards._sources[number]
        at = self._shards._masters[id(parameter)][1]
        return self.held[at : at + tensor.size].view(tensor.shape)


class Parameter:
    """A parameter as ZeRO-3 knows it, whose values are all on this rank."""

    def __init__(self, extent: tuple[int, ...]) -> None:
        import torch

        self.shape = self.ds_shape = extent
        self.ds_numel, self.dtype = math.prod(extent), torch.bfloat16
        self.ds_tensor = SimpleNamespace(ds_numel=self.ds_numel)


class Engine:
    """An engine's parameters, with the values of now, and its receiver."""

    def __init__(self, trained: Trained, shape: ModelShape, device) -> None:
        import torch

        from rose.engine import layout
        from rose.transfer.live import Live
        from rose.transfer.receive import Receiver
        from rose.transfer.stage import place_blocks
        from rose.transfer.store import INITIAL

        self._trained, self.have = trained, INITIAL
        extents = extents_of(shape)
        self._slices = {name: layout.slices(name, size, shape, 0, 1) for name, size in extents}
        ends: dict[str, list[int]] = {}
        for part in self._slices.values():
            stops = [each.stop for each in part.destination]
            before = ends.get(part.parameter, stops)
            ends[part.parameter] = [max(*pair) for pair in zip(before, stops, strict=True)]
        there = {"dtype": torch.bfloat16, "device": device}
        self._parameters = {name: torch.zeros(extent, **there) for name, extent in ends.items()}
        for name, part in self._slices.items():
            self._part(name)[:] = trained.tensor(name)[part.source]

        def places(plan, live):
            return place_blocks(plan, lambda name, _: self._slices[name], live)[0]

        live = Live(self._parameters)
        self.receiver = Receiver(str(trained.store), None, None, places, live)
        self.staged: Any = None

    def _part(self, name: str):
        """Return the part of a parameter that has a tensor's values."""
        part = self._slices[name]
        return self._parameters[part.parameter][part.destination]

    def stage(self, version: int) -> None:
        if self.staged is not None:
            self.staged.release()
        device_bytes = 2 * GIB if self.receiver._live.on_gpu else None
        sizes = threads(16), 8 * GIB, TIMEOUT_S, device_bytes, 8
        self.staged = self.receiver.stage(self.have, version, *sizes)
        self.have = version

    def flip(self) -> None:
        self.staged.flip()
        settle(self.receiver._live.device)
        self.staged.check()

    def differing(self) -> int:
        """Return how many values are not the trainer's."""
        import torch

        found = 0
        for name, part in self._slices.items():
            pair = self._part(name), self._trained.tensor(name)[part.source]
            live, wanted = (each.contiguous().view(torch.int16) for each in pair)
            found += int((live != wanted).sum())
        return found


def extents_of(shape: ModelShape):
    """Yield the (name, shape) of a dense Qwen2's tensors, without the heads' norms of a Qwen3."""
    hidden, width = shape.hidden, shape.intermediate
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name, count in heads.items():
            yield f"{at}self_attn.{name}_proj.weight", (count * shape.head_dim, hidden)
            yield f"{at}self_attn.{name}_proj.bias", (count * shape.head_dim,)
        yield f"{at}self_attn.o_proj.weight", (hidden, shape.heads * shape.head_dim)
        yield f"{at}mlp.gate_proj.weight", (width, hidden)
        yield f"{at}mlp.up_proj.weight", (width, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, width)
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab, hidden)
