"""Every algorithm against its paper's formula in NumPy's float64, on one hand-made batch.

Nothing expected here is computed by the code under test: the formulas are written out again from
the papers. `objective` is the trainer's contract of `algorithms.base`. turn_grpo, whose advantages
are of turns, has a file of its own.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.config import ConfigError, from_dict
from rose.trainer.algorithms import algorithms, build
from rose.trainer.algorithms.base import Summary, TokenBatch, differ
from rose.trainer.growing import Growing

CONF = Path(__file__).parents[2] / "conf"

GRPO = {"clip_low": 0.2, "clip_high": 0.2, "scale_by_std": True}
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "max_response_tokens": 6, "overlong_buffer": 4}
DAPO |= {"overlong_filtering": False}
RLOO = {"clip_low": None, "clip_high": None}
REINFORCE_PP = {"clip_low": 0.2, "clip_high": 0.2, "baseline": "none"}
GSPO = {"clip_low": 0.03, "clip_high": 0.04}
DECOUPLED = {"clip_low": 0.2, "clip_high": 0.2, "weight_cap": 1.5, "scale_by_std": True}
ARGS = {"grpo": GRPO, "dapo": DAPO, "rloo": RLOO, "reinforce_pp": REINFORCE_PP, "gspo": GSPO}
ARGS |= {"decoupled_ppo": DECOUPLED}
TURNS = GRPO | {"gamma": 1.0, "trajectory_weight": 0.5}

# Two groups of three trajectories. Ratios new / proximal lie inside and outside of every clip
# range, on both sides.
REWARDS = np.array([1.0, 0.0, 0.25, 2.0, 2.0, -1.0])
GROUPS = np.array([0, 0, 0, 1, 1, 1])
MASK = np.array(
    [[1, 1, 1, 0], [1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 1]]
)
PROXIMAL = [[-1.0, -0.7, -2.0, 0.0], [-0.3, 0.0, -1.1, -0.9], [0.0, -0.2, 0.0, 0.0]]
PROXIMAL += [[-1.5, -0.4, 0.0, 0.0], [-0.6, -0.8, -1.2, -0.1], [-2.2, -0.5, 0.0, -1.4]]
NEW_LESS_PROXIMAL = [[0.1, 0.5, -0.4, 9.0], [-0.5, 9.0, 0.05, 0.6], [9.0, 0.02, 9.0, 9.0]]
NEW_LESS_PROXIMAL += [[0.24, -0.9, 9.0, 9.0], [-0.1, 0.3, 0.0, 0.22], [0.4, -0.3, 9.0, -0.02]]
PROXIMAL_LESS_BEHAVIOUR = [[0.1, -0.2, 0.3, 5.0], [0.0, 5.0, 0.7, -0.1], [5.0, 0.2, 5.0, 5.0]]
PROXIMAL_LESS_BEHAVIOUR += [[0.41, 0.39, 5.0, 5.0], [-1.0, 0.05, 0.2, 0.0], [0.6, -0.4, 5.0, 0.1]]
NEW, RATIOS = np.add(PROXIMAL, NEW_LESS_PROXIMAL), np.exp(NEW_LESS_PROXIMAL)
ROWS, TOKENS = range(len(REWARDS)), MASK.sum(1)
TRUNCATED = np.array([False, False, True, False, False, True])
OF_TRAJECTORY, OF_BATCH = 1 / len(REWARDS) / TOKENS[:, None], 1 / TOKENS.sum()  # weights of tokens


@dataclass
class Data:
    summary: Summary
    new: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor


def hand_made() -> Data:
    proximal = torch.tensor(PROXIMAL)
    new = (proximal + torch.tensor(NEW_LESS_PROXIMAL)).requires_grad_()
    summary = Summary(*map(torch.tensor, (REWARDS, GROUPS, TOKENS, TRUNCATED)))
    behaviour = proximal - torch.tensor(PROXIMAL_LESS_BEHAVIOUR)
    return Data(summary, new, proximal, behaviour, torch.tensor(MASK).float())


def objective(algorithm, data: Data, micro_batches=(list(ROWS),)) -> torch.Tensor:
    """The loss that the trainer computes, gradients accumulated over the micro-batches."""
    advantages, weights = algorithm.advantages(data.summary), algorithm.token_weights(data.summary)
    total = torch.zeros(())
    for rows in micro_batches:
        # padded to the longest of the micro-batch only
        length = int(data.mask[rows].nonzero()[:, 1].max()) + 1
        tensors = [t[rows, :length] for t in (data.new, data.proximal, data.behaviour)]
        loss, _ = algorithm.token_loss(
            TokenBatch(*tensors, advantages[rows], data.mask[rows, :length])
        )
        total = total + (weights[rows] * loss.sum(1)).sum()
    return total


# ---------------------------------------------------------------- the papers' formulas


def group_normalised(rewards, scale_by_std: bool = True):
    groups = [rewards[group == GROUPS] for group in GROUPS]
    mean = np.array([group.mean() for group in groups])
    std = np.array([group.std(ddof=1) for group in groups])
    return (rewards - mean) / (std if scale_by_std else 1.0)


def ppo(ratio, advantage, low: float, high: float):
    """-min(r A, clip(r) A) and its derivative by log r."""
    plain, clipped = ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage
    return -np.minimum(plain, clipped), np.where(plain <= clipped, -plain, 0.0)


def token_level(advantages, low: float, high: float, weight):
    """sum_i sum_t weight * PPO of the token's ratio, and its gradient by the new
    log-probabilities."""
    value, slope = ppo(RATIOS, advantages[:, None], low, high)
    return (weight * MASK * value).sum(), weight * MASK * slope


def trajectory_level(advantages, low: float, high: float, exponent):
    """Mean over trajectories of PPO on (pi(y) / pi_old(y)) ** exponent."""
    value, slope = ppo(np.exp((NEW_LESS_PROXIMAL * MASK).sum(1) * exponent), advantages, low, high)
    return value.mean(), (slope * exponent / len(REWARDS))[:, None] * MASK


def dapo_advantages():
    """Advantages of rewards with a penalty that grows over the last 4 of 6 tokens."""
    return group_normalised(REWARDS + ((2 - TOKENS) / 4).clip(-1.0, 0.0))


def leave_one_out():
    others = (GROUPS[:, None] == GROUPS) & ~np.eye(len(GROUPS), dtype=bool)
    return REWARDS - np.array([REWARDS[row].mean() for row in others])


def normalised_over_tokens(values):
    every = np.repeat(values, TOKENS)
    return (values - every.mean()) / every.std()


def expected(name: str):
    """Return the loss and its gradient by the new log-probabilities."""
    if name == "rloo":
        gradient = -leave_one_out()[:, None] / len(REWARDS) * MASK
        return (gradient * NEW).sum(), gradient
    normalised, correction = group_normalised(REWARDS), np.exp(PROXIMAL_LESS_BEHAVIOUR)
    if name == "gspo":
        return trajectory_level(normalised, 0.03, 0.04, 1 / TOKENS)
    of_token_level = {
        "grpo": (normalised, 0.2, 0.2, OF_TRAJECTORY),
        "dapo": (dapo_advantages(), 0.2, 0.28, OF_BATCH),
        "reinforce_pp": (normalised_over_tokens(REWARDS), 0.2, 0.2, OF_BATCH),
        "decoupled_ppo": (normalised, 0.2, 0.2, correction * (correction <= 1.5) * OF_BATCH),
    }
    return token_level(*of_token_level[name])


def assert_objective(algorithm, loss: float, gradient) -> None:
    """However the batch is split into micro-batches."""
    for micro_batches in ([list(ROWS)], [[5, 2], [0], [3, 1, 4]]):
        data = hand_made()
        found = objective(algorithm, data, micro_batches)
        found.backward()
        assert found.item() == pytest.approx(loss, rel=1e-4)
        np.testing.assert_allclose(data.new.grad, gradient, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- losses and gradients


@pytest.mark.parametrize("name", ARGS)
def test_loss_and_gradient_are_the_papers(name):
    assert_objective(build(name, ARGS[name]), *expected(name))


def test_rloo_with_a_clip_range_is_ppo_on_the_trajectorys_ratio():
    of_ratio = trajectory_level(leave_one_out(), 0.2, 0.3, 1.0)
    assert_objective(build("rloo", {"clip_low": 0.2, "clip_high": 0.3}), *of_ratio)


@pytest.mark.parametrize(
    "name, args", [("rloo", RLOO | {"clip_low": 0.2, "clip_high": 0.3}), ("gspo", GSPO)]
)
def test_a_token_weighs_the_same_in_whichever_branch_it_stands(name, args):
    """On the policy, where every ratio is 1, and with two rows of one trajectory: 4 + 1 tokens."""
    algorithm = build(name, args)
    rows, lists = [0, 0, 1], ([1.0, 0.0], [0, 0], [5, 3], [False, False])
    summary = Summary(*map(torch.tensor, lists))
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 0], [1, 1, 1, 0]]).float()
    new = torch.full((3, 4), -0.5, requires_grad=True)
    old = new.detach()
    advantages = algorithm.advantages(summary)
    loss, _ = algorithm.token_loss(TokenBatch(new, old, old, advantages[rows], mask))
    (algorithm.token_weights(summary)[rows] * loss.sum(1)).sum().backward()
    per_token = advantages / 2 / (summary.response_tokens if name == "gspo" else 1)
    torch.testing.assert_close(new.grad, -per_token[rows][:, None] * mask)


def test_grpo_with_a_normaliser_is_dr_grpos_loss():
    """Section 3.2: the sum over a trajectory's tokens, divided by the same number for all."""
    advantages = group_normalised(REWARDS, scale_by_std=False)
    args = GRPO | {"scale_by_std": False, "normaliser": 7}
    sums = token_level(advantages, 0.2, 0.2, 1 / len(REWARDS) / 7)
    assert_objective(build("grpo", args), *sums)


