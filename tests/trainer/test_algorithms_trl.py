"""ROSE's losses against TRL's own, on the same model and tokens (TRL is a dependency of this test
only).

TRL's `GRPOTrainer` is the real one, built around a tiny random Qwen3: its `_compute_loss` runs the
model and returns the loss that it would train on. Ours gets log-probabilities from the same model.
Equal parameter gradients then say that one optimizer step of either would be the same step.
"""

import pytest
import torch

from rose.trainer.algorithms import build
from rose.trainer.algorithms.base import Summary, TokenBatch
from rose.trainer.importance import Bounds, importance_weights
from rose.trainer.reference import penalty

pytestmark = [
    pytest.mark.slow,  # importing TRL takes about 9 s
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM:UserWarning"),
]

ROWS, PROMPT, RESPONSE, GROUP_SIZE = 6, 3, 5, 3
LENGTHS = [5, 2, 4, 1, 5, 3]


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    """(trainer settings) -> GRPOTrainer in training mode with a model of its own, always the same
    one."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    words = {"<pad>": 0, "<end>": 1, "hello": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="hello")),
        pad_token="<pad>",
        eos_token="<end>",
    )
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = Qwen3Config(**sizes, pad_token_id=0, eos_token_id=1)
    folder = str(tmp_path_factory.mktemp("trl"))

    def make(**settings) -> GRPOTrainer:
        torch.manual_seed(3)
        here = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": []}
        batch = {"num_generations": GROUP_SIZE, "per_device_train_batch_size": ROWS}
        config = GRPOConfig(**here, **batch, beta=0.0, gradient_checkpointing=False, **settings)
        trainer = GRPOTrainer(
            Qwen3ForCausalLM(shape),
            lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["hello"] * 6}),
            processing_class=tokenizer,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1  # set by Trainer.train()
        return trainer

    return make


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """(ids (6, 8) int64, response mask (6, 5) float32), right-padded."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 40, (ROWS, PROMPT + RESPONSE), generator=generator)
    mask = (torch.arange(RESPONSE)[None] < torch.tensor(LENGTHS)[:, None]).float()
    return ids, mask


def response_logprobs(model, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    attention = torch.cat([torch.ones(ROWS, PROMPT), mask], dim=1).long()
    logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)


def parameter_gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


GRPO = {"clip_low": 0.2, "clip_high": 0.2, "scale_by_std": True}
ASYMMETRIC = GRPO | {"clip_low": 0.1, "clip_high": 0.3}
DR_GRPO = GRPO | {"scale_by_std": False, "normaliser": 9}
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "max_response_tokens": 9, "overlong_buffer": 0}
DAPO |= {"overlong_filtering": False}
CISPO = DAPO | {"clip_low": 0.999, "loss": "cispo"}  # TRL has no bound below
GSPO = {"clip_low": 0.03, "clip_high": 0.04}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04}
# ROSE's algorithm and arguments, TRL's kind of loss and settings.
CASES = {
    "grpo": ("grpo", GRPO, "grpo", {"epsilon": 0.2}),
    "grpo-asymmetric": ("grpo", ASYMMETRIC, "grpo", {"epsilon": 0.1, "epsilon_high": 0.3}),
    "dapo": ("dapo", DAPO, "dapo", {"epsilon": 0.2, "epsilon_high": 0.28}),
    "dr-grpo": ("grpo", DR_GRPO, "dr_grpo", {"epsilon": 0.2, "max_completion_length": 9}),
    "dual-clip": ("grpo", GRPO | {"dual_clip": 1.25}, "grpo", {"epsilon": 0.2, "delta": 1.25}),
    "cispo": ("dapo", CISPO, "cispo", {"epsilon_high": 1.28}),
    "gspo": ("gspo", GSPO, "grpo", SEQUENCE),
}


@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["", "kl"])
@pytest.mark.parametrize("corrected", [False, True], ids=["", "importance-corrected"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_parameter_gradients_are_trls(trl_trainer, case, corrected, beta):
    name, args, loss_type, settings = CASES[case]
    if name == "gspo" and beta:
        pytest.skip("TRL corrects the penalty by the sequence's ratio here, ROSE by the token's")
    trainer = trl_trainer(loss_type=loss_type, **settings)
    trainer.beta = beta
    ids, mask = tokens()
    algorithm = build(name, args)
    lists = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0], [0, 0, 0, 1, 1, 1], LENGTHS, [False] * ROWS
    summary = Summary(*map(torch.tensor, lists))
    advantages = algorithm.advantages(summary)

    logprobs = response_logprobs(trainer.model, ids, mask)
    noise = torch.Generator().manual_seed(7)
    proximal = logprobs.detach() + 0.3 * torch.randn(ROWS, RESPONSE, generator=noise)
    behaviour = proximal + 0.8 * torch.randn(ROWS, RESPONSE, generator=noise)
    importance = importance_weights(proximal, behaviour, mask, Bounds(2.0 if corrected else None))

    loss, statistics = algorithm.token_loss(
        TokenBatch(logprobs, proximal, behaviour, advantages, mask)
    )
    reference = proximal - 0.5 * torch.randn(ROWS, RESPONSE, generator=noise)
    loss = importance * loss + beta * penalty(logprobs, reference, mask, proximal)
    ours = (algorithm.token_weights(summary) * loss.sum(1)).sum()
    ours.backward()
    our_gradients = parameter_gradients(trainer.model)
    assert 0 < statistics["clip_fraction"] < mask.sum()  # the clip matters in this batch
    trainer.model.zero_grad()

    trainer.use_vllm = corrected  # TRL weighs by this ratio when vLLM made the tokens
    rows = {"prompt_ids": ids[:, :PROMPT], "prompt_mask": torch.ones(ROWS, PROMPT).long()}
    rows |= {"completion_ids": ids[:, PROMPT:], "completion_mask": mask.long()}
    rows |= {"advantages": advantages, "num_items_in_batch": mask.sum()}
    rows |= {"old_per_token_logps": proximal, "ref_per_token_logps": reference}
    rows |= {"importance_sampling_ratio": importance}
    theirs = trainer._compute_loss(trainer.model, rows)
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(
        our_gradients, parameter_gradients(trainer.model), rtol=1e-4, atol=1e-7
    )
