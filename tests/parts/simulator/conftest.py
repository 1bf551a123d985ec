"""Composed configurations of simulated runs."""

import pytest

from rose.parts.simulator import config
from rose.parts.simulator.study import build
from tests.conftest import compose_tree


@pytest.fixture
def tree():
    """tree("sim.steps=3", ...) -> the composed tree, unchecked."""
    return lambda *overrides: compose_tree("mode=simulate", "sim=default", *overrides)


@pytest.fixture
def make_config(tree):
    """make_config("sim.steps=3", ...) -> the checked `Config`."""
    return lambda *overrides: config.from_dict(tree(*overrides))


@pytest.fixture
def spec_of(make_config):
    """spec_of("sim.steps=3", ...) -> the `Spec` of ROSE's system in its paper's setting of 8B."""

    def made(*overrides):
        c = make_config("+experiment=rose_8b", *overrides)
        return build.make_spec(c, "rose", build.ours(c), 1)

    return made
