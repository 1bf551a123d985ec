"""A request trace: what it is, and how it is cut and scaled to a benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

BLOCK = 512  # github.com/kvcache-ai/Mooncake: tokens of a prefix block in its traces
LARGEST = np.iinfo(np.int32).max


class TraceError(ValueError):
    """What is wrong with a trace, and where in its file."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; arrays of one length."""

    # float64, seconds from the first request (after `slice`: from the slice's start)
    at: np.ndarray
    prompt_tokens: np.ndarray  # int32
    output_tokens: np.ndarray  # int32; 0: the service failed (BurstGPT)
    blocks: tuple[tuple[int, ...], ...] | None = (
        None  # of each prompt's BLOCK tokens (the last: of the rest); equal
    )
    # numbers are equal prefixes up to there; null: not known

    def __len__(self) -> int:
        return len(self.at)

    @property
    def seconds(self) -> float:
        """Of the last request."""
        return float(self.at[-1]) if len(self) else 0.0

    def slice(self, start_s: float, seconds: float) -> Trace:
        """Requests of [start_s, start_s + seconds), at times from `start_s`."""
        low, high = np.searchsorted(self.at, [start_s, start_s + seconds])
        return replace(self.part(slice(low, high)), at=self.at[low:high] - start_s)

    def part(self, which: slice) -> Trace:
        """Some of the requests, at their times."""
        return Trace(
            self.at[which],
            self.prompt_tokens[which],
            self.output_tokens[which],
            self.blocks and self.blocks[which],
        )

    def scaled(self, time_factor: float) -> Trace:
        """Times multiplied: 2 halves the rate and keeps the bursts."""
        if not (time_factor > 0 and math.isfinite(time_factor)):
            raise ValueError(
                f"time_factor={time_factor}: a trace's times can be multiplied by positive numbers "
                "only"
            )
        return replace(self, at=self.at * time_factor)

    def tokens_scaled(self, prompt: float, output: float) -> Trace:
        """Lengths multiplied and rounded, each 1 at least; equal prefixes are not known any
        more."""

        def times(lengths: np.ndarray, factor: float) -> np.ndarray:
            return np.clip(np.rint(lengths * factor), 1, LARGEST).astype(np.int32)

        return Trace(self.at, times(self.prompt_tokens, prompt), times(self.output_tokens, output))

    def clipped(self, max_prompt: int, max_output: int) -> Trace:
        """Longer prompts and outputs cut to these many tokens; no request is dropped."""
        return replace(
            self,
            prompt_tokens=np.minimum(self.prompt_tokens, np.int32(max_prompt)),
            output_tokens=np.minimum(self.output_tokens, np.int32(max_output)),
        )

    def peak(self, window_s: float) -> float:
        """Requests in the fullest window of so many seconds, in units of the mean of all whole
        windows."""
        windows = math.floor(self.seconds / window_s)
        if windows < 1:
            raise ValueError(f"a trace of {self.seconds:g} s has no window of {window_s:g} s")
        counts = np.bincount((self.at / window_s).astype(np.int64))[:windows]
        return float(counts.max() / counts.mean())
