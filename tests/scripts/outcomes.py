"""Outcomes of simulated runs, made up."""

from rose.parts.simulator.study.outcome import EVERY, Outcome


def outcome(point: str, system: str, seed: int, others: float = 0.0, **numbers: float) -> Outcome:
    """An outcome with these numbers; all others are alike."""
    return Outcome(point=point, system=system, seed=seed, **dict.fromkeys(EVERY, others) | numbers)
