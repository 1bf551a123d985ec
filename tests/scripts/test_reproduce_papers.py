"""Other papers beside the simulator: their settings compose, and each row is measured as it says."""

import functools
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

from rose.parts.simulator.study import build
from scripts import csv_tables
from scripts.harness import Failed
from scripts.simulator import reproduce_papers as papers
from tests.scripts.outcomes import outcome


@pytest.fixture(scope="module")
def composed():
    """composed(setting, overrides) -> the configuration, composed once for all rows of it."""
    made = functools.cache(lambda setting, given: papers.composed(f"papers/{setting}", given))
    return lambda setting, overrides=(): made(setting, tuple(overrides))


@pytest.mark.slow
def test_every_row_has_its_setting_and_systems_and_every_setting_a_row(composed):
    files = {path.stem for path in (REPOSITORY / "conf/experiment/papers").glob("*.yaml")}
    assert files == {setting for setting, _ in papers.settings_of(papers.ROWS)}
    for row in papers.ROWS:
        names = set(build.systems(composed(row.setting, row.overrides)))
        other = row.rival_setting or row.setting
        names_there = set(build.systems(composed(other, row.overrides)))
        assert row.system in names and (not row.rival or row.rival in names_there)


def test_ratios_are_paired_by_seed_and_a_rival_may_have_a_setting_of_its_own():
    row = next(row for row in papers.ROWS if row.rival_setting)
    ours, theirs = (row.setting, row.system), (row.rival_setting, row.rival)
    made = []
    for seed in (1, 2):
        made.append(outcome(*ours, seed, 1.0, trajectories_s=3.0 * seed))
        made.append(outcome(*theirs, seed, 1.0, trajectories_s=2.0 * seed))
    [found] = papers.compared([row], made)
    assert found["ours"] == pytest.approx(1.5) and found["ours_low"] == pytest.approx(1.5)
    assert found["ratio"] == pytest.approx(1.5 / row.paper[0])


def test_a_setting_is_simulated_and_written_and_the_page_gets_a_line_for_it(tmp_path):
    code = papers.main(["only=libra_14b", "seeds=1", "steps=2", "processes=1", f"out={tmp_path}"])
    assert code == 0
    rows = csv_tables.read_csv(tmp_path / "papers.csv")
    assert {row["setting"] for row in rows} == {"libra_14b"}
    assert all(float(row["ours"]) > 0 for row in rows)
    words = papers.words(rows)
    assert words.count("\n") == 1 + len(rows)
    assert "| libra_14b: libra, throughput over balanced | 1.80 |" in words


@pytest.mark.parametrize(
    "argument, known",
    [("only=seer_7b", "no seer_7b.*seer_72b"), ("seed=1", "seeds.*draw"), ("fast", "seeds")],
)
def test_what_is_unknown_is_named_beside_what_is_known(argument, known):
    with pytest.raises(Failed, match=known):
        papers.main([argument])
