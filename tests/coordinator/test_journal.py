"""The journal's replay takes the same decisions; whatever was changed in it is found."""

import pytest

from rose.coordinator import journal
from rose.scheduler import events as ev
from tests.coordinator.conftest import scheduler


def played(world):
    """A step with a lost worker, a moved turn and a finished group; the journal's path."""
    world.hub.feed(ev.StepBegun(at=1.0, step=1, groups=1))
    world.ready("rollout-1")
    world.request("g0.0.t0"), world.request("g0.1.t0")
    world.progress([4])
    world.down("rollout-0")
    world.finish([5], attempt=2, rank=11)
    world.finish([6], attempt=1, turn="g0.1.t0", rank=11)
    world.hub.feed(ev.GroupFinished(at=2.0, group="g0", accepted=True))
    world.journal.flush()
    return world.journal_path


def test_a_changed_action_is_found_with_its_line_and_a_removed_event_too(world):
    path = played(world)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"WorkerJoined"' not in line))
    with pytest.raises(ValueError, match="the live run did"):
        journal.replay(path, scheduler())
    number = next(i for i, line in enumerate(lines) if b'"AssignTurn"' in line)
    lines[number] = lines[number].replace(b'"attempt":1', b'"attempt":3')
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=f"line {number + 1}: .*attempt=3.*attempt=1"):
        journal.replay(path, scheduler())


def test_a_last_line_that_a_crash_tore_ends_the_replay(world):
    path = played(world)
    whole = journal.replay(path, scheduler())
    assert whole == len(path.read_bytes().splitlines()) - 1 > 10
    path.write_bytes(path.read_bytes()[:-5])
    assert journal.replay(path, scheduler()) == whole - 1
