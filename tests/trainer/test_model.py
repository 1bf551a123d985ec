"""Log-probabilities and entropy equal the plain computation, however the vocabulary is chunked."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rose.trainer import model
from rose.trainer.batching import LOGIT_ELEMENTS_KEPT
from rose.trainer.collate import collate
from tests.trainer import tiny_world
from tests.trainer.test_prefix_tree import assert_alike


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return tiny_world.save_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def batch():
    rows, _ = tiny_world.make_batch(seed=1)
    return collate(list(rows), rows, tiny_world.VOCABULARY)


def naive(hf, batch, temperature=1.0):
    attention = torch.arange(batch.inputs.shape[1]) < torch.tensor(tiny_world.LENGTHS)[:, None]
    logits = hf(input_ids=batch.inputs, attention_mask=attention.long()).logits
    logp = (logits / temperature).log_softmax(-1)
    entropy = -((logp.exp() * logp).sum(-1) * batch.mask).sum()
    return logp.gather(2, batch.targets[..., None]).squeeze(2) * batch.mask, entropy


@pytest.mark.parametrize("rows_per_chunk, temperature", [(1, 1.0), (7, 0.6), (10_000, 1.5)])
def test_values_and_gradients_equal_the_naive_ones(folder, batch, rows_per_chunk, temperature):
    policy = model.load(folder, torch.float32, gradient_checkpointing=False)
    policy.head.chunk_rows, policy.head.temperature = rows_per_chunk, temperature
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs, entropy = policy(batch.inputs, batch.targets, batch.mask)
    expected, expected_entropy = naive(plain, batch, temperature)
    (logprobs**2).sum().backward()
    (expected**2).sum().backward()
    ours, theirs = policy.named_weights(), dict(plain.named_parameters())
    assert_alike(
        (logprobs, entropy, [parameter.grad for _, parameter in ours]),
        (expected, expected_entropy, [theirs[name].grad for name, _ in ours]),
    )


def test_torchs_operations_get_few_logits_at_once(monkeypatch):
    """A chunk's logits take seven times the memory by torch's operations than by the kernels."""
    monkeypatch.setattr(model, "LOGIT_ELEMENTS_PLAIN", 3 * 50)
    head = model.Head(torch.nn.Linear(4, 50), LOGIT_ELEMENTS_KEPT)
    hidden, targets = torch.randn(8, 4, requires_grad=True), torch.arange(8)
    rows, chunk = [], head.chunk
    head.chunk = lambda *given: rows.append(len(given[0])) or chunk(*given)
    head.plain(hidden, targets)[0].sum().backward()
    assert rows[:3] == [3, 3, 2] and max(rows) == 3


def test_weights_have_the_folders_names_and_tied_ones_come_once(folder):
    policy = model.load(folder, torch.float32, False)
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert sorted(name for name, _ in policy.named_weights()) == sorted(stored.keys())


def test_a_row_without_policy_tokens_still_reaches_every_parameter(folder):
    policy = model.load(folder, torch.float32, False)
    batch = collate([], {}, tiny_world.VOCABULARY)
    logprobs, entropy = policy(batch.inputs, batch.targets, batch.mask)
    logprobs.sum().backward()
    assert entropy == 0
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_a_model_whose_logits_are_scaled_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"logit_scale": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="logit_scale=0.5"):
        model.load(tmp_path, torch.float32, False)
