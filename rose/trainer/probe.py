"""A check at the start that rejects a model which the trainer would train as another policy.

Two rows of different length are computed as steps compute them: by `Policy`, in training mode, in
one micro-batch, and as a prefix tree. Each row is also computed alone by the model's own `forward`,
in evaluation mode and with transformers' plain attention, as an engine would compute it. If the
log-probabilities differ by more than rounding, the trainer would train a policy from which no
engine samples. This rejects models that scale or cap their logits, or have layers between the last
hidden states and the head. It also rejects models that draw random numbers in training, attend to
padding, or have rotary positions that depend on a micro-batch's longest row.

All passes go through DeepSpeed's engine, whose hooks gather weights that ZeRO-3 has split. So the
probe runs after the split, on all ranks together.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rose.trainer import prefix_tree
from rose.trainer.deepspeed_engine import DeepSpeedEngine
from rose.trainer.model import Policy
from rose.trainer.prefix_tree import PrefixTree

LENGTHS = (49, 25)  # tokens of the two rows, of which the second is padded
SHARED = 9  # tokens that the rows have in common at their beginning
# Largest mean difference over a row, in nats a token. Rounding gives small random models 1e-6 in
# float32, and 0.02 (dense) to 0.06 (mixtures) in bfloat16. The larger limit is for trained models,
# whose logits in bfloat16 are multiples of 1/8.
LIMITS = {torch.float32: 3e-4, torch.bfloat16: 0.5}
# Passes of a model that draws random numbers in training, since their effect may be rare. A layer
# that is dropped in one pass of ten goes unnoticed with a probability of 12 %.
DRAWS = 20

UNLIKE = (
    "the trainer needs logits that are the product of base_model's last hidden states and the "
    "output matrix, causal attention, and layers that compute the same in training as in "
    "evaluation; docs/models.md has models that were tried"
)
FAR = (
    "its rotary positions change for all rows of a micro-batch once one row is longer than the "
    "context before scaling; set model.max_context to that (original_max_position_embeddings in "
    "its config.json, or else max_position_embeddings), or use another model of docs/models.md"
)
TREE = "set trainer.share_prefixes=false"


def check(engine: DeepSpeedEngine, folder: object, max_context: int, trees: bool) -> None:
    """Raise `ValueError`, on every rank, for a model that fails, or whose log-probabilities are not
    those of its own `forward`. `trees`: micro-batches can be prefix trees."""
    policy, device = engine.policy, engine.device
    lengths = [min(length, max_context) for length in LENGTHS]
    rows = np.random.default_rng(0).integers(policy.vocabulary, size=(2, lengths[0]))
    rows[1, :SHARED], rows[1, lengths[1] :] = rows[0, :SHARED], 0
    takes_positions = "position_ids" in inspect.signature(policy.hf.base_model.forward).parameters
    # From `begin` on, the first row's last input is at the context's last position.
    begin = max_context - (lengths[0] - 1)
    alone = f"model {folder}: a row alone"
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        with _own_forward(policy):
            own = [_computed(engine, rows[i : i + 1, :n], alone) for i, n in enumerate(lengths)]
        _compare(engine, f"model {folder}: rows of unlike length", rows, own, UNLIKE)
        if takes_positions and policy.shared is None:
            what = f"model {folder}: a row beside one of model.max_context={max_context} tokens"
            with _first_row_at(policy, begin):
                _compare(engine, what, rows, [None, own[1]], FAR)
        if trees:
            tree = prefix_tree.build(rows[:, :-1], np.array(lengths) - 1)
            _compare(engine, f"model {folder}: a prefix tree", rows, own, TREE, tree)


def _compare(
    engine: DeepSpeedEngine,
    what: str,
    rows: np.ndarray,
    own: list[Tensor | None],
    remedy: str,
    tree: PrefixTree | None = None,
) -> None:
    """Raise `ValueError` if a row's log-probabilities differ from `own`, which the model's own
    `forward` computed. A row with None in `own` is not compared."""
    limit, temperature = LIMITS[engine.policy.hf.dtype], engine.policy.head.temperature
    name, exact, first = type(engine.policy.hf).__name__, False, torch.empty(0)
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        before = _random_state(engine.device)
        found = _computed(engine, rows, what, remedy, tree)
        pairs = [(a[: b.shape[1]], b[0]) for a, b in zip(found, own, strict=True) if b is not None]
        off = max(float((a - b).abs().mean()) for a, b in pairs) * temperature
        if not off <= limit:
            raise ValueError(
                f"{what}: log-probabilities differ from those of {name}'s own forward by "
                f"{off:.2g} nats a token, more than {limit:g}: {remedy}"
            )
        if all(map(torch.equal, before, _random_state(engine.device))):
            return
        # Random numbers may have a smaller effect than bfloat16's limit, so compare exactly.
        if draw == 0:
            torch.manual_seed(draw)
            first, exact = found, torch.equal(found, _computed(engine, rows, what, remedy, tree))
        elif exact and not torch.equal(found, first):
            raise ValueError(f"{what}: {name} draws random numbers in training: {remedy}")


def _computed(
    engine: DeepSpeedEngine,
    rows: np.ndarray,
    what: str,
    remedy: str = "use another model (docs/models.md)",
    tree: PrefixTree | None = None,
) -> Tensor:
    """Compute log-probabilities of each row's tokens but the first, (B, T). Raises `ValueError` if
    the model fails, and `torch.OutOfMemoryError`."""
    tokens, replay = torch.from_numpy(rows), engine.policy.replay
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    experts = replay and torch.full((*inputs.shape, replay.layers, replay.top_k), -1)
    try:
        return engine(inputs, targets, torch.ones(inputs.shape), tree, experts)[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # The errors of models' code and torch's kernels have no common base class.
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        name = type(engine.policy.hf).__name__
        raise ValueError(f"{what}: {name} fails with {said}; {remedy}") from error


@contextmanager
def _own_forward(policy: Policy) -> Iterator[None]:
    """Make `policy` use the model's own `forward`, in evaluation mode, within this context."""

    def forward(
        inputs: Tensor, targets: Tensor, mask: Tensor, tree: None, experts: Tensor | None
    ) -> tuple[Tensor, None]:
        if policy.replay is not None:
            policy.replay.begin(experts, mask)
        logits = policy.hf(input_ids=inputs, use_cache=False).logits.float()
        logp = (logits / policy.head.temperature).log_softmax(-1)
        return logp.gather(2, targets[..., None]).squeeze(2), None

    attention = policy.hf.config._attn_implementation
    policy.forward = forward  # ZeRO-3's hooks, which are around `policy`, still run
    policy.hf.set_attn_implementation("eager")
    policy.eval()
    try:
        yield
    finally:
        policy.train()
        policy.hf.set_attn_implementation(attention)
        del policy.forward


@contextmanager
def _first_row_at(policy: Policy, begin: int) -> Iterator[None]:
    """Give the first row positions from `begin` on, as if it ended a long row, in this context."""

    def shift(module: object, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        inputs = given["input_ids"]
        at = torch.arange(inputs.shape[1], device=inputs.device).repeat(len(inputs), 1)
        at[0] += begin
        return args, given | {"position_ids": at}

    hook = policy.hf.base_model.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a pass on `device` may draw from."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]
