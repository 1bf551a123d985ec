"""The types of `model`, and the numbers of a model that planning needs."""

from __future__ import annotations

from typing import Any, Literal

from rose.config.common import Count, Natural, Section


class ModelShape(Section):
    """The numbers of a decoder's config.json that planning needs. If model.shape is null, they are
    read from the model's folder."""

    layers: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    tied_embeddings: bool
    # experts of each layer of a mixture; 0: dense, with an MLP of width `intermediate`
    experts: Natural = 0
    experts_per_token: Natural = 0
    expert_intermediate: Natural = 0
    type: str = ""  # `model_type` of the config.json; "": not known yet

    @property
    def mlp_width(self) -> int:
        """Number of a layer's intermediate channels that one token uses."""
        return self.experts_per_token * self.expert_intermediate or self.intermediate

    @property
    def parameters(self) -> int:
        return self._parameters(self.experts * self.expert_intermediate or self.intermediate)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses; of the experts, only those to which it is routed."""
        return self._parameters(self.mlp_width)

    def _parameters(self, mlp_width: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + self.hidden * (3 * mlp_width + self.experts + 2)
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * block + embeddings + self.hidden

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's index in the recorded experts of a token."""
        return 1 if self.experts <= 256 else 2

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each projection in a layer's attention and MLP, by its HF name. In a
        mixture the MLP is one expert's, and the router is left out."""
        h, i = self.hidden, self.expert_intermediate or self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": (queries, h), "k_proj": (keys, h), "v_proj": (keys, h)}
        return attention | {
            "o_proj": (h, queries),
            "gate_proj": (i, h),
            "up_proj": (i, h),
            "down_proj": (h, i),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token at 2 bytes an element, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


class Model(Section):
    """The model: `path` is an HF folder or a hub id, and `source` says where it comes from.

    1. `folder`: the folder `path` must exist.
    2. `hub`: the launcher downloads `revision`, a branch, tag or commit of the hub id `path`.
    3. `tiny`, `smollm2`: a script of this name in scripts/ makes the model in the user's cache,
       with the arguments `recipe`.
    `snapshot`: the folder of a hub id, which the launcher sets; it is no key of conf/.
    """

    name: str
    source: Literal["folder", "hub", "tiny", "smollm2"]
    path: str | None
    recipe: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    max_context: Count
    shape: ModelShape | None
    chat_template_args: dict[str, Any]
    # format of tool calls and of reasoning: auto, hermes, or the name of a parser of vLLM's
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    # texts of tokens that end a turn, in addition to those that the folder's files name
    end_of_turn: list[str] = []
    revision: str | None = None
    snapshot: str | None = None
