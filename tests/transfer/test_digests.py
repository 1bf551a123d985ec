"""Blocks hashed where a GPU has them: the kernel itself, in Triton's interpreter and through its
compiler, and what there is without it."""

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
COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rose.transfer import delta_triton, xxh3_triton

held = {"master": "*fp32", "held": "*i16", "n": "i64"}
move = {"indices": "*i32", "count": "i32", "sign": "i32", "LOW": "constexpr"}
KERNELS = (
    (xxh3_triton._accumulate, {"blocks": "*i64", "table": "*u64", "lanes_out": "*u64"}, {}, 1),
    (delta_triton._compare, held | {"counts": "*i32"}, {}, 4),
    (
        delta_triton._compact,
        held | {"ends": "*i64", "positions": "*i32", "differences": "*i16", "first": "i32", "before": "i64"},
        {},
        4,
    ),
    (delta_triton._move, move | {"live": "*i16", "differences": "*i16"}, {"LOW": 0x7FFF}, 4),
    (delta_triton._move, move | {"live": "*i32", "differences": "*i32"}, {"LOW": 0x7FFFFFFF}, 4),
)
for capability in (80, 90, 100):
    for kernel, types, constants, warps in KERNELS:
        types = {name: types[name] for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=types, constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()})
        target = GPUTarget("cuda", capability, 32)
        print(capability, len(triton.compile(source, target=target, options={"num_warps": warps}).asm["cubin"]))
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
def test_the_kernel_in_tritons_interpreter(environment):
    run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/transfer/on_triton.py"],
        environment | {"TRITON_INTERPRET": "1"},
    )


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_from_ampere_on(environment, tmp_path):
    said = run(["-c", COMPILES], environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    sizes = dict(map(int, line.split()) for line in said.splitlines())
    assert sizes.keys() == {80, 90, 100} and min(sizes.values()) > 1000


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
