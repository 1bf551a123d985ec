"""tree_grpo against its formula, written out over nested lists: the loss of whole rows with every
leaf's path, and what is trained of them once. Without forks it is grpo, bit for bit."""

import math
import random
from itertools import count

import pytest
import torch

from rose.trainer import segments
from rose.trainer.algorithms import build
from rose.trainer.algorithms.base import Summary
from tests.made import trajectory as drawn

ARGS = {"clip_low": 0.2, "clip_high": 0.2, "scale_by_std": True}


def fork(turns, *below):
    """[turns of a segment, what follows it], which is forks and leaves. A leaf, or an episode that
    ended before it forked, is [turns, reward]; a reward alone has two turns."""
    return [turns, [each if isinstance(each, list) else [2, each] for each in below]]


def group(*trees):
    return fork(0, *trees)[1]


EARLY = fork(2, fork(1, 0.0, 1.0), fork(1, 0.5, 0.25))
GROUPS = [
    group(EARLY, fork(1, fork(3, 1.0, 1.0), fork(2, 0.0, -1.0))),
    group(
        *(0.5, fork(1, fork(2, 1.0, 0.0), fork(1, 0.0, 0.0)), 0.25),
        fork(1, [2, 1.0], [2, 0.0], [1, 0.5]),
    ),
    group(fork(1, [1, 1.0], [1, 1.0]), 1.0, 1.0),
    group(fork(1, [2, 3.0], [1, 0.0])),
]


def value(node):
    below = node[1]
    return below if isinstance(below, float) else sum(map(value, below)) / len(below)


def leaves(node):
    return [node[1]] if isinstance(node[1], float) else [x for n in node[1] for x in leaves(n)]


def expected(groups, scale):
    """Of each leaf: its reward, group, and for each turn (segment, advantage, weight of its tokens
    in this leaf's row, before the tokens are counted)."""
    found, number = [], count()
    for g, group in enumerate(groups):
        rewards = [reward for node in group for reward in leaves(node)]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))

        def walk(siblings, above, share, g=g, std=std):
            mean = sum(map(value, siblings)) / len(siblings)
            for node in siblings:
                advantage = value(node) - mean
                if scale:
                    advantage = advantage / std if std > 1e-9 else 0.0
                path = above + [(next(number), advantage)] * node[0]
                if isinstance(node[1], float):
                    found.append((node[1], g, path, share))
                else:
                    walk(node[1], path, share / len(node[1]))

        walk(group, [], 1.0)
    trees = sum(map(len, groups))
    return [(reward, g, path, share / trees) for reward, g, path, share in found]


def trajectories(rows, seed=3):
    """The leaves as trajectories whose turns have one to four tokens, the same in each that has
    the turn."""
    draw, made, found, names = random.Random(seed), {}, [], {}
    for row, (reward, group, path, _) in enumerate(rows):
        name, tokens, mask, turns, makers = f"g{group}.{row}", [7] * 3, [0] * 3, [], []
        for turn, (segment, _) in enumerate(path):
            own = made.setdefault((segment, turn), [draw.randrange(90)] * draw.randrange(1, 5))
            makers.append(names.setdefault((segment, turn), name))
            tokens += [*own, 8]
            mask += [1] * len(own) + [0]
            turns.append((turn, len(own)))
        inherited = [(m, makers.count(m)) for m in dict.fromkeys(makers) if m != name]
        logprobs, versions = [-0.5 * bit for bit in mask], [bit - 1 for bit in mask]
        more = {"turns": len(path), "turn_tokens": turns, "inherited": inherited}
        found.append(drawn(name, tokens, mask, logprobs, versions, reward, **more))
    return found


def summary(made):
    found = segments.find(made)
    rows = [(t.reward, int(t.group[1:]), t.response_tokens, False) for t in made]
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(each) for each in found], batch_first=True, padding_value=-1
    )
    return Summary(*map(torch.tensor, zip(*rows, strict=True)), segments=padded), found


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("groups", [GROUPS, *([group] for group in GROUPS)])
def test_each_token_is_trained_once_with_the_sum_of_what_its_leaves_give_it(groups, scale):
    rows = expected(groups, scale)
    made = trajectories(rows)
    algorithm = build("tree_grpo", ARGS | {"scale_by_std": scale})
    whole, found = summary(made)
    advantages, weights = algorithm.advantages(whole), algorithm.token_weights(whole)
    # the plain formula: every leaf trains its whole path, a token by 1 / (tokens of the path)
    wanted = {}
    for (_, _, path, share), t in zip(rows, made, strict=True):
        for (segment, advantage), (turn, tokens) in zip(path, t.turn_tokens, strict=True):
            _, weight, _ = wanted.get((segment, turn), (0.0, 0.0, 0))
            wanted[segment, turn] = (advantage, weight + share / t.response_tokens, tokens)
    got = {}
    samples = segments.samples(made, found)
    assert [owner for _, owner in samples] == list(range(len(made)))
    for sample, row in samples:
        assert sample.response_tokens == sum(sample.mask) > 0
        for turn, tokens in sample.turn_tokens:
            key = (rows[row][2][turn][0], turn)
            assert key not in got, "trained twice"
            got[key] = (advantages[row, turn].item(), weights[row, turn].item(), tokens)
    assert got.keys() == wanted.keys()
    for key, (advantage, weight, tokens) in wanted.items():
        close = pytest.approx(advantage, abs=2e-5), pytest.approx(weight, rel=1e-6)
        assert got[key] == (*close, tokens), key
    if scale is False:  # advantages along a path add up to the leaf's against the group's trees
        for row, (reward, g, path, _) in enumerate(rows):
            trees = [value(node) for node in groups[g]]
            steps = [advantages[row, k].item() for k, (s, _) in enumerate(path)]
            own = sum(a for k, a in enumerate(steps) if k == 0 or path[k][0] != path[k - 1][0])
            assert own == pytest.approx(reward - sum(trees) / len(trees), abs=1e-6)


def test_every_other_algorithm_gets_the_trajectories_whole():
    made = trajectories(expected(GROUPS[:1], True))
    assert [t for t, _ in segments.samples(made, [])] == made


def test_a_lost_sibling_leaves_no_fork_behind():
    """Of two that forked off each other one failed, and the tree is the other's path."""
    made = trajectories(expected([group(fork(1, [1, 1.0], [1, 0.0]), 0.0)], False))
    whole, found = summary([made[1], made[2]])
    assert found[0] == [found[0][0]] * 2, "one segment"
    grpo, ours = (build(n, ARGS | {"scale_by_std": False}) for n in ("grpo", "tree_grpo"))
    assert ours.advantages(whole)[:, 0].tolist() == grpo.advantages(whole).tolist()


@pytest.mark.parametrize("scale", [True, False])
def test_without_forks_it_is_grpo(scale):
    draw = random.Random(1)
    rows = [
        (draw.choice([0.0, 0.3, 1.0]), g, draw.randrange(1, 9), False)
        for g in range(5)
        for _ in "abcd"
    ]
    rows[0] = (*rows[0][:2], 0, False)
    whole = Summary(*map(torch.tensor, zip(*rows, strict=True)))
    args = ARGS | {"scale_by_std": scale}
    grpo, ours = build("grpo", args), build("tree_grpo", args)
    assert torch.equal(ours.advantages(whole), grpo.advantages(whole))
    found, wanted = (each.token_weights(whole)[1:] for each in (ours, grpo))
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)
