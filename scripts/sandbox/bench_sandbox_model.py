"""The episode with a model for scripts/sandbox/bench_sandbox.py: errands in one shell, by sampled commands.

The tiny model with which `+experiment=terminal` begins prints and changes files, one errand a turn.
The output of the last commands is in its system message, where it confuses the model least. Each
turn has its own seed, so that an episode that continues in the same state has the same tokens. Left
out: engines with batches, whose rounding differs from run to run.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from rose.agent.chat import ChatFormat
from rose.agent.envs import _ladder
from rose.config import Model
from rose.models import resolve
from rose.parts.sandbox.envs.terminal import BASH
from scripts.sandbox.bench_sandbox_episodes import Turn

RUNGS = ("print", "replace")  # alternating; "find" would have folders of the same names
SEEN_TURNS = 2
SEEN = 160  # characters of a command's output that the model sees
NEW_TOKENS = 32
WRITE = "mkdir work; cd work; for name in {names}; do echo {words} > $name; done"


class Sampled:
    """An `Episode` of `length` turns, the first of which writes the files. Raises `ConfigError`."""

    name = "model"
    check = "head *; pwd"

    def __init__(self, model: Model, length: int = 16) -> None:
        self.length = length
        torch.set_num_threads(1)
        folder = resolve(model)
        self._chat = ChatFormat.of(folder, model)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def next(self, turns: list[Turn]) -> Turn:
        if not turns:
            words = " ".join(_ladder.COLOURS)
            return Turn(WRITE.format(names=" ".join(_ladder.NAMES), words=words))
        tokens = self._sample(self._context(turns), seed=len(turns))
        call = self._chat.parse(self._chat.decode(tokens), [BASH])
        return Turn(_command(call), tuple(tokens))

    def _context(self, turns: list[Turn]) -> list[int]:
        seen = "".join(turn.shown[:SEEN] for turn in turns[-SEEN_TURNS:])
        errand = _ladder.draw(len(turns), (RUNGS[len(turns) % 2],)).instruction
        messages = [
            {"role": "system", "content": f"{seen}{_ladder.SYSTEM}"},
            {"role": "user", "content": errand},
        ]
        return self._chat.start(messages, [BASH])

    @torch.inference_mode()
    def _sample(self, context: list[int], seed: int) -> list[int]:
        """Sample tokens until an end-of-turn token, at most `NEW_TOKENS`."""
        drawn, made = torch.Generator().manual_seed(seed), []
        step = self._model(torch.tensor([context]), use_cache=True)
        while len(made) < NEW_TOKENS and not (made and made[-1] in self._chat.eos_ids):
            if made:
                last = torch.tensor([made[-1:]])
                step = self._model(last, past_key_values=step.past_key_values, use_cache=True)
            chances = step.logits[0, -1].softmax(-1)
            made.append(int(torch.multinomial(chances, 1, generator=drawn)))
        return made


def _command(asked) -> str:
    """Return the command of a call of bash, or `:` if the model called nothing."""
    call = getattr(asked, "call", None)
    command = call.arguments.get("command") if call is not None else None
    return command if isinstance(command, str) else ":"
