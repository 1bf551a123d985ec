"""Sorted queue of turns that finds the first turn whose KV need is at most a bound.

A sorted list is cut into blocks, and each block knows the smallest KV need of its turns. Adding and
removing work within one block. A search compares the bound with the blocks' smallest needs, and
reads the turns of at most two blocks. A balanced tree would scale better, but is slower at the
queue lengths of a run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any

from rose.scheduler.state import NOT_RESERVED, UNBOUNDED, TurnState

# Turns of a block after a cut. A block with twice as many turns is cut in two. The value is near
# the square root of the longest queue that we expect, 50,000 turns.
BLOCK = 256

# (key of the order policy, sequence, turn); the sequence makes the entry unique
Entry = tuple[Any, int, TurnState]


class TurnQueue:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._blocks: list[list[Entry]] = []
        self._last: list[Entry] = []  # last entry of each block
        self._least: list[int] = []  # smallest KV need in each block

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, turn: str) -> bool:
        return turn in self._entries

    def add(self, turn: TurnState, key: Any) -> None:
        entry = self._entries[turn.turn] = (key, turn.sequence, turn)
        if not self._blocks:
            self._blocks, self._last, self._least = [[entry]], [entry], [turn.kv_need]
            return
        at = min(bisect_left(self._last, entry), len(self._blocks) - 1)
        block = self._blocks[at]
        insort(block, entry)
        if len(block) >= 2 * BLOCK:
            self._blocks[at : at + 1] = [block[:BLOCK], block[BLOCK:]]
            self._last[at : at + 1] = [block[BLOCK - 1], block[-1]]
            self._least[at : at + 1] = [_least(block[:BLOCK]), _least(block[BLOCK:])]
        else:
            self._last[at] = block[-1]
            self._least[at] = min(self._least[at], turn.kv_need)

    def remove(self, turn: TurnState) -> None:
        entry = self._entries.pop(turn.turn)
        at = bisect_left(self._last, entry)
        block = self._blocks[at]
        del block[bisect_left(block, entry)]
        if not block:
            del self._blocks[at], self._last[at], self._least[at]
            return
        self._last[at] = block[-1]
        if turn.kv_need == self._least[at]:
            self._least[at] = _least(block)

    def first(self, room: int = UNBOUNDED, after: Entry | None = None) -> tuple[Entry | None, int]:
        """Return the first entry behind `after` whose turn needs at most `room` KV tokens. Return
        also the smallest KV need of the turns skipped before it; NOT_RESERVED if there are none."""
        start = bisect_right(self._last, after) if after else 0
        passed = NOT_RESERVED
        for at in range(start, len(self._blocks)):
            cut = after is not None and at == start
            if self._least[at] > room and not cut:
                passed = min(passed, self._least[at])
                continue
            block = self._blocks[at]
            for i in range(bisect_right(block, after) if cut else 0, len(block)):
                need = block[i][2].kv_need
                if need <= room:
                    return block[i], passed
                if need < passed:
                    passed = need
        return None, passed

    def next_entries(self, count: int, after: Entry | None = None) -> list[Entry]:
        """Return the first `count` entries behind `after`, in order."""
        start = bisect_right(self._last, after) if after else 0
        found: list[Entry] = []
        for at in range(start, len(self._blocks)):
            block = self._blocks[at]
            begin = bisect_right(block, after) if after is not None and at == start else 0
            found += block[begin : begin + count - len(found)]
            if len(found) >= count:
                break
        return found


def _least(block: list[Entry]) -> int:
    return min(entry[2].kv_need for entry in block)
