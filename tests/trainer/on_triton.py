"""Run by tests/transfer/test_digests.py in Triton's interpreter: the CPU's memory is the device's."""

import pytest
import torch

from rose.trainer import head_triton
from rose.trainer.model import Head


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(head_triton, "BLOCK", 64)


def exact(head, hidden, targets, weights):
    """Compute the same in float64, from logits as the product rounds them."""
    weight = head.weight.detach()
    bias = None if head.bias is None else head.bias.detach()
    logits = torch.nn.functional.linear(hidden.detach(), weight, bias).double() / head.temperature
    logp = logits.log_softmax(-1)
    logprobs = logp.gather(1, targets[:, None])[:, 0]
    of_logits = torch.nn.functional.one_hot(targets, len(weight)) - logp.exp()
    of_logits = of_logits * weights.double()[:, None] / head.temperature
    entropy = -(logp.exp() * logp).sum()
    of_weight = of_logits.T @ hidden.detach().double()
    return logprobs, entropy, of_logits @ weight.double(), of_weight, of_logits.sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [4, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernels_are_the_heads_own_operations_and_float64s(
    dtype, temperature, chunk_rows, bias
):
    torch.manual_seed(0)
    vocabulary = 203
    head = Head(torch.nn.Linear(16, vocabulary, bias).to(dtype), chunk_rows * vocabulary)
    torch.nn.init.normal_(head.weight, std=2.0)
    head.temperature = temperature
    hidden = torch.randn(9, 16).to(dtype).requires_grad_()
    targets, weights = torch.randint(0, vocabulary, (9,)), torch.randn(9)
    leaves = [hidden, head.weight, *([head.bias] if bias else [])]

    def run(function):
        logprobs, entropy = function(hidden, targets)
        assert logprobs.dtype == torch.float32 and entropy.shape == () and not entropy.requires_grad
        gradients = torch.autograd.grad((logprobs * weights).sum(), leaves)
        return logprobs.detach(), entropy, *gradients

    ours, twin = run(head.fused), run(head)
    right = exact(head, hidden, targets, weights)
    rounding = 1e-5 if dtype == torch.float32 else 0.02
    for found, also, wanted in zip(ours, twin, right[: len(ours)], strict=True):
        largest = wanted.abs().max()
        limit = rounding if found.dim() == 2 or found.shape == (vocabulary,) else 2e-6
        assert (found.double() - wanted).abs().max() <= limit * largest
        assert (found.double() - also.double()).abs().max() <= 2 * limit * largest


def test_a_frozen_head_gets_no_gradient_and_no_rows_give_zeros():
    head = Head(torch.nn.Linear(8, 70, bias=False), 7 * 70)
    hidden = torch.randn(3, 8, requires_grad=True)
    empty = torch.zeros(0, 8, requires_grad=True)
    logprobs, entropy = head.fused(empty, torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == (0,) and entropy == 0
    logprobs.sum().backward()
    assert not head.weight.grad.any() and empty.grad.shape == (0, 8)
    head.weight.requires_grad_(False).grad = None
    head.fused(hidden, torch.arange(3))[0].sum().backward()
    assert head.weight.grad is None and hidden.grad.any()


def test_extreme_logits_and_those_that_are_no_numbers():
    head = Head(torch.nn.Linear(1, 130, bias=False), 2**20)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-3e4, 3e4, 130)[:, None])
    found = head.fused(torch.ones(1, 1), torch.tensor([129]))
    assert [float(x) for x in found] == [0.0, 0.0]
    low = head.fused(torch.ones(1, 1), torch.tensor([0]))[0]
    torch.testing.assert_close(low, torch.tensor([-6e4]))
    assert head.fused(torch.full((1, 1), torch.nan), torch.tensor([0]))[0].isnan()
