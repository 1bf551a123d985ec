"""The search over policies: what is composed, what goes on to the next round, and the front, from
made outcomes."""

import math
from functools import cache

import pytest

from rose.parts.simulator.study import build
from scripts import csv_tables
from scripts.simulator import reproduce_rose
from scripts.simulator import study_policies as study
from tests.scripts.outcomes import outcome

SPEED = {"synchronous": 1.0, "one_step_off": 1.5, "carry_over": 2.0, "bounded_staleness": 1.9}
ROUTING = {"rose": 1.0, "earliest_finish": 1.1, "seer": 0.8}
CACHED = cache(reproduce_rose.composed)
ROUNDS = [study.Round(1, 1, 4, 2, 1), study.Round(1, 3, 4, 2, 0)]


@pytest.fixture(autouse=True)
def composed_once(monkeypatch):
    monkeypatch.setattr(study, "composed", lambda setting, given: CACHED(setting, tuple(given)))


def outcomes_of(c):
    """Faster by `SPEED` and `ROUTING` and by the trainer's GPUs; as stale as the bound. The
    setting's own is ROSE."""
    made = []
    for name, system in build.systems(c).items():
        batching, routing = system.scheduler.batching, system.scheduler.routing
        off = batching.args.get("staleness", batching.name == "one_step_off")
        stale = float(batching.args.get("eta", off))
        fast = SPEED[batching.name] * ROUTING[routing.name]
        fast *= 1 + 0.05 * ("hybrid" in system.pools)
        times = {"step_s": 1000 / fast, "staleness": 0.9 * stale, "staleness_max": stale}
        for seed in c.sim.seeds:
            made.append(outcome(c.name, name, seed, tokens_s=fast * (100 + seed), **times))
    return made


def small():
    names = {"batching": list(SPEED), "order": ["fifo"], "routing": list(ROUTING)}
    return study.compositions(names, 1)


@pytest.mark.slow
def test_every_composition_is_a_system_of_the_simulator_with_the_settings_numbers():
    every = study.compositions({})
    assert len(every) == len(set(map(str, every)))
    some = [each for each in every if each.order.name == "mlfq" or each.routing.name == "rose"]
    c = study.of_round("rose_8b", study.Round(4, 1, 4, 2, 4), [7, 8], some)
    assert c.sim.seeds == [7] and (c.rollout.workers, c.trainer.ranks, c.sim.n_serving) == (2, 2, 4)
    for name, system in build.systems(c).items():
        build.make_scheduler(c, system)  # arguments that a policy doesn't take are refused
        provisioning = system.scheduler.provisioning
        assert provisioning.args["n_serving"] == 4
        assert ("hybrid" in system.pools) == (provisioning.name == "all_idle"), name
    # In synchronous steps due_first is fifo.
    assert not [name for name in map(str, every) if name.startswith("synchronous, due_first")]


def test_staleness_and_names_narrow_the_search():
    assert {study.bound(each.batching) for each in small()} == {0, 1}
    fresh = {each.batching.name for each in study.compositions({}, 0)}
    assert fresh == {"synchronous", "tail_batching"}
    with pytest.raises(SystemExit, match="order=lifo: no lifo; there are fifo"):
        study.main(["order=lifo"])


def test_the_shipped_options_are_among_what_is_searched():
    every = set(study.compositions({}))
    assert study.shipped("best") in every and study.shipped("best_sync") in every
    assert {what for _, what in study.KEPT} <= set(map(str, every))


def test_a_round_keeps_the_fastest_of_each_staleness_and_what_has_a_name():
    first, last = study.search("rose_8b", small(), ROUNDS, [1, 2, 3], outcomes_of)
    assert {"synchronous", "carry_over staleness=1 carry=1"} <= {row["batching"] for row in first}
    fastest = {
        "synchronous, fifo, earliest_finish, all_idle",
        "carry_over staleness=1 carry=0.5, fifo, earliest_finish, all_idle",
    }
    assert {study._name(row) for row in last} == fastest | set(study.named())
    assert {row["seeds"] for row in first} == {1} and {row["seeds"] for row in last} == {3}
    assert last[0]["over_rose"] == pytest.approx(2.0 * 1.1 * 1.05) and math.isfinite(last[0]["low"])


def test_the_table_shows_the_last_round_by_staleness(tmp_path):
    found = study.search("rose_8b", small(), ROUNDS, [1, 2, 3], outcomes_of)
    rows = [row for each in found for row in each]
    csv_tables.write_csv(tmp_path / study.FILE, rows)
    lines = study.words(csv_tables.read_csv(tmp_path / study.FILE)).splitlines()
    mine = next(line for line in lines[2:] if line.split(" | ")[1] == "ROSE")
    expected = "| synchronous, fifo, rose, rose | ROSE | 0.00, 0 | 0.0% | 1.00 (1.00–1.00) | 1000 |"
    assert mine == expected
    few = [row | {"divided": 2, "seeds": 1} for row in rows if row["round"] == 1]
    csv_tables.write_csv(tmp_path / study.FILE, few)
    shown = study.words(csv_tables.read_csv(tmp_path / study.FILE))
    assert "| Qwen3-8B, FrozenLake, 1/2, 1 seed: tokens/s" in shown
    table = lines[2:-2]
    stale = [float(line.split(" | ")[2].split(", ")[1]) for line in table]
    names = {study._name(row) for row in rows if row["round"] == 2}
    assert stale == sorted(stale) and len(table) == len(names)
