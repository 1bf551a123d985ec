"""Calibration finds again what a measurement was made from, and says what is wrong with a file."""

import json

import numpy as np
import pytest

from rose.parts.lending.rules.predictor import Predictor, Work
from rose.parts.simulator import calibrate
from rose.parts.simulator.calibrate import CalibrationError

COEFFICIENTS = (0.01, 2e-4, 1e-8, 5e-4, 1e-7, 0.004)


def lines(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def step_log(path, noise: float = 0.0):
    draw, truth, rows, now = np.random.default_rng(1), Predictor(COEFFICIENTS), [], 0.0
    for _ in range(400):
        chunk = [int(draw.integers(8, 2000)), int(draw.integers(0, 500))]
        prefill = [chunk] * int(draw.integers(0, 3))
        decodes = int(draw.integers(0 if prefill else 1, 64))
        row = {"prefill": prefill, "decodes": decodes}
        row["decode_context"] = decodes * int(draw.integers(1, 4000))
        ended = now + truth.seconds(work(row)) * np.exp(draw.normal(0, noise))
        rows.append({"began": now, "ended": ended} | row)
        now = ended
    return lines(path, rows)


def work(row) -> Work:
    return Work(tuple(map(tuple, row["prefill"])), row["decodes"], row["decode_context"])


def test_a_step_log_gives_back_the_coefficients_it_was_made_with(tmp_path):
    step, error = calibrate.of_steps([step_log(tmp_path / "a.jsonl", noise=0.01)])
    assert tuple(vars(step).values()) == pytest.approx(COEFFICIENTS, rel=0.1)
    assert error < 0.02


def test_steps_together_take_as_long_as_they_did_also_where_a_quota_stops_every_third_one(tmp_path):
    rows = list(map(json.loads, open(step_log(tmp_path / "a.jsonl", 0.01))))
    for row in rows[::3]:
        row["ended"] += 2 * (row["ended"] - row["began"])
    step, _ = calibrate.of_steps([lines(tmp_path / "b.jsonl", rows)])
    fitted = Predictor(list(vars(step).values()))
    prefills = [row for row in rows if row["prefill"]]
    for kind in (rows, prefills, [row for row in rows if row["decodes"] < 16]):
        predicted = sum(fitted.seconds(work(row)) for row in kind)
        assert predicted == pytest.approx(sum(r["ended"] - r["began"] for r in kind), rel=0.1)


def test_training_time_is_a_line_in_the_tokens_with_no_negative_part(tmp_path):
    def found(*times):
        rows = [{"kind": "eval", "step": 0}]
        for step, (tokens, train) in enumerate([(1, 99.0), *times]):
            row = {"kind": "step", "step": step, "tokens": tokens}
            rows.append(row | {"time_train": train, "time_sync": 0.2})
        made = calibrate.of_metrics(lines(tmp_path / "metrics.jsonl", rows))
        return made.step_s, made.token_s, made.sync_s, made.steps

    line = found((1000, 1.5), (2000, 2.0), (4000, 3.0))
    assert line == pytest.approx((1.0, 5e-4, 0.2, 3))
    assert found((1000, 0.5), (2000, 2.0))[:2] == (0, pytest.approx(4500 / 5e6))
    assert found((1000, 3.0), (2000, 2.0))[:2] == (2.5, 0.0)
    with pytest.raises(CalibrationError, match="1 training steps after the first 1; at least 2"):
        found((1000, 0.5))


def entry(kind, at, actions=(), **fields):
    return {"event": {"type": kind, "at": at, **fields}, "actions": list(actions)}


def journal(path, *more):
    def turn(name, number, at, context, **fields):
        ids = {"turn": f"{name}.t{number}", "trajectory": name, "group": name.split(".")[0]}
        sizes = {"context_tokens": context, "max_new_tokens": 64}
        return entry("TurnRequested", at, **ids, **sizes, **fields)

    admitted = [{"type": "AdmitGroup", "index": 0, "group": "g0"}]
    rows = [
        {"batching": {"next": 0}},
        entry("StepBegun", 10.0, admitted, step=1, groups=1),
        turn("g0.0", 0, 10.5, 70, domain="search"),
        turn("g0.1", 0, 10.6, 70, domain="search"),
        entry("TurnProgressed", 11.0, turn="g0.0.t0", attempt=1, tokens=5),
        entry("TurnEnded", 11.2, turn="g0.0.t0", tokens=6),
        turn("g0.0", 1, 12.0, 106, domain="search", outcome="failed"),
        entry("TurnProgressed", 12.5, turn="g0.0.t1", attempt=1, tokens=9),
        entry("TurnEnded", 13.0, turn="g0.0.t1"),
        entry("TrajectoryEnded", 13.25, trajectory="g0.0"),
        turn("e1.0", 0, 14.0, 70),
        entry("TurnEnded", 15.0, turn="e1.0.t0", tokens=3),
        entry("TrajectoryEnded", 15.0, trajectory="e1.0"),
    ]
    return lines(path, [*rows, *more])


def test_a_journal_tells_each_trajectory_turn_by_turn(tmp_path):
    [[episode]] = calibrate.of_journal(journal(tmp_path / "journal.jsonl"), {"g0.0": 1.0})
    expected = (70, (6, 9), (30, 0))
    assert (episode.prompt_tokens, episode.output_tokens, episode.observation_tokens) == expected
    assert episode.tool_s == pytest.approx((0.8, 0.25)) and episode.reset_s == pytest.approx(0.5)
    assert (episode.failed, episode.reward, episode.domain) == ((True, False), 1.0, "search")


def test_a_trajectory_that_was_cut_off_and_a_torn_last_line_are_left_out(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal(path, entry("TrajectoryEnded", 16.0, trajectory="g0.1"))  # its turn never ended
    path.write_text(path.read_text() + '{"event": {"type": "Ti')
    assert sum(map(len, calibrate.of_journal(path))) == 1


def test_recorded_groups_are_drawn_whole_and_by_the_seed(tmp_path):
    groups = calibrate.of_journal(journal(tmp_path / "journal.jsonl"))
    other = [[groups[0][0].__class__(1, (1,), (0,), (0.0,), (False,), 0.0)]]
    recorded = calibrate.Recorded(groups + other, 64)
    draws = [np.random.default_rng(i % 20) for i in range(40)]
    groups = [recorded.group(i % 20, 4, i // 20, draw) for i, draw in enumerate(draws)]
    drawn, again = groups[:20], groups[20:]
    assert drawn == again and all(len(set(map(id, group))) == 1 for group in drawn)
    assert {g[0].prompt_tokens for g in drawn} == {1, 70}
