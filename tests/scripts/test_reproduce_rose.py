"""The paper beside the simulator: tables and what is put into the docs, from made
outcomes."""

import math

import msgspec
import pytest

from rose.parts.simulator.study import table
from scripts import csv_tables
from scripts.harness import simulated
from scripts.simulator import reproduce_rose
from tests.scripts.outcomes import outcome

SPEED = {"roll_grpo": 1.0, "roll_dapo": 0.8, "rose_dapo": 1.2, "areal": 1.1, "rose_areal": 1.7}
SPEED |= {"rlboost": 1.2, "serverless": 1.3, "best": 2.0, "best_sync": 1.6, "rose": 1.5}


@pytest.fixture
def outcomes():
    """Each system `SPEED` times as fast as roll_grpo, with a spread over three seeds that all
    share."""

    def made(name, speed, seed):
        times = {"step_s": 100 * seed / speed, "rollout_s": 60 * seed / speed}
        times |= {"trajectories_s": speed / seed, "attainment": math.nan}
        return outcome("p", name, seed, 0.01, **times)

    return [made(name, speed, seed) for name, speed in SPEED.items() for seed in (1, 2, 3)]


def test_every_row_of_the_paper_is_compared_by_its_own_measure(outcomes):
    rows = {
        (row["mine"], row["what"], row["rival"]): row
        for row in reproduce_rose.compared("rose_8b", outcomes)
    }
    expected = {
        ("rose", "throughput over", "roll_grpo"): 1.5,
        ("rose_dapo", "throughput over", "roll_dapo"): 1.5,  # DAPO on both sides
        ("rose", "throughput over", "areal"): 1.5 / 1.1,
        ("rose_areal", "throughput over", "areal"): 1.7 / 1.1,
        ("rose", "rollout time under", "rlboost"): 1.5 / 1.2,
        ("rose", "allocation overhead", "serverless"): 0.01,
        ("best", "throughput over", "rose"): 2.0 / 1.5,
    }
    assert {key: rows[key]["ours"] for key in expected} == pytest.approx(expected)
    plain = rows["rose", "throughput over", "roll_grpo"]
    assert plain["difference"] == pytest.approx(1.5 / 1.31 - 1)
    assert len(rows) == len(reproduce_rose.PUBLISHED)


def test_files_keep_the_rows_of_the_other_setting_and_the_page_has_both(outcomes, tmp_path):
    path = tmp_path / "rose_paper.csv"
    for setting in ("rose_32b", "rose_8b", "rose_8b"):
        reproduce_rose.merge_settings(path, reproduce_rose.compared(setting, outcomes))
    rows = csv_tables.read_csv(path)
    assert [row["setting"] for row in rows] == ["rose_8b"] * 10 + ["rose_32b"] * 10
    words = reproduce_rose.beside(rows)
    line = "| rose, throughput over roll_grpo | 1.31 | 1.50 (1.50–1.50), +14% | 1.46 | 1.50"
    assert line in words
    assert "| best, throughput over rose | none | 1.33 (1.33–1.33) | none |" in words
    alone = reproduce_rose.beside([row for row in rows if row["setting"] == "rose_32b"])
    assert "8B" not in alone and words.count("\n") == alone.count("\n")


def test_table_1_is_absolute_and_serving_alone_is_roses_run_without_its_rollouts(
    outcomes, tmp_path
):
    late = {"ttft_p99_s": 0.35, "tpot_p99_s": 0.04, "gap_p99_s": 0.09}
    late |= {"alone_ttft_p99_s": 0.3, "alone_tpot_p99_s": 0.03, "alone_gap_p99_s": 0.07}
    some = [
        msgspec.structs.replace(o, system=name, rollout_s=500.0 + 10 * o.seed, **late)
        for o in outcomes
        if o.system == "rose"
        for name in ("rose", "uncontrolled", "prism")
    ]
    path = tmp_path / "rose_table1.csv"
    reproduce_rose.merge_settings(path, reproduce_rose.table1("rose_8b", some))
    words = reproduce_rose.table1_words(csv_tables.read_csv(path)).splitlines()
    assert words[2] == "| Qwen3-8B, rose | 496, 520 | 338, 350 | 136; 40, 90 |"
    assert words[3] == "| Qwen3-8B, serving alone | –, – | 315, 300 | 118; 30, 70 |"
    others = [line.split(" | ")[0] for line in words[4:]]
    assert others == ["| Qwen3-8B, uncontrolled", "| Qwen3-8B, prism"]


def test_systems_are_measured_against_the_resource_fixed_one(outcomes, tmp_path):
    rows = [
        {"setting": "rose_8b"} | dict(zip(table.CSV_COLUMNS, line.split(","), strict=False))
        for line in table.csv_text(outcomes).splitlines()[1:]
    ]
    words = reproduce_rose.effects(rows)
    assert "| best | 2.00 (2.00–2.00) | 100 | 0.01, 1.0% |" in words
    assert "Online requests" not in words, "nobody lent"
    lent = [row | {"attainment": "0.998"} if row["system"] == "rose" else row for row in rows]
    assert reproduce_rose.effects(lent).endswith(": 99.80% to 99.80%.")


def test_parameters_that_change_little_share_a_line():
    def row(parameter, ratio):
        return {"setting": "rose_8b", "parameter": parameter, "over areal": str(ratio)}

    rows = [row("as it is", 1.0), row("turns", 0.9), row("turns", 1.1), row("load", 1.01)]
    table, words = reproduce_rose.varied_words(rows).split("\n\n")
    assert table.splitlines()[2:] == ["| as it is | 1.00 |", "| turns | 0.90, 1.10 |"]
    assert words.endswith(": load.")


def test_a_table_is_put_between_its_marks_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- measured: by a script -->\nold\n<!-- end of measured -->\nb\n")
    csv_tables.put(page, "measured", "new")
    text = "a\n<!-- measured: by a script -->\nnew\n<!-- end of measured -->\nb\n"
    assert page.read_text() == text
    with pytest.raises(SystemExit, match="end of other"):
        csv_tables.put(page, "other", "x")


def test_a_factor_multiplies_what_the_setting_has():
    c = simulated("+experiment=rose_8b")
    link = c.sim.pool["cooperative"].link.gbit_s
    keys = ["sim.pool.cooperative.link.gbit_s", "sim.environment.factors.output"]
    expected = [f"++{keys[0]}={1.2 * link:g}", f"++{keys[1]}=1.2"]
    assert reproduce_rose.times(c, keys, 1.2) == expected
    assert float(reproduce_rose.times(c, ["sim.efficiency.memory"], 0.8)[0].split("=")[1]) < 0.8
