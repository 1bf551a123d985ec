"""All kernels, in Triton's interpreter and through its compiler, and what there is without it for
blocks that are hashed where a GPU has them."""

import os
import sys
from pathlib import Path

import pytest
import torch

from rose.transfer import digests
from rose.transfer.base import xxh3
from rose.transfer.blocks import Rectangle
from rose.transfer.live import Live, Place
from tests.foreign import python_of
from tests.processes import ran

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_S = 300
# Each line that it prints: capability, bytes of the binary, and `.local` in its assembly: what a
# kernel spills of its registers.
COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rose.trainer import head_triton
from rose.transfer import delta_triton, xxh3_triton

types = {"blocks": "*i64", "table": "*u64", "lanes_out": "*u64", "counts": "*i32", "ends": "*i64"}
types |= {"positions": "*i32", "first": "i32", "before": "i64", "master": "*fp32", "held": "*i16"}
types |= {"n": "i64", "indices": "*i32", "count": "i32", "sign": "i32", "differences": "*i16"}
types |= {"logits": "*bf16", "targets": "*i64", "width": "i32", "temperature": "fp32"}
types |= dict.fromkeys(("logprobs", "entropies", "log_sums", "gradients"), "*fp32")
block, wide = {"BLOCK": head_triton.BLOCK}, {"live": "*i32", "differences": "*i32"}
KERNELS = (
    (xxh3_triton._accumulate, {}, {}, 1),
    (delta_triton._compare, {}, {}, 4),
    (delta_triton._compact, {}, {}, 4),
    (delta_triton._move, {"live": "*i16"}, {"LOW": 0x7FFF}, 4),
    (delta_triton._move, wide, {"LOW": 0x7FFFFFFF}, 4),
    (head_triton._sums, {}, block | {"LOWEST": head_triton.LOWEST}, head_triton.WARPS),
    (head_triton._gradients, {}, block, head_triton.WARPS),
)
for capability in (80, 90, 100):
    for kernel, own, constants, warps in KERNELS:
        own = types | own | dict.fromkeys(constants, "constexpr")
        own = {name: own[name] for name in kernel.arg_names}
        fixed = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
        source = ASTSource(fn=kernel, signature=own, constexprs=fixed)
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options={"num_warps": warps})
        print(capability, len(made.asm["cubin"]), made.asm["ptx"].count(".local"), kernel.__name__)
"""


@pytest.fixture(scope="module")
def environment():
    """Of processes that have Triton, beside the packages of this one."""
    (packages,) = python_of("triton").parents[1].glob("lib/python*/site-packages")
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}:{packages}"}


def run(command, environment):
    command = [sys.executable, *command]
    done = ran(command, cwd=REPOSITORY, env=environment, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["trainer", "transfer"])
def test_the_kernels_in_tritons_interpreter(environment, folder):
    tests = f"tests/{folder}/on_triton.py"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    run(command, environment | {"TRITON_INTERPRET": "1"})


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_from_ampere_on(environment, tmp_path):
    said = run(["-c", COMPILES], environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    found = [line.split() for line in said.splitlines()]
    assert [capability for capability, *_ in found] == 7 * ["80"] + 7 * ["90"] + 7 * ["100"]
    assert all(int(size) > 1000 for _, size, _, _ in found), found
    assert all(spilled == "0" for *_, spilled, name in found if name in ("_sums", "_gradients"))


def test_without_triton_blocks_are_read_back_which_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(digests, "trust", digests._Trust())
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rose.transfer.xxh3_triton", raising=False)
    live = Live({"x": torch.arange(4096, dtype=torch.int16)})
    live.on_gpu = True
    places = {n: Place("x", [Rectangle(n, 2048 + n, 0, 1)]) for n in range(3)}
    for _ in range(2):
        found = digests.digests(live, places, 2)
        assert found == {n: xxh3(live.view(p)) for n, p in places.items()}
    (said,) = [record.message for record in caplog.records]
    assert "Triton fails on cpu: ModuleNotFoundError" in said
    assert not digests.hashes_on_device(live)
