"""Arguments of policies that make no sense are refused, with their names and values."""

import pytest

from rose.config import ConfigError
from tests.scheduler.said import built

TIMES = {"patience_s": 5.0, "idle_s": 100.0, "cool_down_s": 10.0, "back_off_s": 60.0}
ON_DEMAND = {"min": 0, "max": 2} | TIMES
ROSE = {"n_serving": 2, "recent_s": 10.0, "hysteresis": 0.1, "activation_s": 5.0, "idle_s": 30.0}
ELASTIC = ROSE | {"hybrid_wait_s": 10.0, "gain": 0.05}
REBALANCE = {"crowded": 1.2, "margin": 1.25, "move_s": 1.0, "patience_s": 10.0, "at_once": 2}
MLFQ = {"limits": [5], "first": "short", "patience": 1}
OF_PROVISIONING = "scheduler.provisioning.args"
OF_ROUTING = "scheduler.routing.args"


@pytest.mark.parametrize(
    "kind, name, args, words",
    [
        ("routing", "fastest", {}, "scheduler.routing.name='fastest': no"),
        ("order", "fifo", {"x": 1}, "scheduler.order.args"),
        ("order", "mlfq", MLFQ | {"limits": []}, r"limits=\[\]"),
        ("order", "mlfq", MLFQ | {"limits": [5, 5]}, r"limits=\[5, 5\].*ascending"),
        ("order", "mlfq", MLFQ | {"first": "middle"}, "first='middle'"),
        ("order", "mlfq", MLFQ | {"patience": -1}, "patience=-1"),
        ("placement", "rebalance", REBALANCE | {"crowded": 0.5}, "placement.args.*crowded=0.5"),
        ("placement", "rebalance", REBALANCE | {"at_once": 0}, "at_once=0"),
        ("provisioning", "on_demand", ON_DEMAND | {"min": 3}, OF_PROVISIONING),
        ("provisioning", "on_demand", ON_DEMAND | {"max": 0}, OF_PROVISIONING),
        ("provisioning", "on_demand", ON_DEMAND | {"min": -1}, OF_PROVISIONING),
        ("provisioning", "on_demand", ON_DEMAND | {"patience_s": -1.0}, OF_PROVISIONING),
        ("provisioning", "on_demand", ON_DEMAND | {"back_off_s": float("nan")}, OF_PROVISIONING),
        ("provisioning", "rose", ROSE | {"n_serving": -1}, OF_PROVISIONING),
        ("provisioning", "rose", ROSE | {"idle_s": -1.0}, OF_PROVISIONING),
        ("provisioning", "rose", ROSE | {"recent_s": float("nan")}, OF_PROVISIONING),
        ("provisioning", "elastic", ELASTIC | {"switch_s": -1.0}, "switch_s=-1"),
        ("routing", "seer", {"chunk_tokens": 0}, OF_ROUTING),
        ("routing", "libra", {"limits": [], "shares": [1]}, OF_ROUTING),
        ("routing", "libra", {"limits": [9], "shares": [1, -1]}, OF_ROUTING),
        ("routing", "libra", {"limits": [9], "shares": [1]}, OF_ROUTING),
        ("routing", "rose", {"imbalance": 1}, OF_ROUTING),
        ("routing", "thunder", {"period_s": 0.0, "half_life_s": 1.0}, OF_ROUTING),
        ("routing", "thunder", {"period_s": 5.0, "half_life_s": -1.0}, OF_ROUTING),
        ("batching", "synchronous", {"max_admitted": 0.5}, "max_admitted=0.5"),
        ("batching", "dapo", {"oversample": 0.9}, "oversample=0.9"),
        ("batching", "dapo", {"oversample": 3.0}, "max_admitted=2"),
        ("batching", "tail_batching", {"speculation": 0.0, "spare": 0.0}, "speculation=0"),
        ("batching", "tail_batching", {"speculation": 1.0, "spare": -0.5}, "spare=-0.5"),
        ("batching", "bounded_staleness", {"eta": -1, "running": 1.0}, "eta=-1"),
        ("batching", "bounded_staleness", {"eta": 1, "running": 0.0}, "running=0"),
        ("batching", "trajectory_async", {"alpha": 0, "retries": 1}, "alpha=0.*synchronous"),
        ("batching", "trajectory_async", {"alpha": 1, "retries": -1}, "retries=-1"),
        ("batching", "carry_over", {"staleness": 1, "carry": 2.0}, "staleness=1, carry=2"),
        ("batching", "carry_over", {"staleness": 0, "carry": 0.5}, "staleness=0, carry=0.5"),
        ("batching", "carry_over", {"staleness": -1, "carry": 0.0}, "staleness=-1"),
        ("batching", "carry_over", {"staleness": 1, "carry": 1, "max_admitted": 0.5}, "ted=0.5"),
    ],
)
def test_arguments_that_make_no_policy_are_refused(kind, name, args, words):
    plain = {"max_admitted": 2.0} if kind == "batching" else {}
    with pytest.raises(ConfigError, match=words):
        built(**{kind: (name, plain | args)})
