"""How long a check of an answer may take: RollPacker's adaptive limit (arXiv 2509.21009, section
4.3), kept over a requeue.

min(max(FLOOR_S, FACTOR * T), `most_s`), where T is what the slowest correct answer of the same
prompt took: code that runs much longer than every right answer did is wrong or too slow, and need
not be waited for. Without a correct answer yet, `most_s`.
"""

from __future__ import annotations

import json
from pathlib import Path

from rose.files import write_whole

FLOOR_S = 2.0  # of the paper
FACTOR = 1.5  # of the paper; its repository has 2
MOST_PROMPTS = 100_000  # remembered; the longest unused goes first


class Anchors:
    """`path`: the file that holds them; what stands there is taken over."""

    def __init__(self, path: Path, most_s: float, adaptive: bool) -> None:
        self._path, self._most_s, self._adaptive = path, most_s, adaptive
        self._slowest: dict[str, float] = {}  # prompt -> seconds, the longest unused first
        self._changed = False
        if adaptive and path.exists():
            self._slowest = {
                str(prompt): float(seconds)
                for prompt, seconds in json.loads(path.read_text(encoding="utf-8")).items()
            }

    def limit_s(self, prompt: str) -> float:
        """Seconds that the next answer to `prompt` may take."""
        if not self._adaptive or prompt not in self._slowest:
            return self._most_s
        self._slowest[prompt] = seconds = self._slowest.pop(prompt)
        return min(max(FLOOR_S, FACTOR * seconds), self._most_s)

    def correct(self, prompt: str, seconds: float) -> None:
        """A correct answer was found to be so within `seconds`."""
        known = self._slowest.pop(prompt, 0.0)
        self._slowest[prompt] = max(known, seconds)
        self._changed = self._changed or seconds > known
        while len(self._slowest) > MOST_PROMPTS:
            del self._slowest[next(iter(self._slowest))]

    def save(self) -> None:
        """Write them, if any has changed."""
        if self._adaptive and self._changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, (json.dumps(self._slowest) + "\n").encode())
            self._changed = False