def test_each_token_is_clipped_by_an_advantage_of_its_own():
    """Each token has the advantage of its turn."""
    data, of_tokens = hand_made(), np.array([[0.5, -1.0, -0.5, 2.0]] * len(ROWS))
    tensors = data.new, data.proximal, data.behaviour, torch.tensor(of_tokens).float(), data.mask
    loss, _ = build("grpo", GRPO).token_loss(TokenBatch(*tensors))
    loss.sum().backward()
    value, slope = ppo(RATIOS, of_tokens, 0.2, 0.2)
    np.testing.assert_allclose(loss.detach(), value * MASK, rtol=1e-4)
    np.testing.assert_allclose(data.new.grad, slope * MASK, rtol=1e-4)


@pytest.mark.parametrize(
    "name, advantages, weight",
    [("grpo", group_normalised(REWARDS), OF_TRAJECTORY), ("dapo", dapo_advantages(), OF_BATCH)],
)
def test_a_dual_clip_bounds_the_loss_of_negative_advantages_alone(name, advantages, weight):
    """max(min(r A, clip(r) A), c A) for A < 0 (arXiv:1912.09729, equation 5)."""
    c, of_tokens = 1.1, advantages[:, None]
    loss, gradient = expected(name)
    cut = (of_tokens < 0) & (c < RATIOS) & (MASK == 1)
    assert cut.any(), "the batch has such tokens"
    loss += (cut * weight * (RATIOS - c) * of_tokens).sum()
    assert_objective(build(name, ARGS[name] | {"dual_clip": c}), loss, np.where(cut, 0.0, gradient))


