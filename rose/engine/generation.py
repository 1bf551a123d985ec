"""Turns of an engine, from their prompts to their ends, over flips of the weights: mixed into
`Engine`.

A turn is one vLLM request or several: one that new weights interrupt goes on as another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from rose import protocol
from rose.engine import plugin
from rose.engine.start import EngineDied, EngineError


class Chunk(NamedTuple):
    """Tokens since the last chunk. `logprobs` are of the distribution that they were drawn from, at
    rollout.temperature, of the tokens that rollout.top_p and top_k leave."""

    tokens: list[int]
    logprobs: list[float]
    version: int  # policy version that made them
    finish: protocol.FinishReason | None
    cached_tokens: int  # of the prompt, found in the prefix cache
    # with `routing`, as a request ends: `routed` rows, as `protocol.TurnResult` has them
    experts: bytes = b""
    routed: int = 0


@dataclass
class Turn:
    request: str
    aborted: bool = False
    evicted: bool = False  # its engine's scheduler gave it back


class Generation:
    """`_turns`: those that run, by their ids."""

    async def generate(
        self, turn_id: str, tokens: bytes, sampling: protocol.Sampling, routed: int = 0
    ) -> AsyncIterator[Chunk]:
        """Continue `tokens` (int32, packed); the last chunk has `finish`: ABORT after `abort`, or
        when a co-serving engine gives the turn back (stop_reason `plugin.EVICTED`). With routing
        all chunks together have the experts of what follows the first `routed` tokens, but for the
        turn's last token, which goes through the model with the next turn.

        The sampler's seed is a function of `sampling.seed` and the number of tokens, so that a turn
        continued from partial tokens doesn't draw the same numbers again. Raises `EngineDied`;
        `EngineError` if the engine is inactive, or `turn_id` is already running here, or has a seed
        that would kill this engine: vLLM on CPU cannot prefill a seeded prompt in parts.
        """
        self._check_active()
        if turn_id in self._turns:
            raise EngineError(f"turn {turn_id} is already running on this engine")
        if sampling.seed is not None and not self._takes_seeds:
            raise EngineError(
                f"turn {turn_id} has a sampling seed, which vLLM on CPU takes only without chunked "
                "prefill; use deterministic=true or "
                "rollout.engine_args.enable_chunked_prefill=false"
            )
        turn = self._turns[turn_id] = Turn("")
        prompt = protocol.unpack_tokens(tokens).tolist()
        end = min(len(prompt) + sampling.max_new_tokens, self._max_context)
        try:
            finish = None
            while finish is None:
                await self._open.wait()
                self._check_alive()
                if turn.aborted or len(prompt) >= end:
                    finish = (
                        protocol.FinishReason.ABORT
                        if turn.aborted
                        else protocol.FinishReason.LENGTH
                    )
                    yield Chunk([], [], self.version, finish, 0)
                    return
                left = end - len(prompt)
                async for chunk in self._stream(turn, turn_id, prompt, sampling, left, routed):
                    prompt += chunk.tokens
                    routed += chunk.routed
                    # the abort came before vLLM knew the request
                    if turn.aborted and chunk.finish is None:
                        await self._llm.abort(turn.request)
                    interrupted = chunk.finish is protocol.FinishReason.ABORT and not (
                        turn.aborted or turn.evicted
                    )
                    finish = None if interrupted else chunk.finish
                    if chunk.tokens or chunk.routed or finish:
                        yield chunk._replace(finish=finish)
        finally:
            del self._turns[turn_id]

    async def _stream(
        self,
        turn: Turn,
        turn_id: str,
        prompt: list[int],
        sampling: protocol.Sampling,
        max_tokens: int,
        routed: int,
    ) -> AsyncIterator[Chunk]:
        """One vLLM request, from start to its own end."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        self._serial += 1
        turn.request = f"{turn_id}#{self._serial}"
        version, first, made = self.version, True, 0
        # the number of tokens is part of the seed: a turn that goes on elsewhere doesn't draw the
        # same again
        seed = None if sampling.seed is None else (sampling.seed * 1_000_003 + len(prompt)) % 2**63
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            stop_token_ids=self._stop_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # else a tokenizer's, where an engine has one, would end turns too
            output_kind=RequestOutputKind.DELTA,
            routed_experts_prompt_start=routed,
            skip_clone=True,
        )
        # a prefix that older weights cached, or whose memory was given back, never matches
        request = tokens_input(list(prompt), cache_salt=f"v{version}a{self._activations}")
        self._prompted += len(prompt)
        try:
            begun = self._llm.generate(request, params, turn.request, lora_request=self._adapter)
            async for output in begun:
                part, cached = output.outputs[0], output.num_cached_tokens or 0
                tokens = list(part.token_ids)
                logprobs = list(part.logprobs.logprobs) if part.token_ids else []
                self._cached += cached if first else 0
                first = False
                finish = protocol.FinishReason(part.finish_reason) if part.finish_reason else None
                turn.evicted = part.stop_reason == plugin.EVICTED
                ends = self._version_ends(turn.request, part, version, made, len(tokens))
                for low, high, made_by in ends[:-1]:
                    yield Chunk(tokens[low:high], logprobs[low:high], made_by, None, cached)
                low, high, made_by = ends[-1]
                made += len(tokens)
                self._generated += len(tokens)
                rows = part.routed_experts
                experts = (b"", 0) if rows is None else (rows.tobytes(), len(rows))
                yield Chunk(tokens[low:high], logprobs[low:high], made_by, finish, cached, *experts)
        except EngineDeadError as error:
            raise EngineDied(f"engine process {self.pid} died during turn {turn_id}") from error

    def _version_ends(
        self, request: str, part, version: int, made: int, count: int
    ) -> list[tuple[int, int, int]]:
        """(low, high, version) of the `count` new tokens of an output, after `made` earlier ones of
        its request: vLLM notes with each step's outputs which weights made them. One entry at
        least."""
        processor = self._llm.output_processor
        states = [
            processor.request_states[i]
            for i in processor.external_req_ids.get(request, ())
            if i in processor.request_states
        ]
        if states:
            starts = states[0].weight_version_starts
        else:  # its last output: vLLM has forgotten the request
            starts = [(span.version, span.start) for span in part.weight_versions or ()]
        begins = [(0, version)] + [
            (start - made, int(label)) for label, start in starts if label != "default"
        ]
        found = []
        for (low, label), (high, _) in zip(begins, [*begins[1:], (count, 0)], strict=False):
            low, high = max(low, 0), min(max(high, 0), count)
            if low < high:
                found.append((low, high, label))
        return found or [(0, count, begins[-1][1])]

    async def abort(self, turn_id: str) -> None:
        """End a turn's iterator with what it has and finish ABORT; unknown turns have ended."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            turn.aborted = True
            if turn.request and self.alive:
                await self._llm.abort(turn.request)
