"""The episode that a model plays in scripts/sandbox/bench_sandbox.py, killed at every turn: real sandboxes,
checkpoints and model."""

import asyncio

import pytest

from rose.parts.sandbox import Sandbox, Spec
from scripts.harness import configured
from scripts.sandbox.bench_sandbox import close
from scripts.sandbox.bench_sandbox_episodes import (
    CHAT,
    CLASSIFIED,
    Sampled,
    kill_at_each_turn,
    play,
)

pytestmark = pytest.mark.slow

TURNS = 8


async def killed(episode, policy):
    """What an undisturbed episode ends with, and what became of the killed ones."""
    try:
        async with await Sandbox.start(Spec()) as box:
            played = await play(box, episode)
        return played, await kill_at_each_turn(episode, policy, 0.0, played.end)
    finally:
        close()


def test_a_models_episode_goes_on_with_the_same_tokens_from_any_turn():
    episode = Sampled(configured("+experiment=terminal").model, TURNS)
    played, made = asyncio.run(killed(episode, CLASSIFIED))
    assert made.right == TURNS and made.played.end == played.end
    commands = {turn.command.split()[0] for turn in played.turns[1:]}
    assert {"cat", "sed"} <= commands, "it reads and writes"
    assert all(turn.tokens for turn in played.turns[1:])


def test_without_its_machine_it_does_not():
    episode = Sampled(configured("+experiment=terminal").model, TURNS)
    _, made = asyncio.run(killed(episode, CHAT))
    assert made.right == 0
