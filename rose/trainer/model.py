"""The policy as the trainer sees it: an HF decoder that returns log-probabilities of given tokens.

Every model takes this one path. The vocabulary's logits are computed only for the tokens that the
policy made, in chunks whose activations are recomputed in the backward pass, so (B, T, V) never
exists. Left out: heads that scale or cap their logits (Gemma 2, Granite); `load` refuses them.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from rose.config import Lora
from rose.trainer import adapter, tree_attention
from rose.trainer.batching import LOGIT_ELEMENTS
from rose.trainer.prefix_tree import PrefixTree

HF_PREFIX = "hf."  # of parameter names in `Policy`; without it they are those of the model's folder


class Head(nn.Module):
    """Log-probability and entropy from hidden states. It owns the output matrix (shared with the HF
    model), so that ZeRO-3 gathers it once per pass, however many chunks a rank has."""

    def __init__(self, output: nn.Linear, logit_elements: int):
        super().__init__()
        self.weight, self.bias = output.weight, output.bias
        self.elements = logit_elements
        self.chunk_rows = max(1, logit_elements // output.out_features)

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(N, H) hidden states, (N,) int64 -> (N,) float32 log-probabilities, () float32 summed
        entropy, nats."""
        if len(hidden) <= self.chunk_rows or not torch.is_grad_enabled():
            parts = [self._chunk(h, t) for h, t in self._chunks(hidden, targets)]
        else:
            parts = [
                checkpoint(self._chunk, h, t, use_reentrant=False, preserve_rng_state=False)
                for h, t in self._chunks(hidden, targets)
            ]
        logprobs, entropies = zip(*parts, strict=False)
        return torch.cat(logprobs), torch.stack(entropies).sum()

    def _chunks(self, hidden: Tensor, targets: Tensor):
        return zip(hidden.split(self.chunk_rows), targets.split(self.chunk_rows), strict=False)

    def _chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = F.linear(hidden, self.weight, self.bias).float().log_softmax(-1)  # (n, V)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum()
        return logp.gather(1, targets[:, None]).squeeze(1), entropy


class Policy(nn.Module):
    def __init__(
        self, hf: nn.Module, logit_elements: int = LOGIT_ELEMENTS, lora: Lora | None = None
    ):
        super().__init__()
        self.hf, self.lora = hf, lora
        # whether trees are attended to by flex attention, or by stretches
        self.flex = self.by_stretches = False
        self.head = Head(hf.get_output_embeddings(), logit_elements)
        if lora is not None:
            self.register_state_dict_post_hook(adapter.keep_own)

    @property
    def vocabulary(self) -> int:
        return self.hf.config.vocab_size

    def largest_layer(self) -> int:
        """Elements of its parameters, also where ZeRO-3 has split them; 0 without such layers."""
        layers = getattr(self.hf.base_model, "layers", None) or ()
        sizes = ([getattr(p, "ds_numel", p.numel()) for p in x.parameters()] for x in layers)
        return max(map(sum, sizes), default=0)

    def why_not_flex(self, device: torch.device) -> str:
        """Why flex attention can't train this model here; "" if it can. It is tried, compiled."""
        config = self.hf.config
        heads, size = config.num_attention_heads, config.hidden_size
        return tree_attention.why_not_flex(
            device,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or size // heads,
            self.hf.dtype,
        )

    def use_flex(self) -> None:
        """Trees by flex attention from now on. Not of models with a `prefix_tree.obstacle`."""
        self.hf.set_attn_implementation(tree_attention.NAME)
        self.flex = True

    def use_stretches(self) -> None:
        """The same on a CPU, by stretches."""
        self.hf.set_attn_implementation(tree_attention.NAME)
        self.by_stretches = True

    def forward(
        self, inputs: Tensor, targets: Tensor, mask: Tensor, tree: PrefixTree | None = None
    ) -> tuple[Tensor, Tensor]:
        """inputs, targets (B, T) int64, mask (B, T) -> log-probabilities of the targets at
        temperature 1, (B, T) float32, 0 where mask is 0; their summed entropy in nats, () float32.
        A `tree` of the inputs changes no value, only the cost."""
        made = mask.bool()
        if tree is None:
            # (N, H)
            hidden = self.hf.base_model(input_ids=inputs, use_cache=False).last_hidden_state[made]
        else:
            tree, attended = tree_attention.attended(tree, self.flex, self.by_stretches)
            states = self.hf.base_model(
                input_ids=tree.tokens[None],
                attention_mask=attended,
                position_ids=tree.depths[None],
                use_cache=False,
            ).last_hidden_state[0]  # (L, H)
            hidden = states[tree.nodes[made]]
        logprobs, entropy = self.head(hidden, targets[made])
        return torch.zeros(mask.shape, device=mask.device).masked_scatter(made, logprobs), entropy

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """(name in the model's folder, parameter), tied ones once; with an adapter its own, named
        after the matrices beside which they stand."""
        return [(n, p) for n, p in self._named() if not self.lora or p.requires_grad]

    def base_weights(self) -> list[tuple[str, nn.Parameter]]:
        """The same of the frozen ones below an adapter."""
        return [(n, p) for n, p in self._named() if self.lora and not p.requires_grad]

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        parameters = self.named_parameters()
        return [(adapter.stored_name(n.removeprefix(HF_PREFIX)), p) for n, p in parameters]


def load(
    folder: Path | str,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    logit_elements: int = LOGIT_ELEMENTS,
    lora: Lora | None = None,
) -> Policy:
    """The model of an HF folder (or hub id), without dropout, with a new adapter if it is to have
    one. Under an `HfDeepSpeedConfig` of ZeRO-3 that the caller holds, the weights are split over
    the ranks as they are read.

    Raises `ValueError` for a model whose logits are not a plain product, or as `adapter.attach`.
    """
    config = AutoConfig.from_pretrained(str(folder))
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model {folder}: its config has {key}={getattr(config, key)}, which the trainer "
                "does not apply; use a model without it"
            )
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            # the policy being trained must be the one that was sampled from
            setattr(config, key, 0.0)
    hf = AutoModelForCausalLM.from_pretrained(
        str(folder), config=config, dtype=dtype, attn_implementation="sdpa"
    )
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    if lora is not None:
        adapter.attach(hf, lora, dtype)
    return Policy(hf, logit_elements, lora)
