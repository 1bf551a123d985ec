"""Tree rollouts in a real run, which a power failure, dead hosts and a dead engine interrupt: the
same leaves, forked off at the same turns, with the same tokens as in a run that nothing interrupts.
"""

from pathlib import Path

import pytest

from rose.coordinator import replay
from rose.trainer import segments
from tests.job.hosts import kill_hosts
from tests.job.job import Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 3
TREES = (
    "deterministic=true",
    f"trainer.steps={STEPS}",
    "algorithm=tree_grpo",
    "rollout/branch=tree",
    "rollout.group_size=8",
    "rollout.environment_hosts=2",
    "rollout.host_restarts=100",
    "eval.episodes=0",
)


def leaves(run: Path) -> list[tuple]:
    return [
        (t.id, t.inherited, t.tokens, t.mask, t.reward)
        for step in range(1, STEPS + 1)
        for group in replay.load(run, step)
        for t in group
    ]


def tokens_before(t, turns: int) -> int:
    """Bytes of its tokens up to the end of its first turns."""
    made = sum(tokens for _, tokens in t.turn_tokens[:turns])
    return 4 * ([i for i, bit in enumerate(t.mask) if bit][made - 1] + 1)


def test_trees_come_out_the_same_through_a_power_failure_dead_hosts_and_a_dead_engine(tmp_path):
    whole = Job(tmp_path / "whole", *TREES)
    assert whole.wait() == 0, whole.said + whole.logs()

    powerless = Job(tmp_path, *TREES)
    powerless.until(lambda: powerless.phase() == ("rollout", 2), "the second step's rollout")
    powerless.until(lambda: list((powerless.run / "turns").glob("v*.turns")), "a recorded turn")
    powerless.kill_everything()

    last = Job(tmp_path, *TREES)
    assert kill_hosts(last, 1) == 1
    # while it has no turns: the rest of a seeded turn that goes on elsewhere is another draw
    last.until(lambda: last.phase() == ("train", STEPS - 1), "the step's training")
    last.engine().kill()
    assert kill_hosts(last, 1) == 1
    assert last.wait() == 0, last.said + last.logs()
    assert last.steps()[-1]["engine_restarts"] == 1 and last.orphans() == []
    assert last.steps()[-1]["failed_trajectories"] == 0
    assert sum(row["trajectories_restarted"] for row in last.steps()) >= 2

    assert trained_on(last.run, STEPS) == [f"g{g}.{m}" for g in range(2 * STEPS) for m in range(8)]
    assert leaves(last.run) == leaves(whole.run)
    forked = 0
    for step, row in enumerate(last.steps(), 1):
        group = [t for group in replay.load(last.run, step) for t in group]
        found = segments.find(group)
        made = sum(s.response_tokens for s, _ in segments.samples(group, found))
        assert row["tokens"] == made < sum(t.response_tokens for t in group), "each token once"
        forked += sum(bool(t.inherited) for t in group)
        by_name = {t.id: t for t in group}
        for t in group:
            for place, (maker, _) in enumerate(t.inherited):
                turns = sum(n for _, n in t.inherited[: place + 1])
                shared = tokens_before(t, turns)
                assert t.tokens[:shared] == by_name[maker].tokens[:shared] != b""
    assert forked > 0.5 * 6 * 2 * STEPS, "most of the six of each group's eight forked off"
