"""Waiting turns, sorted: the first that fits into so much room is found without a look at each.

A sorted list cut into blocks, each with the smallest KV need of its turns. Adding and removing cost
a binary search and a move within one block; finding costs a look at each block and at the turns of
one. Left out: a balanced tree, which is asymptotically better and slower at any size that a run
has.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any

from rose.scheduler.state import FREE, UNBOUNDED, TurnState

# turns of a block; at twice that it is cut. Near the square root of the largest queue expected,
# 50,000
BLOCK = 256

# (key of the order, sequence, turn); the sequence makes it unique
Entry = tuple[Any, int, TurnState]


class TurnQueue:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._blocks: list[list[Entry]] = []
        self._last: list[Entry] = []  # of each block
        self._least: list[int] = []  # KV need in each block

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
        """The first, behind `after`, that needs at most `room` KV tokens; and the smallest need of
        those before it, FREE if there are none."""
        start = bisect_right(self._last, after) if after else 0
        passed = FREE
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

    def some(self, count: int, after: Entry | None = None) -> list[Entry]:
        """The first `count` behind `after`, in order."""
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
