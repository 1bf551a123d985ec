"""The proposer that vLLM calls after each engine step (speculative method `custom_class`).

vLLM passes rows of token ids without their request ids. So the worker extension gives the proposer
vLLM's model runner, whose batch has the request ids. A request id begins with the turn's id:
"g12.5.t2#1#7-..." is attempt 1 at turn 2 of trajectory "g12.5" in group "g12", and the engine's
request 7. Tokens are written into their group's text at the next step that looks drafts up. The
prompt, which a group's trajectories share, is written once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from rose.parts.drafts.gain import Gate
from rose.parts.drafts.text import Text, acceptance

Clock = Callable[[], float]  # seconds


class _Row:
    """A running request."""

    __slots__ = ("chances", "count", "group", "path", "seen", "tail", "text")

    def __init__(self, group: str, text: Text, most: int) -> None:
        self.group = group
        self.text = text
        self.tail = -1  # the request's last node in `text`
        self.seen = 0  # number of the request's tokens that are in `text`
        # The last draft that was looked up: see `loops.look_up`.
        self.path = np.zeros((2, most), np.int32)
        self.chances = np.zeros(most)
        self.count = 0


class GroupProposer:
    """Drafts tokens for the running requests of one vLLM worker."""

    def __init__(self, vllm_config: Any) -> None:
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.gate, self.memory_bytes = Gate(adaptive=True), 0
        self.overall = acceptance(prior=True)
        # group -> its text, the least recently used first
        self.texts: OrderedDict[str, Text] = OrderedDict()
        self._rows: dict[str, _Row] = {}  # request id -> row
        self._last: dict[str, _Row] = {}  # trajectory -> the row of its last request
        # Turn on another engine -> (its group's text, its last node there, number of its tokens).
        self._fed: dict[str, tuple[Text, int, int]] = {}
        self._runner: Any = None
        self._clock: Clock = time.perf_counter
        self._before: list[str] = []  # requests of the last step if all of them decoded, else empty
        self._drafted, self._returned_at = 0, 0.0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; vLLM calls it, but there is no draft model."""

    def begin(
        self, runner: Any, adaptive: bool, memory_bytes: int, clock: Clock = time.perf_counter
    ) -> None:
        """Set the proposer up, before the first request. `runner` is vLLM's model runner,
        `memory_bytes` limits the texts of all groups together, and `clock` times steps."""
        self._runner, self.gate, self.memory_bytes = runner, Gate(adaptive), memory_bytes
        self._clock = clock

    # ----------------------------------------------------------------- what vLLM calls

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each request; called by vLLM after each step.

        `sampled_token_ids` has each request's tokens of this step, [] while its prompt is computed.
        `num_tokens_no_spec` (requests,) is each request's number of tokens, and `token_ids_cpu`
        (requests, length) has their ids.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        ids = self._runner.input_batch.req_ids
        self.gate.accepted(sum(len(sampled) - 1 for sampled in sampled_token_ids if sampled))
        self._observe(ids, sampled_token_ids)
        self._drafted = 0
        if self.gate.looks_up():
            found = [i for i, sampled in enumerate(sampled_token_ids) if sampled]
            chances = np.zeros((len(found), self.most))
            rows = []
            for at, i in enumerate(found):
                tokens = token_ids_cpu[i, : num_tokens_no_spec[i]]
                row = self._write(ids[i], tokens)
                row.count = row.text.draft(row.tail, self.most, self.overall, row.path, row.chances)
                chances[at, : row.count] = row.chances[: row.count]
                rows.append(row)
            for i, row, length in zip(found, rows, self.gate.decide(chances), strict=True):
                drafts[i] = row.path[0, :length].tolist()
                self._drafted += int(length)
            if len(self._rows) > 2 * len(ids) + 16:
                self._rows = {name: self._rows[name] for name in ids if name in self._rows}
        self._returned_at = self._clock()
        return drafts

    def _observe(self, ids: list[str], sampled: list[list[int]]) -> None:
        """Record the step's duration if it and the last step only decoded, for the same
        requests."""
        decodes = ids.copy() if all(sampled) else []
        if decodes and decodes == self._before:
            self.gate.observe(len(ids), self._drafted, self._clock() - self._returned_at)
        self._before = decodes

    def _write(self, request: str, tokens: np.ndarray) -> _Row:
        """Write the new ones of a request's `tokens` into its group's text; return its row. Also
        compares the new ones with the last draft, to learn chances of acceptance."""
        row = self._rows.get(request)
        if row is None:
            row = self._rows[request] = self._begin(request, tokens)
        elif row.group in self.texts:
            self.texts.move_to_end(row.group)
        if row.count:
            row.text.learn(row.path, row.count, tokens[row.seen :], self.overall)
        row.tail = row.text.extend(row.tail, tokens[row.seen :])
        row.seen = len(tokens)
        return row

    def _begin(self, request: str, tokens: np.ndarray) -> _Row:
        """Create the row of a new request, with `tokens` in its group's text. The turn continues
        the text of its trajectory's last turn if that turn ran on this engine. Otherwise it begins
        with the group's prompt."""
        turn = request.partition("#")[0]
        trajectory, group = turn.rpartition(".")[0], turn.partition(".")[0]
        text = self._text(group)
        row, last = _Row(group, text, self.most), self._last.get(trajectory)
        if (
            last is not None
            and last.text is text
            and 0 < last.seen <= len(tokens)
            and text.ends_with(last.tail, tokens[: last.seen])
        ):
            row.tail, row.seen = last.tail, last.seen
        else:
            row.tail, row.seen = text.begin(tokens), len(tokens)
        self._last[trajectory] = row
        return row

    # ----------------------------------------------------------------- groups

    def feed(self, turn: str, start: int, before: bytes, tokens: bytes) -> None:
        """Add tokens that a sibling's turn got on another engine to its group's text.

        `tokens` (int32) are the turn's tokens from number `start` on. `before` (int32) is the end
        of its context. Tokens that were fed already are skipped. After a gap, the tokens begin a
        new text in the group's tree.
        """
        text, tail, have = self._fed.get(turn, (None, -1, 0))
        group = turn.partition(".")[0]
        new = np.frombuffer(tokens, "<i4").copy()
        if text is None or text is not self.texts.get(group) or start > have:
            text, have = self._text(group), start
            tail = text.extend(-1, np.frombuffer(before if start == 0 else b"", "<i4").copy())
        new = new[have - start :]
        self._fed[turn] = text, text.extend(tail, new), have + len(new)

    def drop(self, groups: list[str]) -> None:
        """Forget these groups, which have ended."""
        for group in groups:
            self.texts.pop(group, None)
        gone = set(groups)
        for known in (self._last, self._fed):
            for name in [name for name in known if name.partition(".")[0] in gone]:
                del known[name]

    def _text(self, group: str) -> Text:
        """Return the group's text, and create it if needed. Before that, drops the least recently
        used groups while all texts take more than `memory_bytes`."""
        text = self.texts.get(group)
        if text is None:
            over = sum(text.nbytes for text in self.texts.values()) - self.memory_bytes
            while over > 0:
                oldest = next(iter(self.texts))
                over -= self.texts[oldest].nbytes
                self.drop([oldest])
            text = self.texts[group] = Text()
        self.texts.move_to_end(group)
        return text