def test_cispo_clips_weights_and_leaves_every_token_its_gradient():
    """arXiv:2506.13585, equation 4, with DAPO's advantages and weights."""
    clipped = RATIOS.clip(0.8, 1.28)
    gradient = -clipped * dapo_advantages()[:, None] * OF_BATCH * MASK
    algorithm = build("dapo", ARGS["dapo"] | {"loss": "cispo"})
    assert_objective(algorithm, (gradient * NEW).sum(), gradient)
    assert statistics(algorithm)["clip_fraction"] == ((clipped != RATIOS) * MASK).sum() > 0


def test_reinforce_pp_baseline_takes_off_the_groups_mean_first():
    algorithm = build("reinforce_pp", REINFORCE_PP | {"baseline": "group"})
    wanted = normalised_over_tokens(group_normalised(REWARDS, scale_by_std=False))
    found = algorithm.advantages(hand_made().summary)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARGS)
def test_what_stands_under_the_mask_does_not_matter(name):
    data = hand_made()
    clean = objective(build(name, ARGS[name]), data).item()
    hole = data.mask == 0
    for garbage in (float("nan"), float("-inf"), 1e30):
        new = data.new.detach().masked_fill(hole, garbage).requires_grad_()
        filled = {k: getattr(data, k).masked_fill(hole, garbage) for k in ("proximal", "behaviour")}
        dirty = replace(data, new=new, **filled)
        found = objective(build(name, ARGS[name]), dirty)
        found.backward()
        assert found.item() == pytest.approx(clean, rel=1e-6)
        assert new.grad[hole].eq(0).all() and new.grad.isfinite().all()


