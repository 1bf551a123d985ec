"""A mixin of `Engine` that generates turns, also while new weights are put in place.

A turn is one vLLM request or several: when new weights interrupt a request, the turn continues as
another request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from rose import protocol
from rose.engine import plugin
from rose.engine.start import EngineDied, EngineError


class Chunk(NamedTuple):
    """New tokens of a turn, all of one policy version. `logprobs` are of the distribution that they
    were sampled from, after rollout.temperature, rollout.top_p and rollout.top_k."""

    tokens: list[int]
    logprobs: list[float]
    version: int  # policy version that generated the tokens
    finish: protocol.FinishReason | None
    cached_tokens: int  # prompt tokens found in the prefix cache
    # The experts that `routed` tokens were routed to, as in `protocol.TurnResult`. An engine with
    # `routing` sends them with the last chunk of a vLLM request.
    experts: bytes = b""
    routed: int = 0


@dataclass
class Turn:
    """A running turn."""

    request: str  # id of the vLLM request that generates the turn's tokens
    aborted: bool = False
    evicted: bool = False  # true if the scheduler of an engine on a shared device evicted it


class Generation:
    """Generates and aborts the turns of an engine. `_turns` has the running turns by id."""

    async def generate(
        self, turn_id: str, tokens: bytes, sampling: protocol.Sampling, routed: int = 0
    ) -> AsyncIterator[Chunk]:
        """Generate the tokens that follow `tokens` (int32, packed), and yield them in chunks.

        Only the last chunk has `finish`. It is ABORT after `abort`, and when an engine on a shared
        device evicts the turn (vLLM's stop_reason is `plugin.EVICTED`).

        An engine with `routing` also yields the experts of every token after the first `routed`
        ones. The turn's last token has none, because it goes through the model in the next turn.

        The sampler's seed is a function of `sampling.seed` and the number of tokens. So a turn that
        is continued from partial tokens doesn't draw the same random numbers again.

        Raises `EngineDied`. Raises `EngineError` if the engine is inactive, if `turn_id` is already
        running here, or if a seed would kill this engine: vLLM on a CPU cannot prefill a seeded
        prompt in chunks."""
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
                    # `abort` may have been called before vLLM had the request.
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
        """Run one vLLM request until it ends for any reason, and yield its output."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self._serial += 1
        turn.request = f"{turn_id}#{self._serial}"
        version = self.version
        first = True
        generated = 0  # tokens of this request
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
            # Otherwise a turn would also end at the end token of a tokenizer that vLLM loads.
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            routed_experts_prompt_start=routed,
            skip_clone=True,
        )
        # By the salt, a cached prefix matches only if the same weights computed it, and its memory
        # was not released since.
        request = tokens_input(list(prompt), cache_salt=f"v{version}a{self._releases}")
        self._prompted += len(prompt)
        try:
            outputs = self._llm.generate(request, params, turn.request, lora_request=self._adapter)
            async for output in outputs:
                part, cached = output.outputs[0], output.num_cached_tokens or 0
                tokens = list(part.token_ids)
                logprobs = list(part.logprobs.logprobs) if part.token_ids else []
                self._cached += cached if first else 0
                first = False
                finish = protocol.FinishReason(part.finish_reason) if part.finish_reason else None
                turn.evicted = part.stop_reason == plugin.EVICTED
                spans = self._version_spans(turn.request, part, version, generated, len(tokens))
                for low, high, by in spans[:-1]:
                    yield Chunk(tokens[low:high], logprobs[low:high], by, None, cached)
                low, high, by = spans[-1]
                generated += len(tokens)
                self._generated += len(tokens)
                rows = part.routed_experts
                experts = b"" if rows is None else rows.tobytes()
                routed = 0 if rows is None else len(rows)
                yield Chunk(
                    tokens[low:high], logprobs[low:high], by, finish, cached, experts, routed
                )
        except EngineDeadError as error:
            raise EngineDied(f"engine process {self.pid} died during turn {turn_id}") from error

    def _version_spans(
        self, request: str, part, version: int, generated: int, count: int
    ) -> list[tuple[int, int, int]]:
        """Split an output's `count` new tokens into (low, high, version); at least one span. With
        each step's outputs, vLLM records the weights' version. `generated` is the number of the
        request's earlier tokens, `version` the version at its start."""
        processor = self._llm.output_processor
        states = [
            processor.request_states[i]
            for i in processor.external_req_ids.get(request, ())
            if i in processor.request_states
        ]
        if states:
            starts = states[0].weight_version_starts
        else:  # vLLM drops a request's state with its last output
            starts = [(span.version, span.start) for span in part.weight_versions or ()]
        begins = [(0, version)] + [
            (start - generated, int(label)) for label, start in starts if label != "default"
        ]
        found = []
        for (low, label), (high, _) in zip(begins, [*begins[1:], (count, 0)], strict=False):
            low, high = max(low, 0), min(max(high, 0), count)
            if low < high:
                found.append((low, high, label))
        return found or [(0, count, begins[-1][1])]

    async def abort(self, turn_id: str) -> None:
        """End a turn, unless it has already ended, with finish ABORT and the tokens so far."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            turn.aborted = True
            if turn.request and self.alive:
                await self._llm.abort(turn.request)
