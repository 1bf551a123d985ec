"""The main job with real MPI, vLLM and DeepSpeed: whole steps of a mixture, and
environments that fail."""

import json

import pytest

from rose import config as cfg
from rose.coordinator import journal, replay
from rose.observe import cost
from rose.observe.metrics import read_metrics, rows_of
from rose.policies import build
from tests.job.job import Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MIXTURE = """
env=games rollout.workers=2 trainer.ranks=2 rollout.environment_hosts=2 observe.report=true
trainer.optimizer.schedule=linear trainer.optimizer.warmup_steps=0 eval.episodes=16 eval.beside=true
+env@eval.sets.sums=calculator +eval.sets.sums.episodes=3 +eval.sets.sums.samples=2
""".split()
# Each engine gets turns, even if it is slow.
MIXTURE += ["scheduler/routing=round_robin"]


def test_whole_steps_of_a_mixture_with_two_engines_and_two_trainer_ranks(tmp_path):
    job = Job(tmp_path, *MIXTURE)
    assert job.wait() == 0, job.said + job.logs()
    steps = job.steps()
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert [row["version"] for row in steps] == [1, 2, 3]
    assert all(row["staleness_mean"] == 0 for row in steps)
    # not each step: nothing changes where all members of each group got the same reward
    assert any(row["sync_bytes"] > 0 for row in steps)
    assert all(row[f"tokens_per_s/rollout-{engine}"] > 0 for row in steps for engine in (0, 1))
    assert all(row["mismatch_max_ratio"] < 1.01 for row in steps), "both compute in float32"
    evals = rows_of(read_metrics(job.run), "eval")
    assert [row["eval_n"] for row in evals] == [16, 16]
    assert all(row["eval_n/frozen_lake"] + row["eval_n/calculator"] == 16 for row in evals)
    assert all((row["eval_n/sums"], row["eval_tasks/sums"]) == (6, 3) for row in evals)
    assert all(0 <= row["eval_pass_at_2/sums"] <= 1 for row in evals)
    assert evals[1]["eval_versions_later"] == 0
    assert [row["lr"] / steps[0]["lr"] for row in steps] == pytest.approx([1, 2 / 3, 1 / 3])
    spent = cost.total(cost.of_attempts(job.run)[0].values())
    assert spent.trained == sum(row["tokens"] for row in steps) < spent.made
    assert spent.dedicated_s > 4 * sum(row["time_step"] for row in steps) and not spent.borrowed_s
    *_, cost_line, play_line = job.said.splitlines()
    assert cost_line == f"Cost: {spent.text()}"
    assert play_line.startswith("Watch it play: ") and f"play {job.run} --before" in play_line
    groups = [group for step in (1, 2, 3) for group in replay.load(job.run, step)]
    of = {t.group: t.domain for group in groups for t in group}
    assert 7 <= list(of.values()).count("frozen_lake") <= 9
    assert set(of.values()) == {"frozen_lake", "calculator"}
    found = sum(row["trajectories/calculator"] for row in steps)
    assert found == 4 * list(of.values()).count("calculator")
    assert all(row.get("turns_mean/calculator", 0) <= 4 for row in steps)
    assert "By environment" in (job.run / "report.html").read_text()
    assert trained_on(job.run, 3) == [f"g{g}.{m}" for g in range(12) for m in range(4)]
    assert (job.run / "report.html").stat().st_size > 10_000
    loads = [
        json.loads(line)["args"]
        for path in (job.run / "events").rglob("*.jsonl")
        for line in path.open()
        if '"load_version"' in line
    ]
    assert sorted(load["version"] for load in loads) == [0, 0, 1, 1, 2, 2, 3, 3]
    logs = [path.read_text() for path in (job.run / "logs" / "latest").glob("rollout-*.log")]
    late = sum(words.count("from the store: not broadcast within") for words in logs)
    elsewhere = sum(load["mirrored"] == 0 for load in loads)
    assert elsewhere <= late and elsewhere < len(loads), (
        "dedicated engines read what was broadcast to their node, if it came in time"
    )
    assert job.orphans() == []
    config = cfg.load(job.run / "config.json")
    replayed = build(config.scheduler, config.rollout.turn_timeout_s)
    assert journal.replay(job.run / "journal" / "attempt-001.jsonl", replayed) > 100
    again = Job(tmp_path, *MIXTURE)
    assert again.wait() == 0 and "finished" in again.said


def test_failing_environments_are_replaced_and_too_many_stop_the_run(tmp_path):
    job = Job(tmp_path, "model.max_context=64")  # no prompt fits
    assert job.wait() == 1
    assert "tasks of frozen_lake fail each time" in job.said and "model.max_context" in job.said
    assert job.orphans() == []