def statistics(algorithm) -> dict[str, float]:
    data = hand_made()
    tensors = (data.new, data.proximal, data.behaviour, algorithm.advantages(data.summary))
    _, found = algorithm.token_loss(TokenBatch(*tensors, data.mask))
    return {key: value.item() for key, value in found.items()}


def test_statistics_are_sums_over_response_tokens():
    logs, (_, gradient) = np.array(NEW_LESS_PROXIMAL), expected("grpo")
    wanted = {"clip_fraction": (gradient == 0.0), "ratio": RATIOS, "policy_kl": RATIOS - 1 - logs}
    wanted = {key: (values * MASK).sum() for key, values in wanted.items()}
    assert statistics(build("grpo", GRPO)) == pytest.approx(wanted, rel=1e-4)


def test_decoupled_ppo_alone_corrects_the_mismatch_and_counts_the_tokens_that_its_cap_masked():
    # exp(0.7), exp(0.41), exp(0.6) > 1.5 > exp(0.39)
    assert statistics(build("decoupled_ppo", DECOUPLED))["weight_masked"] == 3
    corrects = {name for name in ARGS if build(name, ARGS[name]).corrects_mismatch}
    assert corrects == {"decoupled_ppo"}


# ---------------------------------------------------------------- edge cases


def advantages_of(name, rewards, groups=None) -> list[float]:
    none = torch.zeros(len(rewards), dtype=torch.int64)
    groups = none if groups is None else torch.tensor(groups)
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return (
        build(name, ARGS[name]).advantages(Summary(rewards, groups, none + 2, none.bool())).tolist()
    )


@pytest.mark.parametrize("name", ARGS)
def test_a_group_without_a_difference_teaches_nothing(name):
    """0.1 is not exact in binary: rounding noise must not become an advantage."""
    for rewards in ([0.1] * 4, [0.1 + 0.1 + 0.1, 0.3, 0.3, 0.3], [1e9 / 3 * 3, 1e9, 1e9, 1e9]):
        assert not differ(rewards) and advantages_of(name, rewards) == [0] * 4


@pytest.mark.parametrize("rewards", [(2.0**24, 2.0**24 + 1), (1e15, 1e15 + 1e4), (0, 1e-9)])
@pytest.mark.parametrize("name", ARGS)
def test_the_better_of_two_rewards_has_the_advantage_however_close_they_are(name, rewards):
    """2^24 and 2^24 + 1 are one number in float32."""
    worse, better = advantages_of(name, rewards)
    assert differ(rewards) and worse < 0 < better


@pytest.mark.parametrize("name", sorted(set(ARGS) - {"reinforce_pp"}))
def test_a_group_of_one_has_no_advantage(name):
    alone, better, worse = advantages_of(name, [5.0, 1.0, 0.0], [0, 1, 1])
    assert alone == 0 and better > 0 > worse


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("name", ARGS)
def test_a_trajectory_without_tokens_is_harmless(name, clip):
    args = ARGS[name] | ({"clip_low": clip, "clip_high": clip} if clip else {})
    algorithm, data = build(name, args), hand_made()
    data.summary.response_tokens[1] = data.mask[1] = 0
    objective(algorithm, data).backward()
    assert data.new.grad[1].eq(0).all() and data.new.grad.isfinite().all()
    assert data.new.grad.ne(0).any()


@pytest.mark.parametrize("name", ARGS)
def test_a_batch_without_any_tokens_is_finite(name):
    summary = replace(hand_made().summary, response_tokens=torch.zeros(6, dtype=torch.int64))
    algorithm = build(name, ARGS[name])
    assert algorithm.advantages(summary).isfinite().all()
    assert algorithm.token_weights(summary).isfinite().all()


@pytest.mark.parametrize("name", ARGS)
def test_an_exploded_ratio_keeps_the_gradient_finite(name):
    data = hand_made()
    new = torch.full_like(data.proximal, -0.1).requires_grad_()
    far = replace(data, new=new, proximal=data.proximal - 1000)
    objective(build(name, ARGS[name]), far).backward()
    assert far.new.grad.isfinite().all()


def test_overlong_filtering_gives_truncated_trajectories_no_loss():
    weights = build("dapo", DAPO | {"overlong_filtering": True}).token_weights(hand_made().summary)
    assert weights.tolist() == pytest.approx(~TRUNCATED / TOKENS[~TRUNCATED].sum())


LONG = (2, 40, 45, 60, 300), [(2, 2), (40, 50), (45, 50), (60, 60), (9, 90)]


