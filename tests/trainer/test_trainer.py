"""The real trainer (DeepSpeed, gloo, 1 and 2 processes) equals a plain PyTorch loop, resumes bit
for bit, publishes exactly its weights, and refuses what is not finite."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rose.protocol import unpack_floats, unpack_tokens
from rose.trainer.algorithms import build
from rose.trainer.algorithms.base import Summary, TokenBatch
from rose.trainer.importance import Bounds, importance_weights
from rose.transfer.receive import materialise
from tests.trainer import tiny_world

pytestmark = pytest.mark.slow

# seed of the batch (even: prefix trees), tokens of a micro-batch, updates, scale of the rewards
STEPS = [[1, 4000, 1, 1], [2, 40, 2, 1], [3, 100, 1, 1]]
LAST = [4, 64, 1, 1]
ACTIONS = [["publish", 0], *(["train", *step] for step in STEPS), ["publish", 3], ["save"]]
ACTIONS += [["train", *LAST, 4], ["publish", 4]]
ACTIONS += [["train", 5, 64, 1, "inf"], ["train", 6, 64, 1, 1e38], ["publish", 5]]
JOB = {"name": "run", "settings": [], "actions": ACTIONS}
RESUMED = {"name": "resumed", "settings": []}
RESUMED |= {"actions": [["load"], ["turn"], ["train", *LAST], ["turn"], ["publish", 4]]}
WORLDS = [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2)]


class World:
    def __init__(self, folder, stage, ranks):
        self.folder, self.stage, self.ranks = folder, stage, ranks
        self.model = tiny_world.save_model(folder / "model")
        self.reports = self.run(JOB)

    def run(self, job):
        job = job | {"settings": [*job["settings"], f"trainer.zero_stage={self.stage}"]}
        return tiny_world.run_world(job, self.folder, self.ranks)

    def version(self, number, name="run"):
        return {n: t.numpy() for n, t in materialise(self.folder / name, number).items()}


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"zero{world[0]}-ranks{world[1]}")
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), *request.param)


def as_tensors(summary, **of_turns) -> Summary:
    plain = ("rewards", "groups", "response_tokens", "truncated")
    return Summary(*(torch.tensor(getattr(summary, field)) for field in plain), **of_turns)


class Plain:
    """The same steps, one trajectory at a time, without DeepSpeed, padding, chunks or shares."""

    temperature = 1.0

    def __init__(self, folder, kl_coef=0.0, name="grpo", **args):
        self.kl_coef, self.kl = kl_coef, 0.0
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        grpo = {"clip_low": 0.2, "clip_high": 0.2, "scale_by_std": False}
        self.algorithm = build(name, grpo | args)
        self.optimizer, self.applied = self.adam(self.model.parameters()), 0

    @staticmethod
    def adam(parameters):
        return torch.optim.AdamW(parameters, 0.01, (0.9, 0.95), 1e-3, weight_decay=0.1)

    def logprobs(self, t, model=None):
        tokens = torch.tensor(unpack_tokens(t.tokens)).long()
        logits = (model or self.model)(input_ids=tokens[None, :-1]).logits
        logp = (logits / self.temperature).log_softmax(-1)
        return logp.gather(2, tokens[None, 1:, None]).squeeze(2)  # (1, T)

    def loss(self, t, row, proximal, advantages, weights):
        mask = torch.tensor(np.frombuffer(t.mask, np.uint8)[1:].astype(np.float32))[None]
        behaviour = torch.tensor(unpack_floats(t.logprobs))[None, 1:]
        logprobs = self.logprobs(t)
        own = advantages[row : row + 1]
        if own.dim() == 2:  # of turns: each of its tokens gets its turn's
            tokens = torch.zeros_like(mask)
            tokens[mask == 1] = own[0].repeat_interleave(
                torch.tensor([n for _, n in t.turn_tokens] + [0] * (own.shape[1] - t.turns))
            )
            own = tokens
        batch = TokenBatch(logprobs, proximal, behaviour, own, mask)
        losses, _ = self.algorithm.token_loss(batch)
        with torch.no_grad():
            difference = self.logprobs(t, self.reference)
        difference = difference - logprobs
        kl = (difference.exp() - difference - 1) * mask * (logprobs - proximal).exp()
        self.kl += kl.sum().item()
        importance = importance_weights(proximal, behaviour, mask, Bounds(1.1))
        return (weights[row] * (importance * losses + self.kl_coef * kl)).sum()

    def train_forked(self, seed):
        """(loss, gradient norm) where every leaf trains its whole path, by its share of its tree."""
        rows, summary = tiny_world.make_forked(seed)
        turns = [each + [-1] * (4 - len(each)) for each in summary.segments]
        whole = as_tensors(summary, segments=torch.tensor(turns))
        advantages, trees = self.algorithm.advantages(whole), sum(tiny_world.SHARES)
        weights = [
            share / max(1, tokens) / trees
            for share, tokens in zip(tiny_world.SHARES, summary.response_tokens, strict=True)
        ]
        return self.gradient(rows, rows, self.proximal(rows), advantages, weights)

    def proximal(self, rows):
        with torch.no_grad():
            return {row: self.logprobs(t) for row, t in rows.items()}

    def gradient(self, rows, chosen, proximal, advantages, weights, factor=1):
        """(loss, norm of its gradient, which is clipped)"""
        loss = sum(self.loss(rows[r], r, proximal[r], advantages, weights) for r in chosen)
        (loss * factor).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        return loss.item(), float(norm)

    def train(self, seed, limit, updates, _):
        """Returns (loss, mean gradient norm)."""
        rows, summary = tiny_world.make_batch(seed)
        turns = [each + [torch.nan] * (3 - len(each)) for each in summary.turn_rewards]
        whole = as_tensors(summary, turn_rewards=torch.tensor(turns, dtype=torch.float64))
        advantages, weights = self.algorithm.advantages(whole), self.algorithm.token_weights(whole)
        proximal, total, norms = self.proximal(rows), 0.0, []
        for update in tiny_world.plan(seed, rows, 1, limit, updates)[0][0]:
            self.optimizer.zero_grad()
            chosen = [row for micro in update for row in micro]
            of_batch = proximal, advantages, weights
            loss, norm = self.gradient(rows, chosen, *of_batch, factor=updates)
            total, norms = total + loss, [*norms, norm]
            self.applied += 1
            self.optimizer.param_groups[0]["lr"] = 0.01 * min(1, self.applied / 2)
            self.optimizer.step()
        return total, sum(norms) / len(norms)


def test_parameters_loss_and_gradient_equal_the_plain_loop(world):
    plain = Plain(world.model)
    for step, metrics in zip(STEPS, world.reports[0]["metrics"], strict=False):
        loss, norm = plain.train(*step)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    trained, start = world.version(3), world.version(0)
    parameters = dict(plain.model.named_parameters())
    assert trained.keys() == parameters.keys()
    for name, parameter in parameters.items():
        moved = np.abs(trained[name] - start[name]).max()
        assert moved > 1e-3
        np.testing.assert_allclose(
            trained[name], parameter.detach().numpy(), rtol=0, atol=2e-3 * moved, err_msg=name
        )


class Warm(Plain):
    temperature = 1.5


WARM = f"rollout.temperature={Warm.temperature}"
TURNS = {"gamma": 0.9, "trajectory_weight": 0.25}


@pytest.mark.parametrize(
    ("stage", "ranks", "algorithm", "args"), [(0, 1, "grpo", {}), (3, 2, "turn_grpo", TURNS)]
)
def test_everything_at_once_equals_the_plain_loop(stage, ranks, algorithm, args, tmp_path):
    model = tiny_world.save_model(tmp_path / "model")
    settings = [f"algorithm={algorithm}", *(f"algorithm.args.{k}={v}" for k, v in args.items())]
    settings += ["algorithm.kl_coef=0.5", f"trainer.zero_stage={stage}", WARM]
    actions = [*(["train", *step] for step in STEPS), ["turn"], ["train", *LAST]]
    job = {"name": "run", "settings": settings, "actions": actions}
    reports = tiny_world.run_world(job, tmp_path, ranks)
    plain, without = (Warm(model, kl, algorithm, **args) for kl in (0.5, 0.0))
    for step, metrics in zip([*STEPS, LAST], reports[0]["metrics"], strict=True):
        plain.kl = 0.0
        loss, norm = plain.train(*step)
        other, _ = without.train(*step)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["reference_kl"] * metrics["tokens"] == pytest.approx(plain.kl, abs=1e-4)
    assert abs(loss - other) > 1e-4  # the penalty is part of what was compared
    assert reports[0]["models"] == 2
    # weights, Adam's two moments and the reference leave the device together
    for report in reports:
        assert min(report["gone"]) > 0.8 * 16 * report["parameters"] / ranks


def test_metrics_are_of_the_whole_batch_on_every_rank(world):
    for metrics in zip(*(report["metrics"] for report in world.reports), strict=True):
        assert all(m == metrics[0] for m in metrics)
    first = world.reports[0]["metrics"][0]
    _, summary = tiny_world.make_batch(1)
    assert first["tokens"] == sum(summary.response_tokens)
    assert 0 < first["importance_capped"] < 1 < first["mismatch_max_ratio"]
    # before the first update, policy and proximal are one
    assert first["ratio"] == pytest.approx(1)
    # second of two warm-up updates comes with the next step
    assert first["lr"] == pytest.approx(0.005)


def test_publishing_reproduces_the_models_bytes(world):
    stored, published = load_file(world.model / "model.safetensors"), world.version(0)
    assert stored.keys() == published.keys()
    for name, tensor in stored.items():
        assert tensor.numpy().tobytes() == published[name].tobytes(), name
    assert world.reports[0]["parameters"] == sum(tensor.numel() for tensor in stored.values())


def test_what_is_not_finite_is_refused_on_every_rank_and_nothing_applied(world):
    for report in world.reports:
        loss, gradient = report["errors"]
        assert "step 8, update 0, micro-batch 0: the loss is not finite" in loss
        assert "step 9, update 0, after its last micro-batch: the gradient is not" in gradient
    before, after = world.version(4), world.version(5)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_a_resumed_run_continues_bit_for_bit_also_where_its_device_is_shared(world):
    reports = world.run(RESUMED)
    # of weights and Adam's two moments, in float32; the smallest tensors are less than a page
    for report in reports:
        assert min(report["gone"]) > 0.8 * 12 * report["parameters"] / world.ranks
    expected, resumed = world.version(4), world.version(4, "resumed")
    assert all(expected[name].tobytes() == resumed[name].tobytes() for name in expected)
    for key in ("loss", "grad_norm", "entropy", "lr"):
        assert reports[0]["metrics"][0][key] == world.reports[0]["metrics"][3][key]


def test_no_rank_loads_torchs_compiler_or_tries_a_c_compiler(world):
    for report in world.reports:
        assert not report["compiler"] and report["operators"] == {}


@pytest.mark.parametrize(
    ("stage", "more"),
    [(2, []), (3, ["trainer.gradient_checkpointing=true", "trainer.reduce_dtype=bfloat16"])],
)
def test_bfloat16_follows_float32_within_its_precision(stage, more, tmp_path):
    tiny_world.save_model(tmp_path / "model")
    actions = [["turn"], ["train", *STEPS[0]], ["turn"], ["publish", 1]]
    settings = [f"trainer.zero_stage={stage}", *tiny_world.BFLOAT16, *more]
    job = {"name": "run", "actions": actions, "settings": settings}
    metrics = tiny_world.run_world(job, tmp_path, 2)[0]["metrics"][0]
    _, norm = Plain(tmp_path / "model").train(*STEPS[0])
    assert metrics["grad_norm"] == pytest.approx(norm, rel=0.05)
    assert {t.dtype for t in materialise(tmp_path / "run", 1).values()} == {torch.bfloat16}


@pytest.mark.parametrize(("seed", "limit", "ranks"), [(2, 4000, 1), (1, 120, 2)])
def test_what_forking_trajectories_share_is_trained_once(seed, limit, ranks, tmp_path):
    """In prefix trees and in rows of their own, also where siblings are on different ranks."""
    model = tiny_world.save_model(tmp_path / "model")
    job = {"name": "run", "actions": [["forked", seed, limit]]}
    job["settings"] = ["algorithm=tree_grpo", "rollout/branch=tree", "rollout.group_size=8"]
    [metrics] = tiny_world.run_world(job, tmp_path, ranks)[0]["metrics"]
    loss, norm = Plain(model, name="tree_grpo").train_forked(seed)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    rows, _ = tiny_world.make_forked(seed)
    again = sum(rows[other].turn_tokens[0][1] for other in tiny_world.FORKS.values())
    assert metrics["tokens"] == sum(t.response_tokens for t in rows.values()) - again


def test_a_trajectory_in_branches_trains_as_it_does_in_one_row(tmp_path):
    """Advantages, also those of turns, and weights are the trajectory's, whichever of its rows a
    token is in, and whether prefix trees compute what rows share once."""
    tiny_world.save_model(tmp_path / "model")
    job = {"settings": ["algorithm=turn_grpo"]}
    found = [
        tiny_world.run_world(job | {"name": name, "actions": [action]}, tmp_path, 1)[0]
        for name, action in (("whole", ["train", 2, 4000, 1, 1]), ("branches", ["split", 2, 4000]))
    ]
    whole, branches = (report["metrics"][0] for report in found)
    for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "tokens"):
        assert branches[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
