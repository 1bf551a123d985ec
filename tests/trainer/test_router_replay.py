"""A trainer whose routers differ from the engine's sends tokens where the engine sent them."""

import msgspec
import numpy as np
import pytest
import torch

from rose.trainer.collate import collate
from rose.trainer.model import Policy
from tests.trainer.test_experts import tiny_mixture
from tests.trainer.tiny_world import make_batch

ROWS = [0, 1, 3]


@pytest.fixture
def rows():
    return make_batch(1)[0]


def chosen_by(model, tokens: list[int]) -> np.ndarray:
    """(T, layers, top k): where the model's own routers send these tokens."""
    seen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, _, out: seen.append(out[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy()


def recorded(model, rows) -> dict:
    """The rows with the experts of all tokens but the last."""
    found = {}
    for number, t in rows.items():
        chosen = chosen_by(model, np.frombuffer(t.tokens, "<i4").tolist())[:-1]
        experts = chosen.astype(np.uint8).tobytes()
        found[number] = msgspec.structs.replace(t, experts=experts)
    return found


def other_routers(model) -> torch.nn.Module:
    made = tiny_mixture()
    made.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer in made.model.layers:
            layer.mlp.gate.weight.add_(torch.randn_like(layer.mlp.gate.weight))
    return made


def forward(policy, rows, numbers=ROWS):
    """(the batch, log-probabilities)"""
    batch = collate(numbers, rows, 97, replay=policy.replay)
    return batch, policy(batch.inputs, batch.targets, batch.mask, None, batch.experts)[0]


def test_tokens_go_where_the_engine_sent_them_and_the_routers_learn(rows):
    engine = tiny_mixture()
    trained, rows = other_routers(engine), recorded(engine, rows)
    policy, used = Policy(trained, router_replay=True), []
    for layer in trained.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, given: used.append(given))
    batch, logprobs = forward(policy, rows)
    for number, row in enumerate(ROWS):
        wanted = policy.replay.unpack(rows[row].experts, 99, "t")
        for layer, (_, chosen, weights) in enumerate(used):
            of_row = slice(number * batch.inputs.shape[1], None)
            assert np.array_equal(chosen[of_row][: len(wanted)].numpy(), wanted[:, layer])
            torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))
    assert 0.2 < policy.replay.differs / batch.mask.sum() < 1
    logprobs.sum().backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in trained.model.layers)


@pytest.mark.parametrize("tokens", [1, 100])
def test_its_own_choices_replayed_and_what_nobody_recorded_change_nothing(rows, tokens):
    model = tiny_mixture()
    rows = {
        n: msgspec.structs.replace(t, experts=t.experts[: 4 * tokens])
        for n, t in recorded(model, rows).items()
    }
    expected = forward(Policy(model), rows)[1]
    policy = Policy(model, router_replay=True)
    torch.testing.assert_close(forward(policy, rows)[1], expected, atol=1e-6, rtol=0)
    assert policy.replay.differs == 0
    batch, logprobs = forward(policy, {}, [])  # a rank's padding row
    assert logprobs.abs().sum() == 0 and (batch.experts == -1).all()


@pytest.mark.parametrize(
    "experts, says",
    [
        (
            b"",
            "g0.1: the experts of its tokens were not recorded, which trainer.router_replay=true",
        ),
        (b"\0" * 5, r"5 bytes of experts for 12 tokens; a token has 4 \(2 layers x 2 experts x"),
        (b"\0" * 52, "52 bytes of experts for 12 tokens"),
        (b"\x08" * 4, "expert 8; the model has 8"),
    ],
)
def test_experts_that_cannot_be_are_refused(rows, experts, says):
    replay = Policy(tiny_mixture(), router_replay=True).replay
    rows = {1: msgspec.structs.replace(rows[1], experts=experts)}
    with pytest.raises(ValueError, match=says):
        collate([1], rows, 97, replay=replay)
