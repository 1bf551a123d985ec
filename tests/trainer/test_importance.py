"""The weight between engine and trainer and the measured mismatch, against plain Python floats."""

import math

import pytest
import torch

from rose.trainer.importance import Bounds, importance_weights, mismatch
from rose.trainer.reference import penalty

PROXIMAL = [[-1.0, -0.5, -2.0], [-0.1, -3.0, 7.0]]
BEHAVIOUR = [[-1.2, -0.5, -1.0], [-2.1, -2.9, float("nan")]]
MASK = [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
# log-ratios of the four response tokens
DIFFERENCES = [-1.0 - -1.2, -2.0 - -1.0, -0.1 - -2.1, -3.0 - -2.9]


def tensors(requires_grad: bool = False):
    proximal = torch.tensor(PROXIMAL, requires_grad=requires_grad)
    return proximal, torch.tensor(BEHAVIOUR), torch.tensor(MASK)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (Bounds(None), MASK),
        (Bounds(2.0), [[math.exp(0.2), 0, math.exp(-1)], [2, math.exp(-0.1), 0]]),
        # IcePop: exp(-1) = 0.37 and exp(2) = 7.4 lie outside of [0.5, 5]
        (Bounds(5.0, floor=0.5), [[math.exp(0.2), 0, 0], [0, math.exp(-0.1), 0]]),
        # products of ratios: exp(0.2 - 1) = 0.45 and exp(2 - 0.1) = 6.7
        (Bounds(2.0, level="sequence"), [[math.exp(-0.8), 0, math.exp(-0.8)], [2, 2, 0]]),
        (Bounds(5.0, 0.4, "sequence"), [[math.exp(-0.8), 0, math.exp(-0.8)], [0, 0, 0]]),
    ],
    ids=["no correction", "cap", "floor", "sequence", "sequence with a floor"],
)
def test_weights_are_the_probability_ratios_within_their_bounds(bounds, expected):
    weights = importance_weights(*tensors(requires_grad=True), bounds)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))
    assert not weights.requires_grad
    if bounds.floor is not None:
        assert mismatch(*tensors(), bounds)["capped"].item() == 2, "tokens"


def test_a_hopeless_ratio_and_that_of_a_long_sequence_stay_finite_and_capped():
    one = torch.ones(1, 1)
    assert importance_weights(0 * one, -1e4 * one, one, Bounds(2.0)).tolist() == [[2.0]]
    long = torch.zeros(1, 1000), torch.full((1, 1000), -1.0), torch.ones(1, 1000)
    assert importance_weights(*long, Bounds(2.0, level="sequence")).unique().tolist() == [2.0]
    far = importance_weights(*(long[1], long[0], long[2]), Bounds(2.0, level="sequence"))
    assert 0 < far.max() < 1e-8


def test_mismatch_sums_over_response_tokens_only():
    found = {key: value.item() for key, value in mismatch(*tensors(), Bounds(1.2)).items()}
    expected = {"kl_k3": sum(math.exp(d) - 1 - d for d in DIFFERENCES), "ratio_max": math.exp(2.0)}
    # exp(0.2) = 1.22 and exp(2.0) = 7.4
    expected |= {"abs_diff": sum(map(abs, DIFFERENCES)), "capped": 2}
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_tiny_kl_is_not_lost_in_rounding():
    logs = torch.full((1, 4), 1e-5)
    expected = pytest.approx(4 * 0.5e-10, rel=1e-4)
    assert mismatch(logs, torch.zeros(1, 4), torch.ones(1, 4))["kl_k3"].item() == expected


def test_identical_logprobs_and_no_response_tokens_have_no_mismatch():
    proximal, behaviour, mask = tensors()
    found = mismatch(proximal, proximal.clone(), mask, Bounds(1.0))
    expected = {"kl_k3": 0, "abs_diff": 0, "capped": 0, "ratio_max": 1}
    assert {key: value.item() for key, value in found.items()} == expected
    assert not any(mismatch(proximal, behaviour, mask * 0, Bounds(2.0)).values())


def test_penalty_is_k3_of_the_reference_with_the_policys_gradient():
    policy, frozen, mask = tensors(requires_grad=True)
    kl = penalty(policy, frozen, mask)
    gaps = [[0.2, 0.0, -1.0], [2.0, -0.1, 0.0]]  # log(policy / reference)
    expected = [[math.exp(-g) + g - 1 for g in row] for row in gaps]
    torch.testing.assert_close(kl, torch.tensor(expected))
    (gradient,) = torch.autograd.grad(kl.sum(), policy)
    expected = [[1 - math.exp(-g) for g in row] for row in gaps]
    torch.testing.assert_close(gradient, torch.tensor(expected))


@pytest.mark.parametrize("update", ["first", "later"])
def test_the_corrected_penalty_has_value_and_gradient_of_kl_to_the_reference(update):
    """Sum over the vocabulary, which gives the exact expectation over tokens that the proximal
    policy draws. In the later updates of a step it is another than the trained policy."""
    generator = torch.Generator().manual_seed(4)
    policy, frozen, drawn = (
        torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    policy.requires_grad_()
    logprobs, reference = policy.log_softmax(0), frozen.log_softmax(0)
    proximal = (policy.detach() if update == "first" else drawn).log_softmax(0)
    corrected = penalty(logprobs, reference, torch.ones(7), proximal)
    found = (proximal.exp() * corrected).sum()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    torch.testing.assert_close(found, kl)
    right, got = (torch.autograd.grad(x, policy, retain_graph=True)[0] for x in (kl, found))
    torch.testing.assert_close(got, right)
    # The plain k3 has the gradient of KL(reference || policy).
    if update == "first":
        other = (reference.exp() * (reference - logprobs)).sum()
        plain = (proximal.exp() * penalty(logprobs, reference, torch.ones(7))).sum()
        wrong, got = (torch.autograd.grad(x, policy, retain_graph=True)[0] for x in (other, plain))
        torch.testing.assert_close(got, wrong)
        assert (wrong - right).norm() > 0.1 * right.norm()
