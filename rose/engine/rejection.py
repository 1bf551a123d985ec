"""Corrections of vLLM 0.32's rejection sampler on CPUs.

1. `expand_batch_to_tokens` gives each drafted position its request's temperature, top-p and top-k.
   On a CPU it fills an int64 copy of its result and returns uninitialized memory. So tokens are
   sampled wrongly at temperatures above 0, though their log-probabilities look right
   (vllm-project/vllm issue 55005).
2. Steps without drafts run the rejection sampler, too. That costs time, and with top-k it kills the
   engine by the maximum of an empty tensor.
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
    """Repeat each request's value in `x` (batch,) once for each of its tokens, into (num_tokens,).
    `cu_num_tokens` (batch,) has running sums of the requests' tokens. A value equal to
    `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    out = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return torch.where(out == replace_from, torch.full_like(out, replace_to), out)


def mend() -> None:
    """Patch vLLM's sampler in this process. Raises `RuntimeError` if vLLM has no
    `expand_batch_to_tokens` to patch, since it is unknown then whether drafted positions are
    sampled correctly."""
    from vllm.v1.sample import rejection_sampler

    if not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} has no rejection_sampler.expand_batch_to_tokens, which "
            "rose/engine/rejection.py mends for drafts on CPUs"
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
