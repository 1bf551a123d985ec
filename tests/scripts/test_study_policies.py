"""The search over policies: what is composed, what goes on to the next round, and the front, from
made outcomes."""

import math
from functools import cache

import pytest

from rose.parts.simulator.study import build
from rose.parts.simulator.study.outcome import EVERY, Outcome
from scripts import csv_tables
from scripts.simulator import reproduce_rose
from scripts.simulator import study_policies as study

SPEED = {"synchronous": 1.0, "one_step_off": 1.5, "carry_over": 2.0, "bounded_staleness": 1.9}
ROUTING = {"rose": 1.0, "earliest_finish": 1.1, "seer": 0.8}


@pytest.fixture(autouse=True)
def composed_once(monkeypatch):
    monkeypatch.setattr(
        study, "composed", lambda setting, overrides: cached(setting, tuple(overrides))
    )


@cache
def cached(setting, overrides):
    return reproduce_rose.composed(setting, overrides)


def outcomes_of(c):
    """Faster by `SPEED` and `ROUTING` and by the trainer's GPUs; as stale as the bound. The
    setting's own is ROSE."""
    made = []
    for name, system in build.systems(c).items():
        policies = system.scheduler
        args = policies.batching.args
        stale = float(
            args.get("eta", args.get("staleness", policies.batching.name == "one_step_off"))
        )
        fast = (
            SPEED[policies.batching.name]
            * ROUTING[policies.routing.name]
            * (1 + 0.05 * ("hybrid" in system.pools))
        )
        made += [
            Outcome(
                point=c.name,
                system=name,
                seed=seed,
                **(
                    dict.fromkeys(EVERY, 0.0)
                    | {
                        "tokens_s": fast * (100 + seed),
                        "step_s": 1000 / fast,
                        "staleness": 0.9 * stale,
                        "staleness_max": stale,
                    }
                ),
            )
            for seed in c.sim.seeds
        ]
    return made


def small(**only):
    return study.compositions(
        {"batching": list(SPEED), "order": ["fifo"], "routing": list(ROUTING)} | only, 1
    )


@pytest.mark.slow
def test_every_composition_is_a_system_of_the_simulator_with_the_settings_numbers():
    every = study.compositions({})
    assert len(every) == len(set(map(str, every)))
    some = [each for each in every if each.order.name == "mlfq" or each.routing.name == "rose"]
    c = study.of_round("rose_8b", study.Round(4, 1, 4, 2, 4), [7, 8], some)
    assert c.sim.seeds == [7] and (c.rollout.workers, c.trainer.ranks, c.sim.n_serving) == (2, 2, 4)
    for name, system in build.systems(c).items():
        build.make_scheduler(c, system)  # arguments that a policy doesn't take are refused
        assert system.scheduler.provisioning.args["n_serving"] == 4
        assert ("hybrid" in system.pools) == (system.scheduler.provisioning.name == "all_idle"), (
            name
        )
    assert not [name for name in map(str, every) if name.startswith("synchronous, due_first")], (
        "it is fifo there"
    )


def test_staleness_and_names_narrow_the_search():
    assert {study.bound(each.batching) for each in small()} == {0, 1}
    assert {each.batching.name for each in study.compositions({}, 0)} == {
        "synchronous",
        "tail_batching",
    }
    with pytest.raises(SystemExit, match="order=lifo: no lifo; there are fifo"):
        study.main(["order=lifo"])


def test_the_shipped_options_are_among_what_is_searched():
    every = set(study.compositions({}))
    assert study.shipped("best") in every and study.shipped("best_sync") in every
    assert {what for _, what in study.KEPT} <= set(map(str, every))


def test_a_round_keeps_the_fastest_of_each_staleness_and_what_has_a_name():
    rounds = [study.Round(1, 1, 4, 2, 1), study.Round(1, 3, 4, 2, 0)]
    first, last = study.search("rose_8b", small(), rounds, [1, 2, 3], outcomes_of)
    assert {"synchronous", "carry_over staleness=1 carry=1"} <= {row["batching"] for row in first}
    fastest = {
        "synchronous, fifo, earliest_finish, all_idle",
        "carry_over staleness=1 carry=0.5, fifo, earliest_finish, all_idle",
    }
    assert {study._name(row) for row in last} == fastest | set(study.named())
    assert {row["seeds"] for row in first} == {1} and {row["seeds"] for row in last} == {3}
    assert last[0]["over_rose"] == pytest.approx(2.0 * 1.1 * 1.05) and math.isfinite(last[0]["low"])


def test_the_table_shows_the_last_round_by_staleness(tmp_path):
    rounds = [study.Round(1, 1, 4, 2, 1), study.Round(1, 3, 4, 2, 0)]
    rows = [
        row
        for found in study.search("rose_8b", small(), rounds, [1, 2, 3], outcomes_of)
        for row in found
    ]
    csv_tables.write_csv(tmp_path / study.FILE, rows)
    lines = study.words(csv_tables.read_csv(tmp_path / study.FILE)).splitlines()
    mine = next(line for line in lines[2:] if line.split(" | ")[1] == "ROSE")
    assert mine == (
        "| synchronous, fifo, rose, rose | ROSE | 0.00, 0 | 0.0% | 1.00 (1.00–1.00) | 1000 |"
    )
    few = [row | {"divided": 2, "seeds": 1} for row in rows if row["round"] == 1]
    csv_tables.write_csv(tmp_path / study.FILE, few)
    assert "| Qwen3-8B, FrozenLake, 1/2, 1 seed: tokens/s" in study.words(
        csv_tables.read_csv(tmp_path / study.FILE)
    )
    table = lines[2:-2]
    stale = [float(line.split(" | ")[2].split(", ")[1]) for line in table]
    assert stale == sorted(stale) and len(table) == len(
        {study._name(row) for row in rows if row["round"] == 2}
    )
