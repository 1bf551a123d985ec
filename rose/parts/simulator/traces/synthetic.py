"""Generates request traces with published burst statistics."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from rose.parts.simulator.traces.trace import LARGEST, Trace

MINUTE_S, HOUR_S = 60, 3600  # definition: seconds
SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)  # definition: quantiles
# name -> quantiles at SHARES of the tokens of (prompts, outputs). Each is from an hour of 2023 in
# the Azure public dataset (github.com/Azure/AzurePublicDataset), CC-BY 4.0.
LENGTHS = {
    "azure_conv": (
        (2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),  # github.com/Azure
        (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000),  # github.com/Azure
    ),
    "azure_code": (
        (3, 17, 75, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437),  # github.com/Azure
        (6, 6, 6, 7, 9, 13, 24, 55, 90, 251, 1899),  # github.com/Azure
    ),
}
Lengths = tuple[float, float] | str


def generate(
    seed: int,
    seconds: float = HOUR_S,
    rate: float = 5.5,  # github.com/Azure: 19,366 conversations in an hour
    minute_peak: float = 1.7,  # ROSE (arXiv 2605.06534)
    second_peak: float = 4.2,  # ROSE (arXiv 2605.06534)
    prompt: Lengths = (1020.0, 0.99),  # ours: fitted to azure_conv
    output: Lengths = (129.0, 0.85),  # ours: fitted to azure_conv
) -> Trace:
    """Generate a trace of `seconds` with about `rate` requests/s. The same arguments generate the
    same trace.

    Arrivals are a Poisson process, whose rate is modulated per minute and per second by lognormal
    factors of mean 1. In an hour, the rate's highest minute and second are expected at
    `minute_peak` and `second_peak` times the mean. Published values of production traffic are 1.7
    and 4.2; a constant rate has 1.0 for both. The counts have Poisson noise in addition.

    `prompt` and `output` are lognormal lengths as (median tokens, sigma of the logarithm), or a
    name in `LENGTHS`, whose quantiles are interpolated linearly in the logarithm. The defaults are
    fitted to Azure's conversation trace, but their longest 1 % are over twice as long.

    Raises `ValueError` for peaks that such a process can't have, and for unknown names of lengths.
    """
    if not (seconds > 0 and rate > 0):
        raise ValueError(f"seconds={seconds}, rate={rate}: both must be positive")
    slow, total = _sigma(minute_peak, HOUR_S // MINUTE_S), _sigma(second_peak, HOUR_S)
    if total < slow:
        raise ValueError(
            f"second_peak={second_peak}: seconds vary no less than minutes, whose peak is "
            f"{minute_peak}"
        )
    draw = np.random.default_rng(seed)
    whole = math.ceil(seconds)
    minutes = np.exp(draw.normal(-(slow**2) / 2, slow, math.ceil(whole / MINUTE_S))).repeat(
        MINUTE_S
    )[:whole]
    fast = math.sqrt(total**2 - slow**2)
    counts = draw.poisson(rate * minutes * np.exp(draw.normal(-(fast**2) / 2, fast, whole)))
    at = np.sort(np.arange(whole).repeat(counts) + draw.random(counts.sum()))
    at = at[at < seconds]
    if not len(at):
        raise ValueError(
            f"seconds={seconds}, rate={rate}, seed={seed}: no request arrives; ask for more"
        )

    return Trace(at - at[0], _lengths(prompt, 0, len(at), draw), _lengths(output, 1, len(at), draw))


def _lengths(of: Lengths, which: int, count: int, draw: np.random.Generator) -> np.ndarray:
    """Draw `count` lengths of prompts (`which` 0) or outputs (`which` 1)."""
    if isinstance(of, str):
        if of not in LENGTHS:
            raise ValueError(
                f"lengths like those of {of!r}; known are {', '.join(LENGTHS)}, or (median, sigma)"
            )
        logs = np.interp(draw.random(count), SHARES, np.log(LENGTHS[of][which]))
    else:
        median, sigma = of
        logs = math.log(median) + draw.normal(0, sigma, count)
    return np.clip(np.rint(np.exp(logs)), 1, LARGEST).astype(np.int32)


def _sigma(peak: float, windows: int) -> float:
    """Return the sigma of a lognormal factor of mean 1 whose largest of `windows` draws is expected
    near `peak`: exp(z sigma - sigma^2/2) = peak, with z the normal quantile of Blom's rank."""
    z = NormalDist().inv_cdf((windows - 0.375) / (windows + 0.25))  # definition: Blom's
    if not 1 <= peak <= math.exp(z * z / 2):
        raise ValueError(
            f"a peak of {peak} times the mean; possible are 1 to {math.exp(z * z / 2):.3g}"
        )
    return z - math.sqrt(z * z - 2 * math.log(peak))
