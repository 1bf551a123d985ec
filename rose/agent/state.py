"""The part of an episode that its snapshots save and its forks copy."""

from __future__ import annotations

from copy import copy

import msgspec

from rose.protocol import TurnResult, pack_floats, pack_tokens


class EpisodeState(msgspec.Struct):
    """An episode between two turns, without the state of its environment. `tokens`, `mask`,
    `logprobs` and `versions` have one entry per token."""

    tokens: bytearray = bytearray()
    mask: bytearray = bytearray()
    logprobs: bytearray = bytearray()
    versions: bytearray = bytearray()
    experts: bytearray = bytearray()  # routing (MoE experts) of the first `routed` tokens
    routed: int = 0
    reward: float = 0.0
    success: bool = False
    turns: int = 0
    invalid_calls: int = 0
    migrations: int = 0
    turn_tokens: list[tuple[int, int]] = []
    turn_rewards: list[float] = []
    outcome: str = ""  # result of the last turn's calls: "ok", "failed", "" without a call
    inherited: list[tuple[str, int]] = []  # per ancestor: (name, copied turns of its own)
    commands_s: float = 0.0  # seconds in the environment's steps
    has_system: bool = False  # True: the first messages include a system message

    def copy(self) -> EpisodeState:
        return EpisodeState(*(copy(value) for value in msgspec.structs.astuple(self)))

    def own_turns(self) -> tuple[int, int]:
        """Return (turns, tokens of these turns), without turns inherited from a fork's parent."""
        inherited = sum(turns for _, turns in self.inherited)
        tokens = sum(n for turn, n in self.turn_tokens if turn >= inherited)
        return self.turns - inherited, tokens

    def observe(self, tokens: list[int]) -> None:
        """Append tokens that the policy did not generate: mask 0, log-probability 0, version -1."""
        self.tokens += pack_tokens(tokens)
        self.mask += bytes(len(tokens))
        self.logprobs += pack_floats([0.0]) * len(tokens)
        self.versions += pack_tokens([-1]) * len(tokens)

    def append(self, result: TurnResult, tokens: int) -> None:
        """Append a turn of the policy, which has this number of tokens."""
        self.tokens += result.tokens
        self.mask += b"\x01" * tokens
        self.logprobs += result.logprobs
        self.versions += result.versions
        self.experts += result.experts
        self.routed += result.routed
        self.turn_tokens.append((self.turns, tokens))
        self.turns += 1
        self.migrations += result.migrations
