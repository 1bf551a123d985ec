"""The check of a mixture's experts for gpu_check.py: their values and gradients against
transformers' plain loop, and the host memory of ranks that read them under ZeRO-3."""

from __future__ import annotations

from pathlib import Path

import msgspec

from scripts.harness import cfg, configured
from tests.gpu.frame import GIB, Report, check
from tests.gpu.trainer import spawn

FOLDER = "experts"  # name within the scratch folder
CLOSE = 0.03  # share of the largest value; bfloat16 has 8 bits, and the two sum in different orders
# Largest share of the experts' bytes that a rank may take if it merges none. It isn't 0, because
# libraries load meanwhile.
OTHERS = 0.5
RANKS_CPU = 2
STEP_S = 120.0
STATUS = Path("/proc/self/status")


class Experts(msgspec.Struct):
    dtype: str
    hidden: int
    width: int  # intermediate channels of an expert
    experts: int
    top_k: int
    tokens: int  # tokens, which choose among the first half of the experts
    layers: int  # layers of the model that is read


GPU = Experts("bfloat16", 2048, 768, 128, 8, 4096, 2)  # a layer of Qwen3-30B-A3B
CPU = Experts("bfloat16", 64, 32, 16, 2, 64, 2)


@check(
    "a mixture's experts: gradients against a plain loop, also of those without tokens; host "
    "memory as ranks read them",
    "out of memory: --set experts.layers=1; the log has the part that failed",
    {"cuda": GPU, "cpu": CPU},
    needs_model=False,
)
def experts(report: Report) -> None:
    for tokens, words in ((report.sizes.tokens, "half of them chosen"), (1, "one token")):
        _compare(report, tokens, words)
    _read(report)


def _config(sizes: Experts):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        moe_intermediate_size=sizes.width,
        tie_word_embeddings=False,
    )


def _compare(report: Report, tokens: int, words: str) -> None:
    import torch
    from transformers.integrations.moe import grouped_mm_experts_forward
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from rose.trainer import mixture

    sizes, device, dtype = report.sizes, report.setup.device, getattr(torch, report.sizes.dtype)
    numbers = torch.Generator(device).manual_seed(0)
    there = {"generator": numbers, "device": device}
    module = Qwen3MoeExperts(_config(sizes)).to(device, dtype)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.02, generator=numbers)
    hidden = torch.randn(tokens, sizes.hidden, **there).to(dtype)
    likely = torch.rand(tokens, sizes.experts // 2, **there)
    weights, chosen = likely.softmax(-1).topk(sizes.top_k)
    direction = torch.randn(tokens, sizes.hidden, **there)
    found = {}
    ways = {"plain": Qwen3MoeExperts.forward.__wrapped__, "rose": mixture.experts}
    for name, compute in (ways | {"torch": grouped_mm_experts_forward}).items():
        module.zero_grad()
        inputs = hidden.clone().requires_grad_()
        values = compute(module, inputs, chosen, weights.to(dtype))
        (values.float() * direction).sum().backward()
        found[name] = [values.detach(), inputs.grad, *(p.grad for p in module.parameters())]
    kinds = ("values", "inputs' gradient", "gate and up's gradient", "down's gradient")
    expected = {"most": CLOSE, "source": "of the largest, against transformers' loop"}
    remedy = "torch's grouped product is wrong on this GPU: don't train mixtures on it"
    for kind, ours, exact in zip(kinds, found["rose"], found["plain"], strict=True):
        off = (ours.float() - exact.float()).abs().max() / exact.float().abs().max()
        report.figure(f"{words}: {kind} off by", float(off), **expected, remedy=remedy)
    empty = torch.ones(sizes.experts, dtype=torch.bool, device=device)
    empty[chosen] = False
    for name, expected in (("rose", {"most": 0.0}), ("torch", {})):
        largest = max(float(g[empty].float().abs().max()) for g in found[name][2:])
        whose = "of experts without tokens" if expected else "the same by torch alone"
        report.figure(f"{words}: largest gradient {whose}", largest, **expected)


def _read(report: Report) -> None:
    import torch
    from transformers import Qwen3MoeForCausalLM

    sizes, folder = report.sizes, report.folder / FOLDER
    torch.manual_seed(0)
    with torch.device(report.setup.device):
        made = Qwen3MoeForCausalLM(_config(sizes)).to(getattr(torch, sizes.dtype))
    made.save_pretrained(folder)
    experts = sum(p.nbytes for n, p in made.named_parameters() if ".experts." in n) / GIB
    del made
    if report.gpus:
        torch.cuda.empty_cache()
    world = report.setup.gpus or RANKS_CPU
    words = f"trainer=zero3_gpu trainer.ranks={world} trainer.dtype={sizes.dtype} "
    words += f"trainer.batch_size={8 * world} rollout.group_size=8 rollout.workers=1"
    trainer = configured(*words.split()).trainer
    first, *others = spawn(report, _read_rank, world, trainer)
    report.figure("experts in the folder", experts, "GiB")
    report.figure("matrices read that are not the folder's", first["wrong"], most=0)
    report.figure("rank 0 took of the host as it read them", first["gib"], "GiB")
    if others:
        # On a CPU the rank's own share of the weights is in host memory, too, so there is no bound.
        bound = {"most": OTHERS * experts} if report.gpus else {}
        report.figure("another rank at most", max(r["gib"] for r in others), "GiB", **bound)


def _read_rank(report: Report, rank: int, world: int, port: int, trainer: cfg.Trainer) -> dict:
    """Return the peak of the process's memory while it reads, including mapped files, less its
    memory before, in GiB, and the number of wrong matrices."""
    import deepspeed
    from safetensors.torch import load_file

    from rose.comm.address import local_place
    from rose.trainer import deepspeed_engine
    from rose.trainer.experts import parts

    folder = report.folder / FOLDER
    device = deepspeed_engine.use_device(report.setup.gpus, rank)
    deepspeed_engine.join_world(device, rank, world, local_place(port), STEP_S)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = _kib("VmRSS")
    policy = deepspeed_engine._load_policy(trainer, folder, 2**16, None)
    took = (_kib("VmHWM") - before) * 1024 / GIB
    stored = {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}
    wrong = 0
    for name, parameter in policy.named_weights():
        with deepspeed.zero.GatheredParameters([parameter]):
            whole = parameter.detach().cpu().reshape(-1)
        for part in parts(name, tuple(parameter.ds_shape)):
            exact = stored[part.name].reshape(-1)
            wrong += not whole[part.start :][: len(exact)].equal(exact)
    return {"gib": took, "wrong": wrong}


def _kib(key: str) -> int:
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))
