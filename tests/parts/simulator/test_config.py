"""Values of the section `sim` that are wrong are named."""

import pytest

from rose.config import ConfigError
from rose.parts.simulator.config import from_dict


@pytest.mark.parametrize(
    "override, words",
    [
        ("sim.pool.spot.link.gbit_s=0", ["sim.pool.spot.link.gbit_s=0: expected `float` > 0.0"]),
        ("sim.pool.spot.kind=rented", ["sim.pool.spot.kind='rented'", "dedicated, cooperative"]),
        ("+sim.efficiency.compute=high", ["sim.efficiency.compute='high': expected `float`, got"]),
        ("sim.systems.roll_grpo.executor=both", ["sim.systems.roll_grpo.executor='both'"]),
        (
            "+sim.systems.roll_grpo.scheduler.order.nme=fifo",
            ["sim.systems.roll_grpo.scheduler.order.nme='fifo'"],
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(tree, override, words):
    with pytest.raises(ConfigError) as error:
        from_dict(tree(override))
    assert all(word in str(error.value) for word in words)


def test_a_mixture_of_environments_can_be_simulated(tree):
    found = from_dict(tree("env=games"))
    assert found.sim.steps and len(found.env.members) > 1
