"""Composed configurations of simulated runs."""

import pytest

from rose.parts.simulator import config
from tests.conftest import compose_tree


@pytest.fixture
def tree():
    """tree("sim.steps=3", ...) -> the composed tree, unchecked."""
    return lambda *overrides: compose_tree("mode=simulate", "sim=default", *overrides)


@pytest.fixture
def make_config(tree):
    """make_config("sim.steps=3", ...) -> the checked `Config`."""
    return lambda *overrides: config.from_dict(tree(*overrides))
