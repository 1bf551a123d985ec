"""The policy as the trainer sees it: an HF decoder that returns log-probabilities of given tokens.

`Policy` serves all models. Logits are computed only for the tokens that the policy generated, and
in chunks, so logits of the shape (B, T, V) never exist. Heads that scale or cap their logits (Gemma
2, Granite) are not supported: `load` and rose/trainer/probe.py reject them.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from rose.config import Lora
from rose.trainer import adapter, mixture, sequence, tree_attention
from rose.trainer.batching import LOGIT_ELEMENTS, LOGIT_ELEMENTS_GPU, LOGIT_ELEMENTS_PLAIN
from rose.trainer.prefix_tree import PrefixTree
from rose.trainer.router_replay import RouterReplay
from rose.trainer.saved_states import PREFIX
from rose.trainer.sequence import SequenceGroup

# Keys of a model's config that change logits or attention, and that `Policy` ignores. `load` checks
# them by name, since rounding in bfloat16 may hide their effect from rose/trainer/probe.py.
UNAPPLIED = (
    *("final_logit_softcapping", "logits_scaling", "logit_scale"),
    "attn_logit_softcapping",  # PyTorch's attention has no such cap
)


class Head(nn.Module):
    """Computes log-probabilities and entropies from hidden states. It holds the output matrix,
    which it shares with the HF model, so that ZeRO-3 gathers the matrix once per pass for all
    chunks. Logits are divided by `temperature`, at which the engines sample."""

    temperature = 1.0
    fuses = True  # false where Triton can't compile kernels

    def __init__(self, output: nn.Linear, logit_elements: int):
        super().__init__()
        self.weight, self.bias = output.weight, output.bias
        self.elements = logit_elements
        self.chunk_rows = max(1, logit_elements // output.out_features)
        self.chunk = self._chunk  # rose/trainer/kernels.py may compile it

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities, (N,) float32, and the summed entropy in nats, ()
        float32. Hidden states are (N, H), targets (N,) int64."""
        return (self.fused if hidden.is_cuda and self.fuses else self.plain)(hidden, targets)

    def plain(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `forward` by torch's operations, on a CPU or where `fuses` is False."""
        rows = max(1, min(self.chunk_rows, LOGIT_ELEMENTS_PLAIN // self.weight.shape[0]))
        chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
        if len(hidden) <= rows or not torch.is_grad_enabled():
            parts = [self._computed(h, t) for h, t in chunks]
        else:
            parts = [
                checkpoint(self._computed, h, t, use_reentrant=False, preserve_rng_state=False)
                for h, t in chunks
            ]
        logprobs, entropies = zip(*parts, strict=False)
        return torch.cat(logprobs), torch.stack(entropies).sum()

    def fused(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `forward` by the kernels of rose/trainer/head_triton.py."""
        from rose.trainer.head_triton import LogProbabilities  # needs Triton

        rows = self.chunk_rows
        if not torch.is_grad_enabled():  # no backward pass for which to keep larger chunks' logits
            rows = max(1, min(rows, LOGIT_ELEMENTS_GPU // self.weight.shape[0]))
        return LogProbabilities.apply(
            hidden, self.weight, self.bias, targets, self.temperature, rows
        )

    def _computed(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a chunk, by the compiled function if there is one."""
        # torch would compile separately for 0 rows and for 1 row, so these run uncompiled.
        return (self.chunk if len(hidden) > 1 else self._chunk)(hidden, targets)

    def _chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a chunk's log-probabilities, (n,), and its summed entropy, ()."""
        logits = F.linear(hidden, self.weight, self.bias).float()  # (n, V)
        if self.temperature != 1.0:
            logits = logits.div_(self.temperature)
        logp = logits.log_softmax(-1)
        # The part with a gradient comes first: recomputation for the backward pass stops after it.
        chosen = logp.gather(1, targets[:, None]).squeeze(1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum()
        return chosen, entropy


class Policy(nn.Module):
    """The model with its head. `shared`: the ranks that compute each row together with this rank;
    None if this rank computes whole rows."""

    def __init__(
        self,
        hf: nn.Module,
        logit_elements: int = LOGIT_ELEMENTS,
        lora: Lora | None = None,
        shared: SequenceGroup | None = None,
        router_replay: bool = False,
    ):
        super().__init__()
        self.hf, self.lora, self.shared = hf, lora, shared
        self.replay = RouterReplay(hf) if router_replay else None
        # attention over trees: by flex attention, by stretches, or (both False) by a dense mask
        self.flex = self.by_stretches = False
        # True if activations for the backward pass wait in page-locked host memory
        self.offloads = False
        self.compiled = False  # True after `kernels.compile_layers`
        self.head = Head(hf.get_output_embeddings(), logit_elements)
        if lora is not None:
            self.register_state_dict_post_hook(adapter.keep_own)
        if shared is not None:
            hf.set_attn_implementation(sequence.NAME)

    @property
    def vocabulary(self) -> int:
        return self.hf.config.vocab_size

    def largest_layer(self) -> int:
        """Count the elements of the largest layer, split or not by ZeRO-3; 0 if none is found."""
        layers = getattr(self.hf.base_model, "layers", None) or ()
        sizes = ([getattr(p, "ds_numel", p.numel()) for p in x.parameters()] for x in layers)
        return max(map(sum, sizes), default=0)

    def attention_form(self) -> tuple[int, int, int, torch.dtype]:
        """Return the number of heads and key-value heads of a rank, and a head's size and dtype."""
        config = self.hf.config
        heads, size = config.num_attention_heads, config.hidden_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        parts = self.shared.size if self.shared else 1
        head_dim = getattr(config, "head_dim", None) or size // heads
        return heads // parts, max(1, kv_heads // parts), head_dim, self.hf.dtype

    def use_flex(self) -> None:
        """Compute trees by flex attention. The model must have no `prefix_tree.obstacle`."""
        self.use_own_attention()
        self.flex = True

    def use_own_attention(self) -> None:
        """Use `tree_attention.attention` for rows, too. Requirement as for `use_flex`."""
        if self.shared is None:
            self.hf.set_attn_implementation(tree_attention.NAME)

    def use_stretches(self) -> None:
        """Compute trees by rose/trainer/stretches.py, on a CPU. Requirement as for `use_flex`."""
        self.hf.set_attn_implementation(tree_attention.NAME)
        self.by_stretches = True

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        mask: Tensor,
        tree: PrefixTree | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities at the head's temperature, (B, T) float32, 0 where
        mask is 0, and their summed entropy in nats, (). Inputs and targets are (B, T) int64, the
        mask is (B, T). A prefix `tree` of the inputs changes no value, only the cost. `experts` are
        the inputs' experts as `RouterReplay.begin` takes them, and exclude a tree."""
        # torch would compile separately for a single token, so rows and trees get a second one.
        if self.compiled and tree is not None:
            tree = tree_attention.padded(tree, 1, 2)
        if self.compiled and mask.shape[1] == 1:
            inputs, targets, mask = (F.pad(x, (0, 1)) for x in (inputs, targets, mask))
            if tree is not None:
                tree = tree._replace(nodes=F.pad(tree.nodes, (0, 1)))
            # `self(...)` would make ZeRO-3's hooks begin a pass within the pass.
            logprobs, entropy = self.forward(inputs, targets, mask, tree)
            return logprobs[:, :1], entropy
        generated, width = mask.bool(), mask.shape[1]
        if self.replay is not None:
            self.replay.begin(experts, mask)
        if self.shared is not None:
            return self._together(self.shared, inputs, targets, generated, tree)
        if tree is None:
            # The padding comes last, so no token attends to it.
            more = 0 if self.replay else tree_attention.rounded(width) - width
            states = self._states(input_ids=F.pad(inputs, (0, more)))
            hidden = states[:, :width][generated]  # (N, H)
        else:
            tree, attended = tree_attention.attended(
                tree, self.flex, by_stretches=self.by_stretches
            )
            states = self._states(
                input_ids=tree.tokens[None], attention_mask=attended, position_ids=tree.depths[None]
            )
            hidden = states[0, tree.nodes[generated]]
        logprobs, entropy = self.head(hidden, targets[generated])
        zeros = torch.zeros(mask.shape, device=mask.device)
        return zeros.masked_scatter(generated, logprobs), entropy

    def _states(self, **inputs: Any) -> Tensor:
        """Compute the last hidden states, (B, L, H)."""
        host = torch.autograd.graph.save_on_cpu(pin_memory=True)
        with host if self.offloads else nullcontext():
            return self.hf.base_model(**inputs, use_cache=False).last_hidden_state

    def _together(
        self,
        shared: SequenceGroup,
        inputs: Tensor,
        targets: Tensor,
        generated: Tensor,
        tree: PrefixTree | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute `forward` with a part of each sequence on every rank of `shared`."""
        width, attended = inputs.shape[1], None
        if tree is None:
            more = tree_attention.rounded(width, shared.size) - width
            tokens = F.pad(inputs, (0, more))
            positions = torch.arange(width + more, device=inputs.device)[None]
            nodes = positions[:, :width].expand_as(inputs)
        else:
            tree, attended = tree_attention.attended(tree, self.flex, shared.size)
            tokens, positions, nodes = tree.tokens[None], tree.depths[None], tree.nodes
        begin, (tokens, positions) = shared.part(tokens, positions)
        # (B, T / size, H), or (1, L / size, H) of a tree
        states = self._states(input_ids=tokens, attention_mask=attended, position_ids=positions)
        own = generated & (nodes >= begin) & (nodes < begin + tokens.shape[1])
        rows = own.nonzero()[:, 0] if tree is None else 0
        logprobs, entropy = self.head(states[rows, nodes[own] - begin], targets[own])
        parts = torch.zeros(own.shape, device=own.device).masked_scatter(own, logprobs)
        return shared.sum(parts), shared.sum(entropy)

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """List the trained weights as (name in the model's folder, parameter), tied weights once.
        With an adapter they are its matrices, named as rose/trainer/adapter.py says."""
        return [(n, p) for n, p in self._named() if not self.lora or p.requires_grad]

    def base_weights(self) -> list[tuple[str, nn.Parameter]]:
        """List the frozen weights below an adapter in the same form; empty without an adapter."""
        return [(n, p) for n, p in self._named() if self.lora and not p.requires_grad]

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """List all parameters with their names in the model's folder."""
        parameters = self.named_parameters()
        return [(adapter.stored_name(n.removeprefix(PREFIX)), p) for n, p in parameters]


def load(
    folder: Path | str,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    logit_elements: int = LOGIT_ELEMENTS,
    lora: Lora | None = None,
    shared: SequenceGroup | None = None,
    router_replay: bool = False,
) -> Policy:
    """Load the model of an HF folder (or hub id), without dropout of values or layers. With `lora`
    it gets a new adapter. With `shared` a group of ranks splits its sequences. While the caller
    holds an `HfDeepSpeedConfig` of ZeRO-3, the weights are split as they are read.

    Raises `ValueError` if the config sets a key of `UNAPPLIED` to anything but null or 1, or if the
    folder lacks a weight, and what `adapter.attach` raises. rose/trainer/probe.py finds effects
    that no key shows."""
    config = AutoConfig.from_pretrained(str(folder))
    for key in UNAPPLIED:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model {folder}: its config has {key}={getattr(config, key)}, which the trainer "
                "does not apply; use a model without it"
            )
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            # Engines sample without dropout, and the trained policy must be the sampled one.
            setattr(config, key, 0.0)
    hf, loaded = AutoModelForCausalLM.from_pretrained(
        str(folder),
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        experts_implementation=mixture.NAME,
        output_loading_info=True,
    )
    if missing := sorted(loaded["missing_keys"]):  # weights with random values now
        raise ValueError(
            f"model {folder}: its weights lack {missing[0]}"
            f"{f' and {len(missing) - 1} more' * (len(missing) > 1)}; copy them again, or save "
            "the model again with save_pretrained"
        )
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    if lora is not None:
        adapter.attach(hf, lora, dtype)
    return Policy(hf, logit_elements, lora, shared, router_replay)
