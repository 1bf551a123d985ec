"""The default lending rules, targets, and a made-up device."""

import functools
import json
import random

import msgspec
import pytest

from rose.parts.lending import settings
from rose.parts.lending.config import Lending, Slo
from rose.parts.lending.rules.predictor import Predictor, Work

# 20 ms to read the weights, 5,000 prompt tokens/s
COEFFICIENTS = (0.02, 2e-4, 1e-7, 1e-3, 2e-6, 0.0)
SLO = Slo(ttft_p50_s=0.5, ttft_p99_s=1.0, tpot_p50_s=0.1, tpot_p99_s=0.2)


@functools.cache
def _default() -> Lending:
    return settings.of_server([]).lending


def profile_of(hold=0.2) -> dict:
    """Return a profile such as rose.parts.lending.profile writes."""
    predictor = Predictor(COEFFICIENTS).to_dict()
    interference = {"hold_p99": hold, "hold_mean": hold / 2}
    return {"rollout": {"predictor": predictor}, "interference": interference}


def lent_by(**changes) -> Lending:
    """The default section `serving.lending` with these values."""
    return msgspec.structs.replace(_default(), **changes)


def folder(path, **shape):
    """A model's folder, with this shape and no weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape))
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture
def predictor():
    """Exact: its P99 is its mean."""
    return Predictor(COEFFICIENTS)


@pytest.fixture
def steps():
    """steps(count, coefficients, noise) -> (work, seconds) of a device that follows the rule."""

    def made(count=400, coefficients=COEFFICIENTS, noise=0.0, seed=0):
        dice, samples, (c0, c1, c2, c3, c4, c5) = random.Random(seed), [], coefficients
        for at in range(count):
            chunks = tuple(
                (dice.randint(1, 1000), dice.choice((0, 0, 500, 3000)))
                for _ in range(dice.randint(1, 3))
            )
            decodes = dice.randint(1, 32)
            work = Work(chunks if at % 2 else (), decodes, decodes * dice.randint(10, 3000))
            prefill = sum(c1 * n + c2 * n * (before + n / 2) for n, before in work.prefill)
            mean = max(c0, prefill) + c3 * decodes + c4 * work.decode_context + c5
            samples.append((work, mean * dice.lognormvariate(0, noise)))
        return samples

    return made
