"""The paper beside the simulator: tables and what is put into the docs, from made
outcomes."""

import math

import msgspec
import pytest

from rose.parts.simulator.study import table
from rose.parts.simulator.study.outcome import EVERY, Outcome
from scripts import csv_tables
from scripts.harness import simulated
from scripts.simulator import reproduce_rose

SPEED = {
    "roll_grpo": 1.0,
    "roll_dapo": 0.8,
    "rose_dapo": 1.2,
    "areal": 1.1,
    "rose_areal": 1.7,
    "rlboost": 1.2,
    "serverless": 1.3,
    "best": 2.0,
    "best_sync": 1.6,
    "rose": 1.5,
}


@pytest.fixture
def outcomes():
    """Each system `SPEED` times as fast as roll_grpo, with a spread over three seeds that all
    share."""
    return [
        Outcome(
            point="p",
            system=name,
            seed=seed,
            **(
                dict.fromkeys(EVERY, 0.01)
                | {
                    "step_s": 100 * seed / speed,
                    "rollout_s": 60 * seed / speed,
                    "trajectories_s": speed / seed,
                    "attainment": math.nan,
                }
            ),
        )
        for name, speed in SPEED.items()
        for seed in (1, 2, 3)
    ]


def test_every_row_of_the_paper_is_compared_by_its_own_measure(outcomes):
    rows = {
        (row["mine"], row["what"], row["rival"]): row
        for row in reproduce_rose.compared("rose_8b", outcomes)
    }
    assert rows["rose", "throughput over", "roll_grpo"]["ours"] == pytest.approx(1.5)
    assert rows["rose", "throughput over", "roll_grpo"]["difference"] == pytest.approx(
        1.5 / 1.31 - 1
    )
    assert rows["rose_dapo", "throughput over", "roll_dapo"]["ours"] == pytest.approx(1.5), (
        "DAPO on both sides"
    )
    assert rows["rose", "throughput over", "areal"]["ours"] == pytest.approx(1.5 / 1.1)
    assert rows["rose_areal", "throughput over", "areal"]["ours"] == pytest.approx(1.7 / 1.1)
    assert rows["rose", "rollout time under", "rlboost"]["ours"] == pytest.approx(1.5 / 1.2)
    assert rows["rose", "allocation overhead", "serverless"]["ours"] == pytest.approx(0.01)
    assert rows["best", "throughput over", "rose"]["ours"] == pytest.approx(2.0 / 1.5)
    assert len(rows) == len(reproduce_rose.PUBLISHED)


def test_files_keep_the_rows_of_the_other_setting_and_the_page_has_both(outcomes, tmp_path):
    path = tmp_path / "rose_paper.csv"
    for setting in ("rose_32b", "rose_8b", "rose_8b"):
        reproduce_rose.merge_settings(path, reproduce_rose.compared(setting, outcomes))
    rows = csv_tables.read_csv(path)
    assert [row["setting"] for row in rows] == ["rose_8b"] * 10 + ["rose_32b"] * 10
    words = reproduce_rose.beside(rows)
    assert (
        "| rose, throughput over roll_grpo | 1.31 | 1.50 (1.50–1.50), +14% | 1.46 | 1.50" in words
    )
    assert "| best, throughput over rose | none | 1.33 (1.33–1.33) | none |" in words
    alone = reproduce_rose.beside([row for row in rows if row["setting"] == "rose_32b"])
    assert "8B" not in alone and words.count("\n") == alone.count("\n")


def test_table_1_is_absolute_and_serving_alone_is_roses_run_without_its_rollouts(
    outcomes, tmp_path
):
    def like(o, system, rollout_s):
        return msgspec.structs.replace(
            o,
            system=system,
            rollout_s=rollout_s,
            ttft_p99_s=0.35,
            alone_ttft_p99_s=0.3,
            tpot_p99_s=0.04,
            alone_tpot_p99_s=0.03,
            gap_p99_s=0.09,
            alone_gap_p99_s=0.07,
        )

    some = [
        like(o, name, 500.0 + 10 * o.seed)
        for o in outcomes
        if o.system == "rose"
        for name in ("rose", "uncontrolled", "prism")
    ]
    path = tmp_path / "rose_table1.csv"
    reproduce_rose.merge_settings(path, reproduce_rose.table1("rose_8b", some))
    words = reproduce_rose.table1_words(csv_tables.read_csv(path)).splitlines()
    assert words[2] == "| Qwen3-8B, rose | 496, 520 | 338, 350 | 136; 40, 90 |"
    assert words[3] == "| Qwen3-8B, serving alone | –, – | 315, 300 | 118; 30, 70 |"
    assert [line.split(" | ")[0] for line in words[4:]] == [
        "| Qwen3-8B, uncontrolled",
        "| Qwen3-8B, prism",
    ]


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
    assert (
        page.read_text() == "a\n<!-- measured: by a script -->\nnew\n<!-- end of measured -->\nb\n"
    )
    with pytest.raises(SystemExit, match="end of other"):
        csv_tables.put(page, "other", "x")


def test_a_factor_multiplies_what_the_setting_has():
    c = simulated("+experiment=rose_8b")
    link = c.sim.pool["cooperative"].link.gbit_s
    assert reproduce_rose.times(
        c, ["sim.pool.cooperative.link.gbit_s", "sim.environment.factors.output"], 1.2
    ) == [
        f"++sim.pool.cooperative.link.gbit_s={1.2 * link:g}",
        "++sim.environment.factors.output=1.2",
    ]
    assert float(reproduce_rose.times(c, ["sim.efficiency.memory"], 0.8)[0].split("=")[1]) < 0.8
