"""A trace of online requests, which can be cut and scaled for a benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

BLOCK = 512  # github.com/kvcache-ai/Mooncake: tokens of a prefix block in its traces
LARGEST = np.iinfo(np.int32).max


class TraceError(ValueError):
    """An error that names what is wrong with a trace, and where in its file."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; arrays of one length."""

    # float64, seconds from the first request (after `slice`: from the slice's start)
    at: np.ndarray
    prompt_tokens: np.ndarray  # int32
    output_tokens: np.ndarray  # int32; 0: the service failed (BurstGPT)
    # Per prompt, a number for each block of BLOCK tokens; the last block may be shorter. Prompts
    # with equal numbers up to a block are equal up to its end. None: unknown.
    blocks: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.at)

    @property
    def seconds(self) -> float:
        """Arrival time of the last request, seconds."""
        return float(self.at[-1]) if len(self) else 0.0

    def slice(self, start_s: float, seconds: float) -> Trace:
        """Return the requests of [start_s, start_s + seconds), with times from `start_s`."""
        low, high = np.searchsorted(self.at, [start_s, start_s + seconds])
        return replace(self.part(slice(low, high)), at=self.at[low:high] - start_s)

    def part(self, which: slice) -> Trace:
        """Return some of the requests, with unchanged times."""
        return Trace(
            self.at[which],
            self.prompt_tokens[which],
            self.output_tokens[which],
            self.blocks and self.blocks[which],
        )

    def scaled(self, time_factor: float) -> Trace:
        """Return the trace with all times multiplied: 2 halves the rate and keeps the bursts."""
        if not (time_factor > 0 and math.isfinite(time_factor)):
            raise ValueError(
                f"time_factor={time_factor}: times can be multiplied by positive numbers only"
            )
        return replace(self, at=self.at * time_factor)

    def tokens_scaled(self, prompt: float, output: float) -> Trace:
        """Return the trace without `blocks`, its lengths multiplied and rounded, at least 1."""

        def times(lengths: np.ndarray, factor: float) -> np.ndarray:
            return np.clip(np.rint(lengths * factor), 1, LARGEST).astype(np.int32)

        return Trace(self.at, times(self.prompt_tokens, prompt), times(self.output_tokens, output))

    def clipped(self, max_prompt: int, max_output: int) -> Trace:
        """Return the trace with longer prompts and outputs cut to these lengths, in tokens. Raises
        `ValueError` for lengths below 1."""
        for name, most in (("max_prompt", max_prompt), ("max_output", max_output)):
            if most < 1:
                raise ValueError(f"{name}={most}: a request has 1 token at least")
        return replace(
            self,
            prompt_tokens=np.minimum(self.prompt_tokens, np.int32(max_prompt)),
            output_tokens=np.minimum(self.output_tokens, np.int32(max_output)),
        )

    def peak(self, window_s: float) -> float:
        """Return the most requests in a window of `window_s`, over the mean of all windows. An
        incomplete last window doesn't count."""
        windows = math.floor(self.seconds / window_s)
        if windows < 1:
            raise ValueError(f"a trace of {self.seconds:g} s has no window of {window_s:g} s")
        counts = np.bincount((self.at / window_s).astype(np.int64))[:windows]
        return float(counts.max() / counts.mean())
