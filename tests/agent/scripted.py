"""A policy whose turns come from a script, a trajectory, and the limits within which it plays."""

import asyncio

from rose import config
from rose.protocol import FinishReason, Phase, StartTrajectory, TurnResult, pack_floats, pack_tokens

# Its environment's seed is 7, its sampling's 11.
START = StartTrajectory("g1.2", "g1", Phase.TRAIN, "hike", 7, 11)


def limits(**changed) -> config.Env:
    plain = {"name": "agent", "args": {}, "max_turns": 8, "max_new_tokens": 64}
    return config.Env(**plain | {"step_timeout_s": 120.0, "max_failures_in_row": 1} | changed)


class Script:
    """Turns from texts, in order, the last one again and again; it remembers the requests and what
    it gave. A turn waits for `gate`, gets new weights behind its second token, and has an
    end-of-turn token if `closed`."""

    def __init__(self, tokenizer, *texts, closed=True):
        self.tokenizer, self.texts, self.closed = tokenizer, texts, closed
        self.requests, self.results = [], []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, request):
        k = len(self.requests)
        self.requests.append(request)
        await self.gate.wait()
        text = self.texts[min(k, len(self.texts) - 1)]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        tokens += [self.tokenizer.eos_token_id] * self.closed
        tokens = tokens[: request.sampling.max_new_tokens]
        full = len(tokens) == request.sampling.max_new_tokens  # which an engine reports first
        stop = tokens[-1] == self.tokenizer.eos_token_id and not full
        made = TurnResult(
            turn=request.turn,
            tokens=pack_tokens(tokens),
            logprobs=pack_floats([-0.25 * (i + 1) for i in range(len(tokens))]),
            versions=pack_tokens([k + (i > 1) for i in range(len(tokens))]),
            migrations=1,
            finish=FinishReason.STOP if stop else FinishReason.LENGTH,
        )
        self.results.append(made)
        return made
