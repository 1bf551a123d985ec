"""The head's kernels in Triton's interpreter and through its compiler."""

import pytest

from tests.transfer.test_digests import environment, run  # noqa: F401

COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rose.trainer import head_triton

sums = dict.fromkeys(("logprobs", "entropies", "log_sums"), "*fp32")
sums = {"logits": "*bf16", "targets": "*i64"} | sums | {"width": "i32", "temperature": "fp32"}
passed = dict.fromkeys(("log_sums", "gradients"), "*fp32")
passed = {"logits": "*bf16", "targets": "*i64"} | passed | {"width": "i32", "temperature": "fp32"}
block = {"BLOCK": head_triton.BLOCK}
for kernel, types, fixed in (
    (head_triton._sums, sums, block | {"LOWEST": head_triton.LOWEST}),
    (head_triton._gradients, passed, block),
):
    for capability in (80, 90, 100):
        source = ASTSource(fn=kernel, signature=types | dict.fromkeys(fixed, "constexpr"), constexprs=fixed)
        made = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": head_triton.WARPS}
        )
        print(capability, len(made.asm["cubin"]), made.asm["ptx"].count(".local"))
"""


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter(environment):  # noqa: F811
    run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/trainer/on_triton.py"],
        environment | {"TRITON_INTERPRET": "1"},
    )


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_from_ampere_on(environment, tmp_path):  # noqa: F811
    said = run(["-c", COMPILES], environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    found = [tuple(map(int, line.split())) for line in said.splitlines()]
    assert [capability for capability, _, _ in found] == 2 * [80, 90, 100]
    assert all(size > 1000 and spilled == 0 for _, size, spilled in found), found
