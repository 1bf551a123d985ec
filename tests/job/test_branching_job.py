"""Tree rollouts in a real run, which a power failure and dead hosts interrupt: the same leaves,
forked off at the same turns, with the same tokens as in a run that nothing interrupts.
"""

from pathlib import Path

import pytest

from rose.coordinator import replay
from rose.trainer import segments
from tests.job.hosts import HOSTS, kill_host, kill_hosts
from tests.job.job import Held, Job, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 2
TREES = ("deterministic=true", f"trainer.steps={STEPS}", "algorithm=tree_grpo")
TREES += ("rollout/branch=tree", *HOSTS)


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


def test_trees_come_out_the_same_through_dead_hosts_and_a_power_failure(tmp_path):
    held = Held(tmp_path, STEPS, groups=2, size=8)
    held.release(1, 2)
    whole = Job(tmp_path / "whole", *TREES, *held.overrides)
    assert whole.wait() == 0, whole.said + whole.logs()

    held.hold(2)
    powerless = Job(tmp_path, *TREES, *held.overrides)
    assert kill_hosts(powerless, 1) == 1
    held.until(powerless, 2)
    powerless.until(lambda: list((powerless.run / "turns").glob("v*.turns")), "a recorded turn")
    kill_host(powerless, 0)
    powerless.kill_everything()

    held.release(2)
    last = Job(tmp_path, *TREES, *held.overrides)
    assert last.wait() == 0, last.said + last.logs()
    assert last.orphans() == [] and last.steps()[-1]["failed_trajectories"] == 0
    assert [fault["what"] for fault in last.faults()] == ["environment host died"] * 2

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
    assert forked > 0, "how many of the six of each group's eight do depends on what is sampled"
