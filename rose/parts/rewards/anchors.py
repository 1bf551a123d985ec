"""RollPacker's adaptive time limit for scoring an answer (arXiv 2509.21009, section 4.3). It is
saved, so that it survives a requeue.

The limit is min(max(FLOOR_S, FACTOR * T), `most_s`), where T is the time of the slowest correct
answer to the same prompt. Code that runs much longer than every correct answer is wrong or too
slow. A prompt without a correct answer so far has the limit `most_s`.
"""

from __future__ import annotations

import json
from pathlib import Path

from rose.files import write_whole

FLOOR_S = 2.0  # the paper's value
FACTOR = 1.5  # the paper's value; its repository has 2
MOST_PROMPTS = 100_000  # most prompts kept; the least recently used is dropped first


class Anchors:
    """Times of the slowest correct answers. `path`: their file, which is read if it exists."""

    def __init__(self, path: Path, most_s: float, adaptive: bool) -> None:
        self._path, self._most_s, self._adaptive = path, most_s, adaptive
        self._slowest: dict[str, float] = {}  # prompt -> seconds, the longest unused first
        self._changed = False
        if adaptive and path.exists():
            try:
                read = json.loads(path.read_text(encoding="utf-8"))
                self._slowest = {str(prompt): float(seconds) for prompt, seconds in read.items()}
            except (OSError, ValueError, TypeError, AttributeError) as error:
                print(f"{path} can't be read ({error}): limits are learned again", flush=True)

    def limit_s(self, prompt: str) -> float:
        """Return the seconds that the next answer to `prompt` may take."""
        if not self._adaptive or prompt not in self._slowest:
            return self._most_s
        self._slowest[prompt] = seconds = self._slowest.pop(prompt)  # moved to the end
        return min(max(FLOOR_S, FACTOR * seconds), self._most_s)

    def correct(self, prompt: str, seconds: float) -> None:
        """Record that scoring a correct answer to `prompt` took `seconds`."""
        known = self._slowest.pop(prompt, 0.0)
        self._slowest[prompt] = max(known, seconds)
        self._changed = self._changed or seconds > known
        while len(self._slowest) > MOST_PROMPTS:
            del self._slowest[next(iter(self._slowest))]

    def save(self) -> None:
        """Write the file if any time has changed. Raises `OSError`."""
        if self._adaptive and self._changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, (json.dumps(self._slowest) + "\n").encode())
            self._changed = False
