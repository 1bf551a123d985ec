"""docs/models.md says what a trial of its families gives today; three of them, of each kind."""

import pytest

from scripts import tabulate_models as script


@pytest.mark.parametrize(
    ("family", "more"), [("qwen3", {}), ("gemma3_text", {}), ("phi3", script.VARIANTS["phi3"])]
)
def test_a_row_of_the_page_is_what_a_trial_gives(family, more):
    row = script.tried(family, more)
    assert f"| {' | '.join(row)} |" in script.PAGE.read_text(encoding="utf-8").splitlines()


def test_a_family_that_does_not_become_small_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(script, "MOST_WEIGHTS", 1)
    assert script.tried("llama", {}) is None
    assert "llama: not made: ValueError" in capsys.readouterr().err
