"""What drafts recorded trajectories would have had accepted."""

import numpy as np
import pytest

from rose.parts.report.trajectories import Sample
from scripts.drafts import replay_drafts
from scripts.harness import Failed


def said(*tokens: int) -> Sample:
    """After a prompt of three tokens."""
    ids = np.array([100, 101, 102, *tokens], np.int32)
    mask = (np.arange(len(ids)) > 2).astype(np.int8)
    ids.flags.writeable = False  # as read from a file
    return Sample(ids, mask, np.zeros(len(ids)), np.zeros(len(ids)), np.zeros(len(ids), int))


def test_who_says_what_a_sibling_has_said_takes_fewer_steps():
    # eight tokens behind the prompt's: one a step, or five and the last three
    for chance, steps in ((0.02, [2, 7, 6]), (0.999, [8, 0, 0])):  # nothing less likely is drafted
        replay = replay_drafts.Replay(4, chance)
        replay.group("g1", [said(*range(9)), said(*range(9))])
        assert replay.counts[:2].tolist() == [[8, 0, 0], steps]
    replay = replay_drafts.Replay(4, 0.02)
    for group in ("g1", "g2"):  # other groups say nothing
        replay.group(group, [said(*range(9))])
    assert replay.counts[0].tolist() == [16, 0, 0]


def test_a_run_without_groups_is_named(tmp_path):
    with pytest.raises(Failed, match=f"run={tmp_path}: no groups"):
        replay_drafts.recorded(tmp_path)
