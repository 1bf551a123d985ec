"""vLLM 0.32's rejection sampler on CPUs, mended.

There `expand_batch_to_tokens`, which gives each drafted position its request's temperature, top-p
and top-k, fills an int64 copy of its result and returns uninitialised memory: tokens are sampled
wrongly at temperatures above 0, while their log-probabilities look right, so that no comparison of
these would notice (vllm-project/vllm issue 55005). And steps without drafts pass the rejection
sampler like others, which costs time, and with top-k ends the engine: the largest of no numbers.
"""

from __future__ import annotations

import torch


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """(batch,) -> (num_tokens,): each request's value, once per token of it; `cu_num_tokens`
    (batch,) are running sums. A value equal to `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    out = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return torch.where(out == replace_from, torch.full_like(out, replace_to), out)


def mend() -> None:
    """Mend it in this process. Raises `RuntimeError` where vLLM has no such function any more:
    then nobody knows whether its drafts are sampled rightly."""
    from vllm.v1.sample import rejection_sampler

    if not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} has no rejection_sampler.expand_batch_to_tokens, which "
            "rose/engine/drafts/rejection.py mends for drafts on CPUs"
        )
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    original = rejection_sampler.RejectionSampler.forward
    if getattr(original, "passes_by", False):
        return

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        if any(metadata.num_draft_tokens):
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        rows = logits[metadata.bonus_logits_indices]
        return self.sampler(logits=rows, sampling_metadata=sampling_metadata)

    forward.passes_by = True
    rejection_sampler.RejectionSampler.forward = forward