@pytest.mark.parametrize(
    "most, buffer, tokens, limits, expected",
    [
        (100, 20, (0, 80, 85, 100, 130), None, [0, 0, -0.25, -1, -1]),
        (6, 0, (0, 5, 1000), None, [0, 0, 0]),
        # by the limit that each trajectory came closest to
        (None, None, *LONG, [-1, 0, -0.5, -1, 0]),
        (None, 50, *LONG, [-1, -0.8, -0.9, -1, 0]),
    ],
)
def test_overlong_punishment_grows_within_the_buffer_and_stops_at_minus_one(
    most, buffer, tokens, limits, expected
):
    dapo = build("dapo", DAPO | {"max_response_tokens": most, "overlong_buffer": buffer})
    rows, limits = torch.zeros(len(tokens)), limits and torch.tensor(limits)
    summary = Summary(rows, rows.long(), torch.tensor(tokens), rows.bool(), limits=limits)
    assert dapo.overlong_punishment(summary).tolist() == pytest.approx(expected)


# ---------------------------------------------------------------- names and arguments


@pytest.mark.parametrize("name", algorithms())
def test_conf_has_a_default_for_every_argument_and_no_other_algorithm(tree, name):
    config = from_dict(tree(f"algorithm={name}")).algorithm
    assert config.name == name and isinstance(build(config.name, config.args), algorithms()[name])
    assert {path.stem for path in (CONF / "algorithm").glob("*.yaml")} == set(algorithms())


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("ppo", {}, ["algorithm.name='ppo'"]),
        ("grpo", GRPO | {"clip": 0.2}, ["algorithm.args.clip=0.2"]),
        ("grpo", {"clip_low": 0.2, "clip_high": 0.2}, ["algorithm.args.scale_by_std: missing"]),
        ("grpo", GRPO | {"clip_low": 1.0}, ["algorithm.args.clip_low=1.0", "< 1.0"]),
        ("grpo", GRPO | {"clip_high": -0.1}, ["algorithm.args.clip_high=-0.1", ">= 0.0"]),
        ("grpo", GRPO | {"clip_high": "wide"}, ["algorithm.args.clip_high='wide'"]),
        ("dapo", DAPO | {"overlong_buffer": 7}, ["args.overlong_buffer=7"]),
        ("rloo", {"clip_low": 0.2, "clip_high": None}, ["algorithm.args.clip_low=0.2"]),
        ("reinforce_pp", REINFORCE_PP | {"baseline": "batch"}, ["algorithm.args.baseline='batch'"]),
        ("decoupled_ppo", DECOUPLED | {"weight_cap": 0}, ["algorithm.args.weight_cap=0", "> 0"]),
        ("turn_grpo", TURNS | {"gamma": 1.5}, ["algorithm.args.gamma=1.5: "]),
        ("turn_grpo", TURNS | {"trajectory_weight": -0.1}, ["args.trajectory_weight=-0.1: "]),
    ],
)
def test_a_bad_configuration_says_which_key_and_what_would_be_right(name, args, words):
    with pytest.raises(ConfigError) as error:
        build(name, args)
    assert all(word in str(error.value) for word in words), str(error.value)


# ---------------------------------------------------------------- batches that grow (test_stream.py)


def groups_of_two(rows):
    """Return the first rows of four groups of two."""
    rewards = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 1.0])[:rows]
    number, tokens = torch.arange(rows), torch.tensor([3, 9, 0, 5, 6, 2, 7, 7][:rows])
    return Summary(rewards, number // 2, tokens, number < 0)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_advantages_of_the_whole_batch_are_found_out(baseline):
    algorithm = build("reinforce_pp", ARGS["reinforce_pp"] | {"baseline": baseline})
    assert algorithm.advantages_of_batch
    growing = Growing(algorithm)
    growing.extend(groups_of_two(4))
    with pytest.raises(ValueError, match="the advantages of groups .* trainer.stream=false"):
        growing.extend(groups_of_two(8))


def test_weights_that_change_by_more_than_a_factor_are_found_out():
    class Longest(algorithms()["grpo"]):
        def token_weights(self, summary):
            longest = summary.response_tokens.max()
            return (summary.response_tokens / longest).pow(len(summary.rewards))

    growing = Growing(Longest(0.2, 0.2, True))
    growing.extend(groups_of_two(2))
    with pytest.raises(ValueError, match="the weights of groups"):
        growing.extend(groups_of_two(4))
